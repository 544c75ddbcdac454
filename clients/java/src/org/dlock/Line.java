package org.dlock;

import static java.util.concurrent.TimeUnit.MILLISECONDS;
import static java.util.concurrent.TimeUnit.SECONDS;

import java.nio.channels.AsynchronousCloseException;
import java.nio.channels.spi.AbstractInterruptibleChannel;
import java.sql.Array;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.time.Duration;
import java.util.Arrays;
import java.util.Map;
import java.util.concurrent.ThreadLocalRandom;
import java.util.function.Supplier;

/** A connection that is made when needed, and again after a failure; the program's own is never replaced. */
final class Line {
    static final long FOREVER = Long.MAX_VALUE;
    /**
     * How late an answer may be.  Then the client drops the connection, and requests a lock in lease scope over
     * another one.
     */
    static final long GRACE = SECONDS.toNanos(5);
    /** How long a canceled request may take to end, and then to be undone */
    static final long OBEY = SECONDS.toNanos(1), UNDO = SECONDS.toNanos(2);

    record Call(String sql, Object... values) {}

    final Source source;
    final Duration patience;
    final boolean given;
    volatile Connection connection;
    private Loan loan;      // the loan of that connection, unless it is the program's
    private final Sql sql;  // executes SQL in the program's transaction, if the connection is not known
    Observer observer = Locks.SILENT;
    boolean inOrder;        // can the connection be used again?
    boolean checked;        // should the server check whether a waiting client is alive?
    long sent;              // the time before the last statement was sent
    boolean doubt;          // may an earlier attempt have been executed, too?
    private volatile PreparedStatement running;
    // the monitor of this protects all fields below
    private Thread acquiring;   // whose calls can be cancelled
    private boolean cancelled, stopped;
    private boolean opening;    // does that thread wait for a connection, and may be interrupted?
    private boolean woken;      // has cancel() interrupted it?
    private int attempt;
    private boolean deaf;       // to interrupts

    Line(Source source, Duration patience) {
        this.source = source;
        this.patience = patience;
        given = false;
        sql = null;
    }

    Line(Connection connection) { this(connection, null); }

    Line(Sql sql) { this(null, sql); }

    private Line(Connection connection, Sql sql) {
        source = null;
        patience = Duration.ZERO;
        given = true;
        this.connection = connection;
        this.sql = sql;
    }

    /** SELECT function(...); options that are null are omitted */
    static Call call(String function, Map<String, ?> options, Object... values) {
        StringBuilder places = new StringBuilder();
        Object[] all = Arrays.copyOf(values, values.length + options.size());
        int n = 0;
        for (Object value : values)
            places.append(n++ == 0 ? "" : ", ").append(place(value));
        for (Map.Entry<String, ?> option : options.entrySet())
            if (option.getValue() != null) {
                places.append(n == 0 ? "" : ", ").append(option.getKey()).append(" => ")
                        .append(place(option.getValue()));
                all[n++] = option.getValue();
            }
        return new Call("SELECT " + function + "(" + places + ")", Arrays.copyOf(all, n));
    }

    private static String place(Object value) { return value instanceof Duration ? "CAST(? AS interval)" : "?"; }

    /** A value as the statement sends it: an interval is text, which the statement casts. */
    private static Object plain(Object value) { return value instanceof Duration ? value.toString() : value; }

    static Object ask(Sql sql, Call call) throws DlockException {
        try {
            return sql.value(call.sql, Arrays.stream(call.values).map(Line::plain).toArray());
        } catch (Exception error) {
            throw DlockException.of(error);
        }
    }

    private static PreparedStatement prepare(Connection connection, Call call) throws SQLException {
        PreparedStatement statement = connection.prepareStatement(call.sql);
        for (int i = 0; i < call.values.length; i++) {
            Object value = plain(call.values[i]);
            if (value instanceof Object[] values)
                value = connection.createArrayOf(values instanceof String[] ? "text" : "int8", values);
            statement.setObject(i + 1, value);
        }
        return statement;
    }

    private static Object result(PreparedStatement statement) throws SQLException {
        try (ResultSet rows = statement.executeQuery()) {
            if (!rows.next())
                return null;
            Object[] row = new Object[rows.getMetaData().getColumnCount()];
            for (int i = 0; i < row.length; i++)
                row[i] = rows.getObject(i + 1) instanceof Array array ? array.getArray() : rows.getObject(i + 1);
            return row.length == 1 ? row[0] : row;
        }
    }

