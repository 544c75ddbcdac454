package org.dlock;

import static java.util.Map.entry;

import java.sql.SQLException;
import java.util.Map;
import org.postgresql.util.PSQLException;
import org.postgresql.util.ServerErrorMessage;

/** An error, with its SQLSTATE, detail and hint; a class for each kind that programs distinguish. */
@SuppressWarnings("serial")
public class DlockException extends SQLException {
    private static final Map<String, Kind> KINDS = Map.ofEntries(
            entry("55P03", LockTimeout::new), entry("40P01", Deadlock::new), entry("55L01", LockLost::new),
            entry("42501", NotAllowed::new), entry("25006", NotPrimary::new), entry("40001", StaleVersion::new),
            entry("22023", BadArgument::new), entry("22004", BadArgument::new), entry("55000", WrongState::new),
            entry("53200", NoRoom::new), entry("53400", NoRoom::new), entry("57014", Cancelled::new),
            entry("58030", QuorumLate::new), entry("57P01", ConnectionLost::new),
            entry("57P02", ConnectionLost::new), entry("57P03", ConnectionLost::new));

    private final transient ServerErrorMessage said;

    private DlockException(SQLException cause) {
        super(message(cause), cause.getSQLState(), cause);
        said = said(cause);
    }

    private DlockException(String message, String state) {
        super(message, state);
        said = null;
    }

    /** The same for an error that a library has wrapped; wraps an error that does not come from SQL. */
    public static DlockException of(Throwable error) {
        for (Throwable cause = error; cause != null; cause = cause.getCause())
            if (cause instanceof SQLException known)
                return of(known);
        return (DlockException) new DlockException(error.toString(), null).initCause(error);
    }

    /** Converts an error of the program's own statements to the class for its SQLSTATE. */
    public static DlockException of(SQLException error) {
        if (error instanceof DlockException known)
            return known;
        String state = error.getSQLState() == null ? "" : error.getSQLState();
        Kind kind = state.isEmpty() || state.startsWith("08") ? ConnectionLost::new : KINDS.get(state);
        return kind == null ? new DlockException(error) : kind.make(error);
    }

    public String getDetail() { return said == null ? null : said.getDetail(); }

    public String getHint() { return said == null ? null : said.getHint(); }

    private static ServerErrorMessage said(SQLException error) {
        for (Throwable cause = error; cause != null; cause = cause.getCause())      // pools wrap errors
            if (cause instanceof PSQLException known)
                return known.getServerErrorMessage();
        return null;
    }

    private static String message(SQLException error) {
        return said(error) == null ? error.getMessage() : said(error).getMessage();
    }

    private interface Kind {
        DlockException make(SQLException cause);
    }

    /** The timeout has passed, or a try found the lock busy. */
    public static final class LockTimeout extends DlockException {
        private LockTimeout(SQLException cause) { super(cause); }
    }

    /** A deadlock: release all locks, and retry. */
    public static final class Deadlock extends DlockException {
        private Deadlock(SQLException cause) { super(cause); }
    }

    /** The lock, ticket or lease is lost; others may have held the lock. */
    public static final class LockLost extends DlockException {
        private LockLost(SQLException cause) { super(cause); }

        LockLost(String message) { super(message, "55L01"); }
    }

    /** The name is another role's, or the function is for administrators. */
    public static final class NotAllowed extends DlockException {
        private NotAllowed(SQLException cause) { super(cause); }
    }

    /** The server is a standby. */
    public static final class NotPrimary extends DlockException {
        private NotPrimary(SQLException cause) { super(cause); }
    }

    /** Another transaction was faster: read again, and retry. */
    public static final class StaleVersion extends DlockException {
        private StaleVersion(SQLException cause) { super(cause); }
    }

    /** A value that is never valid */
    public static final class BadArgument extends DlockException {
        private BadArgument(SQLException cause) { super(cause); }

        BadArgument(String message) { super(message, "22023"); }
    }

    /** A wrong state for this: not held, other slots, a refused upgrade */
    public static final class WrongState extends DlockException {
        private WrongState(SQLException cause) { super(cause); }

        WrongState(String message) { super(message, "55000"); }
    }

    /** No memory for more locks, or no slot for the worker */
    public static final class NoRoom extends DlockException {
        private NoRoom(SQLException cause) { super(cause); }
    }

    /** The statement was canceled, or the thread interrupted; the request has left the queue. */
    public static final class Cancelled extends DlockException {
        private Cancelled(SQLException cause) { super(cause); }

        Cancelled(String message) { super(message, "57014"); }
    }

    /** Standbys do not answer; a lease is not lost by this. */
    public static final class QuorumLate extends DlockException {
        private QuorumLate(SQLException cause) { super(cause); }
    }

    /** No server; the last request may have been executed. */
    public static final class ConnectionLost extends DlockException {
        private ConnectionLost(SQLException cause) { super(cause); }
    }
}
