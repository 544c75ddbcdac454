package org.dlock;

import java.time.Duration;

/**
 * Is told what locks do, for metrics and logs.  The thread that acquires or releases makes the call, so an observer must
 * not wait; a loss is told in the thread of the callbacks.  What an observer throws is logged, and changes nothing.
 */
public interface Observer {
    default void acquired(Lock lock, Duration waited) {}

    /** The acquire has failed: with LockTimeout, if the lock was busy. */
    default void refused(Lock lock, Duration waited, DlockException reason) {}

    /** Also if the lock was lost */
    default void released(Lock lock, Duration held) {}

    default void lost(Lock lock, String reason) {}

    /** The server is away, or does not answer; the statement is sent again. */
    default void retried(DlockException reason) {}
}
