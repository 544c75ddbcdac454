"""One of the holders of ../clients.pl: holder.py PROXY SERVER END"""

import sys
import time

import dlock
import psycopg

proxy, server, end = sys.argv[1:]


def dsn(address):
    host, port = address.split(':')
    return f'host={host} port={port} dbname=postgres user=app'


def say(*words):
    print(*words, flush=True)


def write(scope, fence):
    with psycopg.connect(dsn(server), connect_timeout=10) as db:
        if scope != 'session':
            db.execute("SELECT dlock_guard('mixed', %s)", (fence,))
        count = db.execute('UPDATE proof SET fence = %s WHERE fence < %s',
                           (fence, fence)).rowcount
    say('wrote', scope, fence, count)


def work(scope, lock):
    for turn in range(3):
        now = time.time()
        lock.check()
        say('held', scope, lock.fence, int(now * 1e6))
        if turn == 1:
            try:
                write(scope, lock.fence)
            except psycopg.Error as error:
                say('failed', type(error).__name__)
        time.sleep(0.01)


locks = dlock.Locks(dsn(proxy), patience=5)


def session():
    with locks.lock('mixed', timeout=10) as lock:
        work('session', lock)


def ttl():
    with locks.lock('mixed', ttl=3, timeout=10) as lock:
        work('ttl', lock)


def lease():
    with locks.lease(3) as kept, kept.lock('mixed', timeout=10) as lock:
        work('lease', lock)


turn = 0
while time.time() < float(end):
    scope = (session, ttl, lease)[turn % 3]
    turn += 1
    try:
        scope()
        say('done')
    except dlock.Error as error:
        say('failed', type(error).__name__)
