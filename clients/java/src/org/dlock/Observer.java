package org.dlock;

import java.time.Duration;

/**
 * Observes locks, for metrics and logs.  The thread that acquires or releases makes the call, so an observer must not
 * wait.  A thread of this package reports a loss.  An exception of an observer is logged, and has no other effect.
 */
public interface Observer {
    default void acquired(Lock lock, Duration waited) {}

    /** The acquire has failed: with LockTimeout, if the lock was busy. */
    default void refused(Lock lock, Duration waited, DlockException reason) {}

    /** Also if the lock was lost */
    default void released(Lock lock, Duration held) {}

    default void lost(Lock lock, String reason) {}

    /** The server cannot be reached, or does not answer; the statement is sent again. */
    default void retried(DlockException reason) {}
}
