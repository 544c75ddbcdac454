package org.dlock;

/** A DlockException where an interface of Java allows none that is checked */
@SuppressWarnings("serial")
public final class UncheckedDlockException extends RuntimeException {
    public UncheckedDlockException(DlockException cause) {
        super(cause.getMessage(), cause);
    }

    @Override
    public synchronized DlockException getCause() { return (DlockException) super.getCause(); }
}
