import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.lang.annotation.Retention;
import java.lang.annotation.RetentionPolicy;
import java.lang.reflect.Method;
import java.sql.Array;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Objects;
import java.util.Queue;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.function.LongSupplier;
import java.util.stream.Stream;
import javax.sql.DataSource;
import org.dlock.DlockException;
import org.dlock.Election;
import org.dlock.Event;
import org.dlock.Lease;
import org.dlock.Lock;
import org.dlock.Locks;
import org.dlock.Lost;
import org.dlock.Observer;
import org.dlock.Tickets;

/**
 * The scenarios of clients/scenarios.md, for the Java client.
 *
 * <p>Each row has one method with its name, in the order of the rows.  test/t/client_java.pl starts this program.
 */
public final class Run {
    static final int TIMEOUT = Integer.parseInt(System.getenv("PG_TEST_TIMEOUT_DEFAULT"));
    static final Duration PATIENCE = Duration.ofSeconds(TIMEOUT);
    static final Duration LONG = Duration.ofHours(1);
    static final Duration SHORT = Duration.ofSeconds(2 * Math.max(1, TIMEOUT / 180));
    static final Duration BEAT = Duration.ofMillis(500);
    static final Duration NOW = Duration.ZERO;

    static final String MAIN = url("MAIN", "app");
    static final String OTHER = url("OTHER", "app");
    static final BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
    static Locks locks;
    static Admin admin;

    static String url(String server, String user) {
        return "jdbc:postgresql://" + System.getenv("DLOCK_" + server) + "/postgres?user=" + user;
    }

    //
    // Support for the rows
    //

    @Retention(RetentionPolicy.RUNTIME)
    @interface Row {
        int value();        // reflection does not keep the order
    }

    interface Code {
        void run() throws Exception;
    }

    /** Asks the test that started this program for an action. */
    static void order(String line) throws IOException {
        System.out.println("! " + line);
        System.out.flush();
        if (!"done".equals(in.readLine()))
            Runtime.getRuntime().halt(2);       // the test has ended
    }

    static Object ask(Connection db, String sql, Object... values) throws SQLException {
        try (PreparedStatement statement = db.prepareStatement(sql)) {
            for (int i = 0; i < values.length; i++)
                statement.setObject(i + 1, values[i]);
            if (!statement.execute())
                return null;
            try (ResultSet row = statement.getResultSet()) {
                Object value = row.next() ? row.getObject(1) : null;
                return value instanceof Array array ? List.of((Object[]) array.getArray()) : value;
            }
        }
    }

    static Connection connection() throws SQLException {
        return DriverManager.getConnection(MAIN);
    }

    /** Another session; for any thread */
    static final class Admin {
        final String url;
        private Connection connection;

        Admin(String server) {
            url = url(server, "admin") + "&ApplicationName=admin&socketTimeout=" + TIMEOUT;
        }

        synchronized Object ask(String sql, Object... values) throws Exception {
            long end = System.nanoTime() + PATIENCE.toNanos();
            while (true)
                try {
                    if (connection == null)
                        connection = DriverManager.getConnection(url);
                    return Run.ask(connection, sql, values);
                } catch (SQLException error) {
                    if (!(DlockException.of(error) instanceof DlockException.ConnectionLost)
                            || System.nanoTime() > end)
                        throw error;
                    if (connection != null)
                        connection.close();
                    connection = null;
                    Thread.sleep(10);
                }
        }

        boolean is(String sql, Object... values) throws Exception {
            return Boolean.TRUE.equals(ask(sql, values));
        }

        void until(String sql, Object... values) throws Exception {
            waitUntil(() -> is(sql, values), sql);
        }

        boolean isFree(String name) throws Exception {
            return is("SELECT dlock_try_xact_acquire(?) IS NOT NULL", name);
        }

        void untilFree(String name) throws Exception {
            until("SELECT dlock_try_xact_acquire(?) IS NOT NULL", name);
        }

        long left(String name) throws Exception {
            return (Long) ask("SELECT count(*) FROM dlock_locks WHERE name = ?", name);
        }

        void untilWaits(String name) throws Exception {
            until("SELECT count(*) = 1 FROM dlock_locks WHERE name = ? AND NOT granted", name);
        }

        void force(long ticket) throws Exception {
            check(is("SELECT dlock_force_release(?)", ticket));
        }

        void untilRenewed(long lease, int count) throws Exception {
            for (int i = 0; i < count; i++) {
                Object before = ask("SELECT renewed_at FROM dlock_leases WHERE lease = ?", lease);
                until("SELECT renewed_at > ? FROM dlock_leases WHERE lease = ?", before, lease);
            }
        }

        /** The process of the heartbeat's connection, as soon as there is one */
        Object heartbeat() throws Exception {
            until("SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'dlock heartbeat'");
            return ask("SELECT pid FROM pg_stat_activity WHERE application_name = 'dlock heartbeat'");
        }

        Holder holds(String name, String... info) throws SQLException {
            return new Holder(url, name, info.length == 0 ? null : info[0]);
        }
    }

    static final class Holder implements AutoCloseable {
        private final Connection connection;
        final long ticket;

        Holder(String url, String name, String info) throws SQLException {
            connection = DriverManager.getConnection(url);
            ticket = (Long) Run.ask(connection, "SELECT dlock_acquire(?, info => ?)", name, info);
        }

        @Override
        public void close() throws SQLException {
            Run.ask(connection, "SELECT dlock_release_all()");
            connection.close();
        }
    }

    static void check(boolean condition) {
        if (!condition)
            throw new AssertionError();
    }

    static void same(Object got, Object expected) {
        if (!Objects.equals(got, expected))
            throw new AssertionError("got " + got + ", not " + expected);
    }

    static void waitUntil(Callable<Boolean> condition, String what) throws Exception {
        long end = System.nanoTime() + PATIENCE.toNanos();
        while (!condition.call()) {
            if (System.nanoTime() > end)
                throw new AssertionError("waited for " + what);
            Thread.sleep(10);
        }
    }

    static <E extends Exception> E raises(Class<E> kind, String code, Code code_) {
        try {
            code_.run();
        } catch (Exception error) {
            if (error.getClass() != kind)
                throw new AssertionError("not " + kind, error);
            if (code != null)
                same(((SQLException) error).getSQLState(), code);
            return kind.cast(error);
        }
        throw new AssertionError("no " + kind);
    }

    static void lost(Code code) {
        raises(DlockException.LockLost.class, "55L01", code);
    }

    static void busy(Code code) {
        raises(DlockException.LockTimeout.class, "55P03", code);
    }

    /** Work in another thread, which can be interrupted */
    static final class Task<T> extends FutureTask<T> {
        final Thread thread = new Thread(this);

        Task(Callable<T> work) {
            super(work);
            thread.setDaemon(true);
            thread.start();
        }

        T result() throws Exception {
            try {
                return get(TIMEOUT, TimeUnit.SECONDS);
            } catch (ExecutionException error) {
                throw (Exception) error.getCause();
            }
        }
    }

    static void told(Lost<?> lost) throws Exception {
        lost.future().get(TIMEOUT, TimeUnit.SECONDS);
        check(lost.isSet());
    }

    static Lock kept(String name) {
        return locks.lock(name).ttl(LONG).interval(BEAT);
    }

    /** Locks of the URL, or over a pool if the property names a class that makes pools */
    static Locks service(String url) throws DlockException {
        String maker = System.getProperty("pools");
        if (maker == null)
            return new Locks(url);
        try {
            return new Locks((DataSource) Class.forName(maker).getMethod("of", String.class).invoke(null, url));
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException(error);
        }
    }

    static Locks late() throws DlockException {
        return service(MAIN + "&currentSchema=late,public");
    }

    /**
     * Calls of this function in the late schema wait.  At the end, the calls that have waited are executed, and their
     * sessions have ended.
     */
    static final class Abandoned implements AutoCloseable {
        private final Connection other = DriverManager.getConnection(admin.url);

        Abandoned(String function) throws SQLException {
            ask(other, "SELECT pg_advisory_lock(18)");
            ask(other, "INSERT INTO late.waits VALUES (?)", function);
        }

