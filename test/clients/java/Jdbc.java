import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.SQLTimeoutException;
import java.sql.SQLTransactionRollbackException;
import java.sql.Savepoint;
import java.sql.Statement;
import java.sql.Types;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import org.postgresql.PGConnection;
import org.postgresql.PGNotification;
import org.postgresql.util.PGInterval;
import org.postgresql.util.PSQLException;

/** An application with nothing but the JDBC driver */
final class Jdbc extends Stack {
    static Connection connect() throws SQLException {
        return DriverManager.getConnection(MAIN);
    }

    static void transactions() throws Exception {
        try (Connection db = connect()) {
            db.setAutoCommit(false);
            ask(db, "SELECT dlock_xact_acquire(?)", "pay");
            same(isFree("pay"), false);
            db.commit();
            same(isFree("pay"), true);
            try {
                ask(db, "SELECT dlock_xact_acquire(?)", "pay");
                throw new IllegalStateException();
            } catch (IllegalStateException error) {
                db.rollback();
            }
            same(isFree("pay"), true);
        }
    }

    static void tryAndTimeout() throws Exception {
        try (Connection holder = holder("busy"); Connection db = connect();
                PreparedStatement tries = db.prepareStatement("SELECT dlock_try_acquire(?)")) {
            tries.setString(1, "busy");
            try (ResultSet row = tries.executeQuery()) {
                row.next();
                same(row.getLong(1), 0L);
                same(row.wasNull(), true);
            }
            fails("55P03", () -> ask(db, "SELECT dlock_acquire(?, timeout => ?::interval)", "busy", "50 ms"));
            same(admin("SELECT count(*) FROM dlock_locks WHERE name = 'busy'"), 1L);

            // in a transaction, the rest of it goes on from a savepoint
            db.setAutoCommit(false);
            Savepoint before = db.setSavepoint();
            fails("55P03", () -> ask(db, "SELECT dlock_xact_acquire(?, timeout => '0')", "busy"));
            fails("25P02", () -> ask(db, "SELECT 1"));
            db.rollback(before);
            same(ask(db, "SELECT 1"), 1);
            db.rollback();
        }
    }

    static void releaseOnException() throws Exception {
        try (Connection db = connect()) {
            long fence = (Long) ask(db, "SELECT dlock_acquire(?, info => ?)", "report", "nightly");
            try {
                same(admin("SELECT info FROM dlock_locks WHERE ticket = ?", fence), "nightly");
                throw new IllegalStateException();
            } catch (IllegalStateException error) {
                same(ask(db, "SELECT dlock_release_ticket(?)", fence), true);
            }
            same(isFree("report"), true);

            Object[] fences = (Object[]) db.createArrayOf("int8", new Object[0]).getArray();
            same(fences.length, 0);
            fences = (Object[]) ((java.sql.Array) ask(db, "SELECT dlock_acquire_all(?)",
                    db.createArrayOf("text", new String[] {"a", "b"}))).getArray();
            same(Arrays.asList(fences), List.of(admin("SELECT ticket FROM dlock_locks WHERE name = 'a'"),
                    admin("SELECT ticket FROM dlock_locks WHERE name = 'b'")));
        }
    }

    static void lease() throws Exception {
        long fence;
        try (Connection db = connect()) {
            fence = (Long) ask(db, "SELECT dlock_ttl_acquire(?, ?::interval, owner => ?)", "job", "1 h", "job/17");
        }
        try (Connection db = connect()) {
            same(isFree("job"), false);
            same(ask(db, "SELECT dlock_renew(?)", fence), 1);
            same(ask(db, "SELECT dlock_ttl_acquire(?, ?::interval, owner => ?)", "job", "1 h", "job/17"), fence);
            db.setAutoCommit(false);
            ask(db, "SELECT 1 FROM dlock_guard(?, ?)", "job", fence);
            db.commit();
            db.setAutoCommit(true);
            same(ask(db, "SELECT dlock_release_ticket(?)", fence), true);
            same(ask(db, "SELECT dlock_renew(?)", fence), null);
        }
    }

    /** The grant's notification may come with any answer: ask first, then listen. */
    static void ticket() throws Exception {
        try (Connection db = connect()) {
            PGConnection notifications = db.unwrap(PGConnection.class);
            long ticket;
            try (Connection holder = holder("queue")) {
                ticket = (Long) ask(db, "SELECT dlock_enqueue(?)", "queue");
                same(ask(db, "SELECT dlock_wait(?, '0')", ticket), false);
            }
            PGNotification[] heard = notifications.getNotifications(TIMEOUT * 1000);
            same(heard.length, 1);
            same(heard[0].getParameter().contains("\"granted\""), true);
            same(ask(db, "SELECT dlock_wait(?, '0')", ticket), true);
            same(ask(db, "SELECT dlock_release_ticket(?)", ticket), true);
        }
    }

    static void errors() throws Exception {
        try (Connection db = connect(); Connection holder = holder("busy");
                Connection standby = DriverManager.getConnection(url("STANDBY", "app"))) {
            SQLException timeout = fails("55P03", () -> ask(db, "SELECT dlock_acquire('busy', timeout => '0')"));
            // of the same class as all others: neither java.sql's nor a message tells them apart
            same(timeout instanceof SQLTimeoutException, false);
            same(((PSQLException) timeout).getServerErrorMessage().getHint().contains("dlock_locks"), true);
            fails("55L01", () -> ask(db, "SELECT 1 FROM dlock_guard('gone', 1)"));
            fails("42501", () -> ask(db, "SELECT dlock_acquire('reserved/1')"));
            fails("25006", () -> ask(standby, "SELECT dlock_acquire('standby')"));
            SQLException stale = fails("40001", () -> ask(db, "SELECT dlock_version_bump('doc', 7)"));
            same(stale instanceof SQLTransactionRollbackException, false);

            ask(db, "SELECT dlock_acquire('a')");
            ask(holder, "SELECT dlock_acquire('b')");
            FutureTask<Void> first = aside(() -> ask(db, "SELECT dlock_acquire('b')"));
            untilWaits("b");
            fails("40P01", () -> ask(holder, "SELECT dlock_acquire('a')"));
            ask(holder, "SELECT dlock_release_all()");
            first.get(TIMEOUT, TimeUnit.SECONDS);
        }
    }

