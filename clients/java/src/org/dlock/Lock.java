package org.dlock;

import java.sql.Connection;
import java.sql.SQLException;
import java.time.Duration;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.UUID;

/**
 * A lock, for a block of the program; acquire() returns it, for a try with resources.  With several names, it holds all
 * locks or none, and is lost as soon as one of the locks is lost.
 */
public final class Lock extends Kept<Lock> {
    private final List<String> names;
    private final Map<String, Object> options = new HashMap<>();
    private final Lease lease;
    private final boolean inTransaction;
    private final Line line;
    private Observer observer = Locks.SILENT;
    private Duration timeout, ttl, interval;
    private Duration limit;             // the timeout of this acquire
    private long until, since;
    private String owner, asked;        // the given owner, and the owner of the current request
    private Debt debt;                  // of that owner, if the lock has a ttl of its own
    private boolean doubt;              // may the lease's connection have executed an earlier request, too?
    private volatile Lost<Lock> lost = new Lost<>(this, this::look);
    private volatile List<Long> fences = List.of();

    Lock(Locks locks, String... names) {
        this(locks, null, names);
        for (String name : names)
            if (!locks.source(name).equals(line.source))
                throw new IllegalArgumentException(this + " are on several servers");
    }

    Lock(Lease lease, String... names) { this(lease.locks, lease, names); }

    private Lock(Locks locks, Lease lease, String... names) {
        this(names, lease, false, locks.line(names.length == 0 ? "" : names[0]));
        observer = locks.observer();
    }

    private Lock(String[] names, Lease lease, boolean inTransaction, Line line) {
        this.names = Collections.unmodifiableList(Arrays.asList(names.clone()));     // the server refuses null
        if (names.length == 0 || names.length > new HashSet<>(this.names).size())
            throw new IllegalArgumentException("each name once, please");
        this.lease = lease;
        this.inTransaction = inTransaction;
        this.line = line;
    }

    /** In session scope, on a connection of the program, which must be in autocommit mode */
    public static Lock on(Connection connection, String... names) {
        return new Lock(names, null, false, new Line(connection));
    }

    /** In transaction scope: the lock ends with the transaction, not with its block. */
    public static Lock inTransaction(Connection connection, String... names) {
        return new Lock(names, null, true, new Line(connection));
    }

    /** The same in the transaction of a library that executes SQL.  End a wait by the library, or by a timeout. */
    public static Lock inTransaction(Sql sql, String name) {
        return new Lock(new String[] {name}, null, true, new Line(sql));
    }

    /** How long to wait: without limit by default; zero tries once. */
    public Lock timeout(Duration timeout) { this.timeout = timeout; return this; }

    public Lock shared() { options.put("shared", true); return this; }

    public Lock slots(int slots) { options.put("slots", slots); return this; }

    public Lock permits(int permits) { options.put("permits", permits); return this; }

    public Lock info(String info) { options.put("info", info); return this; }

    /** In lease scope, with a heartbeat */
    public Lock ttl(Duration ttl) { this.ttl = ttl; return this; }

    /** In lease scope: a repeated request of one owner, such as a job's number, gets the same lock. */
    public Lock owner(String owner) { this.owner = owner; return this; }

    /** The time between two renewals; by default a third of the ttl */
    public Lock interval(Duration interval) { this.interval = interval; return this; }

    /** No heartbeat: the lock expires after its ttl, unless the program calls renew(). */
    public Lock noHeartbeat() { return interval(Heart.NEVER); }

    /** Replaces the observer of the Locks. */
    public Lock observer(Observer observer) {
        this.observer = observer;
        line.observer = observer;
        return this;
    }

    public String name() { return names.get(0); }

    /** If there are several names, the fence of the first one */
    public long fence() { return fences.isEmpty() ? 0 : fences.get(0); }

    public long fence(String name) {
        if (!names.contains(name))
            throw new IllegalArgumentException(this + " has no \"" + name + '"');
        return fences.isEmpty() ? 0 : fences.get(names.indexOf(name));
    }

