package org.dlock;

import java.sql.Connection;
import java.sql.SQLException;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.UUID;
import java.util.function.Supplier;

/** A lock, for a block of the program; acquire() returns it, for a try with resources. */
public final class Lock extends Kept<Lock> {
    final String name;
    private final Map<String, Object> options = new HashMap<>();
    private final Lease lease;
    private final boolean inTransaction;
    private final Line line;
    private Duration timeout, ttl, interval;
    private long until;
    private String owner, asked;        // as whom we have asked
    private volatile Lost<Lock> lost = new Lost<>(this, this::look);
    private volatile long fence;

    Lock(Locks locks, String name) {
        this(name, null, false, locks.line(name));
    }

    Lock(Lease lease, String name) {
        this(name, lease, false, lease.locks.line(name));
    }

    private Lock(String name, Lease lease, boolean inTransaction, Line line) {
        this.name = name;
        this.lease = lease;
        this.inTransaction = inTransaction;
        this.line = line;
    }

    /** In session scope, on a connection of the program's, which is to be in autocommit mode */
    public static Lock on(Connection connection, String name) {
        return new Lock(name, null, false, new Line(connection));
    }

    /** In transaction scope: the lock ends with the transaction, not with its block. */
    public static Lock inTransaction(Connection connection, String name) {
        return new Lock(name, null, true, new Line(connection));
    }

    /** How long to wait: for ever by default; zero is to try. */
    public Lock timeout(Duration timeout) { this.timeout = timeout; return this; }

    public Lock shared() { options.put("shared", true); return this; }

    public Lock slots(int slots) { options.put("slots", slots); return this; }

    public Lock permits(int permits) { options.put("permits", permits); return this; }

    public Lock info(String info) { options.put("info", info); return this; }

    /** In lease scope, with a heartbeat */
    public Lock ttl(Duration ttl) { this.ttl = ttl; return this; }

    /** In lease scope, what makes a request the same as an earlier one: a job's number */
    public Lock owner(String owner) { this.owner = owner; return this; }

    /** Between two renewals; a third of the ttl by default */
    public Lock interval(Duration interval) { this.interval = interval; return this; }

    public long fence() { return fence; }

    @Override
    public Lost<Lock> lost() { return lost; }

    public Lock acquire() throws DlockException {
        if (ttl != null && (lease != null || line.given))
            throw new DlockException.BadArgument("no lock in lease scope of this");
        turn(NONE, ASKED);
        lost = new Lost<>(this, this::look);
        heart = null;
        fence = 0;
        asked = null;
        until = Line.after(timeout);
        line.checked = !Duration.ZERO.equals(timeout) && !line.given;
        line.start();
        try {
            if (lease != null)
                acquireOfLease();
            else if (ttl != null)
                acquireWithTtl();
            else
                fence = request(inTransaction ? "dlock_xact_acquire" : "dlock_acquire", null, options);
            if (heart != null)
                line.close();       // a wait needs one, a lock does not
            state.set(HELD);
            return this;
        } catch (DlockException | RuntimeException | Error error) {
            try {
                undo(error);
            } finally {
                state.set(NONE);
            }
            throw error;
        } finally {
            line.finish();
        }
    }

    /** With the time that is left, should it be asked again */
    private long request(String function, Object of, Map<String, Object> with) throws DlockException {
        return (Long) line.ask(() -> call(function, of, with, until), Line.later(until, Line.GRACE), Line.FOREVER);
    }

    private Line.Call call(String function, Object of, Map<String, Object> with, long until) {
        Map<String, Object> all = new HashMap<>(with);
        all.put("timeout", until == Line.FOREVER ? null : Duration.ofNanos(Math.max(0, until - Clock.now())));
        return of == null ? Line.call(function, all, name) : Line.call(function, all, name, of);
    }

    /** What a request in lease scope says */
    Map<String, Object> owned() {
        Map<String, Object> all = new HashMap<>(options);
        asked = owner != null ? owner : UUID.randomUUID().toString();
        all.put("owner", asked);
        return all;
    }

    Map<String, Object> options() { return options; }

    private void acquireOfLease() throws DlockException {
        lease.check();
        if (!line.url.equals(lease.url))
            throw new DlockException.BadArgument(this + " is not on the server of " + lease);
        Map<String, Object> with = owned();
        if (lease.heart.owes(name, asked))
            throw new DlockException.WrongState(this + " is being taken back from this owner");
        line.checkCancelled();
        try {
            // over the lease's connection, where there is no need to wait
            fence = lease.hold(over -> (Long) over.ask(call("dlock_lease_acquire", lease.id(), with, Clock.now())));
        } catch (DlockException.LockTimeout error) {
            if (Duration.ZERO.equals(timeout))
                throw error;
            fence = request("dlock_lease_acquire", lease.id(), with);
        }
        heart = lease.heart;
        heart.add(lost, new Heart.Hold(name, fence));
        lease.check();
    }

