"""Locks of dlock in an application that uses psycopg 3, without its package:
blocking, and with a pool where there is psycopg_pool"""

import unittest

import psycopg
from python_stack import Holder, PsycopgTest, StackTest, is_free, main

try:
    import psycopg_pool
except ImportError:
    psycopg_pool = None


def connect():
    return psycopg.connect('', autocommit=True)


def ask(db, sql, *values):
    cursor = db.execute(sql, values)
    return cursor.fetchone()[0] if cursor.description else None


class Psycopg(PsycopgTest, unittest.TestCase):
    driver, code = psycopg, 'sqlstate'
    connect, ask = staticmethod(connect), staticmethod(ask)

    def transaction(self, db):
        return db.transaction()

    def test_ticket(self):
        """an enqueued ticket is awaited"""
        heard = []
        with Holder('queue') as holder, connect() as db:
            # notifies() has nothing of what has come with an answer
            db.add_notify_handler(heard.append)
            ticket = ask(db, 'SELECT dlock_enqueue(%s)', 'queue')
            asked = "SELECT dlock_wait(%s, '0')"
            self.assertFalse(ask(db, asked, ticket))
            holder.release()
            while not ask(db, asked, ticket):
                if not heard:
                    next(db.notifies())
                heard.clear()
            self.assertEqual(ticket, ask(db, "SELECT dlock_fence('queue')"))


@unittest.skipUnless(psycopg_pool, 'psycopg_pool is not installed')
class Pool(StackTest, unittest.TestCase):
    def forget(self, **options):
        """Who gets the connection next, and is the lock free?"""
        with psycopg_pool.ConnectionPool(
                '', min_size=1, max_size=1, kwargs={'autocommit': True},
                **options) as pool:
            with pool.connection() as db:
                ask(db, "SELECT dlock_acquire('report')")
                pid = db.info.backend_pid
            # comes back in a worker of the pool's, and before it is lent again
            with pool.connection() as db:
                self.assertEqual(db.info.backend_pid, pid)
                return is_free('report')

    def test_pool(self):
        """a pool keeps a session's lock, and its `reset` releases it"""
        def reset(db):
            db.execute('SELECT dlock_release_all()')

        self.assertFalse(self.forget())
        self.assertTrue(self.forget(reset=reset))


if __name__ == '__main__':
    main()