    boolean isShared() { return options.containsKey("shared") || options.containsKey("slots"); }

    @Override
    public Lost<Lock> lost() { return lost; }

    public Lock acquire() throws DlockException { return acquire(timeout, false); }

    Lock acquire(Duration limit, boolean deaf) throws DlockException {
        if (ttl != null && (lease != null || line.given))
            throw new DlockException.BadArgument("no lock in lease scope of this");
        if (names.size() > 1 && (ttl != null || owner != null))
            throw new DlockException.BadArgument("several names have no ttl or owner of their own: use a Lease");
        if (inTransaction && line.connection != null)
            Line.checkTransaction(line.connection);
        turn(NONE, ASKED);
        lost = new Lost<>(this, this::look);
        if (observer != Locks.SILENT)
            lost.addCallback(it -> observer.lost(it, it.lost().reason()));
        heart = null;
        fences = List.of();
        asked = null;
        doubt = false;
        this.limit = limit;
        until = Line.after(limit);
        line.checked = false;
        line.start(deaf);
        long began = Clock.now();
        try {
            if (lease != null)
                acquireOfLease();
            else if (ttl != null)
                acquireWithTtl();
            else
                fences = request(inTransaction ? "dlock_xact_acquire" : "dlock_acquire", null, options);
            if (heart != null)
                line.close();       // a held lock needs no connection
            state.set(HELD);
        } catch (DlockException | RuntimeException | Error error) {
            try {
                undo(error);
            } finally {
                state.set(NONE);
            }
            if (error instanceof DlockException reason)
                Locks.tell(() -> observer.refused(this, Duration.ofNanos(Clock.now() - began), reason));
            throw error;
        } finally {
            line.finish();
        }
        since = Clock.now();
        Locks.tell(() -> observer.acquired(this, Duration.ofNanos(since - began)));
        return this;
    }

    /** Requests the lock.  A repeated request gets the remaining time. */
    private List<Long> request(String function, Object of, Map<String, Object> with) throws DlockException {
        line.checked = !Duration.ZERO.equals(limit) && !line.given;
        return fences(line.ask(() -> call(function, of, with, until), Line.later(until, Line.GRACE), Line.FOREVER));
    }

    /** Releases what the owner must not get again. */
    private void pay(long end) throws DlockException {
        for (Long next = debt.ticket(); next != null; next = debt.ticket()) {
            long owed = next;
            if (owed == 0)
                takeBack(line, name(), owner, end);
            else
                line.ask(() -> Line.call("dlock_release_ticket", Map.of(), owed), end, Line.GRACE);
            debt.paid(owed);
        }
    }

    private static List<Long> fences(Object answer) throws DlockException {
        if (answer instanceof Long[] several)
            return List.of(several);
        if (answer instanceof Number one)
            return List.of(one.longValue());
        throw new DlockException.BadArgument("the statement has returned no number: " + answer);
    }

    private Line.Call call(String function, Object of, Map<String, Object> with, long until) {
        Map<String, Object> all = new HashMap<>(with);
        Object what = names.size() == 1 ? name() : names.toArray(String[]::new);
        String called = names.size() == 1 ? function : function + "_all";
        all.put("timeout", until == Line.FOREVER ? null : Duration.ofNanos(Math.max(0, until - Clock.now())));
        return of == null ? Line.call(called, all, what) : Line.call(called, all, what, of);
    }

    /** The options of a request in lease scope */
    Map<String, Object> owned() {
        Map<String, Object> all = new HashMap<>(options);
        asked = owner != null ? owner : UUID.randomUUID().toString();
        all.put("owner", asked);
        return all;
    }

    Map<String, Object> options() { return options; }

    String asked() { return asked; }

    boolean leaseIsLost() { return lease != null && lease.lost().isSet(); }

    /** Refuses a request while the heartbeat still undoes an earlier one of its owner. */
    void checkOwed(Heart beats) throws DlockException {
        if (beats.owes(names, asked))
            throw new DlockException.WrongState(this + " is being taken back from this owner");
    }

