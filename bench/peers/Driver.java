import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicLong;
import java.util.ArrayList;
import java.util.List;

/**
 * The clients of a peer with a client in Java, as threads of one process.
 * driver.c describes its commands and its output.
 */
final class Driver {
    /** One client, used by one thread. */
    interface Session {
        void acquire(String lock) throws Exception;

        void release(String lock) throws Exception;

        /** Changes the row with that id in PostgreSQL. */
        void update(int row) throws Exception;
    }

    private static final int BUCKETS = 1200;
    private static final long FIRST_LOCK = 1000000000000L;
    private static final String HOT = Long.toString(FIRST_LOCK - 1);

    private final Session[] sessions;

    private final ExecutorService threads = Executors.newCachedThreadPool();

    /** The operations of one client in its turns. */
    private static final class Result {
        final long[] rounds;
        final long[] waits = new long[BUCKETS];
        long done;
        long late;

        Result(int count) {
            rounds = new long[count];
        }
    }

    private Driver(Session[] sessions) {
        this.sessions = sessions;
    }

    /** Microseconds since 1970, the clock that all drivers share. */
    private static long now() {
        var time = java.time.Instant.now();
        return time.getEpochSecond() * 1000000 + time.getNano() / 1000;
    }

    private static void sleepUntil(long us) throws InterruptedException {
        long left = us - now();
        if (left > 0) {
            Thread.sleep(left / 1000, (int) (left % 1000) * 1000);
        }
    }

    private static int bucket(long us) {
        return us <= 1 ? 0 : Math.min((int) (50 * Math.log(us)), BUCKETS - 1);
    }

    private static void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    /** One operation; returns the time of the whole, or of the acquire. */
    private long takeOnce(int client, String what) throws Exception {
        var session = sessions[client];
        var lock = what.equals("hot") ? HOT : Long.toString(FIRST_LOCK + client);
        long began = now();
        session.acquire(lock);
        long got = now();
        if (what.equals("work")) {
            session.update(client);
        }
        session.release(lock);
        return (what.equals("work") ? now() : got) - began;
    }

    private Result takeTurns(int client, String[] word) throws Exception {
        int rounds = Integer.parseInt(word[5]);
        long length = Long.parseLong(word[4]) * 1000;
        var result = new Result(rounds);

        for (int round = 0; round < rounds; round++) {
            long kinds = Long.parseLong(word[7]);
            long turn = Long.parseLong(word[6]);
            long place = round % 2 == 0 ? turn : kinds - 1 - turn;
            long begin = Long.parseLong(word[3]) * 1000 + (round * kinds + place) * length;
            long began;
            sleepUntil(begin);
            while ((began = now()) < begin + length * 7 / 10) {
                long waited = takeOnce(client, word[1]);
                long ended = now();

                if (began >= begin + length / 10) {
                    result.waits[bucket(waited)]++;
                }
                if (ended >= begin + length) {
                    result.late++;
                }
                if (ended >= begin + length / 10 && ended < begin + length * 7 / 10) {
                    result.rounds[round]++;
                    result.done++;
                }
            }
        }
        return result;
    }

    private <T> List<Future<T>> start(List<Callable<T>> tasks) {
        var started = new ArrayList<Future<T>>();
        for (var task : tasks) {
            started.add(threads.submit(task));
        }
        return started;
    }

    private void runTurns(String[] word) throws Exception {
        var tasks = new ArrayList<Callable<Result>>();
        for (int i = 0; i < Integer.parseInt(word[2]); i++) {
            int client = i;
            tasks.add(() -> takeTurns(client, word));
        }
        var results = new ArrayList<Result>();
        for (var task : start(tasks)) {
            results.add(task.get());
        }
        for (int round = 0; round < Integer.parseInt(word[5]); round++) {
            int r = round;
            say("round " + r + " " + results.stream().mapToLong(x -> x.rounds[r]).sum());
        }
        for (int i = 0; i < results.size(); i++) {
            say("client " + i + " " + results.get(i).done);
        }
        for (int bucket = 0; bucket < BUCKETS; bucket++) {
            int b = bucket;
            long count = results.stream().mapToLong(x -> x.waits[b]).sum();
            if (count > 0) {
                say("wait " + b + " " + count);
            }
        }
        say("late " + results.stream().mapToLong(x -> x.late).sum());
        say("end");
    }

    private void pass() throws Exception {
        var first = new AtomicLong();
        var tasks = new ArrayList<Callable<Void>>();
        for (var session : sessions) {
            tasks.add(() -> {
                session.acquire(HOT);
                first.compareAndSet(0, now());
                session.release(HOT);
                return null;
            });
        }
        var started = start(tasks);
        say("waiting");
        for (var task : started) {
            task.get();
        }
        long last = now();
        say("first " + first.get());
        say("last " + last);
    }

    private void run(String line) throws Exception {
        var word = line.split(" ");
        switch (word[0]) {
            case "turns":
                runTurns(word);
                break;
            case "quit":
                // without closing the sessions, as the other drivers do
                Runtime.getRuntime().halt(0);
                break;
            case "hold":
                sessions[0].acquire(HOT);
                say("held " + now());
                break;
            case "release":
                say("released " + now());
                sessions[0].release(HOT);
                break;
            case "pass":
                pass();
                break;
            default:
                throw new IllegalArgumentException(line);
        }
    }

    /** Executes the commands, and ends the process. */
    static void serve(Session[] sessions) {
        try {
            var driver = new Driver(sessions);
            var in = new BufferedReader(new InputStreamReader(System.in));
            String line;
            say("ready");
            while ((line = in.readLine()) != null) {
                driver.run(line);
            }
        } catch (Exception e) {
            e.printStackTrace();
        }
        Runtime.getRuntime().halt(1);
    }
}