        /** Lets later calls return at once. */
        void waitNoMore() throws SQLException { ask(other, "DELETE FROM late.waits"); }

        @Override
        public void close() throws Exception {
            List<?> pids = (List<?>) ask(other, "SELECT array(SELECT pid FROM pg_stat_activity"
                    + " WHERE usename = 'app' AND wait_event = 'advisory')");
            other.close();
            check(!pids.isEmpty());
            for (Object pid : pids)
                admin.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = ?", pid);
        }
    }

    static void untilCallWaits() throws Exception {
        admin.until("SELECT count(*) = 1 FROM pg_stat_activity"
                + " WHERE usename = 'app' AND wait_event = 'advisory'");
    }

    static boolean isHeld(Lock lock) throws Exception {
        return admin.is("SELECT dlock_check(?, ?)", lock.name(), lock.fence());
    }

    static void transaction(Connection db, Code work) throws Exception {
        db.setAutoCommit(false);
        try {
            work.run();
            db.commit();
        } catch (Exception error) {
            db.rollback();
            throw error;
        } finally {
            db.setAutoCommit(true);
        }
    }

    static void is(Event event, String what, String lock, Long ticket) {
        same(event == null ? null : Arrays.asList(event.event(), event.lock(), event.ticket()),
                Arrays.asList(what, lock, ticket));
    }

    static void killSessions() throws Exception {
        admin.ask("SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity WHERE usename = 'app'");
    }

    @SuppressWarnings("serial")
    static final class Mine extends Exception {}

    //
    // Plain use
    //

    @Row(1) static void session_acquire_release() throws Exception {
        long fence;
        Lock used = locks.lock("plain").info("me");
        try (Lock lock = used.acquire()) {
            check(!admin.isFree("plain"));
            fence = lock.fence();
            check(admin.is("SELECT (ticket, info, scope) = (?, 'me', 'session') FROM dlock_locks"
                    + " WHERE name = 'plain'", fence));
            lock.check();
            raises(DlockException.WrongState.class, "55000", lock::acquire);
        }
        same(admin.left("plain"), 0L);
        raises(DlockException.WrongState.class, "55000", used::release);
        try (Lock lock = used.acquire()) {
            check(lock.fence() > fence);
        }
    }

    @Row(2) static void session_exception() throws Exception {
        raises(Mine.class, null, () -> {
            try (Lock lock = locks.lock("plain").acquire()) {
                throw new Mine();
            }
        });
        same(admin.left("plain"), 0L);
    }

    @Row(3) static void session_on_connection() throws Exception {
        try (Connection db = connection()) {
            try (Lock outer = Lock.on(db, "plain").acquire()) {
                try (Lock inner = Lock.on(db, "plain").acquire()) {
                    same(inner.fence(), outer.fence());
                    ask(db, "SELECT 1");
                }
                check(!admin.isFree("plain"));
            }
            check(admin.isFree("plain"));
            ask(db, "SELECT 1");
        }
    }

    static void eachScopeIsBusy(Duration timeout) throws Exception {
        try (Holder holder = admin.holds("busy"); Connection db = connection()) {
            for (Lock lock : List.of(locks.lock("busy"), Lock.on(db, "busy"), locks.lock("busy").ttl(LONG))) {
                busy(lock.timeout(timeout)::acquire);
                same(admin.left("busy"), 1L);
            }
            busy(() -> transaction(db, () -> Lock.inTransaction(db, "busy").timeout(timeout).acquire()));
            same(admin.left("busy"), 1L);
        }
    }

    @Row(4) static void lock_used_twice() throws Exception {
        for (boolean leased : new boolean[] {false, true}) {
            Lock lock = locks.lock("twice");
            if (leased)
                lock.ttl(LONG);
            List<Task<Lock>> tasks = new ArrayList<>();
            try (Holder other = admin.holds("twice")) {
                for (int i = 0; i < 2; i++)
                    tasks.add(new Task<>(lock::acquire));
                waitUntil(() -> tasks.stream().anyMatch(Task::isDone), "the one that is refused");
                admin.untilWaits("twice");
                for (Task<Lock> task : List.copyOf(tasks))
                    if (task.isDone()) {
                        tasks.remove(task);
                        raises(DlockException.WrongState.class, "55000", task::result);
                    }
                same(tasks.size(), 1);
            }
            tasks.get(0).result();
            long fence = lock.fence();
            raises(DlockException.WrongState.class, "55000", lock::acquire);
            lock.check();
            lock.release();
            same(admin.left("twice"), 0L);
            try (Lock again = lock.acquire()) {
                check(again.fence() > fence);
            }
        }
    }

    static void refused(Code check) {
        raises(DlockException.WrongState.class, "55000", check);
    }

    @Row(5) static void check_unheld() throws Exception {
        try (Connection db = connection()) {
            transaction(db, () -> {
                for (Lock lock : List.of(locks.lock("plain"), locks.lock("plain").ttl(LONG),
                        Lock.inTransaction(db, "plain"))) {
                    refused(lock::check);
                    try (Lock held = lock.acquire()) {
                        held.check();
                    }
                    refused(lock::check);
                }
            });
        }
        Lease lease = locks.lease(LONG);
        refused(lease::check);
        try (Lease open = lease.open()) {
            open.check();
        }
        refused(lease::check);
    }

    @Row(6) static void try_busy() throws Exception {
        eachScopeIsBusy(NOW);
    }

    @Row(7) static void timeout() throws Exception {
        eachScopeIsBusy(Duration.ofMillis(50));
        locks.lock("plain").timeout(Duration.ofDays(300 * 365)).acquire().release();
    }

    @Row(8) static void shared() throws Exception {
        try (Lock first = locks.lock("shared").shared().acquire();
                Lock second = locks.lock("shared").shared().acquire()) {
            check(first.fence() != second.fence());
            busy(locks.lock("shared").timeout(NOW)::acquire);
            same(admin.ask("SELECT count(*) FROM dlock_locks WHERE name = 'shared' AND granted"), 2L);
        }
        locks.lock("shared").timeout(NOW).acquire().close();
    }

    @Row(9) static void slots() throws Exception {
        Lock big = locks.lock("slots").slots(3).permits(2).acquire();
        try (Lock small = locks.lock("slots").slots(3).acquire()) {
            busy(locks.lock("slots").slots(3).timeout(NOW)::acquire);
            raises(DlockException.WrongState.class, "55000", locks.lock("slots").slots(4)::acquire);
            big.release();
            locks.lock("slots").slots(3).timeout(NOW).acquire().close();
        }
    }

    @Row(10) static void resize() throws Exception {
        Locks admins = new Locks(admin.url);
        raises(DlockException.NotAllowed.class, "42501", () -> locks.resize("sized", 1));
        admins.resize("sized", 1);
        same(admin.ask("SELECT array_agg(slots) FROM dlock_slots WHERE name = 'sized'"), List.of(1));
        admins.resize("sized", null);
        same(admin.ask("SELECT array_agg(slots) FROM dlock_slots WHERE name = 'sized'"), null);
    }

    @Row(11) static void transaction_commit() throws Exception {
        try (Connection db = connection()) {
            transaction(db, () -> {
                try (Lock lock = Lock.inTransaction(db, "plain").acquire()) {
                    same(admin.ask("SELECT ticket FROM dlock_locks WHERE name = 'plain'"), lock.fence());
                }
                check(!admin.isFree("plain"));
            });
            check(admin.isFree("plain"));
        }
    }

    @Row(12) static void transaction_rollback() throws Exception {
        try (Connection db = connection()) {
            raises(Mine.class, null, () -> transaction(db, () -> {
                try (Lock lock = Lock.inTransaction(db, "plain").acquire()) {
                    throw new Mine();
                }
            }));
            check(admin.isFree("plain"));
        }
    }

    @Row(13) static void transaction_none() throws Exception {
        try (Connection db = connection(); Lock lease = locks.lock("lease").ttl(LONG).acquire()) {
            raises(DlockException.WrongState.class, "55000", () -> Lock.inTransaction(db, "plain").acquire());
            raises(DlockException.WrongState.class, "55000", () -> lease.guard(db));
            same(admin.left("plain"), 0L);
            check(db.isValid(1));
        }
    }

