import com.zaxxer.hikari.HikariConfig;
import com.zaxxer.hikari.HikariDataSource;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Proxy;
import java.sql.Connection;
import java.sql.SQLException;
import java.sql.Statement;
import javax.sql.DataSource;
import org.dlock.Lock;
import org.dlock.Locks;
import org.postgresql.PGConnection;

/** An application with a pool of HikariCP */
final class Hikari extends Stack {
    /** Of one connection, so that the next user gets the same */
    static HikariDataSource pool() {
        HikariConfig config = new HikariConfig();
        config.setJdbcUrl(MAIN);
        config.setMaximumPoolSize(1);
        config.setConnectionTimeout(TIMEOUT * 1000L);
        return new HikariDataSource(config);
    }

    /** A connection that gives back its locks, too, when it is closed: for programs that hold any over a pool */
    static Connection checkOut(DataSource pool) throws SQLException {
        Connection db = pool.getConnection();
        return (Connection) Proxy.newProxyInstance(Hikari.class.getClassLoader(), new Class<?>[] {Connection.class},
                (proxy, method, arguments) -> {
                    try {
                        if (method.getName().equals("close") && !db.isClosed())
                            reset(db);
                        return method.invoke(db, arguments);
                    } catch (InvocationTargetException error) {
                        throw error.getCause();
                    }
                });
    }

    static void reset(Connection db) throws SQLException {
        try (Statement statement = db.createStatement()) {
            if (!db.getAutoCommit())
                db.rollback();
            statement.execute("SELECT dlock_release_all()");
        } catch (SQLException error) {
            db.abort(Runnable::run);        // nobody can say what it holds
        }
    }

    static void transactions() throws Exception {
        try (HikariDataSource pool = pool()) {
            try (Connection db = pool.getConnection()) {
                db.setAutoCommit(false);
                ask(db, "SELECT dlock_xact_acquire('pay')");
                db.commit();
                same(isFree("pay"), true);
                ask(db, "SELECT dlock_xact_acquire('pay')");
            }
            // the pool rolls back what is open
            same(isFree("pay"), true);
        }
    }

    static void timeoutsAndErrors() throws Exception {
        try (HikariDataSource pool = pool(); Connection db = pool.getConnection(); Connection holder = holder("busy")) {
            same(ask(db, "SELECT dlock_try_acquire('busy')"), null);
            // the pool lets the driver's errors pass, and keeps the connection
            fails("55P03", () -> ask(db, "SELECT dlock_acquire(?, timeout => ?::interval)", "busy", "50 ms"));
            fails("55L01", () -> ask(db, "SELECT 1 FROM dlock_guard('gone', 1)"));
            fails("42501", () -> ask(db, "SELECT dlock_acquire('reserved/1')"));
            fails("40001", () -> ask(db, "SELECT dlock_version_bump('doc', 7)"));
            fails("40P01", () -> ask(db, "SELECT raise('40P01', '')"));
            fails("25006", () -> ask(db, "SELECT raise('25006', '')"));
            same(ask(db, "SELECT 1"), 1);
        }
    }

    static void lease() throws Exception {
        try (HikariDataSource pool = pool()) {
            Object fence;
            try (Connection db = pool.getConnection()) {
                fence = ask(db, "SELECT dlock_ttl_acquire(?, ?::interval, owner => ?)", "job", "1 h", "job/17");
                pool.evictConnection(db);
            }
            same(isFree("job"), false);
            try (Connection db = pool.getConnection()) {
                same(ask(db, "SELECT dlock_renew(?)", fence), 1);
                same(ask(db, "SELECT dlock_release_ticket(?)", fence), true);
            }
        }
    }

    static void ticket() throws Exception {
        try (HikariDataSource pool = pool(); Connection db = checkOut(pool)) {
            Object ticket;
            try (Connection holder = holder("queue")) {
                ticket = ask(db, "SELECT dlock_enqueue('queue')");
                same(ask(db, "SELECT dlock_wait(?, '0')", ticket), false);
            }
            same(db.unwrap(PGConnection.class).getNotifications(TIMEOUT * 1000).length, 1);
            same(ask(db, "SELECT dlock_wait(?, '0')", ticket), true);
        }
    }

    static void returned() throws Exception {
        try (HikariDataSource pool = pool()) {
            Object pid;
            try (Connection db = pool.getConnection()) {
                pid = ask(db, "SELECT pg_backend_pid()");
                ask(db, "SELECT dlock_acquire('forgotten')");
            }
            same(isFree("forgotten"), false);
            try (Connection db = pool.getConnection()) {
                same(ask(db, "SELECT pg_backend_pid()"), pid);
                same(ask(db, "SELECT dlock_is_held('forgotten')"), true);
                // to close the session instead of giving it back is one way out
                pool.evictConnection(db);
            }
            until("SELECT dlock_try_xact_acquire('forgotten') IS NOT NULL");

            // what is run for each new connection is not run for one that comes back
            HikariConfig config = new HikariConfig();
            config.setJdbcUrl(MAIN);
            config.setMaximumPoolSize(1);
            config.setConnectionInitSql("SELECT dlock_release_all()");
            try (HikariDataSource other = new HikariDataSource(config)) {
                try (Connection db = other.getConnection()) {
                    ask(db, "SELECT dlock_acquire('forgotten')");
                }
                try (Connection db = other.getConnection()) {
                    same(ask(db, "SELECT dlock_is_held('forgotten')"), true);
                }
            }
        }
    }

    static void answered() throws Exception {
        try (HikariDataSource pool = pool()) {
            Object pid;
            try (Connection db = checkOut(pool)) {
                pid = ask(db, "SELECT pg_backend_pid()");
                ask(db, "SELECT dlock_acquire('forgotten')");
                db.setAutoCommit(false);
                fails("22012", () -> ask(db, "SELECT 1 / 0"));
            }
            same(isFree("forgotten"), true);
            try (Connection db = checkOut(pool)) {
                same(ask(db, "SELECT pg_backend_pid()"), pid);
                admin("SELECT pg_terminate_backend(?, 60000)", pid);
            }
            try (Connection db = pool.getConnection()) {
                same(pid.equals(ask(db, "SELECT pg_backend_pid()")), false);
            }
        }
    }

    /** The client's package over a connection of the pool's */
    static void client() throws Exception {
        try (HikariDataSource pool = pool()) {
            try (Connection db = pool.getConnection()) {
                try (Lock lock = Lock.on(db, "report").acquire()) {
                    same(isFree("report"), false);
                }
                same(isFree("report"), true);
                Lock.on(db, "report").acquire();
                Locks.reset(db);
            }
            same(isFree("report"), true);
        }
    }

    public static void main(String[] arguments) throws Exception {
        test("transaction scope: the pool rolls back", Hikari::transactions);
        test("errors are the driver's, and leave the connection", Hikari::timeoutsAndErrors);
        test("lease: over one connection of the pool, and another", Hikari::lease);
        test("a ticket: asked, then listened for", Hikari::ticket);
        test("the trap of pools: what comes back holds its locks", Hikari::returned);
        test("which a connection that releases them answers", Hikari::answered);
        test("the client's package over the pool", Hikari::client);
        end();
    }
}
