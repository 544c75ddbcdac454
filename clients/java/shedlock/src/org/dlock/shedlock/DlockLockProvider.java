package org.dlock.shedlock;

import java.time.Duration;
import java.util.Optional;
import net.javacrumbs.shedlock.core.LockConfiguration;
import net.javacrumbs.shedlock.core.LockProvider;
import net.javacrumbs.shedlock.core.SimpleLock;
import org.dlock.DlockException;
import org.dlock.Lock;
import org.dlock.Locks;
import org.dlock.UncheckedDlockException;

/**
 * Locks for ShedLock's tasks.
 *
 * <p>lockAtMostFor is the ttl, without a heartbeat; extend() renews.  unlock() renews with the rest of lockAtLeastFor
 * as the ttl, and then the lock expires without the program.  The wall clocks of clients do not matter.
 */
public final class DlockLockProvider implements LockProvider {
    private final Locks locks;
    private final String prefix, info;

    public DlockLockProvider(Locks locks) { this(locks, "shedlock/", null); }

    /** Names of locks are names of tasks, after the prefix.  dlock_locks shows the info of a holder. */
    public DlockLockProvider(Locks locks, String prefix, String info) {
        this.locks = locks;
        this.prefix = prefix;
        this.info = info;
    }

    @Override
    public Optional<SimpleLock> lock(LockConfiguration task) {
        long leastEnd = Locks.now() + task.getLockAtLeastFor().toNanos();
        try {
            return Optional.of(new Held(locks.lock(prefix + task.getName()).info(info).ttl(task.getLockAtMostFor())
                    .noHeartbeat().timeout(Duration.ZERO).acquire(), leastEnd));
        } catch (DlockException.LockTimeout busy) {
            return Optional.empty();
        } catch (DlockException error) {
            throw new UncheckedDlockException(error);
        }
    }

    private static final class Held implements SimpleLock {
        private final Lock lock;
        private final long leastEnd;
        private boolean over;

        Held(Lock lock, long leastEnd) {
            this.lock = lock;
            this.leastEnd = leastEnd;
        }

        /** Throws if the task took longer than lockAtMostFor: another instance may have run at the same time. */
        @Override
        public synchronized void unlock() {
            checkValid();
            try {
                lock.releaseAfter(Duration.ofNanos(leastEnd - Locks.now()));
            } catch (DlockException error) {
                throw new UncheckedDlockException(error);
            }
            over = true;
        }

        /** If it throws, this lock stays valid. */
        @Override
        public synchronized Optional<SimpleLock> extend(Duration lockAtMostFor, Duration lockAtLeastFor) {
            checkValid();
            Optional<SimpleLock> extended = Optional.empty();
            try {
                long leastEnd = Locks.now() + lockAtLeastFor.toNanos();
                lock.renew(lockAtMostFor);
                extended = Optional.of(new Held(lock, leastEnd));
            } catch (DlockException.LockLost error) {
                // there is nothing to extend
            } catch (DlockException error) {
                throw new UncheckedDlockException(error);
            }
            over = true;
            return extended;
        }

        private void checkValid() {
            if (over)
                throw new IllegalStateException(lock + " was unlocked or extended before");
        }
    }
}
