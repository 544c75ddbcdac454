package org.dlock;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * A release, an undo or a renewal without an answer, of a lock with a ttl of its own, whose owner the program gives.
 *
 * <p>The server may execute the abandoned statement at any later time, and then ends what the owner has.  So the
 * owner's next request must not get the same ticket: it first releases that ticket.  Each call owes for itself, because
 * an answer to one call does not settle another call.
 */
record Debt(Source source, String name, String owner) {
    private static final int MOST = 10_000;     // the newest ones are kept
    private static final Map<Debt, List<Long>> OWED = new LinkedHashMap<>();    // a ticket for each call

    /** A ticket to release; 0 if it may be any ticket of the owner, null if nothing is owed */
    Long ticket() {
        synchronized (OWED) {
            return OWED.containsKey(this) ? OWED.get(this).get(0) : null;
        }
    }

    void owe(long ticket) {
        synchronized (OWED) {
            OWED.computeIfAbsent(this, debt -> new ArrayList<>()).add(ticket);
            if (OWED.size() > MOST)
                OWED.remove(OWED.keySet().iterator().next());
        }
    }

    /** Settles one call. */
    void paid(Long ticket) {
        synchronized (OWED) {
            OWED.computeIfPresent(this, (debt, owed) -> owed.remove(ticket) && owed.isEmpty() ? null : owed);
        }
    }
}