    @Row(14) static void lease_acquire_release() throws Exception {
        Lock used = locks.lock("lease").ttl(LONG).owner("job/1").info("me");
        try (Lock lock = used.acquire()) {
            check(admin.is("SELECT (ticket, scope, owner, info) = (?, 'lease', 'job/1', 'me') AND pid IS NULL"
                    + " FROM dlock_locks WHERE name = 'lease'", lock.fence()));
            check(!lock.lost().isSet());
            check(lock.deadline() > Locks.now());
            lock.check();
        }
        check(!used.lost().isSet());
        same(admin.left("lease"), 0L);
    }

    @Row(15) static void lease_renews() throws Exception {
        try (Lock lock = kept("lease").acquire()) {
            long deadline = lock.deadline();
            admin.untilRenewed(lock.fence(), 2);
            check(!admin.isFree("lease") && !lock.lost().isSet());
            waitUntil(() -> lock.deadline() > deadline, "a later deadline");
        }
    }

    @Row(16) static void lease_deadline() throws Exception {
        Lock lock = late().lock("lease").ttl(LONG);
        Task<Lock> waiting;
        long latest;
        try (Connection other = DriverManager.getConnection(admin.url)) {
            ask(other, "SELECT pg_advisory_lock(17)");
            try (Holder holder = admin.holds("lease")) {
                waiting = new Task<>(lock::acquire);
                admin.untilWaits("lease");
            }
            untilCallWaits();
            check(!waiting.isDone());
            latest = Locks.now() + LONG.toNanos() / 100 * 99;
        }
        waiting.result();
        check(latest - LONG.toNanos() < lock.deadline() && lock.deadline() <= latest);
        lock.release();
    }

    static void holds(Lease lease, long count) throws Exception {
        same(admin.ask("SELECT array_agg(held::bigint) FROM dlock_leases WHERE lease = ?", lease.id()),
                List.of(count));
    }

    @Row(17) static void lease_many() throws Exception {
        try (Lease lease = locks.lease(LONG).info("many").open()) {
            List<Lock> many = List.of(lease.lock("a").acquire(), lease.lock("b").acquire(), lease.lock("c").acquire());
            same(admin.ask("SELECT count(*) FROM dlock_leases"), 1L);
            holds(lease, 3);
            many.get(0).release();
            holds(lease, 2);
            check(admin.isFree("a") && !admin.isFree("b"));
            busy(lease.lock("b").timeout(NOW)::acquire);
        }
        same(admin.ask("SELECT count(*) FROM dlock_leases"), 0L);
        check(admin.isFree("b") && admin.isFree("c"));
    }

    @Row(18) static void acquire_all() throws Exception {
        try (Lease lease = locks.lease(LONG).open()) {
            Lock both = lease.lock("a", "b");
            try (Holder other = admin.holds("b")) {
                busy(lease.lock("a", "b").timeout(NOW)::acquire);
                same(admin.left("a") + admin.left("b"), 1L);
                Task<Lock> waiting = new Task<>(both::acquire);
                admin.untilWaits("b");
                both.cancel();
                raises(DlockException.Cancelled.class, "57014", waiting::result);
                same(admin.left("a") + admin.left("b"), 1L);
            }
            both.acquire();
            for (String name : List.of("a", "b"))
                same(admin.ask("SELECT array_agg(ticket) FROM dlock_locks WHERE name = ?", name),
                        List.of(both.fence(name)));
        }
        check(admin.isFree("a") && admin.isFree("b"));
    }

    interface Renewal {
        void with(Duration ttl) throws Exception;
    }

    static void renews(Renewal renewal, LongSupplier deadline, long lease) throws Exception {
        String kept = "SELECT ttl = CAST(? AS interval) FROM dlock_leases WHERE lease = ?";
        Duration half = LONG.dividedBy(2);
        for (Duration ttl : List.of(LONG.multipliedBy(2), half)) {
            long life = ttl.toNanos() / 100 * 99, before = Locks.now();
            renewal.with(ttl);
            check(admin.is(kept, ttl.toString(), lease));
            check(before + life <= deadline.getAsLong() && deadline.getAsLong() <= Locks.now() + life);
        }
        long last = deadline.getAsLong();
        for (Duration refused : List.of(Duration.ofMillis(50), Duration.ofDays(1000)))
            raises(DlockException.BadArgument.class, "22023", () -> renewal.with(refused));
        check(admin.is(kept, half.toString(), lease));
        same(deadline.getAsLong(), last);
    }

    @Row(19) static void renew_ttl() throws Exception {
        try (Lock lock = locks.lock("lease").ttl(LONG).acquire(); Lease lease = locks.lease(LONG).open();
                Lock session = locks.lock("plain").acquire()) {
            renews(lock::renew, lock::deadline, lock.fence());
            renews(lease::renew, lease::deadline, lease.id());
            refused(() -> session.renew(LONG));
        }
    }

    @Row(20) static void change_held() throws Exception {
        for (Lock used : List.of(locks.lock("held"), locks.lock("held").ttl(LONG)))
            lost(() -> {
                try (Lock lock = used.acquire()) {
                    long fence = lock.fence();
                    check(lock.isHeld());
                    lock.setInfo("reads");
                    lock.downgrade();
                    check(admin.is("SELECT (ticket, info, mode) = (?, 'reads', 'shared') FROM dlock_locks"
                            + " WHERE name = 'held'", fence));
                    same(lock.fence(), fence);
                    admin.force(fence);
                    check(!lock.isHeld());
                    lost(lock::downgrade);
                }
            });
    }

    @Row(21) static void lease_closed_under_lock() throws Exception {
        Lease lease = locks.lease(LONG).open();
        Lock lock = lease.lock("closed").acquire();
        lease.close();
        same(admin.left("closed"), 0L);
        told(lock.lost());
        lost(lock::check);
        lost(lock::release);
        lease.close();
        check(!lease.lost().isSet());
    }

    static List<Task<Lease>> openTwice(Lease lease) {
        return List.of(new Task<>(lease::open), new Task<>(lease::open));
    }

    static void oneOpens(List<Task<Lease>> tasks) throws Exception {
        int refused = 0;
        for (Task<Lease> task : tasks)
            try {
                task.result();
            } catch (DlockException.WrongState error) {
                refused++;
            }
        same(refused, 1);
    }

    @Row(22) static void lease_opened_twice() throws Exception {
        Lease lease = locks.lease(LONG);
        oneOpens(openTwice(lease));
        raises(DlockException.WrongState.class, "55000", lease::open);
        same(admin.ask("SELECT count(*) FROM dlock_leases"), 1L);
        lease.close();
        same(admin.ask("SELECT count(*) FROM dlock_leases"), 0L);
    }

    @Row(23) static void lease_closed_while_opening() throws Exception {
        Lease lease = locks.lease(LONG);
        order("freeze");
        List<Task<Lease>> opening = openTwice(lease);
        waitUntil(() -> opening.stream().anyMatch(Task::isDone), "the one that is refused");
        Task<?> closing = new Task<>(() -> {
            lease.close();
            return null;
        });
        waitUntil(() -> closing.isDone() || closing.thread.getState() == Thread.State.TIMED_WAITING, "close()");
        order("thaw");
        closing.result();
        oneOpens(opening);
        same(admin.ask("SELECT count(*) FROM dlock_leases"), 0L);
        lease.open().close();
    }

    static void untilConnections(int most) throws Exception {
        admin.until("SELECT count(*) <= ? FROM pg_stat_activity WHERE usename = 'app'", most);
    }

    @Row(24) static void connections() throws Exception {
        try (Lease lease = locks.lease(LONG).open()) {
            List<Lock> many = new ArrayList<>();
            for (int i = 0; i < 1000; i++)
                many.add(lease.lock("many/" + i).acquire());
            for (int i = 0; i < 10; i++)
                many.add(locks.lock("own/" + i).ttl(LONG).acquire());
            untilConnections(4);
            for (Lock lock : many)
                lock.release();
            untilConnections(4);
        }
    }

