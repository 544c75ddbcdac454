package org.dlock.spring;

import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.Lock;
import org.dlock.Locks;
import org.dlock.ThreadLock;
import org.springframework.integration.support.locks.LockRegistry;

/**
 * Locks for Spring Integration, in lease scope: a ttl, with a heartbeat.
 *
 * <p>All locks that are obtained with one key are the same: a thread may lock one of them, and unlock another.  A key
 * takes memory only while threads hold its lock, or wait for it.
 */
public final class DlockLockRegistry implements LockRegistry {
    private final Locks locks;
    private final String prefix;
    private final Duration ttl;
    private final Map<String, Used> used = new HashMap<>();     // protected by its own monitor

    private static final class Used {
        final ThreadLock lock;
        int users;

        Used(ThreadLock lock) {
            this.lock = lock;
        }
    }

    private interface Attempt<E extends Exception> {
        boolean on(ThreadLock lock) throws E;
    }

    public DlockLockRegistry(Locks locks, Duration ttl) { this(locks, "spring/", ttl); }

    /** Names of locks are keys, after the prefix. */
    public DlockLockRegistry(Locks locks, String prefix, Duration ttl) {
        this.locks = locks;
        this.prefix = prefix;
        this.ttl = ttl;
    }

    @Override
    public Lock obtain(Object lockKey) { return new Obtained(prefix + lockKey); }

    private ThreadLock enter(String name) {
        synchronized (used) {
            Used one = used.computeIfAbsent(name, key -> new Used(new ThreadLock(locks.lock(key).ttl(ttl))));
            one.users++;
            return one.lock;
        }
    }

    private void leave(String name) {
        synchronized (used) {
            if (--used.get(name).users == 0)
                used.remove(name);
        }
    }

    private ThreadLock held(String name) {
        synchronized (used) {
            Used one = used.get(name);
            if (one == null || !one.lock.isHeldByCurrentThread())
                throw new IllegalMonitorStateException("this thread does not hold \"" + name + '"');
            return one.lock;
        }
    }

    private <E extends Exception> boolean attempt(String name, Attempt<E> attempt) throws E {
        boolean held = false;
        ThreadLock lock = enter(name);
        try {
            return held = attempt.on(lock);
        } finally {
            if (!held)
                leave(name);
        }
    }

    private final class Obtained implements Lock {
        private final String name;

        Obtained(String name) {
            this.name = name;
        }

        @Override
        public void lock() {
            attempt(name, lock -> {
                lock.lock();
                return true;
            });
        }

        @Override
        public void lockInterruptibly() throws InterruptedException {
            attempt(name, lock -> {
                lock.lockInterruptibly();
                return true;
            });
        }

        @Override
        public boolean tryLock() { return attempt(name, ThreadLock::tryLock); }

        @Override
        public boolean tryLock(long time, TimeUnit unit) throws InterruptedException {
            return attempt(name, lock -> lock.tryLock(time, unit));
        }

        @Override
        public void unlock() {
            ThreadLock lock = held(name);
            try {
                lock.unlock();
            } finally {
                leave(name);
            }
        }

        @Override
        public Condition newCondition() {
            throw new UnsupportedOperationException("no condition reaches other processes");
        }

        @Override
        public String toString() { return "lock \"" + name + '"'; }
    }
}
