package org.dlock;

import java.sql.SQLException;

/** What a heart keeps, or a connection */
abstract sealed class Kept<T> implements AutoCloseable permits Lock, Lease {
    volatile Heart heart;

    public abstract Lost<T> lost();

    @Override
    public abstract void close() throws DlockException;

    /** Throws LockLost where it is lost; before anything is sent to anybody. */
    public void check() throws DlockException { lost().check(); }

    /** By Locks.now() */
    public long deadline() { return heart == null ? Long.MAX_VALUE : heart.deadline(); }

    void look() {
        if (heart != null)
            heart.look();
    }

    /** Give back what the heart keeps, for as long as that is ours; throws LockLost where it was not. */
    void end(Line line, Line.Call call, boolean last) throws DlockException {
        heart.leave(lost(), last);
        try {
            check();
            try {
                Object returned = line.ask(() -> call, heart.deadline(), heart);
                if ((returned == null || returned.equals(false)) && !line.doubt)
                    lost().set("the server has ended it");
            } catch (DlockException.ConnectionLost error) {
                check();
                throw error;
            }
            check();
        } finally {
            heart.remove(lost());
            if (last)
                heart.end();
            line.close();
        }
    }
}
