package org.dlock;

import static java.util.concurrent.TimeUnit.NANOSECONDS;
import static java.util.concurrent.TimeUnit.SECONDS;

import java.sql.Connection;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;

/**
 * Renews all leases on one server, in one thread, over one connection.
 *
 * <p>Another thread watches the deadlines of all leases and waits only for the clock.  So it reports a loss in time,
 * even if the other threads or the servers hang.
 */
final class Pulse {
    /** Check the clock at least each second, because the clock of Object.wait() can stop while the machine sleeps. */
    private static final long GLANCE = SECONDS.toNanos(1);
    private static final String RENEW = "SELECT array(SELECT dlock_renew(id) FROM unnest(?) AS leases (id)),"
            + " array(SELECT fence FROM unnest(?, ?) AS held (name, fence) WHERE NOT dlock_check(name, fence))";
    private static final String FIND = "SELECT array(SELECT ticket FROM dlock_locks(?)"
            + " WHERE owner IS NOT DISTINCT FROM ? AND lease = coalesce(?, ticket)"
            + " AND scope = 'lease' AND role = current_user)";
    private static final String TAKE_BACK = "SELECT bool_and(dlock_release_ticket(ticket))"
            + " FROM unnest(?) AS found (ticket)";

    /** Protects the fields of hearts and pulses, and the fields below. */
    static final Object ALL = new Object();
    private static final Map<Source, Pulse> PULSES = new HashMap<>();
    private static final List<Runnable> UNTOLD = new ArrayList<>();
    private static boolean watching;

    final Set<Heart> hearts = new LinkedHashSet<>();
    private final Source source;
    private Loan loan;
    private Connection asked;       // a connection that has not answered yet
    private long since;             // when its statement was sent

    private Pulse(Source source) {
        this.source = source;
    }

    static void start(String name, Runnable work) {
        Thread thread = new Thread(work, name);
        thread.setDaemon(true);
        thread.start();
    }

    /** Starts work on which all leases rely.  If an Error ends the work, such as a lack of memory, it begins again. */
    private static void keep(String name, Runnable work) {
        start(name, () -> {
            for (boolean done = false; !done; )
                try {
                    work.run();
                    done = true;
                } catch (RuntimeException | Error error) {
                    try {
                        Line.pause(GLANCE / 10);
                        System.getLogger("org.dlock").log(System.Logger.Level.ERROR, name, error);
                    } catch (RuntimeException | Error ignored) {
                        // for example, still no memory
                    }
                }
        });
    }

    /** Closes the connection at once, without waiting for it. */
    static void cut(Connection connection) {
        try {
            connection.abort(work -> {
                try {
                    start("dlock cut", work);
                } catch (OutOfMemoryError error) {
                    work.run();
                }
            });
        } catch (SQLException | RuntimeException ignored) {
            // it is closed
        }
    }

    static Pulse join(Source source, Heart heart) {
        synchronized (ALL) {
            Pulse pulse = PULSES.get(source);
            if (pulse == null) {
                pulse = new Pulse(source);
                keep("dlock beat", pulse::beat);
                PULSES.put(source, pulse);
            }
            pulse.hearts.add(heart);
            if (!watching) {
                keep("dlock watch", Pulse::watch);
                watching = true;
            }
            ALL.notifyAll();
            return pulse;
        }
    }

    /** Calls back in a separate thread; if none can be started, the watcher tries again. */
    static void tell(Runnable call) {
        try {
            start("dlock lost", call);
        } catch (OutOfMemoryError error) {
            synchronized (ALL) {
                UNTOLD.add(call);
            }
        }
    }

    private static void watch() {
        synchronized (ALL) {
            while (!PULSES.isEmpty() || !UNTOLD.isEmpty()) {
                long next = Clock.now() + GLANCE;
                for (Pulse pulse : PULSES.values()) {
                    for (Heart heart : List.copyOf(pulse.hearts)) {
                        heart.look();
                        next = Math.min(next, heart.deadline);
                    }
                    if (pulse.asked != null) {
                        long patience = pulse.since + pulse.shortest();
                        next = Math.min(next, patience);
                        if (Clock.now() >= patience) {
                            cut(pulse.asked);
                            pulse.asked = null;
                        }
                    }
                }
                List<Runnable> untold = List.copyOf(UNTOLD);
                UNTOLD.clear();
                untold.forEach(Pulse::tell);
                rest(next);
            }
            watching = false;
        }
    }

    /** Caller holds ALL.  No other code knows this package's threads, so none interrupts them. */
    private static void rest(long until) {
        try {
            long left = Math.min(until - Clock.now(), GLANCE);
            if (left > 0)
                NANOSECONDS.timedWait(ALL, left);
        } catch (InterruptedException ignored) {
            // looks again
        }
    }

