package org.dlock;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.function.Consumer;

/** Set when a lock or a lease is lost.  Once set, it stays set. */
public final class Lost<T> {
    private final T holder;
    private final Runnable look;
    private volatile String reason;
    private List<Consumer<? super T>> callbacks = new ArrayList<>();    // protected by this

    Lost(T holder, Runnable look) {
        this.holder = holder;
        this.look = look;
    }

    /** Checks the clock, too, because a stopped process may ask before its watcher has run. */
    public boolean isSet() {
        if (reason == null)
            look.run();
        return reason != null;
    }

    /** Throws LockLost if it is set. */
    public void check() throws DlockException {
        if (isSet())
            throw new DlockException.LockLost(holder + " was lost: " + reason);
    }

    /** Calls back once, with the lock or the lease, in a thread of its own; at once, here, if lost already. */
    public void addCallback(Consumer<? super T> callback) {
        synchronized (this) {
            if (callbacks != null) {
                callbacks.add(callback);
                return;
            }
        }
        call(callback);
    }

    /** Completes at the loss, with the lock or the lease. */
    public CompletableFuture<T> future() {
        CompletableFuture<T> future = new CompletableFuture<>();
        addCallback(future::complete);
        return future;
    }

    /** The reason; null if it is not set */
    public String reason() { return reason; }

    void set(String why) {
        List<Consumer<? super T>> told;
        synchronized (this) {
            if (reason != null)
                return;
            reason = why;
            told = callbacks;
            callbacks = null;
        }
        told.forEach(callback -> Pulse.tell(() -> call(callback)));
    }

    private void call(Consumer<? super T> callback) {
        try {
            callback.accept(holder);
        } catch (Throwable error) {
            System.getLogger("org.dlock").log(System.Logger.Level.ERROR, "callback of " + holder, error);
        }
    }
}
