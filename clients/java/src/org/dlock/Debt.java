package org.dlock;

import java.util.LinkedHashMap;
import java.util.Map;

/**
 * A release, an undo or a renewal without an answer, of a lock with a ttl of its own, whose owner the program gives.
 *
 * <p>The server may execute the abandoned statement at any later time, and then ends what the owner has.  So the
 * owner's next request must not get the same ticket: it first releases that ticket.
 */
record Debt(Source source, String name, String owner) {
    private static final int MOST = 10_000;     // the newest ones are kept
    private static final Map<Debt, Long> OWED = new LinkedHashMap<>();

    /** The ticket to release; 0 if it may be any ticket of the owner, null if nothing is owed */
    Long ticket() {
        synchronized (OWED) {
            return OWED.get(this);
        }
    }

    void owe(long ticket) {
        synchronized (OWED) {
            OWED.merge(this, ticket, (earlier, now) -> earlier.equals(now) ? now : 0);
            if (OWED.size() > MOST)
                OWED.remove(OWED.keySet().iterator().next());
        }
    }

    void paid(Long ticket) {
        synchronized (OWED) {
            OWED.remove(this, ticket);
        }
    }
}