    /** A text is sent as text, and no function has that for an interval. */
    static void intervals() throws Exception {
        try (Connection db = connect(); Statement plain = db.createStatement();
                PreparedStatement bare = db.prepareStatement("SELECT dlock_acquire(?, timeout => ?)")) {
            bare.setString(1, "lock");
            bare.setString(2, "2 s");
            fails("42883", bare::executeQuery);
            bare.setObject(2, 2000);
            fails("42883", bare::executeQuery);

            bare.setObject(2, "2 s", Types.OTHER);
            bare.executeQuery().close();
            bare.setObject(2, new PGInterval(0, 0, 0, 0, 0, 2));
            bare.executeQuery().close();
            ask(db, "SELECT dlock_acquire(?, timeout => ?::interval)", "lock", "2 s");
            ask(db, "SELECT dlock_acquire(?, timeout => make_interval(secs => ?))", "lock", 0.5);
            String half = java.time.Duration.ofMillis(90_500).toString();
            same(ask(db, "SELECT (?::interval)::text", half), "00:01:30.5");
        }
        try (Connection db = DriverManager.getConnection(MAIN + "&stringtype=unspecified");
                PreparedStatement bare = db.prepareStatement("SELECT dlock_acquire(?, timeout => ?)")) {
            bare.setString(1, "lock");
            bare.setString(2, "2 s");
            bare.executeQuery().close();
        }
    }

    /** It does what it is told, and complains of the answer. */
    static void executeUpdate() throws Exception {
        try (Connection db = connect(); Statement statement = db.createStatement()) {
            fails("0100E", () -> statement.executeUpdate("SELECT dlock_acquire('held')"));
            same(isFree("held"), false);
            ask(db, "SELECT dlock_release('held')");
            statement.execute("SELECT dlock_acquire('held')");
            same(ask(db, "SELECT dlock_release('held')"), true);
        }
    }

    static void isCanceled(FutureTask<Void> waiting) throws Exception {
        try {
            waiting.get(TIMEOUT, TimeUnit.SECONDS);
            throw new AssertionError("not canceled");
        } catch (ExecutionException error) {
            same(((SQLException) error.getCause()).getSQLState(), "57014");
        }
        same(admin("SELECT count(*) FROM dlock_locks WHERE name = 'busy'"), 1L);
    }

    static void cancel() throws Exception {
        try (Connection db = connect(); Connection holder = holder("busy");
                Statement waits = db.createStatement()) {
            FutureTask<Void> waiting = aside(() -> waits.execute("SELECT dlock_acquire('busy')"));
            untilWaits("busy");
            waits.cancel();
            isCanceled(waiting);
            // the driver's own timer does the same
            waits.setQueryTimeout(1);
            isCanceled(aside(() -> waits.execute("SELECT dlock_acquire('busy')")));
        }
    }

    /** An interrupt is seen by nobody who reads from a socket. */
    static void interrupt() throws Exception {
        try (Connection db = connect(); Connection holder = holder("busy")) {
            Thread[] thread = new Thread[1];
            FutureTask<Void> waiting = aside(() -> {
                thread[0] = Thread.currentThread();
                ask(db, "SELECT dlock_acquire('busy')");
                same(Thread.interrupted(), true);
            });
            untilWaits("busy");
            thread[0].interrupt();
            untilWaits("busy");
            ask(holder, "SELECT dlock_release_all()");
            waiting.get(TIMEOUT, TimeUnit.SECONDS);
        }
    }

    /** The driver gives the connection up; what waits, or holds, goes with the session. */
    static void socketTimeout() throws Exception {
        try (Connection db = connect(); Connection holder = holder("busy")) {
            ask(db, "SELECT dlock_acquire('mine')");
            db.setNetworkTimeout(Runnable::run, 100);       // which is in whole seconds in the URL
            fails("08006", () -> ask(db, "SELECT dlock_acquire('busy')"));
            same(db.isClosed(), true);
            ask(holder, "SELECT dlock_release_all()");
            until("SELECT count(*) = 0 FROM dlock_locks");
        }
    }

    public static void main(String[] arguments) throws Exception {
        test("transaction scope: free after commit, and after rollback", Jdbc::transactions);
        test("try and timeout, with a savepoint around it", Jdbc::tryAndTimeout);
        test("session scope: released on exception; several at once", Jdbc::releaseOnException);
        test("lease: over one connection, and another", Jdbc::lease);
        test("a ticket: asked, then listened for", Jdbc::ticket);
        test("errors have one class, and their SQLSTATE", Jdbc::errors);
        test("the trap of intervals: a String is none", Jdbc::intervals);
        test("the trap of executeUpdate: it throws, and holds", Jdbc::executeUpdate);
        test("who is canceled has left the queue", Jdbc::cancel);
        test("the trap of interrupts: nobody sees them", Jdbc::interrupt);
        test("the trap of socketTimeout: it ends the session", Jdbc::socketTimeout);
        end();
    }
}
