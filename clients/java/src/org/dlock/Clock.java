package org.dlock;

import java.io.FileInputStream;
import java.io.IOException;
import java.math.BigDecimal;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Nanoseconds of a clock that is never stepped, and that, on Linux, runs while the machine sleeps.
 *
 * <p>nanoTime() stops while the machine sleeps, and Java has no other monotonic clock.  /proc/uptime includes the
 * sleep, in steps of 10 ms, and reading it never blocks if the file is the kernel's own.  now() adds the time by which
 * the uptime is ahead of nanoTime().  This is never too long, because the uptime is read first, and is rounded down.
 * The longest one seen counts, so a later call never returns an earlier time.
 */
final class Clock {
    private static final boolean THERE = isKernels();
    private static final AtomicLong SLEPT = new AtomicLong(THERE ? Long.MIN_VALUE : 0);

    private Clock() {}

    static long now() {
        if (THERE)
            look();
        return System.nanoTime() + SLEPT.get();
    }

    private static void look() {
        // not by a channel, which an interrupt would close
        try (FileInputStream file = new FileInputStream("/proc/uptime")) {
            String text = new String(file.readNBytes(100), StandardCharsets.US_ASCII);
            long up = new BigDecimal(text.substring(0, text.indexOf(' '))).movePointRight(9).longValue();
            SLEPT.accumulateAndGet(up - System.nanoTime(), Math::max);
        } catch (IOException | RuntimeException error) {
            SLEPT.compareAndSet(Long.MIN_VALUE, 0);     // for example, too many open files: the last value stays
        }
    }

    /** Is /proc/uptime the kernel's?  In a container, a program may provide the file, and reading it could block. */
    private static boolean isKernels() {
        try {
            return Files.getFileStore(Path.of("/proc/uptime")).type().equals("proc");
        } catch (IOException | RuntimeException error) {
            return false;
        }
    }
}