    @Row(25) static void connections_waiting() throws Exception {
        try (Connection holder = DriverManager.getConnection(admin.url); Lease lease = locks.lease(LONG).open()) {
            ask(holder, "SELECT count(dlock_acquire('busy/' || n)) FROM generate_series(1, 20) AS n");
            List<Task<Lock>> waiting = new ArrayList<>();
            for (int n = 1; n <= 10; n++) {
                waiting.add(new Task<>(lease.lock("busy/" + n)::acquire));
                waiting.add(new Task<>(locks.lock("busy/" + (10 + n)).ttl(LONG)::acquire));
            }
            admin.until("SELECT count(*) = 20 FROM dlock_locks WHERE NOT granted");
            untilConnections(22);
            ask(holder, "SELECT dlock_release_all()");
            List<Lock> held = new ArrayList<>();
            for (Task<Lock> task : waiting)
                held.add(task.result());
            untilConnections(4);
            for (Lock lock : held)
                lock.release();
        }
    }

    @Row(26) static void lease_same_owner() throws Exception {
        Object fence;
        try (Connection db = connection()) {
            fence = ask(db, "SELECT dlock_ttl_acquire('lease', '1 h', owner => 'job/1')");
        }
        try (Lock lock = locks.lock("lease").ttl(LONG.multipliedBy(2)).owner("job/1").timeout(NOW).acquire()) {
            same(lock.fence(), fence);
            check(lock.deadline() < Locks.now() + LONG.toNanos());
            check(lock.deadline() > Locks.now());
            busy(locks.lock("lease").ttl(LONG).owner("job/2").timeout(NOW)::acquire);
        }
        same(admin.left("lease"), 0L);
    }

    @Row(27) static void guard_commits() throws Exception {
        try (Lock lock = locks.lock("lease").ttl(LONG).acquire(); Connection db = connection()) {
            transaction(db, () -> {
                lock.guard(db);
                ask(db, "INSERT INTO data VALUES (1)");
            });
        }
        same(admin.ask("SELECT count(*) FROM data WHERE n = 1"), 1L);
    }

    @Row(28) static void guard_refuses() throws Exception {
        lost(() -> {
            try (Connection db = connection(); Lock lock = locks.lock("lease").ttl(LONG).acquire()) {
                admin.force(lock.fence());
                lost(() -> transaction(db, () -> {
                    lock.guard(db);
                    ask(db, "INSERT INTO data VALUES (2)");
                }));
            }
        });
        same(admin.ask("SELECT count(*) FROM data WHERE n = 2"), 0L);
    }

    @Row(29) static void enqueue_free() throws Exception {
        try (Tickets tickets = new Tickets(locks)) {
            long ticket = tickets.enqueue("queue");
            is(tickets.next(PATIENCE), "granted", "queue", ticket);
            long other = tickets.enqueue("next");
            is(tickets.next(PATIENCE), "granted", "next", other);
            same(tickets.next(NOW), null);
            tickets.release(ticket);
            check(admin.isFree("queue") && !admin.isFree("next"));
        }
        // a repeated request whose ticket is granted, and was reported
        try (Lease lease = locks.lease(LONG).open(); Tickets old = new Tickets(lease);
                Tickets again = new Tickets(lease)) {
            long ticket = old.enqueue(locks.lock("queue").owner("job/1"));
            is(old.next(PATIENCE), "granted", "queue", ticket);
            same(again.enqueue(locks.lock("queue").owner("job/1")), ticket);
            is(again.next(PATIENCE), "granted", "queue", ticket);
        }
    }

    @Row(30) static void enqueue_waits() throws Exception {
        try (Tickets tickets = new Tickets(locks)) {
            long ticket;
            try (Holder holder = admin.holds("queue")) {
                ticket = tickets.enqueue(locks.lock("queue").info("me"));
                same(tickets.next(NOW), null);
                check(admin.is("SELECT info = 'me' FROM dlock_locks WHERE ticket = ?", ticket));
            }
            is(tickets.next(PATIENCE), "granted", "queue", ticket);
        }
        try (Tickets tickets = new Tickets(locks); Holder holder = admin.holds("queue")) {
            tickets.enqueue("queue");
            Task<Event> waiting = new Task<>(tickets::next);
            waiting.thread.interrupt();
            raises(DlockException.Cancelled.class, "57014", waiting::result);
        }
    }

    @Row(31) static void enqueue_thousands() throws Exception {
        int count = 2000;
        try (Connection holder = DriverManager.getConnection(admin.url); Tickets tickets = new Tickets(locks)) {
            ask(holder, "SELECT count(dlock_acquire('job/' || n)) FROM generate_series(1, ?) AS n", count);
            Set<Long> waiting = new HashSet<>();
            for (int n = 1; n <= count; n++)
                waiting.add(tickets.enqueue("job/" + n));
            same(waiting.size(), count);
            // connections of earlier rows may still be ending
            admin.until("SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'dlock'");
            ask(holder, "SELECT dlock_release_all()");
            for (int n = 1; n <= count; n++) {
                Event event = tickets.next(PATIENCE);
                same(event.event(), "granted");
                check(waiting.remove(event.ticket()));
            }
            same(tickets.next(NOW), null);
        }
    }

    @Row(32) static void enqueue_connection_killed() throws Exception {
        try (Lease lease = locks.lease(LONG).open(); Tickets ours = new Tickets(locks);
                Tickets unread = new Tickets(locks); Tickets released = new Tickets(locks);
                Tickets kept = new Tickets(lease)) {
            long held, waits;
            try (Holder holder = admin.holds("busy")) {
                ours.enqueue("free");
                same(ours.next(PATIENCE).event(), "granted");
                unread.enqueue("unread");
                long gone = released.enqueue("released");
                held = kept.enqueue("kept");
                waits = kept.enqueue("busy");
                is(kept.next(PATIENCE), "granted", "kept", held);
                killSessions();
                lost(() -> ours.next(PATIENCE));
                long again = ours.enqueue("free");
                is(ours.next(PATIENCE), "granted", "free", again);
                lost(() -> unread.enqueue("other"));
                long other = unread.enqueue("other");
                is(unread.next(PATIENCE), "granted", "other", other);
                lost(() -> released.release(gone));
                long next = released.enqueue("released");
                is(released.next(PATIENCE), "granted", "released", next);
                same(kept.next(NOW), null);
                same(admin.ask("SELECT array_agg(ticket ORDER BY ticket) FROM dlock_locks WHERE lease = ?",
                        lease.id()), List.of(held, waits));
            }
            is(kept.next(PATIENCE), "granted", "busy", waits);
            kept.release(waits);
            kept.release(held);
        }
    }

    @Row(33) static void enqueue_released() throws Exception {
        try (Tickets tickets = new Tickets(locks)) {
            long ticket = tickets.enqueue("queue");
            same(tickets.next(PATIENCE).event(), "granted");
            admin.force(ticket);
            is(tickets.next(PATIENCE), "released", "queue", ticket);
            lost(() -> tickets.release(ticket));
        }
    }

    @Row(34) static void election_hand_over() throws Exception {
        List<CountDownLatch> leaving = List.of(new CountDownLatch(1), new CountDownLatch(1));
        List<Long> led = Collections.synchronizedList(new ArrayList<>());
        List<Task<Integer>> running = new ArrayList<>();

        for (int n = 0; n < 2; n++) {
            int me = n;
            Election election = new Election(locks.lock("leader").ttl(LONG).info("node-" + n));
            running.add(new Task<>(() -> election.run(lock -> {
                led.add(lock.fence());
                check(leaving.get(me).await(TIMEOUT, TimeUnit.SECONDS));
                return me;
            })));
            if (n == 0)
                waitUntil(() -> led.size() == 1, "the first leader");
        }
        admin.untilWaits("leader");
        same(admin.ask("SELECT info FROM dlock_locks WHERE name = 'leader' AND granted"), "node-0");
        same(led.size(), 1);
        leaving.get(0).countDown();
        same(running.get(0).result(), 0);
        waitUntil(() -> led.size() == 2, "the second leader");
        leaving.get(1).countDown();
        same(running.get(1).result(), 1);
        check(led.get(0) < led.get(1));

        // stop() during a wait, and during the lead, which continues to the end of the work
        Election stopped = new Election(locks.lock("leader").ttl(LONG));
        try (Holder holder = admin.holds("leader")) {
            Task<Integer> waiting = new Task<>(() -> stopped.run(lock -> 1));
            admin.untilWaits("leader");
            stopped.stop();
            same(waiting.result(), null);
            same(admin.left("leader"), 1L);
        }
        Election leads = new Election(locks.lock("leader").ttl(LONG));
        same(leads.run(lock -> {
            leads.stop();
            return 1;
        }), 1);
        same(admin.left("leader"), 0L);
    }

