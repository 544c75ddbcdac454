import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.SQLException;
import java.time.Duration;
import org.dlock.DlockException;
import org.dlock.Lease;
import org.dlock.Lock;
import org.dlock.Locks;

/** One of the holders of ../clients.pl: Holder PROXY SERVER END */
public class Holder {
    private static String server;

    private static String url(String address) {
        return "jdbc:postgresql://" + address + "/postgres?user=app";
    }

    private static void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    private static void write(String scope, long fence) {
        try (Connection db = DriverManager.getConnection(url(server) + "&connectTimeout=10")) {
            db.setAutoCommit(false);
            if (!scope.equals("session")) {
                PreparedStatement guard = db.prepareStatement("SELECT dlock_guard('mixed', ?)");
                guard.setLong(1, fence);
                guard.execute();
            }
            PreparedStatement update = db.prepareStatement("UPDATE proof SET fence = ? WHERE fence < ?");
            update.setLong(1, fence);
            update.setLong(2, fence);
            int count = update.executeUpdate();
            db.commit();
            say("wrote " + scope + " " + fence + " " + count);
        } catch (SQLException e) {
            say("failed " + e.getClass().getSimpleName());
        }
    }

    private static void work(String scope, Lock lock) throws DlockException, InterruptedException {
        for (int turn = 0; turn < 3; turn++) {
            long now = System.currentTimeMillis();
            lock.lost().check();
            say("held " + scope + " " + lock.fence() + " " + now * 1000);
            if (turn == 1)
                write(scope, lock.fence());
            Thread.sleep(10);
        }
    }

    private static void hold(Locks locks, int scope) throws DlockException, InterruptedException {
        Duration ttl = Duration.ofSeconds(3);
        Duration timeout = Duration.ofSeconds(10);

        if (scope == 0)
            try (Lock lock = locks.lock("mixed").timeout(timeout).acquire()) {
                work("session", lock);
            }
        else if (scope == 1)
            try (Lock lock = locks.lock("mixed").ttl(ttl).timeout(timeout).acquire()) {
                work("ttl", lock);
            }
        else
            try (Lease lease = locks.lease(ttl).open(); Lock lock = lease.lock("mixed").timeout(timeout).acquire()) {
                work("lease", lock);
            }
    }

    public static void main(String[] arguments) throws Exception {
        Locks locks = new Locks(url(arguments[0])).patience(Duration.ofSeconds(5));
        double end = Double.parseDouble(arguments[2]);

        server = arguments[1];
        for (int turn = 0; System.currentTimeMillis() / 1000.0 < end; turn++)
            try {
                hold(locks, turn % 3);
                say("done");
            } catch (DlockException e) {
                say("failed " + e.getClass().getSimpleName());
            }
    }
}