    /** The time after which the watcher drops a silent connection */
    private long shortest() {
        return hearts.stream().mapToLong(heart -> heart.interval).min().orElse(0);
    }

    private void beat() {
        Line.Pauses pauses = Line.pauses();
        long pause = 0;
        for (List<Heart> due; !(due = due(pause)).isEmpty(); )
            try {
                pause = 0;
                if (loan == null)
                    loan = source.connect("dlock heartbeat", patience());
                renew(due);
                if (takeBack(due))
                    pauses = Line.pauses();
                else
                    pause = pauses.next();
            } catch (SQLException | RuntimeException | Error error) {      // does not prove a loss: retry
                close(false);
                pause = pauses.next();
                System.getLogger("org.dlock").log(error instanceof SQLException
                        ? System.Logger.Level.DEBUG : System.Logger.Level.ERROR, "heartbeat", error);
            }
        close(true);
    }

    private void close(boolean inOrder) {
        Loan old = loan;
        loan = null;
        if (old != null)
            old.close(inOrder);
    }

    private long patience() {
        synchronized (ALL) {
            return shortest();
        }
    }

    /** The hearts that are due now or soon; none if no heart is left */
    private List<Heart> due(long pause) {
        synchronized (ALL) {
            long earliest = Clock.now() + Math.min(pause, shortest() / 2);
            while (!hearts.isEmpty()) {
                long now = Clock.now();
                long due = Math.max(earliest, hearts.stream()
                        .mapToLong(heart -> heart.owed.isEmpty() ? heart.due : now).min().getAsLong());
                if (due <= now)
                    return hearts.stream().filter(
                            heart -> !heart.owed.isEmpty() || heart.due <= now + heart.interval / 4).toList();
                rest(due);
            }
            PULSES.remove(source, this);
            ALL.notifyAll();
            return List.of();
        }
    }

    interface Asking {
        Object ask(Line.Call call) throws DlockException;
    }

    /**
     * Releases the ticket that a request of this owner may have left: of this lease, or with a ttl of its own.  False
     * if the request's session still waits, because it has not noticed yet that the client is gone.  An abandoned
     * statement may be executed late, so the one that releases names the tickets: it cannot release what the owner
     * acquires later.
     */
    static boolean takeBack(Asking over, String name, String owner, Long lease) throws DlockException {
        Long[] tickets = (Long[]) over.ask(new Line.Call(FIND, name, owner, lease));
        return tickets.length == 0 || !Boolean.FALSE.equals(over.ask(new Line.Call(TAKE_BACK, (Object) tickets)));
    }

    private Object ask(Line.Call call) throws DlockException {
        synchronized (ALL) {
            asked = loan.connection;
            since = Clock.now();
            ALL.notifyAll();
        }
        try {
            return Line.ask(loan.connection, call);
        } finally {
            synchronized (ALL) {
                asked = null;
            }
        }
    }

    private void renew(List<Heart> due) throws DlockException {
        Map<Heart, Map<Lost<?>, Heart.Hold>> held = new LinkedHashMap<>();
        List<Heart.Hold> locks = new ArrayList<>();
        synchronized (ALL) {
            for (Heart heart : due) {
                Map<Lost<?>, Heart.Hold> of = new HashMap<>(heart.members);
                of.values().removeIf(hold -> hold == null);
                locks.addAll(of.values());
                held.put(heart, of);
            }
        }
        long sent = Clock.now();
        Object[] row = (Object[]) ask(new Line.Call(RENEW, due.stream().map(heart -> heart.id).toArray(Long[]::new),
                locks.stream().flatMap(hold -> hold.names().stream()).toArray(String[]::new),
                locks.stream().flatMap(hold -> hold.fences().stream()).toArray(Long[]::new)));
        Object[] kept = (Object[]) row[0];
        List<Long> gone = List.of((Long[]) row[1]);
        synchronized (ALL) {
            for (int i = 0; i < kept.length; i++) {
                Heart heart = due.get(i);
                heart.due = sent + heart.interval;
                heart.renewed(sent, kept[i], gone, held.get(heart));
            }
        }
    }

    /** Has every owed request been undone? */
    private boolean takeBack(List<Heart> due) throws DlockException {
        boolean done = true;
        for (Heart heart : due)
            for (Heart.Request request : owed(heart))
                if (takeBack(this::ask, request.name(), request.owner(), heart.id))
                    synchronized (ALL) {
                        heart.owed.remove(request);
                    }
                else
                    done = false;
        return done;
    }

    private static List<Heart.Request> owed(Heart heart) {
        synchronized (ALL) {
            return List.copyOf(heart.owed);
        }
    }
}
