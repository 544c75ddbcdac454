"""Locks of dlock in an application that uses psycopg2, and nothing else"""

import select
import unittest
from contextlib import closing, contextmanager

import psycopg2
import psycopg2.errors
from python_stack import TIMEOUT, Holder, PsycopgTest, main


def connect():
    db = psycopg2.connect('')
    db.autocommit = True
    return closing(db)


def ask(db, sql, *values):
    with db.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchone()[0] if cursor.description else None


class Psycopg2(PsycopgTest, unittest.TestCase):
    driver, code = psycopg2, 'pgcode'
    connect, ask = staticmethod(connect), staticmethod(ask)

    @contextmanager
    def transaction(self, db):
        db.autocommit = False
        try:
            with db:
                yield
        finally:
            db.autocommit = True

    def test_ticket(self):
        """an enqueued ticket is awaited"""
        with Holder('queue') as holder, connect() as db:
            ticket = ask(db, 'SELECT dlock_enqueue(%s)', 'queue')
            asked = "SELECT dlock_wait(%s, '0')"
            self.assertFalse(ask(db, asked, ticket))
            holder.release()
            # it may have come with an answer already
            while not db.notifies:
                self.assertTrue(select.select([db], [], [], TIMEOUT)[0])
                db.poll()
            self.assertIn('"granted"', db.notifies.pop().payload)
            self.assertTrue(ask(db, asked, ticket))
            self.assertEqual(ticket, ask(db, "SELECT dlock_fence('queue')"))


if __name__ == '__main__':
    main()