    /** For what lasts until the end of the transaction */
    static void checkTransaction(Connection connection) throws DlockException {
        try {
            if (connection.getAutoCommit())
                throw new DlockException.WrongState("the connection is in autocommit mode");
        } catch (SQLException error) {
            throw DlockException.of(error);
        }
    }

    /** The value, or row, that a statement returns */
    static Object ask(Connection connection, Call call) throws DlockException {
        try (PreparedStatement statement = prepare(connection, call)) {
            return result(statement);
        } catch (SQLException error) {
            throw DlockException.of(error);
        }
    }

    /** The same, but closes the connection if it does not answer by then */
    static Object ask(Connection connection, Call call, long until) throws DlockException {
        bound(connection, until);
        try {
            return ask(connection, call);
        } finally {
            bound(connection, FOREVER);
        }
    }

    static void bound(Connection connection, long until) throws DlockException {
        try {
            if (until != FOREVER || !connection.isClosed())
                connection.setNetworkTimeout(Runnable::run, until == FOREVER ? 0
                        : (int) Math.max(1, Math.min(Integer.MAX_VALUE, (until - Clock.now()) / 1_000_000)));
        } catch (SQLException error) {
            throw DlockException.of(error);
        }
    }

    /** The time of the clock when this duration from now has passed */
    static long after(Duration time) {
        return time == null || time.compareTo(Duration.ofDays(36500)) > 0 ? FOREVER : Clock.now() + time.toNanos();
    }

    static long later(long until, long nanos) { return until == FOREVER ? FOREVER : until + nanos; }

    static long left(long until) { return until == FOREVER ? FOREVER : until - Clock.now(); }

    void close() {
        Loan old = loan;
        connection = null;
        loan = null;
        if (old != null)
            old.close(inOrder());
    }

    /** Takes over the connection of another line, which has none afterwards. */
    void take(Line other) {
        connection = other.connection;
        loan = other.loan;
        inOrder = other.inOrder();
        other.connection = null;
        other.loan = null;
    }

    private synchronized boolean inOrder() { return inOrder && !cancelled; }

    /** Pauses before retries without a server: they grow, and are random so that clients do not retry together. */
    static final class Pauses {
        private final long most;
        private long pause = MILLISECONDS.toNanos(100);

        Pauses(long most) { this.most = most; }

        long next() {
            long now = (long) (pause * ThreadLocalRandom.current().nextDouble(0.5, 1.5));
            pause = Math.min(2 * pause, most);
            return now;
        }
    }

    static Pauses pauses() { return new Pauses(SECONDS.toNanos(2)); }

    /** Sleeps, even if the thread is interrupted; it stays interrupted. */
    static void pause(long nanos) {
        boolean interrupted = Thread.interrupted();
        try {
            MILLISECONDS.sleep(Math.max(1, nanos / 1_000_000));
        } catch (InterruptedException error) {
            interrupted = true;
        }
        if (interrupted)
            Thread.currentThread().interrupt();
    }

    Object ask(Call call) throws DlockException { return ask(() -> call, FOREVER, GRACE); }

    /** Executes a call on this connection only, because another one would not hold its locks. */
    Object askHere(Call call) throws DlockException {
        Connection here = connection;
        if (sql != null)
            return ask(sql, call);
        if (here == null)
            throw new DlockException.WrongState("released during the call");
        return given ? ask(here, call) : ask(here, call, Clock.now() + GRACE);
    }

    /**
     * Executes a call.  If the connection breaks or does not answer within the limit, retries over a new one, until
     * that time, or until the patience with an unreachable server ends.  Without a limit, uses a connection until it
     * breaks.  The program's own connection is never replaced, and has no limit.
     */
    Object ask(Supplier<Call> call, long until, long limit) throws DlockException {
        long end = Math.min(until, after(patience));
        Pauses pauses = pauses();
        doubt = false;
        while (true) {
            try {
                checkCancelled();
                if (sql != null)
                    return ask(sql, call.get());
                if (connection == null)
                    open(Math.min(until, Math.max(Clock.now() + GRACE, end)));
                Call what = call.get();
                return askOnce(connection, what,
                        given ? FOREVER : Math.min(until, limit == FOREVER ? FOREVER : Clock.now() + limit));
            } catch (DlockException.QuorumLate error) {
                if (given || until == FOREVER || Clock.now() >= until)
                    throw error;
                doubt = true;
                Locks.tell(() -> observer.retried(error));
            } catch (DlockException.ConnectionLost | DlockException.NotPrimary error) {
                if (given) {
                    checkCancelled();
                    throw error;
                }
                if (connection != null) {
                    doubt = true;
                    if (limit == FOREVER)
                        end = Math.min(until, after(patience));
                }
                close();
                if (Clock.now() >= end)
                    throw error;
                Locks.tell(() -> observer.retried(error));
            } catch (RuntimeException | Error error) {
                doubt = true;
                throw error;
            }
            pause(pauses.next());
        }
    }

