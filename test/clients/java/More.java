import java.lang.reflect.Field;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.SQLException;
import java.sql.Statement;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.UnaryOperator;
import java.util.stream.Stream;
import javax.sql.DataSource;
import org.dlock.DlockException;
import org.dlock.Election;
import org.dlock.Event;
import org.dlock.Lease;
import org.dlock.Lock;
import org.dlock.Locks;
import org.dlock.Observer;
import org.dlock.Sql;
import org.dlock.ThreadLock;
import org.dlock.Tickets;
import org.dlock.UncheckedDlockException;

/**
 * What the client can do beyond the table of scenarios.
 *
 * <p>What would break it: a deadline that is later than the server's; one of several names that stays, or is missed; a
 * lock of another thread that looks like one's own; an undo that concerns another request; a wait that does not end.
 */
final class More extends Stack {
    static final Duration LONG = Duration.ofHours(1);
    static final Duration DAY = Duration.ofDays(1);
    static final Duration BEAT = Duration.ofMillis(100);
    static final Duration NOW = Duration.ZERO;
    static final Duration PATIENCE = Duration.ofSeconds(TIMEOUT);
    /** Some functions of this schema wait for an advisory lock, or fail; see test/t/client_java.pl. */
    static final String SLOW = MAIN + "&currentSchema=slow,public";
    static final String LATE = MAIN + "&currentSchema=late,public";

    static Locks locks;

    /** The least and the most that the deadline can be after a renewal with this ttl */
    static void expires(long deadline, long before, long after, Duration ttl) {
        long life = ttl.toNanos() - ttl.toNanos() / 100;
        same(deadline >= before + life && deadline <= after + life, true);
    }

    static void renew() throws Exception {
        try (Lock lock = locks.lock("lease").ttl(LONG).acquire()) {
            long deadline = lock.deadline();
            lock.renew();
            same(lock.deadline() > deadline, true);
            admin("SELECT dlock_force_release(?)", lock.fence());
            fails(DlockException.LockLost.class, lock::renew);
            same(lock.lost().isSet(), true);
            fails(DlockException.LockLost.class, lock::release);
        }
        try (Lease lease = locks.lease(LONG).open(); Lock lock = lease.lock("lease").acquire()) {
            fails(DlockException.WrongState.class, lock::renew);
        }
        fails(DlockException.WrongState.class, locks.lock("lease").ttl(LONG)::renew);
    }

    /** The heartbeat goes on with the new ttl: an hour is renewed in twenty minutes, a second at once. */
    static void renewShorter() throws Exception {
        try (Lock lock = locks.lock("lease").ttl(LONG).acquire()) {
            lock.renew(Duration.ofSeconds(2L * Math.max(1, TIMEOUT / 180)));
            untilRenewed(lock.fence());
            lock.check();
            same(lock.deadline() < Locks.now() + LONG.toNanos() / 2, true);
        }
    }

    /** An answer that does not come leaves the shorter ttl. */
    static void renewUnanswered() throws Exception {
        try (Connection other = DriverManager.getConnection(url("MAIN", "admin"))) {
            Lock lock = new Locks(SLOW).lock("lease").ttl(LONG).acquire();
            ask(other, "SELECT pg_advisory_lock(18)");
            long before = Locks.now();
            for (Duration ttl : List.of(DAY, Duration.ofMinutes(10))) {
                FutureTask<Void> renewal = aside(() -> lock.renew(ttl));
                untilSlow();
                Duration least = ttl.compareTo(LONG) < 0 ? ttl : LONG;
                expires(lock.deadline(), before - LONG.toNanos() / 2, Locks.now(), least);
                same(renewal.isDone(), false);
                ask(other, "SELECT pg_advisory_unlock(18)");
                result(renewal);
                expires(lock.deadline(), before, Locks.now(), ttl);
                ask(other, "SELECT pg_advisory_lock(18)");
                before = Locks.now();
            }
            lock.release();
        }
    }

    /** A later call of the lock gets no answer.  It waits for the earlier renewal, or ends before the renewal does. */
    static void renewAnswered() throws Exception {
        for (boolean waits : new boolean[] {true, false}) {
            AtomicReference<Thread> first = new AtomicReference<>(), second = new AtomicReference<>();
            CountDownLatch sent = new CountDownLatch(1);
            Locks over = new Locks(source(MAIN::toString, db -> before(db, (method, arguments) -> {
                Thread caller = Thread.currentThread();
                if (!method.equals("prepareStatement")
                        || !((String) arguments[0]).matches("SELECT dlock_re(new|lease_ticket)\\(.*"))
                    return;
                if (caller == second.get())
                    throw new SQLException("no answer", "08006");
                if (caller == first.get()) {
                    sent.countDown();
                    until(() -> second.get() != null && second.get().getState()
                            == (waits ? Thread.State.BLOCKED : Thread.State.TERMINATED));
                }
            }))).patience(NOW);
            Lock lock = over.lock("lease").ttl(LONG).owner("job/1").acquire();
            FutureTask<Void> renewal = aside(() -> {
                first.set(Thread.currentThread());
                lock.renew(DAY);
            });
            same(sent.await(TIMEOUT, TimeUnit.SECONDS), true);
            FutureTask<Void> later = aside(() -> {
                second.set(Thread.currentThread());
                if (waits)
                    lock.renew(DAY);
                else
                    lock.release();
            });
            fails(DlockException.ConnectionLost.class, () -> result(later));
            result(renewal);
            Lock again = over.lock("lease").ttl(LONG).owner("job/1").acquire();
            same(again.fence() > lock.fence(), true);
            if (waits)
                fails(DlockException.LockLost.class, lock::release);
            again.release();
        }
    }

