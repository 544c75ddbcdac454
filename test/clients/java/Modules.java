import java.lang.reflect.Field;
import java.sql.Connection;
import java.time.Duration;
import java.time.Instant;
import java.util.Map;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Lock;
import net.javacrumbs.shedlock.core.LockConfiguration;
import net.javacrumbs.shedlock.core.LockProvider;
import net.javacrumbs.shedlock.core.SimpleLock;
import org.dlock.DlockException;
import org.dlock.Locks;
import org.dlock.UncheckedDlockException;
import org.dlock.shedlock.DlockLockProvider;
import org.dlock.spring.DlockLockRegistry;
import org.springframework.integration.support.locks.LockRegistry;

/**
 * The modules for ShedLock and Spring Integration, as those libraries call them.
 *
 * <p>What would break it: a task that runs twice, or is not kept for lockAtLeastFor; a lock that outlives
 * lockAtMostFor, or that another thread releases; keys that stay in memory.
 */
final class Modules extends Stack {
    static final Duration LONG = Duration.ofHours(1);
    static final Duration DAY = Duration.ofDays(1);

    static LockConfiguration task(Duration most, Duration least) {
        return new LockConfiguration(Instant.now(), "task", most, least);
    }

    static long ttl() throws Exception {
        return (Long) admin("SELECT extract(epoch FROM ttl)::bigint FROM dlock_leases");
    }

    static void isLost(Code code) throws Exception {
        same(fails(UncheckedDlockException.class, code).getCause().getClass(), DlockException.LockLost.class);
    }

    static void shedLock() throws Exception {
        Locks locks = new Locks(MAIN);
        LockProvider provider = new DlockLockProvider(locks);
        LockProvider other = new DlockLockProvider(locks, "shedlock/", "node-2");
        SimpleLock first = provider.lock(task(LONG, Duration.ZERO)).get();
        same(other.lock(task(LONG, Duration.ZERO)).isPresent(), false);
        same(ttl(), LONG.toSeconds());
        same(admin("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dlock heartbeat'"), 0L);
        first.unlock();
        same(isFree("shedlock/task"), true);
        fails(IllegalStateException.class, first::unlock);

        SimpleLock lock = other.lock(task(LONG, Duration.ZERO)).get();
        same(admin("SELECT info FROM dlock_locks WHERE name = 'shedlock/task'"), "node-2");
        fails(UncheckedDlockException.class, () -> lock.extend(Duration.ofMillis(1), Duration.ZERO));
        SimpleLock extended = lock.extend(DAY, Duration.ZERO).get();
        same(ttl(), DAY.toSeconds());
        fails(IllegalStateException.class, lock::unlock);
        fails(IllegalStateException.class, () -> lock.extend(DAY, Duration.ZERO));
        extended.unlock();
        same(isFree("shedlock/task"), true);
    }

    /** The lock ends by itself, and whoever has it is told. */
    static void shedLockMost() throws Exception {
        LockProvider provider = new DlockLockProvider(new Locks(MAIN));
        SimpleLock lock = provider.lock(task(Duration.ofMillis(500), Duration.ZERO)).get();
        until(() -> isFree("shedlock/task"));
        isLost(lock::unlock);
        SimpleLock late = provider.lock(task(Duration.ofMillis(500), Duration.ZERO)).get();
        until(() -> isFree("shedlock/task"));
        same(late.extend(LONG, Duration.ZERO).isPresent(), false);
    }

    /** The time that is left, without the program */
    static void shedLockLeast() throws Exception {
        LockProvider provider = new DlockLockProvider(new Locks(MAIN));
        provider.lock(task(DAY, LONG)).get().unlock();
        same(isFree("shedlock/task"), false);
        same(ttl() <= LONG.toSeconds() && ttl() > LONG.toSeconds() - 2L * TIMEOUT, true);
        admin("SELECT dlock_force_release(ticket) FROM dlock_locks");
        provider.lock(task(LONG, Duration.ofMillis(500))).get().unlock();
        until(() -> isFree("shedlock/task"));
    }

    static int size(LockRegistry registry) throws Exception {
        Field used = DlockLockRegistry.class.getDeclaredField("used");
        used.setAccessible(true);
        return ((Map<?, ?>) used.get(registry)).size();
    }

    static void spring() throws Exception {
        LockRegistry registry = new DlockLockRegistry(new Locks(MAIN), LONG);
        Lock lock = registry.obtain("key");
        fails(IllegalMonitorStateException.class, lock::unlock);
        lock.lock();
        same(isFree("spring/key"), false);
        lock.lockInterruptibly();
        result(aside(() -> {
            same(registry.obtain("key").tryLock(), false);
            same(registry.obtain("key").tryLock(1, TimeUnit.MILLISECONDS), false);
            fails(IllegalMonitorStateException.class, registry.obtain("key")::unlock);
        }));
        registry.obtain("key").unlock();
        same(isFree("spring/key"), false);
        lock.unlock();
        same(isFree("spring/key"), true);
        fails(IllegalMonitorStateException.class, lock::unlock);
        same(size(registry), 0);
    }

    static void springWaits() throws Exception {
        LockRegistry registry = new DlockLockRegistry(new Locks(MAIN), LONG);
        FutureTask<Void> first, second;
        Thread[] thread = new Thread[1];
        try (Connection holder = holder("spring/key")) {
            same(registry.obtain("key").tryLock(), false);
            first = aside(() -> {
                registry.obtain("key").lock();
                registry.obtain("key").unlock();
            });
            untilWaits("spring/key");
            second = aside(() -> {
                thread[0] = Thread.currentThread();
                registry.obtain("key").lockInterruptibly();
            });
            until(() -> thread[0] != null && thread[0].getState() == Thread.State.WAITING);
            same(admin("SELECT count(*) FROM dlock_locks"), 2L);
            thread[0].interrupt();
            fails(InterruptedException.class, () -> result(second));
        }
        result(first);
        same(size(registry), 0);
    }

    static void springLost() throws Exception {
        LockRegistry registry = new DlockLockRegistry(new Locks(MAIN), LONG);
        registry.obtain("key").lock();
        admin("SELECT dlock_force_release(ticket) FROM dlock_locks");
        isLost(registry.obtain("key")::unlock);
        same(size(registry), 0);
        same(registry.obtain("key").tryLock(), true);
        registry.obtain("key").unlock();
    }

    public static void main(String[] arguments) throws Exception {
        test("ShedLock: one task at a time, and extended", Modules::shedLock);
        test("ShedLock: lockAtMostFor", Modules::shedLockMost);
        test("ShedLock: lockAtLeastFor", Modules::shedLockLeast);
        test("Spring Integration: a lock is a thread's", Modules::spring);
        test("Spring Integration: threads wait in the process", Modules::springWaits);
        test("Spring Integration: a lock that was lost", Modules::springLost);
        end();
    }
}
