package org.dlock;

import java.sql.Connection;
import java.sql.SQLException;
import javax.sql.DataSource;

/**
 * A connection of this package, or of a DataSource.
 *
 * <p>A DataSource may keep its connections for other users.  So a connection is returned with its former settings, and
 * holds nothing.  If its state is unknown, it is closed on the server, too.
 */
final class Loan {
    /** The last user may have left state. */
    private static final String TAKE = "SELECT dlock_release_all(), current_setting('application_name'),"
            + " set_config('application_name', ?, false)";
    private static final String RETURN = "SELECT dlock_release_all(), set_config('application_name', ?, false)";
    /** A killed client's waiter leaves the queue.  A setting other than 0 stays. */
    private static final String CHECK_CLIENT = "SELECT set_config('client_connection_check_interval', '500ms', false)"
            + " WHERE current_setting('client_connection_check_interval') = '0'";
    private static final String CHECK_NO_MORE = "SELECT set_config('client_connection_check_interval', '0', false)";

    final Connection connection;
    private final boolean borrowed;
    private boolean autoCommit, readOnly, checksClient;
    private int networkTimeout;
    private String name;

    private Loan(Connection connection, boolean borrowed) {
        this.connection = connection;
        this.borrowed = borrowed;
    }

    static Loan own(Connection connection) { return new Loan(connection, false); }

    static Loan borrow(DataSource pool, String name, long patience) throws DlockException {
        Loan loan;
        try {
            loan = new Loan(pool.getConnection(), true);
        } catch (SQLException error) {
            throw DlockException.of(error);
        }
        try {
            loan.take(name, Math.min(Line.GRACE, patience));
            return loan;
        } catch (SQLException error) {
            destroy(loan.connection);
            throw DlockException.of(error);
        } catch (RuntimeException | Error error) {
            destroy(loan.connection);
            throw error;
        }
    }

    private void take(String purpose, long patience) throws SQLException {
        long until = Clock.now() + patience;
        networkTimeout = connection.getNetworkTimeout();
        autoCommit = connection.getAutoCommit();
        readOnly = connection.isReadOnly();
        Line.bound(connection, until);
        if (!autoCommit) {
            connection.rollback();
            connection.setAutoCommit(true);
        }
        if (readOnly)
            connection.setReadOnly(false);
        Object[] row = (Object[]) Line.ask(connection, new Line.Call(TAKE, purpose), until);
        name = (String) row[1];
    }

    void checkClient(long until) throws DlockException {
        long soon = Math.min(until, Clock.now() + Line.GRACE);
        checksClient = Line.ask(connection, new Line.Call(CHECK_CLIENT), soon) != null;
    }

    /** Returns a clean connection to its DataSource. */
    void close(boolean inOrder) {
        if (!borrowed)
            quietly(connection);
        else if (inOrder)
            giveBack();
        else
            destroy(connection);
    }

    private void giveBack() {
        try {
            long until = Clock.now() + Line.OBEY;
            if (checksClient)
                Line.ask(connection, new Line.Call(CHECK_NO_MORE), until);
            Line.ask(connection, new Line.Call(RETURN, name), until);
            if (readOnly)
                connection.setReadOnly(true);
            if (!autoCommit)
                connection.setAutoCommit(false);
            connection.setNetworkTimeout(Runnable::run, networkTimeout);
            connection.close();
        } catch (SQLException | RuntimeException error) {
            destroy(connection);
        }
    }

    /** Some pools notice a broken connection only by an error. */
    static void destroy(Connection connection) {
        try {
            connection.abort(Runnable::run);
            connection.createStatement().close();
        } catch (SQLException | RuntimeException expected) {
            // it is closed
        }
        quietly(connection);
    }

    static void quietly(Connection connection) {
        try {
            if (connection != null)
                connection.close();
        } catch (SQLException | RuntimeException ignored) {
            // it is closed
        }
    }
}
