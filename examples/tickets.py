#!/usr/bin/env python3
"""5,000 tickets on one connection

Shows: one process that waits for thousands of locks at once, without a
connection or a thread for each, and works on each lock when it is granted.

    python3 tickets.py setup            # once: 5,000 jobs
    python3 tickets.py                  # on as many machines as you like

Each instance enqueues for every job.  Its tickets belong to a lease, so one
heartbeat keeps all of them, and they survive a broken connection.  If the
instance dies, the lease expires, and the next instance in each queue gets the
job.  Each job is done once, because a guarded transaction writes its row.

PGHOST and so on name the server.
"""

import os
import sys

import dlock
import psycopg

TTL = float(os.environ.get('TTL', '30'))
SETUP = """
    CREATE TABLE job (id integer PRIMARY KEY, runs integer NOT NULL DEFAULT 0);
    INSERT INTO job SELECT n FROM generate_series(1, 5000) AS n
"""


def work(db, name, ticket):
    """Does the job.  Returns False if it was done before."""
    job = int(name.removeprefix('job/'))
    with dlock.translated(), db.transaction():
        db.execute('SELECT dlock_guard(%s, %s)', [name, ticket])
        (runs,) = db.execute('SELECT runs FROM job WHERE id = %s',
                             [job]).fetchone()
        if runs == 0:
            db.execute('UPDATE job SET runs = runs + 1 WHERE id = %s', [job])
    return runs == 0


def run():
    locks = dlock.Locks('')
    with (locks.lease(TTL) as lease,
          dlock.Tickets(locks, lease=lease) as tickets,
          psycopg.connect(autocommit=True) as db):
        jobs = [id for (id,) in db.execute(
            'SELECT id FROM job WHERE runs = 0 ORDER BY id')]
        for job in jobs:
            tickets.enqueue(f'job/{job}')
        print('enqueued', len(jobs), flush=True)

        waiting, done = len(jobs), 0
        while waiting:
            event = tickets.next()
            if event.event == 'wanted':         # the job will be released soon
                continue
            waiting -= 1
            if event.event != 'granted':        # another instance gets the job
                print(event.event, event.lock, flush=True)
                continue
            done += work(db, event.lock, event.ticket)
            tickets.release(event.ticket)
        print('done', done, flush=True)


if __name__ == '__main__':
    if sys.argv[1:] == ['setup']:
        with psycopg.connect() as db:
            db.execute(SETUP)
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        try:
            run()
        except (dlock.LockLost, dlock.Cancelled) as error:
            sys.exit(f'other instances go on: {error}')