    static void noHeartbeat() throws Exception {
        Lock lock = locks.lock("lease").ttl(LONG).noHeartbeat().acquire();
        long deadline = lock.deadline();
        same(admin("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dlock heartbeat'"), 0L);
        lock.renew(DAY);
        same(lock.deadline() > deadline, true);
        lock.release();

        Lock ends = locks.lock("lease").ttl(Duration.ofMillis(500)).noHeartbeat().acquire();
        ends.lost().future().get(TIMEOUT, TimeUnit.SECONDS);
        fails(DlockException.LockLost.class, ends::release);

        locks.lock("lease").ttl(LONG).acquire().releaseAfter(DAY);
        same(admin("SELECT extract(epoch FROM ttl)::bigint FROM dlock_leases"), DAY.toSeconds());
        same(isFree("lease"), false);
        admin("SELECT dlock_force_release(ticket) FROM dlock_locks WHERE name = 'lease'");
        locks.lock("lease").ttl(LONG).acquire().releaseAfter(NOW);
        same(isFree("lease"), true);
        locks.lock("lease").ttl(LONG).acquire().releaseAfter(Duration.ofMillis(1));
        until("SELECT dlock_try_xact_acquire('lease') IS NOT NULL");
    }

    static void downgrade() throws Exception {
        try (Lease lease = locks.lease(LONG).open(); Connection db = DriverManager.getConnection(MAIN)) {
            for (Lock lock : List.of(Lock.on(db, "plain"), lease.lock("plain"), lease.lock("plain", "other"),
                    locks.lock("plain", "other"))) {
                fails(DlockException.WrongState.class, lock::downgrade);
                try (Lock held = lock.acquire()) {
                    long fence = held.fence();
                    fails(DlockException.LockTimeout.class, locks.lock("plain").shared().timeout(NOW)::acquire);
                    held.downgrade();
                    same(held.fence(), fence);
                    locks.lock("plain").shared().timeout(NOW).acquire().release();
                    held.setInfo("reading");
                    same(admin("SELECT info FROM dlock_locks WHERE ticket = ?", fence), "reading");
                    held.setInfo(null);
                    same(admin("SELECT info FROM dlock_locks WHERE ticket = ?", fence), null);
                    same(held.isHeld(), true);
                }
                same(lock.isHeld(), false);
            }
            lease.setInfo("node-2");
            same(admin("SELECT info FROM dlock_leases WHERE lease = ?", lease.id()), "node-2");
        }
    }

    static void isHeld() throws Exception {
        Lock several = locks.lock("plain", "other").acquire();
        same(several.isHeld(), true);
        admin("SELECT dlock_force_release(?)", several.fence());
        same(several.isHeld(), false);
        fails(DlockException.LockLost.class, several::release);
        Lock killed = locks.lock("plain").acquire();
        admin("SELECT pg_terminate_backend(pid, 60000) FROM dlock_locks WHERE name = 'plain'");
        fails(DlockException.ConnectionLost.class, killed::isHeld);
        same(killed.isHeld(), false);
        fails(DlockException.LockLost.class, killed::release);
    }

    static void several() throws Exception {
        try (Lease lease = locks.lease(LONG).interval(BEAT).open(); Connection db = DriverManager.getConnection(MAIN)) {
            for (Lock lock : List.of(locks.lock("a", "b"), Lock.on(db, "a", "b"), Lock.inTransaction(db, "a", "b"))) {
                try (Connection holder = holder("b")) {
                    for (Duration timeout : List.of(NOW, BEAT)) {
                        db.setAutoCommit(false);
                        fails(DlockException.LockTimeout.class, lock.timeout(timeout)::acquire);
                        db.rollback();
                        same(isFree("a"), true);
                        db.setAutoCommit(true);
                    }
                }
                db.setAutoCommit(false);
                try (Lock held = lock.acquire()) {
                    same(admin("SELECT ticket FROM dlock_locks WHERE name = 'b'"), held.fence("b"));
                    same(admin("SELECT ticket FROM dlock_locks WHERE name = 'a'"), held.fence());
                    fails(DlockException.WrongState.class, lock::acquire);
                }
                db.commit();
                db.setAutoCommit(true);
                same(admin("SELECT count(*) FROM dlock_locks"), 0L);
            }
            // two of one lease would have the same tickets
            try (Lock first = lease.lock("a", "b").acquire()) {
                fails(DlockException.WrongState.class, lease.lock("b", "c")::acquire);
                same(isFree("b"), false);
                admin("SELECT dlock_force_release(?)", first.fence("b"));
                first.lost().future().get(TIMEOUT, TimeUnit.SECONDS);
                same(lease.lost().isSet(), false);
                fails(DlockException.LockLost.class, first::release);
            }
            lease.lock("b", "c").acquire().release();
            fails(DlockException.BadArgument.class, locks.lock("a", "b").ttl(LONG)::acquire);
        }
    }

