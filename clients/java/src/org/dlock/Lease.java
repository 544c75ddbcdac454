package org.dlock;

import static java.util.concurrent.TimeUnit.NANOSECONDS;

import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.locks.ReentrantLock;

/** One heartbeat for any number of locks, all of them on one server */
public final class Lease extends Kept<Lease> {
    /** The server refuses a shorter ttl. */
    static final Duration LEAST = Duration.ofMillis(100);

    final Locks locks;
    Source source;
    private final Duration ttl;
    private final Map<String, Object> options = new HashMap<>();
    private volatile Lost<Lease> lost = new Lost<>(this, this::look);
    private String near = "";
    private Duration interval;
    private volatile Line line;         // for all calls that need not wait, one at a time
    private final ReentrantLock free = new ReentrantLock();
    private volatile long id;

    Lease(Locks locks, Duration ttl) {
        this.locks = locks;
        this.ttl = ttl;
    }

    /** Puts the lease on the server to which this name belongs. */
    public Lease near(String name) { near = name; return this; }

    public Lease delay(Duration delay) { options.put("delay", delay); return this; }

    public Lease info(String info) { options.put("info", info); return this; }

    /** The time between two renewals; by default a third of the ttl */
    public Lease interval(Duration interval) { this.interval = interval; return this; }

    public long id() { return id; }

    @Override
    public Lost<Lease> lost() { return lost; }

    /** Of several names, acquire() acquires all or none. */
    public Lock lock(String... names) { return new Lock(this, names); }

    public Lease open() throws DlockException {
        Duration pause = interval(ttl, interval);
        turn(NONE, ASKED);
        line = locks.line(near);
        source = line.source;
        try {
            lost = new Lost<>(this, this::look);
            return hold(over -> {
                id = (Long) over.ask(Line.call("dlock_lease_open", options, ttl));
                heart = new Heart(source, id, over.sent, ttl, pause, lost);
                state.set(HELD);
                return this;
            });
        } catch (DlockException | RuntimeException | Error error) {
            state.set(NONE);    // if the answer is lost, the lease has no locks, and expires
            throw error;
        }
    }

    static Duration interval(Duration ttl, Duration interval) throws DlockException {
        Duration pause = interval == null ? ttl.dividedBy(3) : interval;
        if (ttl.compareTo(LEAST) < 0 || ttl.compareTo(Duration.ofDays(36500)) > 0
                || pause.isNegative() || pause.isZero() || pause.compareTo(ttl.multipliedBy(99).dividedBy(100)) >= 0)
            throw new DlockException.BadArgument("the ttl must be at least 100 ms, and the interval less than the ttl");
        return pause;
    }

    /** Renews now, in addition to the heartbeat; throws LockLost if the lease is lost. */
    public void renew() throws DlockException { renew(null); }

    /** Renews now, and changes the ttl, also for the heartbeat. */
    public void renew(Duration ttl) throws DlockException {
        check();
        Heart heart = this.heart;
        hold(over -> {
            renew(over, heart, ttl);
            return null;
        });
    }

    /** Changes the info that dlock_leases shows; null removes it. */
    public void setInfo(String info) throws DlockException {
        check();
        Heart heart = this.heart;
        Lost<Lease> held = lost;
        Line.Call call = new Line.Call("SELECT dlock_set_info(?, ?)", heart.id, info);
        confirm(held, hold(over -> over.ask(() -> call, heart.deadline(), Line.GRACE)));
    }

    /**
     * Closes the lease, which ends all of its locks.  Does nothing if it is closed already.  If another thread is
     * opening it, waits for the end of open().
     */
    @Override
    public void close() throws DlockException {
        for (Line.Pauses pauses = Line.pauses(); state.get().equals(ASKED); )
            Line.pause(pauses.next());
        if (state.get().equals(NONE))
            return;
        turn(HELD, LEAVING);
        hold(over -> {
            try {
                giveBack(over, Line.call("dlock_lease_close", Map.of(), id), true);
            } finally {
                state.set(NONE);
            }
            return null;
        });
    }

    interface Work<R> {
        R over(Line line) throws DlockException;
    }

    /**
     * Runs work with exclusive use of the lease's connection; if it is not free soon, over another one.  Afterwards,
     * returns a connection of a DataSource, and closes one of a closed lease.
     */
    <R> R hold(Work<R> work) throws DlockException {
        boolean mine = false;
        try {
            mine = free.tryLock() || free.tryLock(Line.GRACE / 2, NANOSECONDS);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
        Line over = mine ? line : new Line(source, locks.line(near).patience);
        try {
            if (state.get().equals(NONE))
                check();        // closed during the wait
            return work.over(over);
        } finally {
            if (over != line || source.pool() != null || !holds())
                over.close();
            if (mine)
                free.unlock();
        }
    }

    @Override
    public String toString() { return "lease " + id; }
}
