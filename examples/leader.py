#!/usr/bin/env python3
"""A leader among many instances

Shows: an election, work that stops when the leadership is lost, and a guard
that refuses the writes of a late leader.

    python3 leader.py setup             # once: the table
    python3 leader.py NAME              # as many instances as you like

One instance leads, and writes a row every second.  If it dies, is paused or
loses its network, the next instance leads after TTL seconds.  After SIGTERM,
the next one leads at once.  A leader that has lost campaigns again.

PGHOST and so on name the server.
"""

import os
import signal
import sys

import dlock
import psycopg

TTL = float(os.environ.get('TTL', '15'))
PAUSE = float(os.environ.get('PAUSE', '1'))
SETUP = """
    CREATE TABLE reading (id bigserial, fence bigint NOT NULL,
                          node text NOT NULL);
"""


def lead(lock, node):
    """Writes rows until the lock is lost."""
    print('leading', lock.fence, flush=True)
    try:
        with dlock.translated(), psycopg.connect(autocommit=True) as db:
            while not lock.lost.wait(PAUSE):
                with db.transaction():
                    lock.guard(db)
                    db.execute('INSERT INTO reading (fence, node)'
                               ' VALUES (%s, %s)', [lock.fence, node])
                print('wrote', flush=True)
    except (dlock.LockLost, dlock.Cancelled, dlock.ConnectionLost):
        pass                            # campaign again
    print('leads no more', flush=True)


def run(node):
    # leaving the block that holds the lock, as SystemExit does, releases it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    election = dlock.Locks('').election('reading', ttl=TTL, info=node)
    while True:
        election.run(lambda lock: lead(lock, node))


if __name__ == '__main__':
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == 'setup':
        with psycopg.connect() as db:
            db.execute(SETUP)
    else:
        run(sys.argv[1])
