package org.dlock;

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
import java.util.Properties;
import java.util.function.Supplier;

/** A connection that is made when it is needed, and made again; one of the program's is never another one. */
final class Line {
    private static final long PAUSE = 100;      // milliseconds before asking again where there was no server

    record Call(String sql, Object... values) {}

    final String url;
    final Duration patience;
    final boolean given;
    volatile Connection connection;
    long sent;              // before the last statement was sent
    boolean doubt;          // was an earlier one perhaps done, too?
    private volatile PreparedStatement running;
    // these are protected by this
    private boolean acquiring, cancelled, stopped;
    private int attempt;

    Line(String url, Duration patience) {
        this.url = url;
        this.patience = patience;
        given = false;
    }

    Line(Connection connection) {
        url = null;
        patience = Duration.ZERO;
        given = true;
        this.connection = connection;
    }

    /** SELECT function(...); what is null of the options is left to the server */
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

    private static PreparedStatement prepare(Connection connection, Call call) throws SQLException {
        PreparedStatement statement = connection.prepareStatement(call.sql);
        for (int i = 0; i < call.values.length; i++) {
            Object value = call.values[i];
            if (value instanceof Duration)
                value = value.toString();       // as in ISO 8601, which an interval is read from
            else if (value instanceof Object[] values)
                value = connection.createArrayOf(values instanceof String[] ? "text" : "int8", values);
            statement.setObject(i + 1, value);
        }
        return statement;
    }

    private static Object result(PreparedStatement statement) throws SQLException {
        try (ResultSet rows = statement.executeQuery()) {
            Object value = rows.next() ? rows.getObject(1) : null;
            return value instanceof Array array ? array.getArray() : value;
        }
    }

    /** The value that a statement returns */
    static Object ask(Connection connection, Call call) throws DlockException {
        try (PreparedStatement statement = prepare(connection, call)) {
            return result(statement);
        } catch (SQLException error) {
            throw DlockException.of(error);
        }
    }

    /** Each host has some time to answer; afterwards, an answer may take as long as it likes. */
    static Connection connect(String url, String name, Duration patience) throws DlockException {
        Properties defaults = new Properties();
        String seconds = String.valueOf(Math.max(2, Math.min(10, patience.toSeconds())));
        defaults.putAll(Map.of("ApplicationName", name, "assumeMinServerVersion", "15", "prepareThreshold", "0",
                "tcpKeepAlive", "true", "connectTimeout", seconds, "socketTimeout", seconds));
        if (url.matches("[^/]*//[^/?]*,.*"))
            defaults.put("targetServerType", "primary");
        Connection connection = null;
        try {
            connection = new org.postgresql.Driver().connect(url, defaults);
            if (connection == null)
                throw new DlockException.BadArgument("not a URL of a PostgreSQL server: " + url);
            connection.setNetworkTimeout(Runnable::run, 0);
            return connection;
        } catch (SQLException error) {
            close(connection);
            throw DlockException.of(error);
        }
    }

    static void close(Connection connection) {
        try {
            if (connection != null)
                connection.close();
        } catch (SQLException ignored) {
            // it is no more
        }
    }

    void close() {
        Connection old = connection;
        connection = null;
        close(old);
    }

    /** Also where the thread is interrupted, which stays to be seen */
    static void pause() {
        boolean interrupted = Thread.interrupted();
        try {
            Thread.sleep(PAUSE);
        } catch (InterruptedException error) {
            interrupted = true;
        }
        if (interrupted)
            Thread.currentThread().interrupt();
    }

    Object ask(Call call) throws DlockException { return ask(() -> call, null, null); }

    /**
     * Over a new connection where one breaks, until then, or for as long as there is patience with a server that is
     * away; cut when the heart ends.
     */
    Object ask(Supplier<Call> call, Long until, Heart heart) throws DlockException {
        Long away = null;
        doubt = false;
        while (true) {
            try {
                if (isCancelled())
                    throw new DlockException.Cancelled("canceled by the program");
                if (connection == null)
                    connection = connect(url, "dlock", Duration.ofSeconds(10));
                away = null;
                return askOnce(connection, call.get(), heart);
            } catch (DlockException.ConnectionLost | DlockException.NotPrimary error) {
                if (given)
                    throw error;
                doubt |= connection != null;
                close();
                if (away == null)
                    away = Clock.now();
                if (Clock.now() >= (until != null ? until : away + patience.toNanos()))
                    throw error;
            }
            pause();
        }
    }

    private Object askOnce(Connection over, Call call, Heart heart) throws DlockException {
        Interrupt interrupt = new Interrupt();
        if (heart != null)
            heart.cuttable(over, true);
        try (PreparedStatement statement = prepare(over, call)) {
            running = statement;
            interrupt.on();
            sent = Clock.now();
            return result(statement);
        } catch (SQLException error) {
            throw DlockException.of(error);
        } finally {
            running = null;
            interrupt.off();
            if (heart != null)
                heart.cuttable(over, false);
        }
    }

    /** What is asked until finish() can be cancelled. */
    synchronized void start() {
        acquiring = true;
        cancelled = false;
        attempt++;
    }

    synchronized void finish() {
        acquiring = false;
        notifyAll();
    }

    private synchronized boolean isCancelled() {
        return acquiring && (cancelled || stopped || Thread.currentThread().isInterrupted());
    }

    /** Nor will there be another attempt. */
    void stop() {
        synchronized (this) {
            stopped = true;
        }
        cancel();
    }

    /** For another thread; returns when the attempt has come to its end. */
    void cancel() { cancel(attempt()); }

    private synchronized int attempt() { return attempt; }

    private void cancel(int which) {
        long patience = Clock.now() + SECONDS.toNanos(5);
        while (true) {
            try {
                synchronized (this) {
                    if (!acquiring || attempt != which)
                        return;
                    cancelled = true;
                }
                PreparedStatement statement = running;
                if (statement != null)
                    statement.cancel();
                Connection silent = connection;
                if (Clock.now() > patience && silent != null && !given)
                    Heart.cut(silent);
                synchronized (this) {
                    if (acquiring && attempt == which)
                        wait(PAUSE);
                }
            } catch (SQLException error) {
                pause();        // asks again
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
                return;
            }
        }
    }

    /** Thread.interrupt() closes such a channel, and wakes nobody who reads from a socket. */
    private final class Interrupt extends AbstractInterruptibleChannel {
        private final int which = attempt();

        void on() { begin(); }

        void off() {
            try {
                end(true);
            } catch (AsynchronousCloseException interrupted) {
                // which the thread still is
            }
        }

        @Override
        protected void implCloseChannel() { Heart.start("dlock cancel", () -> cancel(which)); }
    }
}
