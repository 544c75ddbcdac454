package org.dlock;

import static java.util.concurrent.TimeUnit.MILLISECONDS;
import static java.util.concurrent.TimeUnit.NANOSECONDS;
import static java.util.concurrent.TimeUnit.SECONDS;

import java.sql.Connection;
import java.sql.SQLException;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.Collections;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Queue;
import java.util.Set;
import org.postgresql.PGConnection;
import org.postgresql.PGNotification;

/** Places in many queues, and watched locks, over one connection; for one thread at a time. */
public final class Tickets implements AutoCloseable {
    private static final long ROUND = SECONDS.toNanos(60);      // between queries that make up for lost notifications
    private static final long GLANCE = MILLISECONDS.toNanos(200);       // between checks for an interrupt

    private record Request(String name, Line.Call call, String owner, Heart heart) {
        boolean isOf(Request other) {
            return heart == other.heart && name.equals(other.name) && owner.equals(other.owner);
        }

        /** Lets the heartbeat of the lease undo it. */
        void giveBack() { heart.owe(Collections.singletonList(name), owner); }
    }

    private final Locks locks;
    private final Lease lease;
    private final Line line;
    private Connection connection;
    private final Queue<Event> events = new ArrayDeque<>();
    private final Map<Long, Request> requests = new LinkedHashMap<>();
    private final Set<Long> granted = new HashSet<>();
    private final Set<String> watched = new HashSet<>();
    private long round = Clock.now() + ROUND;
    private boolean again;      // was the last call repeated?
    private volatile boolean closed;

    /** Tickets of the session, which end with the connection */
    public Tickets(Locks locks) { this(locks, ""); }

    /** Tickets of the session, on the server to which the name near belongs */
    public Tickets(Locks locks, String near) {
        this.locks = locks;
        lease = null;
        line = locks.line(near);
    }

    /** Tickets of a lease, which keeps their places */
    public Tickets(Lease lease) throws DlockException {
        lease.check();
        locks = lease.locks;
        this.lease = lease;
        line = new Line(lease.source, locks.line("").patience);
    }

    /** Returns the connection, or a new one if it broke.  Tickets of a lease stay; tickets of the session are lost. */
    private synchronized Connection session() throws DlockException {
        if (lease == null && !isConnected() && !requests.isEmpty()) {
            events.removeIf(event -> requests.containsKey(event.ticket())
                    && !Set.of("held", "free").contains(event.event()));
            requests.clear();
            granted.clear();
            throw new DlockException.LockLost("the tickets are gone with their connection");
        }
        Line.Pauses pauses = Line.pauses();
        for (long end = Line.after(line.patience); !isConnected(); )
            try {
                line.ask(new Line.Call("SELECT 1"));
                restore(line.connection);
                connection = line.connection;
            } catch (DlockException.ConnectionLost error) {
                if (Clock.now() >= end)
                    throw error;
                Line.pause(pauses.next());
            } finally {
                if (connection == null)
                    broken();
            }
        return connection;
    }

    private boolean isConnected() throws DlockException {
        if (closed)
            throw new DlockException.WrongState("the tickets are closed");
        return connection != null;
    }

    private void restore(Connection over) throws DlockException {
        try {
            over.setNetworkTimeout(Runnable::run, (int) NANOSECONDS.toMillis(Line.GRACE));
        } catch (SQLException error) {
            throw DlockException.of(error);
        }
        for (String name : watched)
            Line.ask(over, Line.call("dlock_watch", Map.of(), name));
        for (Map.Entry<Long, Request> old : List.copyOf(requests.entrySet())) {
            Long ticket = old.getKey(), now = null;
            try {
                now = (Long) Line.ask(over, old.getValue().call);
            } catch (DlockException.LockLost | DlockException.WrongState refused) {
                // the lease has ended, or another client holds the lock with other slots
            }
            if (!ticket.equals(now)) {
                if (now != null)
                    Line.ask(over, Line.call("dlock_release_ticket", Map.of(), now));
                forget(ticket, "lost");
            }
            confirm(over, ticket);
        }
    }

    /** Closes the connection, which is not for other use, because it listens. */
    private synchronized void broken() {
        connection = null;
        line.inOrder = false;
        line.close();
    }

    /** Executes a call, and once more over another connection if the first one breaks. */
    private Object ask(Line.Call call) throws DlockException {
        again = false;
        Connection first = session();
        try {
            return Line.ask(first, call);
        } catch (DlockException.ConnectionLost error) {
            broken();
            again = true;
            return Line.ask(session(), call);
        }
    }

    /** May the server have executed the call that failed? */
    private boolean isUnsure(DlockException error) {
        return again || error instanceof DlockException.ConnectionLost || error instanceof DlockException.NotPrimary
                || error instanceof DlockException.QuorumLate || error instanceof DlockException.Cancelled;
    }

    /** Returns the ticket, which is the fence once it is granted. */
    public long enqueue(String name) throws DlockException { return enqueue(locks.lock(name)); }