    /** Several names whose grant was answered by an error are taken back. */
    static void severalInDoubt() throws Exception {
        Locks doubtful = new Locks(SLOW);
        try (Lease lease = doubtful.lease(LONG).open()) {
            fails(DlockException.QuorumLate.class, lease.lock("a", "b")::acquire);
            same(admin("SELECT count(*) FROM dlock_locks"), 0L);
            same(admin("SELECT last_value FROM slow.granted"), 2L);
        }
    }

    /** A source that makes each connection with the URL of that time */
    static DataSource source(Callable<String> url) { return source(url, db -> db); }

    static DataSource source(Callable<String> url, UnaryOperator<Connection> with) {
        return (DataSource) Proxy.newProxyInstance(More.class.getClassLoader(), new Class<?>[] {DataSource.class},
                (proxy, method, arguments) -> switch (method.getName()) {
                    case "getConnection" -> with.apply(DriverManager.getConnection(url.call()));
                    case "hashCode" -> 17;
                    default -> proxy == arguments[0];
                });
    }

    interface Before {
        void call(String method, Object[] arguments) throws Exception;
    }

    /** A connection that makes this call before each of its own */
    static Connection before(Connection db, Before before) {
        return (Connection) Proxy.newProxyInstance(More.class.getClassLoader(), new Class<?>[] {Connection.class},
                (proxy, method, arguments) -> {
                    before.call(method.getName(), arguments);
                    return method.invoke(db, arguments);
                });
    }

    /** A source whose connections are all in use: it waits until it is interrupted. */
    static DataSource exhausted(CountDownLatch asked) {
        return source(() -> {
            asked.countDown();
            try {
                new CountDownLatch(1).await();
                throw new AssertionError();
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
                throw new SQLException("interrupted", error);
            }
        });
    }

    /** cancel() ends the wait for a connection, too, and leaves no interrupt behind; an interrupt stays. */
    static void waitsForPool() throws Exception {
        for (boolean interrupts : new boolean[] {false, true}) {
            CountDownLatch asked = new CountDownLatch(1);
            Lock lock = new Locks(exhausted(asked)).lock("plain");
            Thread[] thread = new Thread[1];
            FutureTask<Void> waiting = aside(() -> {
                thread[0] = Thread.currentThread();
                try {
                    lock.acquire();
                } finally {
                    same(Thread.interrupted(), interrupts);
                }
            });
            same(asked.await(TIMEOUT, TimeUnit.SECONDS), true);
            if (interrupts)
                thread[0].interrupt();
            else
                result(aside(lock::cancel));
            fails(DlockException.Cancelled.class, () -> result(waiting));
        }
    }

    static void untilSlow() throws Exception {
        until("SELECT count(*) = 1 FROM pg_stat_activity WHERE usename = 'app' AND wait_event = 'advisory'");
    }

    /** The answer that comes after the release concerns neither the hold nor the next one. */
    static void changedLate() throws Exception {
        Lock lock = new Locks(SLOW).lock("lease").ttl(LONG);
        try (Connection other = DriverManager.getConnection(url("MAIN", "admin"))) {
            for (boolean again : new boolean[] {false, true}) {
                lock.acquire();
                ask(other, "SELECT pg_advisory_lock(18)");
                FutureTask<Void> change = aside(() -> lock.setInfo("late"));
                untilSlow();
                lock.release();
                if (again)
                    lock.acquire();
                ask(other, "SELECT pg_advisory_unlock(18)");
                fails(DlockException.WrongState.class, () -> result(change));
                same(lock.lost().isSet(), false);
            }
            lock.release();
        }
    }

    /** A request is undone after its answer was lost; a lock of another lease stays, although its owner is the same. */
    static void sameOwner() throws Exception {
        try (Lease one = locks.lease(LONG).open(); Lease two = locks.lease(LONG).open();
                Lock held = one.lock("busy").owner("job/1").acquire()) {
            for (Lock lock : List.of(two.lock("busy"), locks.lock("busy").ttl(LONG))) {
                FutureTask<Void> waiting = aside(lock.owner("job/1")::acquire);
                untilWaits("busy");
                admin("SELECT pg_terminate_backend(pid, 60000) FROM dlock_locks WHERE NOT granted");
                untilWaits("busy");
                lock.cancel();
                fails(DlockException.Cancelled.class, () -> result(waiting));
                same(admin("SELECT count(*) FROM dlock_locks"), 1L);
                same(held.isHeld(), true);
            }
        }
    }

