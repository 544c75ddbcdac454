package org.springframework.integration.support.locks;

import java.util.concurrent.locks.Lock;

/** As much of Spring Integration as the registry needs, to compile it without the library */
public interface LockRegistry {
    Lock obtain(Object lockKey);
}
