import com.zaxxer.hikari.HikariConfig;
import com.zaxxer.hikari.HikariDataSource;
import java.lang.reflect.Proxy;
import java.sql.Connection;
import java.sql.DriverManager;
import java.time.Duration;
import java.util.Map;
import java.util.concurrent.FutureTask;
import java.util.concurrent.atomic.AtomicInteger;
import javax.sql.DataSource;
import org.dlock.DlockException;
import org.dlock.Lease;
import org.dlock.Lock;
import org.dlock.Locks;
import org.dlock.Tickets;

/**
 * The client over a pool of HikariCP: what it borrows comes back as it was, and holds nothing.
 *
 * <p>What would break it: a connection that comes back changed, that holds something, or that is broken; one that does
 * not come back; a lock that the last user of the connection had; a wait for the pool that nothing ends.
 */
final class Sources extends Stack {
    static final Duration LONG = Duration.ofHours(1);
    static final Duration BEAT = Duration.ofMillis(100);

    static HikariConfig config(String url, int size) {
        HikariConfig config = new HikariConfig();
        config.setJdbcUrl(url);
        config.setMaximumPoolSize(size);
        config.setMinimumIdle(0);
        config.setConnectionTimeout(TIMEOUT * 1000L);
        return config;
    }

    /** For the scenarios, of which some stop the server */
    public static DataSource of(String url) {
        HikariConfig config = config(url + "&connectTimeout=1&cancelSignalTimeout=1", 20);
        config.setConnectionTimeout(1000);
        config.setValidationTimeout(500);
        config.setInitializationFailTimeout(-1);
        return new HikariDataSource(config);
    }

    static HikariDataSource pool(int size) { return new HikariDataSource(config(MAIN, size)); }

    static void untilActive(HikariDataSource pool, int count) throws Exception {
        until(() -> pool.getHikariPoolMXBean().getActiveConnections() == count);
    }

    static void untilAwaited(HikariDataSource pool) throws Exception {
        until(() -> pool.getHikariPoolMXBean().getThreadsAwaitingConnection() == 1);
    }

    static Object pid(DataSource pool) throws Exception {
        try (Connection db = pool.getConnection()) {
            return ask(db, "SELECT pg_backend_pid()");
        }
    }

    /** All that the next user could see of the last one */
    static String settings(DataSource pool) throws Exception {
        try (Connection db = pool.getConnection()) {
            return db.getAutoCommit() + " " + db.isReadOnly() + " " + db.getNetworkTimeout() + " "
                    + ask(db, "SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) || pg_backend_pid()"
                            + " FROM pg_settings WHERE name IN ('application_name', 'client_connection_check_interval',"
                            + " 'statement_timeout', 'transaction_isolation', 'transaction_read_only')");
        }
    }

    static void comesBack() throws Exception {
        HikariConfig config = config(MAIN + "&ApplicationName=shop", 1);
        config.setAutoCommit(false);
        config.setReadOnly(true);
        config.addDataSourceProperty("socketTimeout", "50");
        try (HikariDataSource pool = new HikariDataSource(config)) {
            String before = settings(pool);
            Locks locks = new Locks(pool);
            try (Lock lock = locks.lock("plain").acquire()) {
                untilActive(pool, 1);
                same(admin("SELECT application_name FROM pg_stat_activity JOIN dlock_locks USING (pid)"), "dlock");
            }
            untilActive(pool, 0);
            same(settings(pool), before);
            try (Connection holder = holder("plain")) {
                fails(DlockException.LockTimeout.class, locks.lock("plain").timeout(Duration.ZERO)::acquire);
                fails(DlockException.LockTimeout.class, locks.lock("plain").timeout(BEAT)::acquire);
            }
            same(settings(pool), before);
            // also if what came back was in a transaction
            try (Lock lock = locks.lock("plain").ttl(LONG).acquire()) {
                lock.check();
            }
            untilActive(pool, 0);
            same(settings(pool), before);
            // during the lease, too
            try (Lease lease = locks.lease(LONG).open()) {
                untilActive(pool, 0);
                try (Lock lock = lease.lock("plain").acquire()) {
                    untilActive(pool, 0);
                    same(settings(pool), before);
                }
            }
            untilActive(pool, 0);
            same(settings(pool), before);
        }
    }

    /** Of one connection, which comes back as it was left */
    static DataSource careless(Connection db) {
        ClassLoader loader = Sources.class.getClassLoader();
        Object kept = Proxy.newProxyInstance(loader, new Class<?>[] {Connection.class}, (proxy, method, arguments) ->
                method.getName().equals("close") ? null : method.invoke(db, arguments));
        return (DataSource) Proxy.newProxyInstance(loader, new Class<?>[] {DataSource.class},
                (proxy, method, arguments) -> method.getName().equals("getConnection") ? kept
                        : method.getName().equals("hashCode") ? (Object) 17 : (Object) (proxy == arguments[0]));
    }

    static void carelessPool() throws Exception {
        try (Connection db = DriverManager.getConnection(MAIN + "&ApplicationName=shop")) {
            DataSource source = careless(db);
            db.setReadOnly(true);
            db.setAutoCommit(false);
            db.setNetworkTimeout(Runnable::run, 50_000);
            ask(db, "SELECT 1");
            db.commit();
            String before = settings(source);
            new Locks(source).lock("plain").acquire().release();
            same(settings(source), before);
        }
    }