    private void acquireWithTtl() throws DlockException {
        Duration pause = Lease.interval(ttl, interval);
        fence = request("dlock_ttl_acquire", ttl, owned());
        // It may have waited for long; renewed, we know until when it is ours.  The ttl of the same request is the one
        // that came first.
        long micros = ttl.toNanos() / 1000;
        Line.Call renew = owner == null ? new Line.Call("SELECT dlock_renew(?), CAST(? AS bigint)", fence, micros)
                : new Line.Call("SELECT dlock_renew(lease), least(CAST(extract(epoch FROM ttl) * 1000000 AS bigint), ?)"
                        + " FROM dlock_leases WHERE lease = ?", micros, fence);
        Object[] renewed = (Object[]) line.ask(() -> renew,
                Math.min(Clock.now() + ttl.toNanos(), Line.later(until, Line.GRACE)), pause.toNanos());
        if (renewed == null || renewed[0] == null)
            throw new DlockException.LockLost(this + " was lost at once");
        Duration granted = Duration.ofNanos((Long) renewed[1] * 1000);
        heart = new Heart(line.url, fence, line.sent, granted,
                Duration.ofNanos((long) ((double) pause.toNanos() / ttl.toNanos() * granted.toNanos())), lost);
    }

    /**
     * What was broken off may have been done, and is taken back; as soon as the server can be asked, if a lease goes on.
     */
    private void undo(Throwable error) {
        boolean refused = error instanceof DlockException && !(error instanceof DlockException.QuorumLate)
                && fence == 0 && !line.doubt && (lease == null || lease.heart == null || !lease.doubt());
        if (heart != null)
            heart.remove(lost, lease == null);
        if (!line.given || !inTransaction && !(error instanceof DlockException))
            line.close();
        if (asked == null || refused)
            return;
        Line other = new Line(line.url, line.patience);
        long end = Clock.now() + Line.UNDO;
        Line.Pauses pauses = Line.pauses();
        try {
            Line.Call takeBack = new Line.Call(Pulse.TAKE_BACK, name, asked);
            while (Boolean.FALSE.equals(other.ask(() -> takeBack, end, Line.GRACE))) {
                if (Clock.now() >= end)
                    throw new DlockException.WrongState("its session goes on waiting");
                Line.pause(pauses.next());
            }
        } catch (DlockException unanswered) {
            if (lease != null && lease.heart != null)
                lease.heart.owe(name, asked);
            error.addSuppressed(unanswered);        // else it runs out
        } finally {
            other.close();
        }
    }

    /** Throws LockLost where the lock was lost; in transaction scope, it is the transaction's end that releases. */
    public void release() throws DlockException {
        turn(HELD, LEAVING);
        try {
            if (heart != null)
                releaseForLease();
            else if (!inTransaction)
                releaseHere();
        } finally {
            state.set(NONE);
            if (!line.given)
                line.close();
        }
    }

    /** Over the lease's connection, if there is one; and if nothing comes of it, a lease that goes on does it later. */
    private void releaseForLease() throws DlockException {
        Line.Call release = Line.call("dlock_release_ticket", Map.of(), fence);
        if (lease == null) {
            giveBack(line, release, true);
            return;
        }
        try {
            lease.hold(over -> {
                giveBack(over, release, false);
                return null;
            });
        } catch (DlockException.LockLost error) {
            throw error;
        } catch (DlockException | RuntimeException | Error error) {
            heart.owe(name, asked);
            throw error;
        }
    }

    private void releaseHere() throws DlockException {
        Line.Call release = Line.call("dlock_release_ticket", Map.of(), fence);
        try {
            Object released = line.given ? Line.ask(line.connection, release)
                    : Line.ask(line.connection, release, Clock.now() + Line.GRACE);
            if (!Boolean.TRUE.equals(released))
                lost.set("the server has ended its ticket");
        } catch (DlockException.ConnectionLost error) {
            lost.set("its connection is gone: " + error.getMessage());
        }
        lost.check();
    }

    /** For another thread: an acquire that waits throws Cancelled, unless it has got the lock meanwhile. */
    public void cancel() { line.cancel(); }

    void stop() { line.stop(); }

    /** The transaction of this connection commits only while we hold. */
    public void guard(Connection connection) throws DlockException {
        Line.ask(connection, Line.call("dlock_guard", Map.of(), name, fence));
    }

    @Override
    void look() {
        super.look();
        Connection used = line.connection;
        try {
            if (heart == null && isHeld() && used != null && used.isClosed())
                lost.set("its connection is closed");
        } catch (SQLException error) {
            lost.set("its connection is gone: " + error.getMessage());
        }
    }

    @Override
    public void close() throws DlockException {
        if (isHeld())
            release();
    }

    @Override
    public String toString() { return "lock \"" + name + '"'; }
}
