package net.javacrumbs.shedlock.core;

import java.util.Optional;

/** As much of ShedLock as the provider needs, to compile it without the library */
public interface LockProvider {
    Optional<SimpleLock> lock(LockConfiguration lockConfiguration);
}