    /** A lock that the last user forgot is not taken for ours. */
    static void forgotten() throws Exception {
        try (HikariDataSource pool = pool(1)) {
            long forgotten;
            try (Connection db = pool.getConnection()) {
                forgotten = (Long) ask(db, "SELECT dlock_acquire('forgotten')");
            }
            try (Lock lock = new Locks(pool).lock("forgotten").acquire()) {
                same(lock.fence() > forgotten, true);
            }
            same(isFree("forgotten"), true);
        }
    }

    static void killed() throws Exception {
        try (HikariDataSource pool = pool(1)) {
            Object before = pid(pool);
            fails(DlockException.LockLost.class, () -> {
                try (Lock lock = new Locks(pool).lock("plain").acquire()) {
                    admin("SELECT pg_terminate_backend(?, 60000)", before);
                }
            });
            same(pid(pool).equals(before), false);
        }
    }

    /** The server may cancel a moment too late, and then something else. */
    static void unknown() throws Exception {
        try (HikariDataSource pool = pool(1); Connection holder = holder("busy")) {
            for (boolean leased : new boolean[] {false, true}) {
                Object before = pid(pool);
                Lock lock = new Locks(pool).lock("busy");
                if (leased)
                    lock.ttl(LONG);
                FutureTask<Void> waiting = aside(lock::acquire);
                untilWaits("busy");
                lock.cancel();
                fails(DlockException.Cancelled.class, () -> result(waiting));
                until("SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = ?", before);
                same(pid(pool).equals(before), false);
            }
        }
    }

    static void heartbeat() throws Exception {
        AtomicInteger asked = new AtomicInteger();
        try (HikariDataSource pool = pool(2)) {
            DataSource counts = (DataSource) Proxy.newProxyInstance(Sources.class.getClassLoader(),
                    new Class<?>[] {DataSource.class}, (proxy, method, arguments) -> {
                        if (method.getName().equals("getConnection"))
                            asked.incrementAndGet();
                        return method.getName().equals("equals") ? (Object) (proxy == arguments[0])
                                : method.invoke(pool, arguments);
                    });
            Lock used = new Locks(counts).lock("lease").ttl(LONG).interval(BEAT);
            try (Lock lock = used.acquire()) {
                untilRenewed(lock.fence());
                untilActive(pool, 1);
                same(admin("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dlock heartbeat'"), 1L);
                int before = asked.get();
                admin("SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity WHERE usename = 'app'");
                untilRenewed(lock.fence());
                same(asked.get() > before, true);
                same(lock.lost().isSet(), false);
                Thread.currentThread().interrupt();     // which stops no release
            }
            same(Thread.interrupted(), true);
            untilActive(pool, 0);
            same(admin("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'dlock%'"), 0L);
        }
    }

    static void exhausted() throws Exception {
        HikariConfig config = config(MAIN, 1);
        config.setConnectionTimeout(250);
        try (HikariDataSource pool = new HikariDataSource(config); Connection user = pool.getConnection()) {
            fails(DlockException.ConnectionLost.class,
                    new Locks(pool).patience(Duration.ZERO).lock("plain")::acquire);
        }
        try (HikariDataSource pool = pool(1); Connection user = pool.getConnection()) {
            Lock lock = new Locks(pool).lock("plain");
            FutureTask<Void> waiting = aside(lock::acquire);
            untilAwaited(pool);
            lock.cancel();
            fails(DlockException.Cancelled.class, () -> result(waiting));

            Thread[] thread = new Thread[1];
            FutureTask<Void> interrupted = aside(() -> {
                thread[0] = Thread.currentThread();
                try {
                    lock.acquire();
                } finally {
                    same(Thread.interrupted(), true);
                }
            });
            untilAwaited(pool);
            thread[0].interrupt();
            fails(DlockException.Cancelled.class, () -> result(interrupted));
        }
    }

    /** It listens, and would hear for another one. */
    static void tickets() throws Exception {
        try (HikariDataSource pool = pool(1)) {
            Object before = pid(pool);
            try (Tickets tickets = new Tickets(new Locks(pool))) {
                long ticket = tickets.enqueue("queue");
                same(tickets.next().ticket(), ticket);
            }
            same(pid(pool).equals(before), false);
        }
    }

    static void several() throws Exception {
        try (HikariDataSource main = pool(1);
                HikariDataSource other = new HikariDataSource(config(url("OTHER", "app"), 1))) {
            Locks locks = new Locks(Map.of("main", main, "other", other));
            Locks byUrl = new Locks(MAIN, url("OTHER", "app")).keys("main", "other");
            for (int i = 0; i < 20; i++)
                same(byUrl.server("name/" + i).equals(MAIN), locks.server("name/" + i).equals("main"));
            try (Lock lock = locks.lock("name/0").acquire()) {
                same(isFree("name/0"), !locks.server("name/0").equals("main"));
            }
        }
    }

    public static void main(String[] arguments) throws Exception {
        test("a connection comes back as it was", Sources::comesBack);
        test("a connection comes back as it was to a source that resets nothing", Sources::carelessPool);
        test("a lock that the last user forgot is not ours", Sources::forgotten);
        test("a connection that was killed is not used again", Sources::killed);
        test("a connection whose wait was cancelled is not used again", Sources::unknown);
        test("the heartbeat has one connection, and asks for another", Sources::heartbeat);
        test("a wait for the pool can be cancelled, and interrupted", Sources::exhausted);
        test("a connection that listens is not used again", Sources::tickets);
        test("several servers, each with its key", Sources::several);
        end();
    }
}