    private void open(long until) throws DlockException {
        inOrder = true;
        boolean interrupted = startOpening();
        try {
            loan = source.connect("dlock", left(until));
        } finally {
            finishOpening(interrupted);
        }
        connection = loan.connection;
        try {
            if (checked)
                loan.checkClient(until);
        } catch (DlockException.ConnectionLost error) {
            throw error;
        } catch (DlockException ignored) {
            // not supported on every platform
        }
    }

    /** Lets an interrupt end the wait for a pool only if it may end the request.  Returns whether it removed one. */
    private synchronized boolean startOpening() {
        opening = acquiring != null && !deaf;
        return !opening && Thread.interrupted();
    }

    private synchronized void finishOpening(boolean interrupted) {
        opening = false;
        if (woken)
            Thread.interrupted();       // the interrupt of cancel()
        woken = false;
        if (interrupted)
            Thread.currentThread().interrupt();
    }

    private Object askOnce(Connection over, Call call, long until) throws DlockException {
        Interrupt interrupt = new Interrupt();
        if (!given)
            bound(over, until);
        try (PreparedStatement statement = prepare(over, call)) {
            running = statement;
            if (!deaf)
                interrupt.on();
            sent = Clock.now();
            inOrder = false;
            Object result = result(statement);
            inOrder = true;
            return result;
        } catch (SQLException error) {
            DlockException known = DlockException.of(error);
            inOrder = !(known instanceof DlockException.ConnectionLost || known instanceof DlockException.NotPrimary
                    || known instanceof DlockException.Cancelled || known instanceof DlockException.QuorumLate);
            throw known;
        } finally {
            running = null;
            if (!deaf)
                interrupt.off();
            if (!given)
                bound(over, FOREVER);
        }
    }

    /** Calls from here to finish() can be cancelled. */
    synchronized void start(boolean deaf) {
        this.deaf = deaf;
        acquiring = Thread.currentThread();
        cancelled = false;
        doubt = false;
        attempt++;
    }

    synchronized void finish() {
        acquiring = null;
        deaf = false;
        notifyAll();
    }

    synchronized void checkCancelled() throws DlockException {
        if (acquiring != null && (cancelled || stopped || !deaf && Thread.currentThread().isInterrupted()))
            throw new DlockException.Cancelled("canceled by the program");
    }

    /** Ends the attempt, and prevents another one. */
    void stop() {
        synchronized (this) {
            stopped = true;
        }
        cancel();
    }

    /** Returns when the attempt has ended; at once if an observer calls it, in the thread of the attempt. */
    void cancel() { cancel(attempt()); }

    private synchronized int attempt() { return attempt; }

    private synchronized boolean acquires(int which) { return acquiring != null && attempt == which; }

    private void cancel(int which) {
        long patience = Clock.now() + OBEY;
        Pauses pauses = pauses();
        while (true) {
            try {
                synchronized (this) {
                    if (!acquires(which))
                        return;
                    cancelled = true;
                    if (sql != null || acquiring == Thread.currentThread())
                        return;         // the program must end the wait, or the attempt ends by itself
                    if (opening && !woken) {
                        woken = true;
                        acquiring.interrupt();
                    }
                }
                PreparedStatement statement = running;
                if (statement != null)
                    statement.cancel();
                synchronized (this) {
                    if (!acquires(which))
                        return;
                    if (Clock.now() > patience && running != null)
                        Pulse.cut(connection);
                    wait(Math.max(1, pauses.next() / 1_000_000));
                }
            } catch (SQLException error) {
                pause(pauses.next());       // then cancels again
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
                return;
            }
        }
    }

    /** Notices Thread.interrupt(), which closes such a channel, but does not wake a thread that reads from a socket. */
    private final class Interrupt extends AbstractInterruptibleChannel {
        private final int which = attempt();

        void on() { begin(); }

        void off() {
            try {
                end(true);
            } catch (AsynchronousCloseException interrupted) {
                // the thread stays interrupted
            }
        }

        @Override
        protected void implCloseChannel() { Pulse.start("dlock cancel", () -> cancel(which)); }
    }
}
