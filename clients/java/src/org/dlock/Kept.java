package org.dlock;

import java.time.Duration;
import java.util.Map;
import java.util.concurrent.atomic.AtomicReference;

/** A lock or a lease, which may be lost; for one thread at a time */
abstract sealed class Kept<T> implements AutoCloseable permits Lock, Lease {
    /** The states of a lock or a lease */
    static final String NONE = "not held", ASKED = "asked for", HELD = "held", LEAVING = "being released";

    volatile Heart heart;
    final AtomicReference<String> state = new AtomicReference<>(NONE);

    public abstract Lost<T> lost();

    @Override
    public abstract void close() throws DlockException;

    /** Throws LockLost after a loss, WrongState if it is not held.  Call it before each request to another system. */
    public void check() throws DlockException {
        lost().check();
        if (!holds())
            throw new DlockException.WrongState(this + " is " + state);
    }

    boolean holds() { return state.get().equals(HELD); }

    void turn(String before, String after) throws DlockException {
        if (!state.compareAndSet(before, after))
            throw new DlockException.WrongState(this + " is " + state);
    }

    /** The time, by Locks.now(), until which work may continue without an answer from the server */
    public long deadline() { return heart == null ? Long.MAX_VALUE : heart.deadline(); }

    void look() {
        if (heart != null)
            heart.look();
    }

    /** Renews the heart's lease over this line.  One at a time, so that client and server have the same last ttl. */
    void renew(Line over, Heart heart, Duration ttl) throws DlockException {
        if (ttl != null)
            Lease.interval(ttl, null);
        Lost<T> held = lost();
        synchronized (heart) {
            held.check();
            if (this.heart != heart)
                throw new DlockException.WrongState(this + " was released");
            long most = ttl == null ? heart.most() : heart.shorten(ttl);
            Line.Call call = ttl == null ? Line.call("dlock_renew", Map.of(), heart.id)
                    : Line.call("dlock_renew", Map.of(), heart.id, ttl);
            Object kept;
            try {
                kept = over.ask(() -> call, heart.deadline(), Line.GRACE);
            } finally {
                if (!over.doubt)        // it was answered, or not sent
                    heart.limit(most);
            }
            heart.renewed(over.sent, kept, ttl);
            confirm(held, kept != null);
        }
    }

    /** Checks the answer to a call that returns false after a loss, or after a release meanwhile. */
    void confirm(Lost<T> held, Object answer) throws DlockException {
        if (!Boolean.TRUE.equals(answer)) {
            if (!holds() || lost() != held)
                throw new DlockException.WrongState(this + " was released");
            held.set("the server has ended it");
        }
        held.check();
    }

    /** Releases a hold of a heart; throws LockLost if it was lost. */
    void giveBack(Line line, Line.Call call, boolean last) throws DlockException {
        boolean held = !lost().isSet();
        heart.remove(lost(), last);
        try {
            if (held) {
                Object returned = line.ask(() -> call, heart.deadline(), Line.GRACE);
                if ((returned == null || returned.equals(false)) && !line.doubt)
                    lost().set("the server has ended it");
            }
        } catch (DlockException.ConnectionLost | DlockException.NotPrimary error) {
            if (Clock.now() < heart.deadline())
                throw error;
            lost().set("there is no connection: " + error.getMessage());
        }
        lost().check();
    }
}