    private void acquireOfLease() throws DlockException {
        lease.check();
        Heart beats = lease.heart;      // of this request: another thread may close and reopen the lease
        if (!line.source.equals(lease.source))
            throw new DlockException.BadArgument(this + " is not on the server of " + lease);
        Map<String, Object> with = names.size() == 1 ? owned() : options;
        checkOwed(beats);
        line.checkCancelled();
        if (asked == null && !beats.take(names))
            throw new DlockException.WrongState(lease + " has several names at once, some of them of " + this);
        heart = beats;
        try {
            fences = lease.hold(over -> tryOver(over, with));
        } catch (DlockException.LockTimeout error) {
            if (Duration.ZERO.equals(limit))
                throw error;
            fences = request("dlock_lease_acquire", heart.id, with);
        }
        heart.add(lost, new Heart.Hold(names, fences));
        lost.check();
    }

    /** Tries over the lease's connection, which is lent to the lock's line so that a cancel ends the call. */
    private List<Long> tryOver(Line over, Map<String, Object> with) throws DlockException {
        line.take(over);
        try {
            return fences(line.ask(() -> call("dlock_lease_acquire", heart.id, with, Clock.now()),
                    Line.later(until, Line.GRACE), Line.GRACE));
        } finally {
            doubt = line.doubt;
            over.take(line);
            if (!over.inOrder)
                over.close();
        }
    }

    private void acquireWithTtl() throws DlockException {
        boolean beats = interval != Heart.NEVER;
        Duration pause = Lease.interval(ttl, beats ? interval : null);
        debt = owner == null ? null : new Debt(line.source, name(), owner);
        if (debt != null) {
            line.checked = !Duration.ZERO.equals(limit);    // for the request, over the same connection
            pay(Line.later(until, Line.GRACE));
        }
        fences = request("dlock_ttl_acquire", ttl, owned());
        // After a long wait, only a renewal makes the deadline known.  If the request repeats an earlier one, the
        // shorter ttl counts.
        long micros = ttl.toNanos() / 1000;
        Line.Call renew = owner == null ? new Line.Call("SELECT dlock_renew(?), CAST(? AS bigint)", fence(), micros)
                : new Line.Call("SELECT dlock_renew(lease), least(CAST(extract(epoch FROM ttl) * 1000000 AS bigint), ?)"
                        + " FROM dlock_leases WHERE lease = ?", micros, fence());
        Object[] renewed = (Object[]) line.ask(() -> renew,
                Math.min(Clock.now() + ttl.toNanos(), Line.later(until, Line.GRACE)), pause.toNanos());
        if (renewed == null || renewed[0] == null)
            lost.set("the server has ended it");
        lost.check();
        Duration granted = Duration.ofNanos((Long) renewed[1] * 1000);
        heart = new Heart(line.source, fence(), line.sent, granted, !beats ? Heart.NEVER
                : Duration.ofNanos((long) ((double) pause.toNanos() / ttl.toNanos() * granted.toNanos())), lost);
    }

    /**
     * Undoes an interrupted request, because the server may have executed it.  If that fails, the heartbeat of a Lease
     * undoes the request as soon as the server answers again; a lock with a ttl of its own expires, or its owner's next
     * request releases it.
     */
    private void undo(Throwable error) {
        boolean refused = error instanceof DlockException && !(error instanceof DlockException.QuorumLate)
                && fences.isEmpty() && !line.doubt && !doubt;
        if (heart != null)
            heart.remove(lost, lease == null);
        if (!line.given)
            line.close();
        else if (!inTransaction && !(error instanceof DlockException))
            Loan.destroy(line.connection);      // it may hold the lock
        boolean requested = lease == null ? asked != null : heart != null;
        if (!refused && requested)
            takeBack(error);
        if (lease != null && heart != null && asked == null)
            heart.untake(names);
    }