    /** A request for a lease does not go to the lease that the same object opens afterwards. */
    static void reopened() throws Exception {
        CountDownLatch asked = new CountDownLatch(1), mayGo = new CountDownLatch(1);
        AtomicReference<Thread> requester = new AtomicReference<>();
        Lease lease = new Locks(source(() -> {
            if (Thread.currentThread() == requester.get()) {
                asked.countDown();
                mayGo.await();
            }
            return MAIN;
        })).lease(LONG).open();
        FutureTask<Void> waiting = aside(() -> {
            requester.set(Thread.currentThread());
            lease.lock("plain").acquire();
        });
        same(asked.await(TIMEOUT, TimeUnit.SECONDS), true);
        Thread.currentThread().interrupt();     // do not wait for the connection of the lease
        lease.close();
        lease.open();
        same(Thread.interrupted(), true);
        mayGo.countDown();
        fails(DlockException.LockLost.class, () -> result(waiting));
        same(admin("SELECT count(*) FROM dlock_locks"), 0L);
        lease.close();
    }

    /** A call does not connect again for a lease that was closed while it waited, or was in flight. */
    static void closedMeanwhile() throws Exception {
        Lease lease = new Locks(SLOW + "&ApplicationName=closed").lease(LONG).open();
        Lock lock = lease.lock("plain").acquire();
        try (Connection other = DriverManager.getConnection(url("MAIN", "admin"))) {
            ask(other, "SELECT pg_advisory_lock(18)");
            FutureTask<Void> renewal = aside(() -> lease.renew(DAY));
            untilSlow();
            Thread.currentThread().interrupt();     // do not wait for the connection of the lease
            lease.close();
            same(Thread.interrupted(), true);
            ask(other, "SELECT pg_advisory_unlock(18)");
            fails(DlockException.WrongState.class, () -> result(renewal));
        }
        Method hold = Stream.of(Lease.class.getDeclaredMethods())
                .filter(it -> it.getName().equals("hold")).findAny().get();
        hold.setAccessible(true);
        Exception late = fails(InvocationTargetException.class, () -> hold.invoke(lease, (Object) null));
        same(late.getCause().getClass(), DlockException.WrongState.class);
        fails(DlockException.LockLost.class, lock::release);
        until("SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'closed'");
    }

    /** Each statement before the request has only the time that the request has, and so has a rollback. */
    static void borrowedInTime() throws Exception {
        Map<String, Integer> bounds = new LinkedHashMap<>();
        AtomicInteger bound = new AtomicInteger();
        DataSource pool = source(MAIN::toString, db -> before(db, (method, arguments) -> {
            if (method.equals("getAutoCommit"))
                db.setAutoCommit(false);
            else if (method.equals("setNetworkTimeout"))
                bound.set((Integer) arguments[1]);
            else if (List.of("rollback", "prepareStatement").contains(method))
                bounds.put(arguments == null ? "rollback" : (String) arguments[0], bound.get());
        }));
        // half a second ago
        try (Lock lock = new Locks(pool).lock("plain").timeout(Duration.ofMillis(-500)).acquire()) {
            same(bounds.size(), 4);
            for (int most : bounds.values())
                same(most > 0 && most <= 4500, true);
        }
    }

    /** Without a server, a lock of a lease is requested until its timeout, or until a cancel. */
    static void leaseWithoutServer() throws Exception {
        AtomicBoolean away = new AtomicBoolean();
        CountDownLatch retried = new CountDownLatch(1);
        Locks patient = new Locks(source(() -> {
            if (away.get())
                throw new SQLException("away", "08001");
            return MAIN;
        })).patience(DAY);
        try (Lease lease = patient.lease(LONG).open()) {
            Lock lock = lease.lock("plain").observer(new Observer() {
                @Override
                public void retried(DlockException reason) { retried.countDown(); }
            });
            away.set(true);
            try {
                FutureTask<Void> waiting = aside(lock::acquire);
                same(retried.await(TIMEOUT, TimeUnit.SECONDS), true);
                result(aside(lock::cancel));
                fails(DlockException.Cancelled.class, () -> result(waiting));
                FutureTask<Void> tried = aside(lock.timeout(NOW)::acquire);
                fails(DlockException.ConnectionLost.class, () -> result(tried));
            } finally {
                away.set(false);
            }
            lock.acquire().release();
        }
    }

    /** The server breaks each connection after it has executed the request. */
    static void enqueueOwed() throws Exception {
        try (Lease lease = new Locks(SLOW).lease(LONG).interval(BEAT).open(); Tickets tickets = new Tickets(lease)) {
            FutureTask<Void> asked = aside(() -> tickets.enqueue("plain"));
            fails(DlockException.ConnectionLost.class, () -> result(asked));
            until("SELECT count(*) = 0 FROM dlock_locks");
            same(tickets.next(NOW), null);
            lease.check();
        }
    }

