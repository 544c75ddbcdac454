package org.dlock;

import java.time.Duration;
import java.util.Map;
import java.util.concurrent.atomic.AtomicReference;

/** An object that a heart or a connection keeps; for one thread at a time */
abstract sealed class Kept<T> implements AutoCloseable permits Lock, Lease {
    /** The state of a lock or a lease; others are requested, held, being released */
    static final String NONE = "not held", ASKED = "asked for", HELD = "held", LEAVING = "being released";

    volatile Heart heart;
    final AtomicReference<String> state = new AtomicReference<>(NONE);

    public abstract Lost<T> lost();

    @Override
    public abstract void close() throws DlockException;

    /** Throws LockLost, or WrongState if it is not held.  Call it before anything is sent to other systems. */
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

    /** By Locks.now() */
    public long deadline() { return heart == null ? Long.MAX_VALUE : heart.deadline(); }

    void look() {
        if (heart != null)
            heart.look();
    }

    /** Renews its lease over this line; one renewal at a time, so that the last ttl is the server's, too */
    void renew(Line over, long id, Duration ttl) throws DlockException {
        if (ttl != null)
            Lease.interval(ttl, null);
        Heart heart = this.heart;
        synchronized (heart) {
            if (ttl != null)
                heart.shorten(ttl);
            Line.Call call = ttl == null ? Line.call("dlock_renew", Map.of(), id)
                    : Line.call("dlock_renew", Map.of(), id, ttl);
            Object kept = over.ask(() -> call, heart.deadline(), Line.GRACE);
            heart.renewed(over.sent, kept, ttl);
        }
        lost().check();
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
