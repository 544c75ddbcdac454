package org.dlock;

import java.time.Duration;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

/**
 * A lock of java.util.concurrent: the thread that acquired it holds it, may acquire it again,
 * and must release it.
 *
 * <p>Threads that share one object queue in the process, in their order; the first one queues on the server.  Errors are
 * UncheckedDlockExceptions.  If the lock was lost, a repeated lock() and the last unlock() throw one.
 */
public final class ThreadLock implements java.util.concurrent.locks.Lock {
    private final Lock lock;
    private final ReentrantLock mine = new ReentrantLock(true);

    /** The lock must be exclusive, in session scope or with a ttl, and must not be used otherwise. */
    public ThreadLock(Lock lock) {
        if (lock.isShared())
            throw new IllegalArgumentException(lock + " is for several holders");
        this.lock = lock;
    }

    /** The lock, for check() and guard() by the thread that holds it */
    public Lock held() { return lock; }

    public boolean isHeldByCurrentThread() { return mine.isHeldByCurrentThread(); }

    @Override
    public void lock() {
        mine.lock();
        try {
            ask(null, true);
        } catch (DlockException error) {
            throw new UncheckedDlockException(error);
        }
    }

    @Override
    public void lockInterruptibly() throws InterruptedException {
        mine.lockInterruptibly();
        try {
            ask(null, false);
        } catch (DlockException error) {
            throw interruptedOr(error);
        }
    }

    @Override
    public boolean tryLock() {
        if (!mine.tryLock())
            return false;
        try {
            ask(Duration.ZERO, true);
            return true;
        } catch (DlockException.LockTimeout busy) {
            return false;
        } catch (DlockException error) {
            throw new UncheckedDlockException(error);
        }
    }

    @Override
    public boolean tryLock(long time, TimeUnit unit) throws InterruptedException {
        long end = System.nanoTime() + unit.toNanos(time);
        if (!mine.tryLock(time, unit))
            return false;
        try {
            ask(Duration.ofNanos(Math.max(0, end - System.nanoTime())), false);
            return true;
        } catch (DlockException.LockTimeout busy) {
            return false;
        } catch (DlockException error) {
            throw interruptedOr(error);
        }
    }

    /** Requests the lock from the server.  If that fails, the next thread may request it. */
    private void ask(Duration timeout, boolean deaf) throws DlockException {
        boolean held = false;
        try {
            if (mine.getHoldCount() > 1)
                lock.check();
            else
                lock.acquire(timeout, deaf);
            held = true;
        } finally {
            if (!held)
                mine.unlock();
        }
    }

    private static UncheckedDlockException interruptedOr(DlockException error) throws InterruptedException {
        if (error instanceof DlockException.Cancelled && Thread.interrupted())
            throw new InterruptedException(error.getMessage());
        return new UncheckedDlockException(error);
    }

    @Override
    public void unlock() {
        if (!mine.isHeldByCurrentThread())
            throw new IllegalMonitorStateException("another thread holds " + lock + ", or none");
        try {
            if (mine.getHoldCount() == 1)
                lock.release();
        } catch (DlockException error) {
            throw new UncheckedDlockException(error);
        } finally {
            if (mine.getHoldCount() > 1 || !lock.holds())       // otherwise the release was refused
                mine.unlock();
        }
    }

    @Override
    public Condition newCondition() { throw new UnsupportedOperationException("no condition reaches other processes"); }

    @Override
    public String toString() { return lock.toString(); }
}
