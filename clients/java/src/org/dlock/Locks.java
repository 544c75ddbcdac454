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
import java.util.stream.Stream;
import javax.sql.DataSource;

/** The service: one server, or several, over which names are spread. */
public final class Locks {
    static final Observer SILENT = new Observer() {};

    private final List<Source> sources;
    private List<String> keys;
    private Duration patience = Duration.ofSeconds(30);
    private Observer observer = SILENT;

    /** One JDBC URL, which may name several hosts; or one URL for each of several servers. */
    public Locks(String... urls) throws DlockException {
        sources = Stream.of(urls).map(url -> new Source(url, null)).toList();
        keys(urls);
    }

    /** Over the program's own connections.  Each new connection comes from the source. */
    public Locks(DataSource source) throws DlockException { this(Map.of("", source)); }

    /** The same over several servers, each with its key */
    public Locks(Map<String, ? extends DataSource> sources) throws DlockException {
        List<String> keys = List.copyOf(sources.keySet());
        this.sources = keys.stream().map(key -> new Source(null, sources.get(key))).toList();
        keys(keys.toArray(String[]::new));
    }

    /** Keys, one for each server, by which names are spread over the servers; the URLs by default */
    public Locks keys(String... keys) throws DlockException {
        this.keys = List.of(keys);
        if (sources.isEmpty() || Set.copyOf(this.keys).size() != sources.size()
                || keys.length != sources.size())
            throw new DlockException.BadArgument("each server needs a key of its own");
        return this;
    }

    /** How long to wait for a server that cannot be reached */
    public Locks patience(Duration patience) { this.patience = patience; return this; }

    /** For metrics and logs; by default there is none. */
    public Locks observer(Observer observer) { this.observer = observer; return this; }

    Observer observer() { return observer; }

    static void tell(Runnable call) {
        try {
            call.run();
        } catch (RuntimeException | Error error) {
            System.getLogger("org.dlock").log(System.Logger.Level.ERROR, "observer", error);
        }
    }

    /** With several names, acquire() acquires all or none.  All names must be on one server. */
    public Lock lock(String... names) { return new Lock(this, names); }

    public Lease lease(Duration ttl) { return new Lease(this, ttl); }

    /** Tickets whose events report the holder of the lock, now and at each change */
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

    /**
     * Sets the number of permits of a lock, which replaces the number in requests; null restores that number.  The role
     * needs the privilege to do this.
     */
    public void resize(String name, Integer slots) throws DlockException {
        Line line = line(name);
        try {
            line.ask(new Line.Call("SELECT dlock_set_slots(?, CAST(? AS integer))", name, slots));
        } finally {
            line.close();
        }
    }

    /** The URL of the server to which this name belongs; if connections come from a DataSource, the server's key */
    public String server(String name) {
        int best = best(name);
        return sources.get(best).url() == null ? keys.get(best) : sources.get(best).url();
    }

    Source source(String name) { return sources.get(best(name)); }

    private int best(String name) {
        int best = 0;
        for (int i = 1; i < sources.size(); i++)
            if (Arrays.compareUnsigned(hash(keys.get(i), name), hash(keys.get(best), name)) > 0)
                best = i;
        return best;
    }

    private static byte[] hash(String key, String name) {
        try {
            return MessageDigest.getInstance("SHA-256").digest((key + '\0' + name).getBytes(StandardCharsets.UTF_8));
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException(error);
        }
    }

    Line line(String name) {
        Line line = new Line(source(name), patience);
        line.observer = observer;
        return line;
    }

    /** The clock of deadlines, in nanoseconds; on Linux it runs while the machine sleeps */
    public static long now() { return Clock.now(); }

    /** A program or its pool calls this before it returns a connection to the pool. */
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