    @Row(35) static void election_lost() throws Exception {
        List<Long> led = new ArrayList<>();
        same(new Election(kept("leader")).run(lock -> {
            led.add(lock.fence());
            if (led.size() == 1) {
                admin.force(lock.fence());
                try {
                    Thread.sleep(PATIENCE.toMillis());
                } catch (InterruptedException error) {
                    check(lock.lost().isSet());
                    throw error;
                }
                throw new AssertionError("not interrupted");
            }
            return led.size();
        }), 2);
        check(led.get(0) < led.get(1));
        check(!Thread.interrupted());
    }

    @Row(36) static void election_restart() throws Exception {
        Task<String> running;
        try (Lease lease = locks.lease(LONG).interval(BEAT).open()) {
            lease.lock("leader").acquire();
            Locks hasty = service(MAIN).patience(Duration.ZERO);
            running = new Task<>(() -> new Election(hasty.lock("leader").ttl(LONG)).run(lock -> "led"));
            admin.untilWaits("leader");
            order("restart");
            admin.untilRenewed(lease.id(), 1);
            check(!running.isDone());
        }
        same(running.result(), "led");
    }

    @Row(37) static void election_outage() throws Exception {
        CountDownLatch failed = new CountDownLatch(1);
        Locks hasty = service(MAIN).patience(Duration.ZERO).observer(new Observer() {
            @Override
            public void refused(Lock lock, Duration waited, DlockException reason) { failed.countDown(); }
        });
        List<Long> led = Collections.synchronizedList(new ArrayList<>());
        Task<Integer> running = new Task<>(() -> new Election(hasty.lock("leader").ttl(SHORT)).run(lock -> {
            led.add(lock.fence());
            if (led.size() == 1)
                told(lock.lost());      // or interrupted
            return led.size();
        }));
        waitUntil(() -> led.size() == 1, "the first lead");
        order("freeze");
        check(failed.await(TIMEOUT, TimeUnit.SECONDS));     // it has left, and campaigns again
        order("thaw");
        same(running.result(), 2);
        check(led.get(0) < led.get(1));
    }

    @Row(38) static void watch() throws Exception {
        String info = "node \"1\"\\\n" + "\u00e9\ud83d\ude00".repeat(100);
        try (Tickets changes = locks.watch("leader")) {
            is(changes.next(PATIENCE), "free", "leader", null);
            try (Holder holder = admin.holds("leader", info)) {
                Event held = changes.next(PATIENCE);
                is(held, "held", "leader", holder.ticket);
                same(held.details().get("info"), info);
                killSessions();
                // over a new connection, the first event is the current holder
                is(changes.next(PATIENCE), "held", "leader", holder.ticket);
            }
            is(changes.next(PATIENCE), "free", "leader", null);
        }
    }

    @Row(39) static void observer() throws Exception {
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        Locks observed = service(MAIN).observer(new Observer() {
            private void tell(String what) {
                seen.add(what);
                throw new IllegalStateException();
            }

            @Override
            public void acquired(Lock lock, Duration waited) { tell("acquired " + lock.name()); }

            @Override
            public void refused(Lock lock, Duration waited, DlockException reason) {
                tell("refused " + lock.name() + " " + reason.getSQLState());
            }

            @Override
            public void released(Lock lock, Duration held) { tell("released " + lock.name()); }

            @Override
            public void lost(Lock lock, String reason) { tell("lost " + lock.name()); }

            @Override
            public void retried(DlockException reason) { tell("retried"); }
        });
        Lock waiter = observed.lock("busy"), used = observed.lock("lease").ttl(LONG).interval(BEAT);
        Task<Lock> waiting;
        try (Holder holder = admin.holds("busy")) {
            busy(observed.lock("busy").timeout(NOW)::acquire);
            waiting = new Task<>(waiter::acquire);
            admin.untilWaits("busy");
            killSessions();
            admin.untilWaits("busy");
        }
        waiting.result().release();
        lost(() -> {
            try (Lock lock = used.acquire()) {
                admin.force(lock.fence());
                waitUntil(() -> seen.size() == 6, "the loss");
            }
        });
        same(seen, List.of("refused busy 55P03", "retried", "acquired busy", "released busy", "acquired lease",
                "lost lease", "released lease"));
        same(admin.left("busy") + admin.left("lease"), 0L);
    }

    static void fails(Class<? extends Exception> kind, String code, String hint, String sql, Object... values)
            throws Exception {
        try (Connection db = connection()) {
            DlockException error = (DlockException) raises(kind, code, () -> {
                try {
                    ask(db, sql, values);
                } catch (SQLException refused) {
                    throw DlockException.of(refused);
                }
            });
            if (hint != null)
                same(error.getHint(), hint);
        }
    }

    @Row(40) static void errors() throws Exception {
        try (Holder holder = admin.holds("busy")) {
            busy(locks.lock("busy").timeout(NOW)::acquire);
            Task<Lock> waiting = new Task<>(locks.lock("busy")::acquire);
            admin.untilWaits("busy");
            check(admin.is("SELECT pg_cancel_backend(pid) FROM dlock_locks WHERE NOT granted"));
            raises(DlockException.Cancelled.class, "57014", waiting::result);
        }
        try (Connection one = connection(); Connection two = connection();
                Lock a = Lock.on(one, "a").acquire(); Lock b = Lock.on(two, "b").acquire()) {
            List<Task<Lock>> waiting = List.of(
                    new Task<>(Lock.on(one, "b")::acquire), new Task<>(Lock.on(two, "a")::acquire));
            waitUntil(() -> waiting.stream().anyMatch(Task::isDone), "a victim");
            for (Task<Lock> task : waiting)
                if (task.isDone())
                    raises(DlockException.Deadlock.class, "40P01", task::result);
            // the other acquire still waits, and uses its connection
            admin.ask("SELECT pg_cancel_backend(pid) FROM dlock_locks WHERE NOT granted");
            waitUntil(() -> waiting.stream().allMatch(Task::isDone), "the other one");
        }
        fails(DlockException.LockLost.class, "55L01", null, "SELECT dlock_guard('gone', 1)");
        raises(DlockException.NotAllowed.class, "42501", locks.lock("reserved/1")::acquire);
        raises(DlockException.NotPrimary.class, "25006",
                new Locks(url("STANDBY", "app")).patience(NOW).lock("standby")::acquire);
        fails(DlockException.StaleVersion.class, "40001", null, "SELECT dlock_version_bump('doc', 7)");
        raises(DlockException.BadArgument.class, "22023", locks.lock("slots").slots(0)::acquire);
        raises(DlockException.BadArgument.class, "22004", locks.lock((String) null)::acquire);
        try (Lock lock = locks.lock("slots").slots(2).acquire()) {
            raises(DlockException.WrongState.class, "55000", locks.lock("slots").slots(3)::acquire);
        }
        fails(DlockException.NoRoom.class, "53200", "do this", "SELECT raise('53200', 'do this')");
        fails(DlockException.NoRoom.class, "53400", "do this", "SELECT raise('53400', 'do this')");
        fails(DlockException.QuorumLate.class, "58030", "do this", "SELECT raise('58030', 'do this')");
        fails(DlockException.class, "22012", "do this", "SELECT raise('22012', 'do this')");
        raises(DlockException.ConnectionLost.class, null,
                new Locks("jdbc:postgresql://127.0.0.1:1/").patience(NOW).lock("x")::acquire);
        raises(DlockException.BadArgument.class, null, new Locks("jdbc:other:").lock("x")::acquire);
        raises(DlockException.BadArgument.class, null,
                locks.lock("x").ttl(LONG).interval(LONG)::acquire);
    }