    /** A repeated request that breaks off leaves the ticket of the earlier one alone. */
    static void enqueueAgain() throws Exception {
        AtomicReference<String> url = new AtomicReference<>(MAIN);
        Locks over = new Locks(source(url::get)).patience(BEAT);
        try (Lease lease = over.lease(LONG).interval(BEAT).open(); Tickets tickets = new Tickets(lease)) {
            Lock lock = over.lock("plain").owner("job/1");
            long ticket = tickets.enqueue(lock);
            url.set(SLOW);
            killSessions();
            FutureTask<Void> again = aside(() -> tickets.enqueue(lock));
            fails(DlockException.ConnectionLost.class, () -> result(again));
            url.set(MAIN);
            for (int i = 0; i < 2; i++)     // the heartbeat undoes after it renews
                untilRenewed(lease.id());
            same(admin("SELECT ticket FROM dlock_locks"), ticket);
            same(tickets.next(PATIENCE).event(), "granted");
            tickets.release(ticket);
        }
    }

    static void killSessions() throws Exception {
        admin("SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity WHERE usename = 'app'");
    }

    /** Tickets use a new connection only with all that the old one had. */
    static void restored() throws Exception {
        AtomicReference<String> url = new AtomicReference<>(MAIN);
        Locks over = new Locks(source(url::get)).patience(BEAT);
        try (Tickets changes = over.watch("plain")) {
            same(changes.next(PATIENCE).event(), "free");
            url.set(SLOW);
            killSessions();
            fails(DlockException.WrongState.class, () -> changes.next(PATIENCE));
            url.set(MAIN);
            try (Connection holder = holder("plain")) {
                same(changes.next(PATIENCE).event(), "held");
            }
        }
        try (Lease lease = over.lease(LONG).open(); Tickets tickets = new Tickets(lease)) {
            long ticket = tickets.enqueue("plain");
            same(tickets.next(PATIENCE).event(), "granted");
            url.set(SLOW);
            killSessions();
            FutureTask<Void> next = aside(() -> tickets.next(PATIENCE));
            fails(DlockException.ConnectionLost.class, () -> result(next));
            url.set(MAIN);
            same(tickets.next(NOW), null);
            tickets.release(ticket);
        }
    }

    /** A ticket that the server refuses to give back does not keep the others. */
    static void restoredWithoutOne() throws Exception {
        try (Lease lease = locks.lease(LONG).open(); Tickets tickets = new Tickets(lease)) {
            long gone = tickets.enqueue(locks.lock("gone").slots(2)), kept = tickets.enqueue("kept");
            for (int i = 0; i < 2; i++)
                same(tickets.next(PATIENCE).event(), "granted");
            killSessions();
            admin("SELECT dlock_force_release(?)", gone);
            try (Lock other = locks.lock("gone").slots(3).acquire()) {
                same(tickets.next(PATIENCE), new Event("lost", "gone", gone, Map.of()));
                tickets.release(kept);
            }
        }
    }

    /** The next call of next() queries the server as it does every minute. */
    static void startRound(Tickets tickets) throws ReflectiveOperationException {
        Field round = Tickets.class.getDeclaredField("round");
        round.setAccessible(true);
        round.setLong(tickets, Locks.now());
    }

    /** If the connection has become silent, the next round connects again, also if nothing waits for a grant. */
    static void roundSilent() throws Exception {
        AtomicReference<Connection> last = new AtomicReference<>(), silent = new AtomicReference<>();
        Locks over = new Locks(source(MAIN::toString, db -> {
            last.set(db);
            return before(db, (method, arguments) -> {
                if (db == silent.get() && method.equals("prepareStatement"))
                    throw new SQLException("no answer", "08006");
            });
        }));
        try (Tickets changes = over.watch("plain")) {
            same(changes.next(PATIENCE).event(), "free");
            silent.set(last.get());
            startRound(changes);
            same(changes.next(PATIENCE).event(), "free");
        }
        try (Tickets tickets = new Tickets(over)) {
            tickets.enqueue("plain");
            same(tickets.next(PATIENCE).event(), "granted");
            silent.set(last.get());
            startRound(tickets);
            fails(DlockException.LockLost.class, () -> tickets.next(NOW));
        }
    }

    /** The loss of the connection keeps the events of tickets that were lost before. */
    static void lostBefore() throws Exception {
        try (Tickets tickets = new Tickets(locks); Connection a = holder("a"); Connection b = holder("b")) {
            tickets.enqueue("plain");
            same(tickets.next(PATIENCE).event(), "granted");
            long first = tickets.enqueue("a"), second = tickets.enqueue("b");
            for (long ticket : new long[] {first, second})
                admin("SELECT dlock_force_release(?)", ticket);
            startRound(tickets);
            same(tickets.next(PATIENCE), new Event("lost", "a", first, Map.of()));
            killSessions();
            fails(DlockException.LockLost.class, () -> tickets.enqueue("other"));
            same(tickets.next(NOW), new Event("lost", "b", second, Map.of()));
            same(tickets.next(NOW), null);
        }
    }

