import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.util.HashMap;
import java.util.Map;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.ExponentialBackoffRetry;

/**
 * ZooKeeper's clients: Curator's InterProcessMutex.
 *
 * <p>All clients of a process share one CuratorFramework, as an application's
 * threads do and as its manual recommends. ZOOKEEPER is the server's address,
 * and JDBC that of PostgreSQL.
 */
final class ZooKeeperPeer implements Driver.Session {
    private static final int SESSION_TIMEOUT_MS = 5000;

    private final CuratorFramework curator;
    private final Map<String, InterProcessMutex> locks = new HashMap<>();
    private PreparedStatement update;

    private ZooKeeperPeer(CuratorFramework curator) {
        this.curator = curator;
    }

    @Override
    public void acquire(String lock) throws Exception {
        locks.computeIfAbsent(lock, x -> new InterProcessMutex(curator, "/locks/" + x)).acquire();
    }

    @Override
    public void release(String lock) throws Exception {
        locks.get(lock).release();
    }

    @Override
    public void update(int row) throws Exception {
        if (update == null) {
            Connection connection = DriverManager.getConnection(System.getenv("JDBC"));
            update = connection.prepareStatement(
                    "UPDATE guarded SET value = value + 1 WHERE id = ?");
        }
        update.setInt(1, row);
        update.executeUpdate();
    }

    public static void main(String[] arguments) throws Exception {
        var curator =
                CuratorFrameworkFactory.newClient(
                        System.getenv("ZOOKEEPER"),
                        SESSION_TIMEOUT_MS,
                        SESSION_TIMEOUT_MS,
                        new ExponentialBackoffRetry(100, 10));
        curator.start();
        curator.blockUntilConnected();
        var sessions = new ZooKeeperPeer[Integer.parseInt(arguments[0])];
        for (int i = 0; i < sessions.length; i++) {
            sessions[i] = new ZooKeeperPeer(curator);
        }
        Driver.serve(sessions);
    }
}
