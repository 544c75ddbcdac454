package org.dlock;

import java.sql.Connection;
import java.sql.SQLException;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import javax.sql.DataSource;

/** The source of connections: a URL, or a DataSource of the program, which gives each connection */
record Source(String url, DataSource pool) {
    /** The patience is the time for an answer, which the hosts of a URL share. */
    Loan connect(String name, long patience) throws DlockException {
        return pool == null ? Loan.own(connectTo(name, patience)) : Loan.borrow(pool, name, patience);
    }

    /** The timeouts are for the connect.  Afterwards, an answer may take any time. */
    private Connection connectTo(String name, long patience) throws DlockException {
        Properties defaults = new Properties();
        int hosts = url.replaceFirst("[^/]*(//([^/?]*))?.*", "$2").split(",").length;
        long share = TimeUnit.NANOSECONDS.toSeconds(patience) / hosts;
        String seconds = String.valueOf(Math.max(1, Math.min(10, share)));
        defaults.putAll(Map.of("ApplicationName", name, "assumeMinServerVersion", "15", "prepareThreshold", "0",
                "tcpKeepAlive", "true", "connectTimeout", seconds, "socketTimeout", seconds,
                "cancelSignalTimeout", "1"));
        if (hosts > 1)
            defaults.put("targetServerType", "primary");
        Connection connection = null;
        try {
            connection = new org.postgresql.Driver().connect(url, defaults);
            if (connection == null)
                throw new DlockException.BadArgument("not a URL of a PostgreSQL server: " + url);
            connection.setNetworkTimeout(Runnable::run, 0);
            return connection;
        } catch (SQLException error) {
            Loan.quietly(connection);
            throw DlockException.of(error);
        }
    }
}