    /** close() ends the next() of another thread, which listens, or waits for a connection. */
    static void ticketsClosed() throws Exception {
        Tickets changes = locks.watch("plain");
        same(changes.next(PATIENCE).event(), "free");
        FutureTask<Void> listening = aside(changes::next);
        changes.close();
        fails(DlockException.WrongState.class, () -> result(listening));
        fails(DlockException.WrongState.class, () -> changes.watch("plain"));

        CountDownLatch asked = new CountDownLatch(1), mayGo = new CountDownLatch(1);
        AtomicReference<Connection> made = new AtomicReference<>();
        AtomicReference<Thread> closer = new AtomicReference<>();
        Tickets tickets = new Tickets(new Locks(source(() -> {
            asked.countDown();
            mayGo.await();
            return MAIN;
        }, db -> {
            made.set(db);
            return db;
        })));
        FutureTask<Void> connecting = aside(tickets::next);
        same(asked.await(TIMEOUT, TimeUnit.SECONDS), true);
        FutureTask<Void> closing = aside(() -> {
            closer.set(Thread.currentThread());
            tickets.close();
        });
        until(() -> closing.isDone() || closer.get() != null && closer.get().getState() == Thread.State.BLOCKED);
        mayGo.countDown();
        result(closing);
        fails(DlockException.WrongState.class, () -> result(connecting));
        same(made.get().isClosed(), true);
    }

    /** After another error than the server's, the program's connection is closed, even if a pool would keep it. */
    static void brokenOff() throws Exception {
        try (Connection db = DriverManager.getConnection(MAIN)) {
            Lock lock = Lock.on(before(db, (method, arguments) -> {
                if (method.equals("close"))
                    throw new SQLException("the pool keeps it");
                if (method.equals("prepareStatement")) {
                    ask(db, "SELECT dlock_acquire('plain')");
                    throw new IllegalStateException("of the test");
                }
            }), "plain");
            fails(IllegalStateException.class, lock::acquire);
            until("SELECT dlock_try_xact_acquire('plain') IS NOT NULL");
            fails(DlockException.ConnectionLost.class, lock::acquire);
        }
    }

    /** An observer ends the acquire that it is called by. */
    static void observerEnds() throws Exception {
        AtomicReference<Runnable> end = new AtomicReference<>();
        Lock lock = new Locks("jdbc:postgresql://127.0.0.1:1/").lock("plain").observer(new Observer() {
            @Override
            public void retried(DlockException reason) { end.get().run(); }
        });
        Election election = new Election(lock);
        end.set(lock::cancel);
        FutureTask<Void> acquire = aside(lock::acquire);
        fails(DlockException.Cancelled.class, () -> result(acquire));
        end.set(election::stop);
        result(aside(() -> same(election.run(held -> "led"), null)));
    }

    static void callbackHangs() throws Exception {
        CountDownLatch mayReturn = new CountDownLatch(1);
        Lock lock = locks.lock("lease").ttl(LONG).interval(BEAT).acquire();
        lock.lost().addCallback(it -> {
            try {
                mayReturn.await();
            } catch (InterruptedException error) {
                throw new IllegalStateException(error);
            }
        });
        admin("SELECT dlock_force_release(?)", lock.fence());
        same(lock.lost().future().get(TIMEOUT, TimeUnit.SECONDS), lock);
        mayReturn.countDown();
        fails(DlockException.LockLost.class, lock::release);
    }

    /** After an Error, the heartbeat renews, and the watcher closes a connection that does not answer. */
    static void withoutMemory() throws Exception {
        Set<String> fail = ConcurrentHashMap.newKeySet();
        fail.addAll(List.of("dlock beat", "dlock watch"));
        Locks over = new Locks(source(LATE::toString, db -> before(db, (method, arguments) -> {
            if (fail.remove(Thread.currentThread().getName()))
                throw new OutOfMemoryError("of the test");
        })));
        try (Lock lock = over.lock("lease").ttl(LONG).interval(BEAT).acquire()) {
            untilRenewed(lock.fence());
            try (Connection other = DriverManager.getConnection(url("MAIN", "admin"))) {
                ask(other, "SELECT pg_advisory_lock(17)");
                until("SELECT count(*) > 1 FROM pg_stat_activity WHERE usename = 'app' AND wait_event = 'advisory'");
            }
            same(fail.isEmpty(), true);
        }
    }

