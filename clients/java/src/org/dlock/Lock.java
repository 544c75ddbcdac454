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
        line.start();
        try {
            if (lease != null)
                acquireOfLease();
            else if (ttl != null)
                acquireWithTtl();
            else
                fence = request(inTransaction ? "dlock_xact_acquire" : "dlock_acquire", null, options);
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
        Long until = timeout == null ? null : Clock.now() + timeout.toNanos();
        Supplier<Line.Call> call = () -> {
            Map<String, Object> all = new HashMap<>(with);
            all.put("timeout", until == null ? null : Duration.ofNanos(Math.max(0, until - Clock.now())));
            return of == null ? Line.call(function, all, name) : Line.call(function, all, name, of);
        };
        return (Long) line.ask(call, null, null);
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
        fence = request("dlock_lease_acquire", lease.id(), owned());
        heart = lease.heart;
        heart.add(lost, new Heart.Hold(name, fence));
        lease.check();
        line.close();       // of any number, none needs a connection until it is released
    }

    private void acquireWithTtl() throws DlockException {
        Duration pause = Lease.interval(ttl, interval), granted = ttl;
        fence = request("dlock_ttl_acquire", ttl, owned());
        // It may have waited for long; renewed, we know until when it is ours.
        long until = Clock.now() + ttl.toNanos();
        Object kept = null;
        for (boolean asked = false; !asked; )
            try {
                kept = line.ask(() -> Line.call("dlock_renew", Map.of(), fence), until, null);
                asked = true;
            } catch (DlockException.QuorumLate error) {
                if (Clock.now() >= until)
                    throw error;
                Line.pause();
            }
        long sent = line.sent;
        if (kept != null && owner != null) {
            // the ttl of the same request is the one that came first
            kept = line.ask(() -> new Line.Call("SELECT least(CAST(extract(epoch FROM ttl) * 1000000 AS bigint), ?)"
                    + " FROM dlock_leases WHERE lease = ?", ttl.toNanos() / 1000, fence), until, null);
            if (kept != null)
                granted = Duration.ofNanos((Long) kept * 1000);
        }
        if (kept == null)
            throw new DlockException.LockLost(this + " was lost at once");
        heart = new Heart(line.url, fence, sent, granted,
                Duration.ofNanos((long) ((double) pause.toNanos() / ttl.toNanos() * granted.toNanos())));
        heart.add(lost, null);
        heart.start();
    }

    /** What was broken off may have been done, and is taken back. */
    private void undo(Throwable error) {
        boolean refused = error instanceof DlockException && fence == 0 && !line.doubt;
        if (heart != null)
            heart.remove(lost);
        if (!line.given || !inTransaction && !(error instanceof DlockException))
            line.close();
        if (asked == null || refused)
            return;
        Connection other = null;
        try {
            other = Line.connect(line.url, "dlock", line.patience);
            Line.ask(other, new Line.Call("SELECT count(dlock_release_ticket(ticket)) FROM dlock_locks(?)"
                    + " WHERE owner = ? AND scope = 'lease' AND role = current_user", name, asked));
        } catch (DlockException unanswered) {
            error.addSuppressed(unanswered);        // it runs out, then
        } finally {
            Line.close(other);
        }
    }

    /** Throws LockLost where the lock was lost; in transaction scope, it is the transaction's end that releases. */
    public void release() throws DlockException {
        turn(HELD, LEAVING);
        if (inTransaction) {
            state.set(NONE);
            return;
        }
        Line.Call release = Line.call("dlock_release_ticket", Map.of(), fence);
        if (heart != null) {
            end(line, release, lease == null);
            return;
        }
        try {
            if (!Boolean.TRUE.equals(Line.ask(line.connection, release)))
                lost.set("the server has ended its ticket");
        } catch (DlockException.ConnectionLost error) {
            lost.set("its connection is gone: " + error.getMessage());
        } finally {
            state.set(NONE);
            if (!line.given)
                line.close();
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