    /** The same, with the lock's settings of shared, slots, permits, info and, for a lease, owner */
    public long enqueue(Lock lock) throws DlockException {
        here(lock.name());
        if (lease == null)
            return enqueue(
                    new Request(lock.name(), Line.call("dlock_enqueue", lock.options(), lock.name()), null, null));
        lease.check();
        Heart heart = lease.heart;
        Line.Call call = Line.call("dlock_lease_enqueue", lock.owned(), lock.name(), heart.id);
        Request request = new Request(lock.name(), call, lock.asked(), heart);
        lock.checkOwed(heart);
        session();      // without a connection, there is nothing to undo
        boolean ours = requests.values().stream().anyMatch(request::isOf);     // from an earlier call
        try {
            return enqueue(request);
        } catch (DlockException error) {
            if (!ours && isUnsure(error)) {
                requests.values().remove(request);
                request.giveBack();
            }
            throw error;
        }
    }

    private long enqueue(Request request) throws DlockException {
        long ticket = (Long) ask(request.call);
        requests.put(ticket, request);
        confirmAgain(ticket);
        return ticket;
    }

    /** The next event; null if none has come within the timeout. */
    public Event next(Duration timeout) throws DlockException {
        long until = Clock.now() + timeout.toNanos();
        while (true) {
            if (Clock.now() >= round) {
                round = Clock.now() + ROUND;
                ask(new Line.Call("SELECT 1"));     // finds a silent connection
                for (Long ticket : List.copyOf(requests.keySet()))
                    confirmAgain(ticket);
            }
            session();
            if (!events.isEmpty())
                return events.remove();
            long now = Clock.now();
            if (listen(Math.min(GLANCE, Math.min(round, until) - now)) == 0 && now >= until)
                return null;
            if (Thread.currentThread().isInterrupted())
                throw new DlockException.Cancelled("interrupted");
        }
    }

    public Event next() throws DlockException { return next(Duration.ofDays(36500)); }

    /** Waits for notifications, takes those that came with an earlier reply, too, and returns their number. */
    private int listen(long nanos) throws DlockException {
        PGNotification[] heard;
        try {
            heard = session().unwrap(PGConnection.class).getNotifications((int) Math.max(1, nanos / 1_000_000));
        } catch (SQLException error) {
            if (DlockException.of(error) instanceof DlockException.ConnectionLost) {
                broken();
                return 0;
            }
            throw DlockException.of(error);
        }
        if (heard == null)
            return 0;
        for (PGNotification one : heard) {
            Event event = Event.of(one.getParameter());
            switch (String.valueOf(event.event())) {
                case "granted" -> confirmAgain(event.ticket());
                case "released", "expired" -> forget(event.ticket(), event.event());
                case "wanted" -> events.addAll(requests.containsKey(event.ticket()) ? List.of(event) : List.of());
                case "held", "free" -> events.addAll(watched.contains(event.lock()) ? List.of(event) : List.of());
                default -> { }      // an event of a later version
            }
        }
        return heard.length;
    }

    private void confirmAgain(Long ticket) throws DlockException {
        try {
            confirm(session(), ticket);
        } catch (DlockException.ConnectionLost error) {
            if (connection == null)     // out of patience
                throw error;
            broken();       // the next connection asks again
        }
    }

    /** Asks for the grant, because a notification is only a hint.  Each grant is reported once. */
    private void confirm(Connection over, Long ticket) throws DlockException {
        if (!requests.containsKey(ticket) || granted.contains(ticket))
            return;
        try {
            if (Line.ask(over, Line.call("dlock_wait", Map.of(), ticket, Duration.ZERO)).equals(true)) {
                granted.add(ticket);
                events.add(new Event("granted", requests.get(ticket).name, ticket, Map.of()));
            }
        } catch (DlockException.LockLost error) {
            forget(ticket, "lost");
        }
    }

    private Request remove(Long ticket) {
        granted.remove(ticket);
        return requests.remove(ticket);
    }

    private void forget(Long ticket, String event) {
        Request request = remove(ticket);
        if (request != null)
            events.add(new Event(event, request.name, ticket, Map.of()));
    }

    /**
     * After an error other than LockLost, the heartbeat of a lease repeats the release.  A ticket of the session can be
     * released again.
     */
    public void release(long ticket) throws DlockException {
        // a new connection must not request the ticket of a lease again
        Request request = lease == null ? requests.get(ticket) : remove(ticket);
        if (request == null)
            throw new DlockException.LockLost("ticket " + ticket + " is not ours");
        try {
            boolean released = ask(Line.call("dlock_release_ticket", Map.of(), ticket)).equals(true);
            remove(ticket);
            if (!released && !again)
                throw new DlockException.LockLost("ticket " + ticket + " was lost");
        } catch (DlockException.LockLost error) {
            throw error;
        } catch (DlockException error) {
            if (lease != null)
                request.giveBack();
            throw error;
        }
    }

    /** Watches the lock: an event reports its holder now, and at each change. */
    public void watch(String name) throws DlockException {
        here(name);
        ask(Line.call("dlock_watch", Map.of(), name));
        watched.add(name);
    }

    private void here(String name) throws DlockException {
        if (!locks.source(name).equals(line.source))
            throw new DlockException.BadArgument('"' + name + "\" is on another server");
    }

    /** Ends the session's tickets; a lease keeps its own.  If another thread is in next(), that throws WrongState. */
    @Override
    public void close() {
        closed = true;
        broken();
    }
}