    /** Lost between the grant and the first renewal */
    static void electionLostAtOnce() throws Exception {
        Election election = new Election(new Locks(LATE).lock("leader").ttl(LONG));
        try (Connection other = DriverManager.getConnection(url("MAIN", "admin"))) {
            ask(other, "SELECT pg_advisory_lock(17)");
            FutureTask<Void> running = aside(() -> same(election.run(held -> "led"), "led"));
            untilSlow();
            admin("SELECT dlock_force_release(ticket) FROM dlock_locks");
            ask(other, "SELECT pg_advisory_unlock(17)");
            result(running);
        }
    }

    static void electionOfLease() throws Exception {
        Lease lease = locks.lease(LONG).interval(BEAT).open();
        Election election = new Election(lease.lock("plain"));
        fails(DlockException.LockLost.class, () -> result(aside(() -> election.run(held -> {
            admin("SELECT dlock_force_close(?)", lease.id());
            until(() -> lease.lost().isSet());
            held.check();
            return null;
        }))));
    }

    static void releaseRefused() throws Exception {
        try (Tickets tickets = new Tickets(locks); Connection other = DriverManager.getConnection(url("MAIN", "admin"));
                Statement change = other.createStatement()) {
            long ticket = tickets.enqueue("plain");
            same(tickets.next(PATIENCE).event(), "granted");
            change.execute("REVOKE EXECUTE ON FUNCTION dlock_release_ticket FROM PUBLIC");
            try {
                fails(DlockException.NotAllowed.class, () -> tickets.release(ticket));
            } finally {
                change.execute("GRANT EXECUTE ON FUNCTION dlock_release_ticket TO PUBLIC");
            }
            tickets.release(ticket);
            same(isFree("plain"), true);
        }
    }

    static void guards() throws Exception {
        try (Lock lock = locks.lock("guarded").ttl(LONG).acquire();
                Connection db = DriverManager.getConnection(MAIN)) {
            Sql sql = (text, values) -> ask(db, text, values);
            db.setAutoCommit(false);
            for (boolean lost : new boolean[] {false, true}) {
                if (lost)
                    admin("SELECT dlock_force_release(?)", lock.fence());
                for (boolean plain : new boolean[] {false, true}) {
                    Code guard = plain ? () -> lock.guard(db) : () -> lock.guard(sql);
                    if (lost) {
                        fails(DlockException.LockLost.class, guard);
                        db.rollback();
                    } else {
                        guard.run();
                        db.commit();
                    }
                }
            }
            fails(DlockException.LockLost.class, lock::release);
        }
    }

    /** As an ORM would: with its own transaction, and errors that wrap the driver's */
    static void throughSql() throws Exception {
        try (Connection db = DriverManager.getConnection(MAIN); Connection holder = holder("busy")) {
            Sql sql = (text, values) -> {
                try {
                    return ask(db, text, values);
                } catch (SQLException error) {
                    throw new IllegalStateException("wrapped", error);
                }
            };
            db.setAutoCommit(false);
            try (Lock lock = Lock.inTransaction(sql, "plain").timeout(LONG).info("me").acquire()) {
                same(admin("SELECT info FROM dlock_locks WHERE ticket = ? AND scope = 'transaction'", lock.fence()),
                        "me");
                same(lock.isHeld(), true);
            }
            same(isFree("plain"), false);
            db.commit();
            same(isFree("plain"), true);
            Lock busy = Lock.inTransaction(sql, "busy");
            DlockException error = fails(DlockException.LockTimeout.class, busy.timeout(BEAT)::acquire);
            same(error.getSQLState(), "55P03");
            same(error.getHint() != null, true);
            db.rollback();
            // nothing to cancel it with: cancel() returns, and the program ends it
            FutureTask<Void> waiting = aside(busy.timeout(null)::acquire);
            untilWaits("busy");
            busy.cancel();
            ask(holder, "SELECT dlock_release_all()");
            result(waiting);
            db.rollback();
            fails(DlockException.class, Lock.inTransaction((text, values) -> {
                throw new IllegalStateException("no database");
            }, "plain")::acquire);
            fails(DlockException.BadArgument.class, Lock.inTransaction((text, values) -> "?", "plain")::acquire);
        }
    }

