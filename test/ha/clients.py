"""Clients of test/ha/run that live through all faults, and write down how.

    clients.py DIRECTORY PATH=DSN...

Each is a thread with a connection of its own to whichever host takes writes, or
with none at the time.  What they do stands in DIRECTORY:

    SCOPE.PATH.calls    a line for each call: begin, end, '' or what went wrong
    holders             a line for each thing that happened to a holder of a lease

The scopes are those of dlock, and "insert", an INSERT by the same path.  The
holders use the package in clients/python: each has a lock of its own by a
lease, and all of them campaign for one lock; they take one path in turn after
the other.  Whoever holds writes to something outside of the database, which
compares fences: a file.  The times are those of CLOCK_MONOTONIC.
"""

import fcntl
import os
import random
import signal
import socket
import sys
import threading
import time

import psycopg2

import dlock

PATIENCE = 2        # seconds until an answer that does not come is not awaited
PAUSE = float(os.environ.get('DLOCK_HA_PAUSE', '0.02'))
TTL = 20            # of holders: longer than Patroni takes
DIRECTORY = sys.argv[1]
PATHS = dict(path.split('=', 1) for path in sys.argv[2:])
over = threading.Event()


def now():
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def connect(dsn):
    """The hosts in any order, as one that is stopped takes its time"""
    options = psycopg2.extensions.parse_dsn(dsn)
    hosts = options['host'].split(',')
    random.shuffle(hosts)
    connection = psycopg2.connect(**{**options, 'host': ','.join(hosts),
                                     'connect_timeout': PATIENCE})
    connection.autocommit = True
    return connection


class Scope(threading.Thread):
    """Makes one kind of call again and again"""

    def __init__(self, name, path, *statements, before=None):
        super().__init__(daemon=True)
        self.dsn = PATHS[path]
        self.statements = [s.replace('PATH', path) for s in statements]
        self.before = before
        self.connection = None
        self.value = None
        self.begun = 0
        self.file = open(f'{DIRECTORY}/{name}.{path}.calls', 'w', buffering=1)

    def run(self):
        while not over.is_set():
            begin = now()
            error = ''
            try:
                self.call()
            except psycopg2.Error as failed:
                error = (failed.pgcode or ' '.join(str(failed).split())[:60])
                self.close()
            self.begun = 0
            print(begin, now(), error, sep='\t', file=self.file)
            time.sleep(PAUSE)

    def call(self):
        if self.connection is None:
            self.connection = connect(self.dsn)
        cursor = self.connection.cursor()
        # From here on, watch() may cancel the call.
        self.begun = now()
        if self.before and self.value is None:
            cursor.execute(self.before)
            self.value = cursor.fetchone()[0]
        for statement in self.statements:
            cursor.execute(statement.replace('LEASE', str(self.value)))
            row = cursor.fetchone() if cursor.description else None
            # The lease is gone: open another one.
            if self.before and row == (None,):
                self.value = None

    def close(self):
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def give_up(self):
        """From another thread: what does not answer is not waited for."""
        begun, connection = self.begun, self.connection
        if not begun or now() - begun < PATIENCE or connection is None:
            return
        try:
            with socket.socket(fileno=os.dup(connection.fileno())) as s:
                s.shutdown(socket.SHUT_RDWR)
        except (OSError, psycopg2.Error):
            pass


def scopes(path):
    return [
        Scope('insert', path, 'INSERT INTO plain VALUES (1)'),
        Scope('session', path, "SELECT dlock_acquire('session PATH', '5 s')",
              "SELECT dlock_release('session PATH')"),
        Scope('transaction', path,
              "SELECT dlock_xact_acquire('transaction PATH', '5 s')"),
        Scope('ticket', path, """DO $$
              DECLARE t bigint := dlock_enqueue('ticket PATH', 'nobody');
              BEGIN
                  PERFORM dlock_wait(t, '5 s');
                  PERFORM dlock_release_ticket(t);
              END $$"""),
        Scope('lease', path, """DO $$
              BEGIN
                  PERFORM dlock_release_ticket(dlock_ttl_acquire(
                      'lease PATH', '30 s', '5 s', owner => 'it'));
              END $$"""),
        Scope('renew', path, 'SELECT dlock_renew(LEASE)',
              before="SELECT dlock_lease_open('60 s')"),
    ]


class Refused(Exception):
    pass


class Resource:
    """Something that compares fences, for all who write to it"""

    def __init__(self, name):
        self.file = open(f'{DIRECTORY}/{name}.resource', 'a+')

    def write(self, fence):
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            self.file.seek(0)
            seen = int(self.file.read() or 0)
            if fence < seen:
                raise Refused(f'{fence} after {seen}')
            if fence > seen:
                self.file.truncate(0)
                self.file.write(str(fence))
                self.file.flush()
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)


class Holder(threading.Thread):
    """Holds a lock by a lease as long as it can, and works"""

    def __init__(self, number, name, work_for):
        super().__init__(daemon=True)
        self.dsn = list(PATHS.values())[number % len(PATHS)]
        self.number = number
        self.lock_name = name
        self.work_for = work_for

    def note(self, what, detail=''):
        with open(f'{DIRECTORY}/holders', 'a') as file:
            print(now(), self.number, self.lock_name, what, detail,
                  sep='\t', file=file)

    def run(self):
        locks = dlock.Locks(self.dsn, patience=5)
        resource = Resource(self.lock_name)
        while not over.is_set():
            try:
                with locks.lock(self.lock_name, ttl=TTL, timeout=30,
                                owner=f'holder/{self.number}') as lock:
                    self.note('holds', lock.fence)
                    self.work(lock, resource)
                    # Noted before the release, whatever the release returns
                    self.note('ends', lock.fence)
            except dlock.LockTimeout:
                pass
            except dlock.LockLost as error:
                self.note('lost', ' '.join(str(error).split()))
            except dlock.Error as error:
                self.note('error', f'{error.sqlstate} {error}'.replace('\n', ' '))
                time.sleep(0.2)

    def work(self, lock, resource):
        until = now() + self.work_for
        while now() < until and not over.is_set():
            lock.check()
            try:
                resource.write(lock.fence)
            except Refused as error:
                # Within the ttl, no other client can have held the lock.
                try:
                    lock.check()
                except dlock.LockLost:
                    raise
                self.note('refused', error)
                return
            time.sleep(PAUSE)


def main():
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    threads = [scope for path in PATHS for scope in scopes(path)]
    for scope in threads:
        scope.start()
    holders = [Holder(n, f'own_{n}', 10**9) for n in range(3)]
    holders += [Holder(n, 'shared', 3) for n in range(3, 6)]
    for holder in holders:
        holder.start()
    while not over.wait(0.2):
        for scope in threads:
            scope.give_up()


main()
