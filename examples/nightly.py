#!/usr/bin/env python3
"""A nightly job that many machines start, but that is done only once

Shows: a lock with a ttl, guarded transactions, and a job that another machine
completes.

    python3 nightly.py setup            # once: tables with six accounts
    python3 nightly.py 2026-06-01       # from cron, on every machine

One instance works, and the others wait.  If the first dies or is paused, its
lease expires, and the next one continues after the last committed account.  A
late instance cannot write, because the guard refuses its transaction.

PGHOST and so on name the server.  If an instance is silent for TTL seconds,
the next one replaces it.
"""

import os
import socket
import sys

import dlock
import psycopg

TTL = float(os.environ.get('TTL', '30'))
SETUP = """
    CREATE TABLE account (id integer PRIMARY KEY, cents bigint NOT NULL);
    CREATE TABLE interest (account integer NOT NULL, night date NOT NULL,
                           cents bigint NOT NULL);
    CREATE TABLE progress (night date PRIMARY KEY, account integer NOT NULL);
    INSERT INTO account SELECT n, n * 1000 FROM generate_series(1, 6) AS n
"""


def pay_next(db, night):
    """Pays the next account, and returns its id, or None if all are done."""
    (done,) = db.execute('SELECT coalesce(max(account), 0) FROM progress'
                         ' WHERE night = %s', [night]).fetchone()
    row = db.execute('SELECT id, cents FROM account WHERE id > %s'
                     ' ORDER BY id LIMIT 1', [done]).fetchone()
    if row is None:
        return None
    account, cents = row
    interest = cents // 100
    db.execute('UPDATE account SET cents = %s WHERE id = %s',
               [cents + interest, account])
    db.execute('INSERT INTO interest VALUES (%s, %s, %s)',
               [account, night, interest])
    db.execute('INSERT INTO progress VALUES (%s, %s) ON CONFLICT (night)'
               ' DO UPDATE SET account = EXCLUDED.account', [night, account])
    return account


def run(night):
    locks = dlock.Locks('')
    with (locks.lock('nightly', ttl=TTL, info=socket.gethostname()) as lock,
          psycopg.connect(autocommit=True) as db):
        print('working', flush=True)
        while True:
            with dlock.translated(), db.transaction():
                lock.guard(db)
                account = pay_next(db, night)
            if account is None:
                print('done', flush=True)
                return
            print('account', account, flush=True)


if __name__ == '__main__':
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == 'setup':
        with psycopg.connect() as db:
            db.execute(SETUP)
    else:
        try:
            run(sys.argv[1])
        except (dlock.LockLost, dlock.Cancelled) as error:
            sys.exit(f'another instance goes on: {error}')
