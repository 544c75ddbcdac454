package org.dlock;

import java.time.Duration;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** Keeps a lease, and reports its loss.  Each method synchronizes on Pulse.ALL. */
final class Heart {
    record Hold(List<String> names, List<Long> fences) {}

    /** A request to undo, because the server may have executed it.  A request for several names has no owner. */
    record Request(String name, String owner) {}

    /** The interval of a lease without a heartbeat */
    static final Duration NEVER = Duration.ofDays(36500);

    final long id;
    private final Pulse pulse;
    // Pulse.ALL protects all fields below
    long interval, life, deadline, due;
    private long most = Long.MAX_VALUE;     // the longest life
    boolean over;
    /** The objects to notify: the lease, without a hold, and locks */
    final Map<Lost<?>, Hold> members = new HashMap<>();
    final Set<Request> owed = new LinkedHashSet<>();
    /** Requests without an owner share a ticket, so only one object may make them. */
    private final Set<String> taken = new HashSet<>();

    Heart(Source source, long id, long sent, Duration ttl, Duration interval, Lost<?> lost) {
        this.id = id;
        this.interval = interval.toNanos();
        life = life(ttl);
        deadline = sent + life;
        due = Clock.now() + this.interval;
        members.put(lost, null);
        // otherwise the watcher could end the lease before the pulse is known
        synchronized (Pulse.ALL) {
            pulse = Pulse.join(source, this);
        }
    }

    private static long life(Duration ttl) { return ttl.toNanos() - ttl.toNanos() / 100; }

    boolean take(List<String> names) {
        synchronized (Pulse.ALL) {
            return Collections.disjoint(taken, names) && taken.addAll(names);
        }
    }

    void untake(List<String> names) {
        synchronized (Pulse.ALL) {
            taken.removeAll(names);
        }
    }

    void add(Lost<?> lost, Hold hold) {
        synchronized (Pulse.ALL) {
            members.put(lost, hold);
            if (over)
                lost.set("its lease is over");
        }
    }

    /** Stops notifying an object.  With last, it ends the lease, and with it all of its remaining locks. */
    void remove(Lost<?> lost, boolean last) {
        synchronized (Pulse.ALL) {
            members.remove(lost);
            if (last && !over)
                lose("its lease is closed");
        }
    }

    /** Lets the heartbeat undo a request as soon as the server answers again. */
    void owe(List<String> names, String owner) {
        synchronized (Pulse.ALL) {
            names.forEach(name -> owed.add(new Request(name, owner)));
            Pulse.ALL.notifyAll();
        }
    }

    boolean owes(List<String> names, String owner) {
        synchronized (Pulse.ALL) {
            return names.stream().anyMatch(name -> owed.contains(new Request(name, owner)));
        }
    }

    long deadline() {
        synchronized (Pulse.ALL) {
            return deadline;
        }
    }

    void look() {
        synchronized (Pulse.ALL) {
            if (!over && Clock.now() >= deadline)
                lose("its deadline has passed");
        }
    }

    /**
     * Applies a shorter ttl before it is sent, because the server may apply it before the answer arrives.  The server
     * may execute an abandoned request at any later time, so no later change gives the lease a longer life.  Returns
     * the earlier limit, for limit().
     */
    long shorten(Duration ttl) {
        synchronized (Pulse.ALL) {
            long before = most;
            most = Math.min(most, life(ttl));
            if (life(ttl) < life)
                change(ttl);
            deadline = Math.min(deadline, Clock.now() + life);
            Pulse.ALL.notifyAll();
            return before;
        }
    }

    /** Caller holds Pulse.ALL. */
    private void change(Duration ttl) {
        long next = Math.min(life(ttl), most);
        if (interval < NEVER.toNanos())
            interval = Math.max(1, (long) ((double) next / life * interval));
        life = next;
        due = Math.min(due, Clock.now() + interval);
    }

    void limit(long longest) {
        synchronized (Pulse.ALL) {
            most = longest;
        }
    }

    long most() {
        synchronized (Pulse.ALL) {
            return most;
        }
    }

    void renewed(long sent, Object kept, Duration ttl) {
        synchronized (Pulse.ALL) {
            if (kept != null && ttl != null && !over)
                change(ttl);
            renewed(sent, kept, List.of(), Map.of());
        }
    }

    /** Caller holds Pulse.ALL. */
    private void lose(String reason) {
        over = true;
        pulse.hearts.remove(this);
        members.keySet().forEach(lost -> lost.set(reason));
        Pulse.ALL.notifyAll();
    }

    /** Caller holds Pulse.ALL. */
    void renewed(long sent, Object kept, List<Long> gone, Map<Lost<?>, Hold> held) {
        if (over)
            return;
        if (kept == null) {
            lose("the server has ended its lease");
            return;
        }
        deadline = Math.max(deadline, sent + life);
        held.forEach((lost, hold) -> {
            if (!Collections.disjoint(gone, hold.fences) && members.get(lost) == hold)
                lost.set("the server has ended its ticket");
        });
    }
}