    private void takeBack(Throwable error) {
        Line other = new Line(line.source, line.patience);
        long end = Clock.now() + Line.UNDO;
        try {
            for (String name : names)
                takeBack(other, name, asked, end);
        } catch (DlockException | RuntimeException | Error unanswered) {
            if (lease != null)
                heart.owe(names, asked);
            else if (debt != null)
                debt.owe(fence());
            error.addSuppressed(unanswered);
        } finally {
            other.close();
        }
    }

    private void takeBack(Line over, String name, String owner, long end) throws DlockException {
        Line.Pauses pauses = Line.pauses();
        while (!Pulse.takeBack(call -> over.ask(() -> call, end, Line.GRACE), name, owner,
                heart == null ? null : heart.id)) {
            if (Clock.now() >= end)
                throw DlockException.of(new SQLException("its session goes on waiting"));
            Line.pause(pauses.next());
        }
    }

    /**
     * Throws LockLost if the lock was lost.  In transaction scope, the end of the transaction releases the lock.  If a
     * connection of the program refuses the release, as in a failed transaction, the lock stays held: release it again.
     */
    public void release() throws DlockException {
        leave(() -> {
            if (heart != null)
                releaseForLease();
            else if (!inTransaction)
                releaseHere();
        });
    }

    /** For a lock with a ttl: ends the hold here, and lets the lock expire after this time, without the program. */
    public void releaseAfter(Duration time) throws DlockException {
        if (ttl == null)
            throw new DlockException.WrongState(this + " has no ttl");
        if (time.isNegative() || time.isZero())
            release();
        else
            leave(() -> giveBack(Line.call("dlock_renew", Map.of(), fence(),
                    time.compareTo(Lease.LEAST) < 0 ? Lease.LEAST : time), false));
    }

    private interface Leaving {
        void run() throws DlockException;
    }

    private void leave(Leaving leaving) throws DlockException {
        turn(HELD, LEAVING);
        long held = Clock.now() - since;
        boolean refused = false;
        try {
            leaving.run();
        } catch (DlockException error) {
            refused = line.given && !(error instanceof DlockException.LockLost);
            throw error;
        } finally {
            if (!line.given)
                line.close();
            state.set(refused ? HELD : NONE);
            if (!refused)
                Locks.tell(() -> observer.released(this, Duration.ofNanos(held)));
        }
    }

    private Line.Call releaseCall() { return changeCall("dlock_release_ticket"); }

    /** Releases over the connection of a Lease, if there is one.  If that fails, the Lease's heartbeat repeats it. */
    private void releaseForLease() throws DlockException {
        if (lease == null) {
            giveBack(releaseCall(), true);
            return;
        }
        try {
            lease.hold(over -> {
                giveBack(over, releaseCall(), false);
                return null;
            });
        } catch (DlockException | RuntimeException | Error error) {
            lost.check();
            heart.owe(names, asked);
            throw error;
        } finally {
            if (asked == null)
                heart.untake(names);
        }
    }

    /** Gives back a lock with a ttl of its own. */
    private void giveBack(Line.Call call, boolean releases) throws DlockException {
        Debt owed = lost.isSet() ? null : debt;
        boolean released = false;
        if (owed != null)
            owed.owe(fence());
        try {
            giveBack(line, call, true);
            released = releases;
        } finally {
            if (owed != null && (released || !line.doubt))      // it was answered, or not sent
                owed.paid(fence());
        }
    }

    private void releaseHere() throws DlockException {
        try {
            if (!Boolean.TRUE.equals(line.askHere(releaseCall())))
                lost.set("the server has ended its ticket");
        } catch (DlockException.ConnectionLost error) {
            lost.set("its connection is gone: " + error.getMessage());
        }
        lost.check();
    }

    /** Executes a call that queries or changes the held lock. */
    private Object tell(Line.Call call) throws DlockException {
        check();
        if (heart == null)
            return line.askHere(call);
        if (lease != null)
            return lease.hold(over -> over.ask(() -> call, heart.deadline(), Line.GRACE));
        Line once = new Line(line.source, line.patience);
        try {
            return once.ask(() -> call, heart.deadline(), Line.GRACE);
        } finally {
            once.close();
        }
    }