    @Row(41) static void sharding() throws Exception {
        String third = "jdbc:postgresql://nowhere/";
        Locks both = new Locks(MAIN, OTHER).keys("main", "other");
        Locks turned = new Locks(OTHER, MAIN).keys("other", "main");
        Locks more = new Locks(MAIN, OTHER, third).keys("main", "other", "third");
        Admin other = new Admin("OTHER");
        List<Lock> held = new ArrayList<>();
        Set<String> here = new TreeSet<>(), there = new TreeSet<>();
        boolean moved = false;

        for (int n = 0; n < 20; n++) {
            String name = "shard/" + n;
            held.add(both.lock(name).acquire());
            if (admin.left(name) > 0)
                here.add(name);
            if (other.left(name) > 0)
                there.add(name);
            busy(turned.lock(name).timeout(NOW)::acquire);
            moved |= more.server(name).equals(third);
            check(more.server(name).equals(third) || more.server(name).equals(both.server(name)));
        }
        check(moved && !here.isEmpty() && !there.isEmpty());
        same(here.size() + there.size(), 20);
        check(Collections.disjoint(here, there));
        for (Lock lock : held)
            lock.release();
        // by the same rule as in all clients
        same(List.of(new Locks("a", "b", "c").server("x"), new Locks("a", "b", "c").server("\u00e9")),
                List.of("b", "c"));
    }

    //
    // Faults
    //

    @Row(42) static void session_connection_killed() throws Exception {
        lost(() -> {
            try (Lock lock = locks.lock("killed").acquire()) {
                killSessions();
                try (Holder holder = admin.holds("killed")) {
                    check(holder.ticket > lock.fence());
                }
            }
        });
    }

    @Row(43) static void session_restart() throws Exception {
        Lock used = locks.lock("restart");
        lost(() -> {
            try (Lock lock = used.acquire()) {
                order("restart");
            }
        });
        long fence = used.fence();
        try (Lock again = used.acquire()) {
            check(again.fence() > fence);
        }
    }

    @Row(44) static void lease_connection_killed() throws Exception {
        try (Lock lock = kept("lease").acquire()) {
            for (int n = 0; n < 2; n++) {
                admin.heartbeat();
                killSessions();
                admin.untilRenewed(lock.fence(), 1);
            }
            check(!lock.lost().isSet());
            check(admin.is("SELECT dlock_check('lease', ?)", lock.fence()));
        }
    }

    @Row(45) static void lease_acquire_killed() throws Exception {
        Lock lock = locks.lock("lease").ttl(LONG).owner("job/1");
        Task<Lock> waiting;
        try (Holder holder = admin.holds("lease")) {
            waiting = new Task<>(lock::acquire);
            admin.untilWaits("lease");
            Object pid = admin.ask("SELECT pid FROM dlock_locks WHERE NOT granted");
            check(admin.is("SELECT pg_terminate_backend(?, 60000)", pid));
            admin.untilWaits("lease");
        }
        waiting.result();
        same(admin.ask("SELECT array_agg(ticket) FROM dlock_locks WHERE name = 'lease' AND owner = 'job/1'"),
                List.of(lock.fence()));
        same(admin.left("lease"), 1L);
        lock.release();
    }

    @Row(46) static void lease_backend_stopped() throws Exception {
        try (Lock lock = kept("lease").acquire()) {
            Object pid = admin.heartbeat();
            order("stop " + pid);
            admin.untilRenewed(lock.fence(), 2);
            check(!lock.lost().isSet());
            order("continue " + pid);
            check(!admin.isFree("lease"));
        }
        same(admin.left("lease"), 0L);
    }

    @Row(47) static void lease_server_stopped() throws Exception {
        lost(() -> {
            try (Lock lock = locks.lock("lease").ttl(SHORT).acquire()) {
                admin.heartbeat();
                order("freeze");
                told(lock.lost());
                lost(lock::check);
                order("thaw");
                check(admin.is("SELECT true"));
                check(lock.lost().isSet());
            }
        });
        admin.untilFree("lease");
    }

    @Row(48) static void lease_client_stopped() throws Exception {
        lost(() -> {
            try (Lock lock = locks.lock("lease").ttl(SHORT).acquire()) {
                CompletableFuture<Lock> called = new CompletableFuture<>();
                lock.lost().addCallback(called::complete);
                order("suspend " + ProcessHandle.current().pid()
                        + " SELECT dlock_try_xact_acquire('lease') IS NOT NULL");
                check(lock.lost().isSet());
                same(called.get(TIMEOUT, TimeUnit.SECONDS), lock);
                check(admin.is("SELECT true"));
                check(lock.lost().isSet());
                try (Holder holder = admin.holds("lease")) {
                    check(holder.ticket > lock.fence());
                }
            }
        });
    }

    @Row(49) static void lease_restart() throws Exception {
        try (Lock lock = kept("lease").acquire()) {
            order("restart");
            admin.untilRenewed(lock.fence(), 2);
            check(!lock.lost().isSet());
            check(admin.is("SELECT dlock_check('lease', ?)", lock.fence()));
        }
        same(admin.left("lease"), 0L);
    }

    @Row(50) static void lease_worker_killed() throws Exception {
        Task<Lock> waiting;
        Lock successor = locks.lock("lease").ttl(LONG), used = kept("lease");
        try (Lock lock = used.acquire()) {
            waiting = new Task<>(successor::acquire);
            admin.untilWaits("lease");
            check(admin.is("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
                    + " WHERE backend_type = 'dlock worker'"));
            admin.untilRenewed(lock.fence(), 2);
            check(!lock.lost().isSet());
        }
        check(waiting.result().fence() > used.fence());
        successor.release();
    }

    @Row(51) static void lease_forced_release() throws Exception {
        lost(() -> {
            try (Lock lock = kept("lease").acquire()) {
                admin.force(lock.fence());
                told(lock.lost());
                check(lock.lost().isSet() && lock.lost().isSet());
            }
        });
    }

    @Row(52) static void lease_forced_one_of_many() throws Exception {
        try (Lease lease = locks.lease(LONG).interval(BEAT).open(); Lock kept = lease.lock("kept").acquire()) {
            lost(() -> {
                try (Lock forced = lease.lock("forced").acquire()) {
                    admin.force(forced.fence());
                    told(forced.lost());
                    check(!kept.lost().isSet() && !lease.lost().isSet());
                }
            });
        }
        same(admin.left("kept"), 0L);
    }

    @Row(53) static void lease_quorum_late() throws Exception {
        try (Lock lock = late().lock("lease").ttl(LONG).interval(BEAT).acquire()) {
            admin.heartbeat();
            admin.untilRenewed(lock.fence(), 1);
            admin.ask("UPDATE late.quorum SET late = true");
            Object called = admin.ask("SELECT last_value FROM late.calls");
            // the first call may have been sent before the update
            admin.until("SELECT last_value > ? + 1 FROM late.calls", called);
            long deadline = lock.deadline();
            admin.until("SELECT last_value > ? + 3 FROM late.calls", called);
            check(lock.deadline() == deadline && !lock.lost().isSet());
            admin.ask("UPDATE late.quorum SET late = false");
            waitUntil(() -> lock.deadline() > deadline, "a later deadline");
            check(!lock.lost().isSet());
        }
    }

    @Row(54) static void lease_opened_late() throws Exception {
        lost(() -> {
            try (Lease lease = late().lease(Duration.ofSeconds(1)).open()) {
                lease.check();
            }
        });
        admin.until("SELECT count(*) = 0 FROM dlock_leases");
        admin.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = 'app'");
    }

    @Row(55) static void lease_callback() throws Exception {
        List<Object> called = Collections.synchronizedList(new ArrayList<>());
        Lock used = kept("lease");
        lost(() -> {
            try (Lock lock = used.acquire()) {
                lock.lost().addCallback(it -> {
                    called.addAll(List.of("bad", it));
                    throw new AssertionError();
                });
                lock.lost().addCallback(it -> called.addAll(List.of("good", it)));
                admin.force(lock.fence());
                waitUntil(() -> called.size() == 4, "two callbacks");
                lock.lost().addCallback(it -> called.addAll(List.of("late", it)));
            }
        });
        same(called.subList(4, 6), List.of("late", used));
        same(new HashSet<>(called), Set.of("bad", "good", "late", used));
    }