    static void threads() throws Exception {
        for (Lock under : List.of(locks.lock("plain"), locks.lock("plain").ttl(LONG))) {
            ThreadLock lock = new ThreadLock(under);
            notMine(lock);
            lock.lock();
            lock.lock();
            same(lock.isHeldByCurrentThread(), true);
            result(aside(() -> {
                same(lock.isHeldByCurrentThread(), false);
                same(lock.tryLock(), false);
                same(lock.tryLock(1, TimeUnit.MILLISECONDS), false);
                notMine(lock);
            }));
            lock.unlock();
            same(isFree("plain"), false);
            lock.unlock();
            same(isFree("plain"), true);
            notMine(lock);

            // one of another process
            try (Connection holder = holder("plain")) {
                same(lock.tryLock(), false);
                same(lock.tryLock(1, TimeUnit.MILLISECONDS), false);
                Thread[] thread = new Thread[1];
                FutureTask<Void> breaks = aside(() -> {
                    thread[0] = Thread.currentThread();
                    lock.lockInterruptibly();
                });
                untilWaits("plain");
                thread[0].interrupt();
                fails(InterruptedException.class, () -> result(breaks));
                same(admin("SELECT count(*) FROM dlock_locks"), 1L);

                FutureTask<Void> deaf = aside(() -> {
                    thread[0] = Thread.currentThread();
                    lock.lock();
                    same(Thread.interrupted(), true);
                    lock.unlock();
                });
                untilWaits("plain");
                Object waits = admin("SELECT ticket FROM dlock_locks WHERE NOT granted");
                thread[0].interrupt();
                same(result(deaf, holder, waits), true);
            }

            lock.lock();
            admin("SELECT dlock_force_release(?)", lock.held().fence());
            if (lock.held().deadline() == Long.MAX_VALUE)
                lock.held().isHeld();
            UncheckedDlockException error = fails(UncheckedDlockException.class, lock::unlock);
            same(error.getCause().getClass(), DlockException.LockLost.class);
            same(lock.isHeldByCurrentThread(), false);
            same(lock.tryLock(), true);
            lock.unlock();
        }
        fails(IllegalArgumentException.class, () -> new ThreadLock(locks.lock("plain").shared()));
        fails(UnsupportedOperationException.class, new ThreadLock(locks.lock("plain"))::newCondition);
    }

    static void threadLockRefused() throws Exception {
        try (Connection db = DriverManager.getConnection(MAIN)) {
            ThreadLock lock = new ThreadLock(Lock.on(db, "plain"));
            lock.lock();
            db.setAutoCommit(false);
            fails("22012", () -> ask(db, "SELECT 1 / 0"));
            fails(UncheckedDlockException.class, lock::unlock);
            db.rollback();
            lock.unlock();
            same(isFree("plain"), true);
            notMine(lock);
        }
    }

    /** The error names the lock. */
    static void notMine(ThreadLock lock) throws Exception {
        IllegalMonitorStateException error = fails(IllegalMonitorStateException.class, lock::unlock);
        same(String.valueOf(error.getMessage()).contains("lock \"plain\""), true);
    }

    /** Does it wait with the same ticket until the holder releases? */
    static boolean result(FutureTask<Void> deaf, Connection holder, Object ticket) throws Exception {
        boolean waits = ticket.equals(admin("SELECT ticket FROM dlock_locks WHERE NOT granted"));
        ask(holder, "SELECT dlock_release_all()");
        result(deaf);
        return waits;
    }

    public static void main(String[] arguments) throws Exception {
        locks = new Locks(MAIN);
        test("renew, and the errors of renew", More::renew);
        test("renew with a shorter ttl quickens the heartbeat", More::renewShorter);
        test("a renewal without an answer leaves the shorter ttl", More::renewUnanswered);
        test("a renewal's answer settles no other call", More::renewAnswered);
        test("without a heartbeat; released later", More::noHeartbeat);
        test("downgrade and setInfo, on a connection, of a lease, and of several names", More::downgrade);
        test("isHeld of several names, and over a connection that is gone", More::isHeld);
        test("several names: all or none, in each scope", More::several);
        test("several names: a grant in doubt is taken back", More::severalInDoubt);
        test("a wait for a pool can be cancelled, and interrupted", More::waitsForPool);
        test("a change that is answered after the release", More::changedLate);
        test("a request is taken back, and no other lease's", More::sameOwner);
        test("a request of a lease that was opened again", More::reopened);
        test("a call for a lease that was closed meanwhile", More::closedMeanwhile);
        test("the first statements of a borrowed connection have the time of the request", More::borrowedInTime);
        test("a lease's lock without a server: timeout and cancel", More::leaseWithoutServer);
        test("a lease's ticket that was enqueued in doubt is taken back", More::enqueueOwed);
        test("a ticket stays when a repeated request breaks off", More::enqueueAgain);
        test("tickets restore their connection, or drop it", More::restored);
        test("tickets of which the server refuses one", More::restoredWithoutOne);
        test("a round finds a silent connection", More::roundSilent);
        test("events of tickets that were lost before their connection", More::lostBefore);
        test("tickets that another thread closes", More::ticketsClosed);
        test("an acquire that broke off leaves no lock on the program's connection", More::brokenOff);
        test("an observer can end the acquire", More::observerEnds);
        test("a callback that hangs does not keep others", More::callbackHangs);
        test("an Error ends neither the heartbeat nor the watcher", More::withoutMemory);
        test("an election that is lost at once campaigns again", More::electionLostAtOnce);
        test("an election ends with the lease of its lock", More::electionOfLease);
        test("a ticket stays when its release is refused", More::releaseRefused);
        test("a guard over a connection, and whatever executes SQL", More::guards);
        test("transaction scope over whatever executes SQL", More::throughSql);
        test("a lock of a thread, as in java.util.concurrent", More::threads);
        test("a thread keeps a lock whose release is refused", More::threadLockRefused);
        end();
    }
}
