package org.dlock;

/** A DlockException for interfaces that allow no checked exception */
@SuppressWarnings("serial")
public final class UncheckedDlockException extends RuntimeException {
    public UncheckedDlockException(DlockException cause) {
        super(cause.getMessage(), cause);
    }

    @Override
    public synchronized DlockException getCause() { return (DlockException) super.getCause(); }
}
