package org.dlock;

import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicReference;

/** Runs work while this process leads, and campaigns again after a loss. */
public final class Election {
    private final Lock lock;
    private volatile boolean stopped;

    /** What is done by the leader; its thread is interrupted when the lock is lost. */
    public interface Work<T> {
        T run(Lock lock) throws Exception;
    }

    /** For a lock in lease scope; its info tells others who leads. */
    public Election(Lock lock) {
        this.lock = lock;
    }

    /** What work returns that was done to its end while we lead; null where stop() came before */
    public <T> T run(Work<T> work) throws Exception {
        while (!stopped)
            try (Lock held = lock.acquire()) {
                return lead(work, held);
            } catch (DlockException.LockLost | InterruptedException error) {
                if (!lock.lost().isSet())       // but another lock, of work's; or somebody else's interrupt
                    throw error;
            } catch (DlockException.Cancelled error) {
                if (!stopped)
                    throw error;
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
            synchronized (worker) {     // no interrupt comes when the work is over,
                worker.set(null);
                if (interrupted.get())
                    Thread.interrupted();       // nor stays
            }
        }
    }

    /** For another thread: campaign no more. */
    public void stop() {
        stopped = true;
        lock.stop();
    }
}
