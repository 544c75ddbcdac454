"""The types of the client, as a program sees them.  mypy --strict checks this
file, and that each mistake here is an error.  It is not run."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import psycopg

import dlock


def sources(connect: Callable[[], psycopg.Connection[tuple[int]]]
            ) -> list[dlock.Locks]:
    return [dlock.Locks(''), dlock.Locks(connect), dlock.Locks(lambda: ''),
            dlock.Locks(['host=a', 'host=b'], keys=['a', 'b'], patience=1,
                        observer=dlock.logged)]


def uses(locks: dlock.Locks) -> None:
    with locks.lock('a', timeout=1, slots=3, permits=2, info='me') as lock:
        fence: int | None = lock.fence
        held: bool = lock.is_held()
        lock.downgrade()
        lock.set_info(None)
    with locks.lease(30, delay=1) as lease:
        lease.renew(60)
        all: list[dlock.Lock] = lease.acquire_all(['a', 'b'], timeout=0)
    led: int | None = locks.election('a', ttl=3).run(lambda lock: 7)
    locks.resize('a', None)
    print(fence, held, all, led)


def calls(db: psycopg.Connection[tuple[int]], lock: dlock.Lock) -> int:
    lock.guard(db)
    dlock.Calls(db).guard(lock)
    fences: list[int] = dlock.Calls(db).xact_acquire_all(['a'], shared=True)
    return fences[0] + dlock.Calls(db).xact_acquire('a', timeout=1)


locks = dlock.Locks('')


@locks.locked('report', timeout=0)
def report(word: str) -> int:
    return len(word)


@locks.locked(lambda word: f'report/{word}')
def reports(word: str) -> int:
    return len(word)


length: int = report('a') + reports('b')
block: AbstractContextManager[dlock.Lock] = locks.lock('a')


async def tasks(locks: dlock.AsyncLocks) -> None:
    async with locks.lock('a', ttl=30, owner='b', interval=10) as lock:
        await lock.renew(60)
        await lock.lost.wait()

    @locks.locked('b')
    async def work(number: int) -> str:
        return str(number)

    done: str = await work(1)
    async with locks.lease(30) as lease:
        all: list[dlock.AsyncLock] = await lease.acquire_all(['a'])
    print(done, all)


def mistakes(db: object, lock: dlock.Lock, lease: dlock.Lease) -> None:
    locks.lock('a', time_out=1)            # type: ignore[call-arg]
    locks.lock('a', timeout='1s')           # type: ignore[arg-type]
    locks.lock('a', 1)                      # type: ignore
    locks.lease()                           # type: ignore[call-arg]
    locks.lease(30, ttl=30)                 # type: ignore
    locks.election('a', tll=1)              # type: ignore[call-arg]
    locks.locked('a', owner='b')            # type: ignore[call-arg]
    lease.lock('a', ttl=3)                  # type: ignore[call-arg]
    lease.acquire_all(['a'], slots=3)       # type: ignore[call-arg]
    lock.renew('1s')                        # type: ignore[arg-type]
    dlock.Locks(7)                          # type: ignore[arg-type]
    dlock.Locks('', patients=1)             # type: ignore[call-arg]
    dlock.Lock(locks, 'a', time_out=1)      # type: ignore[call-arg]
    dlock.Calls(db).xact_acquire('a', owner='b')    # type: ignore[call-arg]
    dlock.Tickets(locks).enqueue('a', slot=3)       # type: ignore[call-arg]
    report(7)                               # type: ignore[arg-type]
