package org.dlock;

import static java.util.concurrent.TimeUnit.NANOSECONDS;
import static java.util.concurrent.TimeUnit.SECONDS;

import java.sql.Connection;
import java.sql.SQLException;
import java.time.Duration;
import java.util.Collections;
import java.util.HashMap;
import java.util.IdentityHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

/**
 * What keeps a lease, and tells of its loss.
 *
 * <p>It has two threads.  One renews, over a connection of its own.  The other one watches the deadline, and waits for
 * nothing but the clock: whatever becomes of the first, and of the server, it tells of the loss in time.
 */
final class Heart {
    /** A look at the clock at least each second: the one by which threads wait stands still where the machine sleeps */
    private static final long GLANCE = SECONDS.toNanos(1);
    private static final String PASSED = "its deadline has passed";

    record Hold(String name, long fence) {}

    private final String url;
    private final long id, interval, life;
    // all below is protected by this
    private long deadline;
    private boolean over, ending;
    private Connection asked;       // from which no answer has come,
    private long since;             // since then
    private final Set<Connection> cuttable = Collections.newSetFromMap(new IdentityHashMap<>());
    /** Who is to be told: the lease, without a hold, and locks */
    private final Map<Lost<?>, Hold> members = new HashMap<>();

    Heart(String url, long id, long sent, Duration ttl, Duration interval) {
        this.url = url;
        this.id = id;
        this.interval = interval.toNanos();
        life = ttl.toNanos() - ttl.toNanos() / 100;
        deadline = sent + life;
    }

    static void start(String name, Runnable work) {
        Thread thread = new Thread(work, name);
        thread.setDaemon(true);
        thread.start();
    }

    /** The same for what somebody waits for: where there are no more threads, in this one */
    static void startOrRun(String name, Runnable work) {
        try {
            start(name, work);
        } catch (OutOfMemoryError error) {
            work.run();
        }
    }

    /** At once, without waiting for the connection */
    static void cut(Connection connection) {
        try {
            connection.abort(work -> startOrRun("dlock cut", work));
        } catch (SQLException | RuntimeException ignored) {
            // it is closed
        }
    }

    void start() {
        start("dlock watch", this::watch);
        start("dlock beat", this::beat);
    }

    synchronized void add(Lost<?> lost, Hold hold) {
        members.put(lost, hold);
        if (over)
            lost.set("its lease is over");
    }

    synchronized void remove(Lost<?> lost) { members.remove(lost); }

    /**
     * From now on, that the lock is gone is no loss; nor is it, for the last one, of the lease.  The deadline is.  The
     * last one ends the lease, and with it all locks that are still on it.
     */
    synchronized void leave(Lost<?> lost, boolean last) {
        members.replace(lost, null);
        ending |= last;
        if (last)
            for (Lost<?> member : members.keySet())
                if (member != lost)
                    member.set("its lease is closed");
    }

    /** Nothing is told any more. */
    synchronized void end() {
        over = true;
        cuttable.forEach(Heart::cut);
        notifyAll();
    }

    synchronized long deadline() { return deadline; }

    synchronized void look() {
        if (!over && Clock.now() >= deadline)
            lose(PASSED);
    }

    /** A connection that is cut at the end, should somebody wait for it */
    synchronized void cuttable(Connection connection, boolean yes) {
        if (!yes) {
            cuttable.remove(connection);
            return;
        }
        cuttable.add(connection);
        if (over)
            cut(connection);
    }

    /** Caller holds this. */
    private void lose(String reason) {
        end();
        members.keySet().forEach(lost -> lost.set(reason));
    }

    private synchronized void watch() {
        while (!over) {
            long left = Math.min(deadline - Clock.now(), GLANCE);
            if (asked != null) {
                long patience = since + interval - Clock.now();
                if (patience <= 0) {
                    cut(asked);
                    asked = null;
                } else {
                    left = Math.min(left, patience);
                }
            }
            if (left > 0)
                pause(left);
            look();
        }
    }

    private void beat() {
        long pause = interval;
        while (!rest(pause)) {
            Connection connection = null;
            try {
                connection = Line.connect(url, "dlock heartbeat", Duration.ofNanos(interval));
                cuttable(connection, true);
                do {
                    long began = Clock.now();
                    renew(connection);
                    pause = began + interval - Clock.now();
                } while (!rest(pause));
            } catch (SQLException error) {      // says nothing: ask again
                System.getLogger("org.dlock").log(System.Logger.Level.DEBUG, "renewal of " + id, error);
            } catch (RuntimeException error) {
                System.getLogger("org.dlock").log(System.Logger.Level.ERROR, "renewal of " + id, error);
            } finally {
                synchronized (this) {
                    asked = null;
                    cuttable.remove(connection);
                }
                Line.close(connection);
            }
            pause = Math.min(interval, SECONDS.toNanos(1) / 2);
        }
    }

    /** True where it is over */
    private synchronized boolean rest(long nanos) {
        long until = Clock.now() + nanos, left;
        while (!over && (left = until - Clock.now()) > 0)
            pause(left);
        return over;
    }

    /** Caller holds this; nobody knows its threads, to interrupt them. */
    private void pause(long nanos) {
        try {
            NANOSECONDS.timedWait(this, nanos);
        } catch (InterruptedException ignored) {
            // asks again
        }
    }

    private void renew(Connection connection) throws DlockException {
        Map<Lost<?>, Hold> locks;
        synchronized (this) {
            locks = new HashMap<>(members);
            locks.values().removeIf(hold -> hold == null);
            since = Clock.now();
            asked = connection;
            notifyAll();
        }
        long sent = since;
        Object kept = Line.ask(connection, Line.call("dlock_renew", Map.of(), id));
        List<Long> gone = kept == null || locks.isEmpty() ? List.of() : gone(connection, locks);
        synchronized (this) {
            asked = null;
            if (over)
                return;
            if (kept != null)
                deadline = Math.max(deadline, sent + life);
            else if (!ending)
                lose("the server has ended its lease");
            locks.forEach((lost, hold) -> {
                if (gone.contains(hold.fence) && members.get(lost) == hold)
                    lost.set("the server has ended its ticket");
            });
            notifyAll();
        }
    }

    private static List<Long> gone(Connection connection, Map<Lost<?>, Hold> locks) throws DlockException {
        Object[] fences = (Object[]) Line.ask(connection, new Line.Call(
                "SELECT coalesce(array_agg(fence), '{}') FROM unnest(?, ?) AS held (name, fence)"
                + " WHERE NOT dlock_check(name, fence)",
                locks.values().stream().map(Hold::name).toArray(String[]::new),
                locks.values().stream().map(Hold::fence).toArray(Long[]::new)));
        return List.of((Long[]) fences);
    }
}
