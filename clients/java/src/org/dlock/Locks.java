package org.dlock;

import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.sql.Connection;
import java.sql.SQLException;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** The service: where the server is, or the servers are. */
public final class Locks {
    private final List<String> urls;
    private List<String> keys;
    private Duration patience = Duration.ofSeconds(30);

    /** One JDBC URL, which may name several hosts; or those of several servers, over which names are spread. */
    public Locks(String... urls) throws DlockException {
        this.urls = List.of(urls);
        keys(urls);
    }

    /** By which names are spread over servers, one for each; the URLs by default */
    public Locks keys(String... keys) throws DlockException {
        this.keys = List.of(keys);
        if (urls.isEmpty() || Set.copyOf(this.keys).size() != urls.size())
            throw new DlockException.BadArgument("each server needs a key of its own");
        return this;
    }

    /** How long a server that is away is waited for */
    public Locks patience(Duration patience) { this.patience = patience; return this; }

    public Lock lock(String name) { return new Lock(this, name); }

    public Lease lease(Duration ttl) { return new Lease(this, ttl); }

    /** Who holds the lock: now, and at each change, as events */
    public Tickets watch(String name) throws DlockException {
        Tickets changes = new Tickets(this, name);
        try {
            changes.watch(name);
        } catch (DlockException error) {
            changes.close();
            throw error;
        }
        return changes;
    }

    /** The URL of the server that has this name */
    public String server(String name) {
        int best = 0;
        for (int i = 1; i < urls.size(); i++)
            if (Arrays.compareUnsigned(hash(keys.get(i), name), hash(keys.get(best), name)) > 0)
                best = i;
        return urls.get(best);
    }

    private static byte[] hash(String key, String name) {
        try {
            return MessageDigest.getInstance("SHA-256").digest((key + '\0' + name).getBytes(StandardCharsets.UTF_8));
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error);
        }
    }

    Line line(String name) { return new Line(server(name), patience); }

    /** The moment, in nanoseconds, as deadlines are; in Linux, of a clock that goes on while the machine sleeps */
    public static long now() { return Clock.now(); }

    /** What a program, or its pool, calls before a connection goes back */
    public static void reset(Connection connection) throws SQLException {
        if (connection.isClosed())
            return;
        if (!connection.getAutoCommit())
            connection.rollback();
        Line.ask(connection, Line.call("dlock_release_all", Map.of()));
        if (!connection.getAutoCommit())
            connection.rollback();
    }
}
