import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.Objects;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;

/**
 * What the tests of the stacks have in common.
 *
 * <p>Each does what an application would, as docs/java.md advises; and each trap that the page warns of is
 * sprung once, so that the advice can go if the trap does.  test/t/client_java.pl starts them, with the servers of
 * clients/README.md in the environment, and reads what is printed here.
 *
 * <p>What would break it: a result, an error or an argument that the library takes for something else; a lock that
 * stays after an exception, or in the pool.
 */
class Stack {
    static final int TIMEOUT = Integer.parseInt(System.getenv("PG_TEST_TIMEOUT_DEFAULT"));
    static final String MAIN = url("MAIN", "app");
    private static boolean failed;
    private static Connection admin;        // with which the tests look at it

    interface Code {
        void run() throws Exception;
    }

    static String url(String server, String user) {
        return "jdbc:postgresql://" + System.getenv("DLOCK_" + server) + "/postgres?user=" + user;
    }

    /** The value of the first row */
    static Object ask(Connection db, String sql, Object... values) throws SQLException {
        try (PreparedStatement statement = db.prepareStatement(sql)) {
            for (int i = 0; i < values.length; i++)
                statement.setObject(i + 1, values[i]);
            try (ResultSet rows = statement.executeQuery()) {
                rows.next();
                return rows.getObject(1);
            }
        }
    }

    static synchronized Object admin(String sql, Object... values) throws SQLException {
        if (admin == null)
            admin = DriverManager.getConnection(url("MAIN", "admin"));
        return ask(admin, sql, values);
    }

    static boolean isFree(String name) throws SQLException {
        return (Boolean) admin("SELECT dlock_try_xact_acquire(?) IS NOT NULL", name);
    }

    static void until(String sql, Object... values) throws Exception { until(() -> (Boolean) admin(sql, values)); }

    static void until(Callable<Boolean> condition) throws Exception {
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(TIMEOUT);
        while (!condition.call()) {
            if (System.nanoTime() > end)
                throw new AssertionError("waited in vain");
            Thread.sleep(10);
        }
    }

    /** What has become of it: its error, or nothing */
    static void result(FutureTask<?> task) throws Exception {
        try {
            task.get(TIMEOUT, TimeUnit.SECONDS);
        } catch (ExecutionException error) {
            throw error.getCause() instanceof Exception cause ? cause : error;
        }
    }

    static <E extends Exception> E fails(Class<E> kind, Code code) throws Exception {
        try {
            code.run();
        } catch (Exception error) {
            if (error.getClass() != kind)
                throw error;
            return kind.cast(error);
        }
        throw new AssertionError("no " + kind);
    }

    static void untilWaits(String name) throws Exception {
        until("SELECT count(*) = 1 FROM dlock_locks WHERE name = ? AND NOT granted", name);
    }

    static void untilRenewed(long lease) throws Exception {
        Object before = admin("SELECT renewed_at FROM dlock_leases WHERE lease = ?", lease);
        until("SELECT renewed_at > ? FROM dlock_leases WHERE lease = ?", before, lease);
    }

    /** Somebody else has the lock, and the connection, until that is closed. */
    static Connection holder(String name) throws SQLException {
        Connection holder = DriverManager.getConnection(url("MAIN", "admin"));
        ask(holder, "SELECT dlock_acquire(?)", name);
        return holder;
    }

    static FutureTask<Void> aside(Code code) {
        FutureTask<Void> task = new FutureTask<>(() -> {
            code.run();
            return null;
        });
        Thread thread = new Thread(task);
        thread.setDaemon(true);
        thread.start();
        return task;
    }

    static void same(Object got, Object wanted) {
        if (!Objects.equals(got, wanted))
            throw new AssertionError("got " + got + ", wanted " + wanted);
    }

    /** The error, which has to be of the driver's class, and of none that is narrower */
    static SQLException fails(String state, Code code) throws Exception {
        try {
            code.run();
        } catch (SQLException error) {
            if (!state.equals(error.getSQLState()))
                throw error;
            same(error.getClass().getName(), "org.postgresql.util.PSQLException");
            return error;
        }
        throw new AssertionError("no error " + state);
    }

    static void test(String name, Code code) throws Exception {
        try {
            code.run();
            until("SELECT count(*) = 0 FROM dlock_locks");
            System.out.println("ok " + name);
        } catch (Exception | AssertionError error) {
            failed = true;
            System.out.println("not ok " + name);
            error.printStackTrace(System.out);
            admin("SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity WHERE usename = 'app'");
            admin("SELECT count(dlock_force_release(ticket)) FROM dlock_locks");
        }
    }

    static void end() {
        System.out.flush();
        Runtime.getRuntime().halt(failed ? 1 : 0);
    }
}
