package org.dlock;

import java.io.FileInputStream;
import java.io.IOException;
import java.math.BigDecimal;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Nanoseconds of a clock that nobody steps, and that goes on while the machine sleeps.
 *
 * <p>nanoTime() stands still then, and Java has no other one.  /proc/uptime does not, in hundredths of a second, and
 * without waiting for anybody where it is the kernel's own: so by how much it is ahead is what the machine has slept.
 * As it is read first, and rounds down, that is never too much; and the most that was seen counts.  A moment that is
 * taken later is never too early beside one that was taken before.
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
            SLEPT.compareAndSet(Long.MIN_VALUE, 0);     // no more files, perhaps: as it was seen last
        }
    }

    /** In a container it may be a program's, which could keep us waiting. */
    private static boolean isKernels() {
        try {
            return Files.getFileStore(Path.of("/proc/uptime")).type().equals("proc");
        } catch (IOException | RuntimeException error) {
            return false;
        }
    }
}
