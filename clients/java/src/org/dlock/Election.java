package org.dlock;

import static java.util.concurrent.TimeUnit.NANOSECONDS;
import static java.util.concurrent.TimeUnit.SECONDS;

import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicReference;

/** Runs work while this process leads, and campaigns again after a loss. */
public final class Election {
    private static final long MOST = SECONDS.toNanos(15);

    private final Lock lock;
    private final CountDownLatch stopped = new CountDownLatch(1);

    /** The leader's work; its thread is interrupted when the lock is lost. */
    public interface Work<T> {
        T run(Lock lock) throws Exception;
    }

    /** For a lock in lease scope; its info tells others who leads. */
    public Election(Lock lock) {
        this.lock = lock;
    }

    /**
     * Returns the result of work that was completed while this process led; null if stop() was called before.  Waits
     * for an unreachable server without limit.
     */
    public <T> T run(Work<T> work) throws Exception {
        Line.Pauses pauses = new Line.Pauses(MOST);
        while (stopped.getCount() > 0) {
            boolean leads = false, done = false;
            T result = null;
            try (Lock held = lock.acquire()) {
                leads = true;
                pauses = new Line.Pauses(MOST);
                result = lead(work, held);
                done = true;
                return result;
            } catch (DlockException.LockLost error) {
                // the work has lost another lock, or the lock's Lease is over
                if (leads && !lock.lost().isSet() || lock.leaseIsLost())
                    throw error;
            } catch (InterruptedException error) {
                if (!lock.lost().isSet())       // other code has interrupted it
                    throw error;
            } catch (DlockException.ConnectionLost | DlockException.NotPrimary error) {
                if (done)                       // while leading; the lock expires
                    return result;
                if (leads)                      // an error of the work
                    throw error;
                stopped.await(pauses.next(), NANOSECONDS);
            } catch (DlockException.Cancelled error) {
                if (stopped.getCount() > 0)
                    throw error;
            }
        }
        return null;
    }

    private <T> T lead(Work<T> work, Lock held) throws Exception {
        AtomicReference<Thread> worker = new AtomicReference<>(Thread.currentThread());
        AtomicBoolean interrupted = new AtomicBoolean();
        held.lost().addCallback(lost -> {
            synchronized (worker) {
                if (worker.get() != null) {
                    interrupted.set(true);
                    worker.get().interrupt();
                }
            }
        });
        try {
            T result = work.run(held);
            held.check();
            return result;
        } finally {
            synchronized (worker) {     // after the work, no interrupt comes or stays
                worker.set(null);
                if (interrupted.get())
                    Thread.interrupted();
            }
        }
    }

    /** Called by another thread: ends the campaign, not the work. */
    public void stop() {
        stopped.countDown();
        lock.stop();
    }
}