    private Long[] fencesArray() { return fences.toArray(Long[]::new); }

    /** The call changes a ticket, and returns whether the ticket existed. */
    private Line.Call changeCall(String function, Object... more) {
        String values = more.length == 0 ? "" : ", ?";
        return names.size() == 1
                ? new Line.Call("SELECT " + function + "(?" + values + ")", with(fence(), more))
                : new Line.Call(
                        "SELECT bool_and(" + function + "(ticket" + values + ")) FROM unnest(?) AS held (ticket)",
                        more.length == 0 ? new Object[] {fencesArray()} : new Object[] {more[0], fencesArray()});
    }

    private void change(String function, Object... more) throws DlockException {
        confirm(lost, tell(changeCall(function, more)));
    }

    private static Object[] with(Object first, Object... more) {
        return more.length == 0 ? new Object[] {first} : new Object[] {first, more[0]};
    }

    /** Makes an exclusive lock shared, without releasing it. */
    public void downgrade() throws DlockException { change("dlock_downgrade"); }

    /** Changes the info that dlock_locks shows while the lock is held; null removes it. */
    public void setInfo(String info) throws DlockException { change("dlock_set_info", info); }

    /** Asks the server.  The answer can be outdated on arrival; to be sure, guard. */
    public boolean isHeld() throws DlockException {
        if (!holds() || lost.isSet())
            return false;
        Line.Call call = names.size() == 1 ? new Line.Call("SELECT dlock_check(?, ?)", name(), fence()) : new Line.Call(
                "SELECT bool_and(dlock_check(name, fence)) FROM unnest(?, ?) AS held (name, fence)",
                names.toArray(String[]::new), fencesArray());
        try {
            return Boolean.TRUE.equals(tell(call));
        } catch (DlockException.LockLost error) {
            return false;
        }
    }

    /** Renews now, in addition to the heartbeat; throws LockLost if the lease is lost. */
    public void renew() throws DlockException { renew(null); }

    /** Renews now, and changes the ttl, also for the heartbeat. */
    public void renew(Duration ttl) throws DlockException {
        check();
        Heart renewed = heart;
        if (renewed == null || lease != null)
            throw new DlockException.WrongState(this + " has no ttl of its own");
        Line once = new Line(line.source, line.patience);
        Debt owed = ttl == null ? null : debt;
        if (owed != null)
            owed.owe(renewed.id);
        try {
            renew(once, renewed, ttl);
        } finally {
            if (owed != null && !once.doubt)    // it was answered, or not sent
                owed.paid(renewed.id);
            once.close();
        }
    }

    /**
     * Called by another thread or an observer: a waiting acquire throws Cancelled, unless it has just succeeded.
     * Closes the connection, even if it is the program's, if the server does not answer.
     */
    public void cancel() { line.cancel(); }

    void stop() { line.stop(); }

    /** The transaction of this connection can commit only while the lock is held. */
    public void guard(Connection connection) throws DlockException {
        Line.checkTransaction(connection);
        for (String name : names)
            Line.ask(connection, guard(name));
    }

    /** The same for the transaction of a library that executes SQL */
    public void guard(Sql sql) throws DlockException {
        for (String name : names)
            Line.ask(sql, guard(name));
    }

    /** Selects a number, because every library can read a number. */
    private Line.Call guard(String name) {
        return new Line.Call("SELECT 1 FROM dlock_guard(?, ?)", name, fence(name));
    }

    @Override
    void look() {
        super.look();
        Connection used = line.connection;
        try {
            if (heart == null && holds() && used != null && used.isClosed())
                lost.set("its connection is closed");
        } catch (SQLException error) {
            lost.set("its connection is gone: " + error.getMessage());
        }
    }

    @Override
    public void close() throws DlockException {
        if (holds())
            release();
    }

    @Override
    public String toString() {
        return names.size() == 1 ? "lock \"" + name() + '"' : "locks \"" + String.join("\", \"", names) + '"';
    }
}