    @Row(56) static void lease_callback_hangs() throws Exception {
        CountDownLatch called = new CountDownLatch(1), mayReturn = new CountDownLatch(1);
        lost(() -> {
            try (Lease lease = locks.lease(SHORT).interval(Duration.ofMillis(200)).open()) {
                Lock lock = lease.lock("lease").acquire();
                lock.lost().addCallback(it -> {
                    called.countDown();
                    try {
                        mayReturn.await(2 * TIMEOUT, TimeUnit.SECONDS);
                    } catch (InterruptedException error) {
                        throw new IllegalStateException(error);
                    }
                });
                admin.force(lock.fence());
                check(called.await(TIMEOUT, TimeUnit.SECONDS));
                order("freeze");
                told(lease.lost());     // even if nothing calls isSet()
                mayReturn.countDown();
                order("thaw");
            }
        });
    }

    /** Ends the waiters, and checks that nothing is left. */
    static void ends(Lock lock, boolean cancels) throws Exception {
        try (Holder holder = admin.holds("busy")) {
            Task<Lock> waiting = new Task<>(lock::acquire);
            admin.untilWaits("busy");
            if (cancels)
                lock.cancel();
            else
                waiting.thread.interrupt();
            raises(DlockException.Cancelled.class, "57014", waiting::result);
            same(admin.left("busy"), 1L);
        }
        admin.untilFree("busy");
    }

    /** Java's way to cancel: the waiting thread is interrupted. */
    @Row(57) static void acquire_client_timeout() throws Exception {
        try (Connection db = connection()) {
            for (Lock lock : List.of(locks.lock("busy"), locks.lock("busy").ttl(LONG), Lock.on(db, "busy"))) {
                ends(lock, false);
                // an interrupt before the acquire counts, too
                Thread.currentThread().interrupt();
                raises(DlockException.Cancelled.class, "57014", lock::acquire);
                check(Thread.interrupted());
                same(admin.left("busy"), 0L);
                lock.acquire().release();
            }
            ask(db, "SELECT 1");
        }
        // an interrupted thread can release a lock that it holds
        for (Lock lock : List.of(locks.lock("busy"), kept("busy"))) {
            try (Lock held = lock.acquire()) {
                Thread.currentThread().interrupt();
            }
            check(Thread.interrupted());
            same(admin.left("busy"), 0L);
        }
    }

    @Row(58) static void acquire_cancelled() throws Exception {
        try (Connection db = connection()) {
            for (Lock lock : List.of(locks.lock("busy"), locks.lock("busy").ttl(LONG), Lock.on(db, "busy"))) {
                ends(lock, true);
                try (Lock held = lock.acquire()) {
                    lock.cancel();      // too late
                }
            }
            same(admin.left("busy"), 0L);
        }

        // cancelled after the grant, before the renewal
        try (Connection other = DriverManager.getConnection(admin.url)) {
            Lock lock = late().lock("busy").ttl(LONG);
            ask(other, "SELECT pg_advisory_lock(17)");
            Task<Lock> waiting = new Task<>(lock::acquire);
            untilCallWaits();
            lock.cancel();
            raises(DlockException.Cancelled.class, "57014", waiting::result);
            same(admin.left("busy"), 0L);
        }
    }

    @Row(59) static void acquire_broken_off() throws Exception {
        try (Lease lease = locks.lease(LONG).open(); Connection db = connection()) {
            Lock kept = lease.lock("kept").acquire();
            for (boolean twice : new boolean[] {false, true})
                for (Lock lock : List.of(locks.lock("busy"), locks.lock("busy").ttl(LONG), lease.lock("busy"),
                        Lock.on(db, "busy"))) {
                    try (Holder other = admin.holds("busy")) {
                        Task<Lock> waiting = new Task<>(lock::acquire);
                        admin.untilWaits("busy");
                        waiting.thread.interrupt();
                        if (twice)
                            waiting.thread.interrupt();
                        raises(DlockException.Cancelled.class, "57014", waiting::result);
                        admin.until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy'");
                    }
                    admin.untilFree("busy");
                    ask(db, "SELECT 1");
                }
            kept.check();
        }
    }

    @Row(60) static void waiter_killed() throws Exception {
        try (Holder other = admin.holds("busy")) {
            Process waiter = new ProcessBuilder(System.getProperty("java.home") + "/bin/java", "-cp",
                    System.getProperty("java.class.path"), "Run", "--wait", "busy").start();
            admin.untilWaits("busy");
            waiter.destroyForcibly().waitFor();
            admin.until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy'");
        }
    }

    @Row(61) static void server_silent() throws Exception {
        Locks hasty = service(MAIN).patience(Duration.ofSeconds(1));
        Lock session = locks.lock("mine").acquire();
        Lock waiter = locks.lock("busy").ttl(LONG);
        Duration soon = Duration.ofMillis(50);
        try (Holder other = admin.holds("busy");
                Connection db = DriverManager.getConnection(MAIN + "&cancelSignalTimeout=1")) {
            List<Task<?>> waiting = List.of(new Task<>(waiter::acquire), new Task<>(Lock.on(db, "busy")::acquire));
            admin.until("SELECT count(*) = 2 FROM dlock_locks WHERE NOT granted");
            order("freeze");
            List<Task<?>> asked = List.of(new Task<>(hasty.lock("x").timeout(soon)::acquire),
                    new Task<>(hasty.lock("x").ttl(LONG).timeout(soon)::acquire),
                    new Task<>(hasty.lease(LONG)::open));
            Task<?> released = new Task<>(() -> {
                session.release();
                return null;
            });
            waiter.cancel();
            waiting.get(1).thread.interrupt();
            for (Task<?> one : waiting)
                raises(DlockException.Cancelled.class, "57014", one::result);
            for (Task<?> one : asked)
                raises(DlockException.ConnectionLost.class, null, one::result);
            lost(released::result);
            order("thaw");
        }
        admin.until("SELECT count(*) = 0 FROM dlock_locks");
    }

    @Row(62) static void release_silent() throws Exception {
        try (Lease lease = locks.lease(LONG).interval(BEAT).open()) {
            Lock own = kept("own").acquire(), leased = lease.lock("silent").acquire();
            List<?> pids = (List<?>) admin.ask(
                    "SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_activity"
                            + " WHERE usename = 'app' AND application_name <> 'dlock heartbeat'");
            for (Object pid : pids)
                order("stop " + pid);
            own.release();
            leased.release();
            check(admin.left("own") + admin.left("silent") == 0);
            check(!lease.lost().isSet());
            for (Object pid : pids)
                order("continue " + pid);
        }
    }

    @Row(63) static void release_owed() throws Exception {
        try (Lease lease = service(MAIN).patience(Duration.ofMillis(100)).lease(LONG).interval(BEAT).open()) {
            Lock lock = lease.lock("owed").acquire();
            killSessions();
            order("freeze");
            raises(DlockException.ConnectionLost.class, null, lock::release);
            order("thaw");
            admin.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'owed'");
            check(!lease.lost().isSet());
            lease.lock("owed").timeout(NOW).acquire().release();
        }
    }

    @Row(64) static void acquire_owed() throws Exception {
        try (Lease lease = service(MAIN).patience(Duration.ofMillis(100)).lease(LONG).interval(BEAT).open()) {
            Lock lock = lease.lock("owed").owner("job/1");
            try (Holder holder = admin.holds("owed")) {
                Task<Lock> waiting = new Task<>(lock::acquire);
                admin.untilWaits("owed");
                order("freeze");
                lock.cancel();
                raises(DlockException.Cancelled.class, "57014", waiting::result);
                refused(lock::acquire);     // it is still to be taken back
                order("thaw");
            }
            admin.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'owed'");
            check(!lease.lost().isSet());
            waitUntil(() -> {
                try {
                    lock.timeout(NOW).acquire().release();
                    return true;
                } catch (DlockException.WrongState owed) {
                    return false;
                }
            }, "the end of the request");
        }
    }

