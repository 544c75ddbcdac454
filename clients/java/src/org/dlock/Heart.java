package org.dlock;

import java.time.Duration;
import java.util.HashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** What keeps a lease, and tells of its loss; each call takes Pulse.ALL by itself. */
final class Heart {
    record Hold(String name, long fence) {}

    /** What it may have left is to be taken back. */
    record Request(String name, String owner) {}

    final long id, interval, life;
    private final Pulse pulse;
    // all below is protected by Pulse.ALL
    long deadline, due;
    boolean over;
    /** Who is to be told: the lease, without a hold, and locks */
    final Map<Lost<?>, Hold> members = new HashMap<>();
    final Set<Request> owed = new LinkedHashSet<>();

    Heart(String url, long id, long sent, Duration ttl, Duration interval, Lost<?> lost) {
        this.id = id;
        this.interval = interval.toNanos();
        life = ttl.toNanos() - ttl.toNanos() / 100;
        deadline = sent + life;
        due = Clock.now() + this.interval;
        members.put(lost, null);
        pulse = Pulse.join(url, this);
    }

    void add(Lost<?> lost, Hold hold) {
        synchronized (Pulse.ALL) {
            members.put(lost, hold);
            if (over)
                lost.set("its lease is over");
        }
    }

    /** It is told nothing more.  The last one ends the lease, and with it all locks that are still on it. */
    void remove(Lost<?> lost, boolean last) {
        synchronized (Pulse.ALL) {
            members.remove(lost);
            if (last && !over)
                lose("its lease is closed");
        }
    }

    /** Take back what it has left, as soon as the server can be asked. */
    void owe(String name, String owner) {
        synchronized (Pulse.ALL) {
            owed.add(new Request(name, owner));
            Pulse.ALL.notifyAll();
        }
    }

    boolean owes(String name, String owner) {
        synchronized (Pulse.ALL) {
            return owed.contains(new Request(name, owner));
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
            if (gone.contains(hold.fence) && members.get(lost) == hold)
                lost.set("the server has ended its ticket");
        });
    }
}