    @Row(65) static void release_late() throws Exception {
        Locks impatient = late().patience(Duration.ofMillis(100));
        for (boolean after : new boolean[] {false, true}) {
            // without a wait: otherwise the server checks the connection, and ends the call that has no client
            Lock first = impatient.lock("late").ttl(LONG).owner("job/1").timeout(NOW).acquire();
            Lock second = impatient.lock("late").ttl(LONG).owner("job/1");
            try (Abandoned calls = new Abandoned(after ? "dlock_renew" : "dlock_release_ticket")) {
                raises(DlockException.ConnectionLost.class, null, () -> first.releaseAfter(after ? LONG : NOW));
                calls.waitNoMore();
                check(second.acquire().fence() > first.fence());
            }
            check(isHeld(second));
            second.release();
        }
    }

    @Row(66) static void release_repeated() throws Exception {
        try (Lease lease = late().lease(LONG).open(); Tickets tickets = new Tickets(lease)) {
            long ticket = tickets.enqueue("queue");
            try (Abandoned calls = new Abandoned("dlock_release_ticket")) {
                Task<Void> releasing = new Task<>(() -> {
                    tickets.release(ticket);
                    return null;
                });
                untilCallWaits();
                admin.ask("SELECT dlock_release_ticket(?)", ticket);
                calls.waitNoMore();
                releasing.result();
            }
        }
    }

    @Row(67) static void release_refused() throws Exception {
        try (Connection db = connection()) {
            Lock lock = Lock.on(db, "plain").acquire();
            long fence = lock.fence();
            db.setAutoCommit(false);
            raises(org.postgresql.util.PSQLException.class, "22012", () -> ask(db, "SELECT 1 / 0"));
            raises(DlockException.class, "25P02", lock::release);
            lock.check();
            same(lock.fence(), fence);
            check(!admin.isFree("plain"));
            db.rollback();
            lock.release();
            check(admin.isFree("plain"));
        }
    }

    @Row(68) static void undo_late() throws Exception {
        Locks impatient = late().patience(Duration.ofMillis(100));
        Lock first = impatient.lock("late").ttl(LONG).owner("job/1");
        Lock second = impatient.lock("late").ttl(LONG).owner("job/1");
        try (Abandoned calls = new Abandoned("dlock_locks")) {
            try (Holder holder = admin.holds("late")) {
                Task<Lock> waiting = new Task<>(first::acquire);
                admin.untilWaits("late");
                // only a request in doubt is undone
                admin.ask("SELECT pg_terminate_backend(pid, 60000) FROM dlock_locks WHERE NOT granted");
                admin.untilWaits("late");
                first.cancel();
                raises(DlockException.Cancelled.class, "57014", waiting::result);
                calls.waitNoMore();
            }
            second.acquire();
        }
        check(isHeld(second));
        second.release();
    }

    @Row(69) static void renew_late() throws Exception {
        Locks impatient = late().patience(Duration.ofMillis(100));
        try (Lock lock = impatient.lock("late").ttl(LONG).acquire()) {
            try (Abandoned calls = new Abandoned("dlock_renew")) {
                raises(DlockException.ConnectionLost.class, null, () -> lock.renew(LONG.dividedBy(2)));
                calls.waitNoMore();
                lock.renew(LONG);
                check(lock.deadline() <= Locks.now() + LONG.toNanos() / 2);
            }
            lock.check();
        }
    }

    @Row(70) static void renew_lost() throws Exception {
        Locks impatient = late().patience(Duration.ofMillis(100));
        for (boolean after : new boolean[] {true, false}) {
            Lock first = impatient.lock("late").ttl(LONG).owner("job/1").timeout(NOW).acquire();
            Lock second = impatient.lock("late").ttl(LONG).owner("job/1");
            try (Abandoned calls = new Abandoned("dlock_renew")) {
                raises(DlockException.ConnectionLost.class, null, () -> first.renew(SHORT));
                order("freeze");
                if (after)
                    told(first.lost());
                try {
                    first.release();
                    throw new AssertionError("released");
                } catch (DlockException.LockLost | DlockException.ConnectionLost expected) {
                    order("thaw");
                }
                calls.waitNoMore();
                check(second.acquire().fence() > first.fence());
            }
            check(isHeld(second));
            second.release();
        }
    }

    @Row(71) static void pool_returned() throws Exception {
        Queue<Connection> pool = new ArrayDeque<>(List.of(connection()));
        Connection db = pool.remove();
        Object pid = ask(db, "SELECT pg_backend_pid()");
        Lock.on(db, "pool").acquire();
        db.setAutoCommit(false);
        raises(org.postgresql.util.PSQLException.class, "22012", () -> ask(db, "SELECT 1 / 0"));
        Locks.reset(db);
        pool.add(db);
        check(admin.isFree("pool"));
        try (Connection next = pool.remove()) {
            same(ask(next, "SELECT pg_backend_pid()"), pid);
            same(ask(next, "SELECT dlock_is_held('pool')"), false);
        }
    }

    @Row(72) static void clock_stepped() throws Exception {
        long day = 86400;
        try (Lock lock = kept("lease").acquire()) {
            long before = System.currentTimeMillis() / 1000, deadline = lock.deadline();
            for (long seconds : new long[] {day, -day}) {
                order("clock " + seconds);
                check(Math.abs(System.currentTimeMillis() / 1000 - before - seconds) < day / 2);
                check(!lock.lost().isSet() && lock.deadline() < deadline + LONG.toNanos());
                admin.untilRenewed(lock.fence(), 1);
            }
            waitUntil(() -> lock.deadline() > deadline, "a later deadline");
            check(lock.deadline() < Locks.now() + LONG.toNanos());
        }
        lost(() -> {
            try (Lock lock = locks.lock("lease").ttl(SHORT).acquire()) {
                admin.heartbeat();
                order("freeze");
                told(lock.lost());
                order("thaw");
            }
        });
        order("clock 0");
    }

    @Row(73) static void lease_promotion() throws Exception {
        Locks pair = service("jdbc:postgresql://" + System.getenv("DLOCK_OTHER") + ","
                + System.getenv("DLOCK_STANDBY") + "/postgres?user=app&targetServerType=primary");
        Admin promoted = new Admin("STANDBY");
        Lock used = pair.lock("lease").ttl(LONG).interval(BEAT);
        try (Lock lock = used.acquire()) {
            order("promote");
            promoted.until("SELECT count(*) = 1 FROM dlock_leases WHERE lease = ?", lock.fence());
            promoted.untilRenewed(lock.fence(), 2);
            check(!lock.lost().isSet());
            check(promoted.is("SELECT dlock_check('lease', ?)", lock.fence()));
        }
        same(promoted.left("lease"), 0L);
        try (Lock lock = pair.lock("lease").ttl(LONG).acquire()) {
            check(lock.fence() > used.fence());
        }
    }

    public static void main(String[] names) throws Exception {
        boolean failed = false;
        System.setOut(new java.io.PrintStream(System.out, true));
        java.util.logging.LogManager.getLogManager().reset();       // rows cause errors in callbacks, which are logged
        locks = service(MAIN).patience(PATIENCE);
        admin = new Admin("MAIN");
        if (names.length > 1 && names[0].equals("--wait"))      // a process of its own, to be killed
            locks.lock(names[1]).ttl(LONG).acquire();
        for (Method row : Stream.of(Run.class.getDeclaredMethods()).filter(it -> it.isAnnotationPresent(Row.class))
                .filter(it -> names.length == 0 || Arrays.asList(names).contains(it.getName()))
                .sorted((a, b) -> a.getAnnotation(Row.class).value() - b.getAnnotation(Row.class).value()).toList()) {
            long began = System.nanoTime();
            try {
                row.invoke(null);
                admin.until("SELECT count(*) = 0 FROM dlock_locks");
                // the next row looks for its own heartbeat
                admin.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'dlock heartbeat'");
                System.out.println("ok " + row.getName());
            } catch (Exception error) {
                StringWriter trace = new StringWriter();
                error.printStackTrace(new PrintWriter(trace));
                trace.toString().lines().forEach(line -> System.out.println("# " + line));
                System.out.println("not ok " + row.getName());
                failed = true;
                order("thaw");
                order("clock 0");
                admin.ask("SELECT count(dlock_force_release(ticket)) FROM dlock_locks");
            }
            System.out.printf("# %s: %.1f s%n", row.getName(), (System.nanoTime() - began) / 1e9);
        }
        // do not wait for threads that a failed row has left
        Runtime.getRuntime().halt(failed ? 1 : 0);
    }
}
