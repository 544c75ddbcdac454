"""Locks of dlock in an application that uses SQLAlchemy.

Each test does what an application would, with the means of the library: units
of work in a Session, connections from a pool, events.  Sessions of the library
are not sessions of the server, and objects that it has loaded are copies; what
is tested is that locks hold their promises even so, and what the application
has to do for that.

What would break it: a result, an error or an argument that the driver takes
for something else; a lock that ends before its transaction does, or stays
after it; a lock that stays in a connection where it must not, or does not
where it must; an UPDATE of the library's that the triggers misunderstand.

Runs with SQLAlchemy 1.4 and 2.0, over psycopg2.  libpq's environment variables
say where the server is; test/t/client_sqlalchemy.pl sets them, and reads what
is printed here.
"""

import os
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from select import select as poll

from psycopg2 import errors
from python_stack import main
from sqlalchemy import (
    DDL, Column, FetchedValue, Integer, Text, create_engine, event, func,
    select, text, update)
from sqlalchemy.exc import (
    DataError, InternalError, OperationalError, ProgrammingError)
from sqlalchemy.orm import Session, declarative_base, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

TIMEOUT = int(os.environ.get('PG_TEST_TIMEOUT_DEFAULT', '180'))
LONG = timedelta(hours=1)
SHORT = timedelta(milliseconds=10)


def new_engine(role='app', **options):
    return create_engine(f'postgresql+psycopg2://{role}@', future=True,
                         **options)


# The application's, and the one with which the tests look at it
engine = new_engine()
admin = new_engine('', isolation_level='AUTOCOMMIT')

# "with Work.begin() as session" is a unit of work: it commits at the end, and
# rolls back when an exception leaves it.
Work = sessionmaker(engine)

Base = declarative_base()


class Account(Base):
    __tablename__ = 'account'
    id = Column(Integer, primary_key=True)
    balance = Column(Integer, nullable=False, default=0)


class Entry(Base):
    """Cannot be changed without a guard."""
    __tablename__ = 'ledger'
    id = Column(Integer, primary_key=True)
    body = Column(Text)


class Doc(Base):
    """Has a version, which SQLAlchemy counts."""
    __tablename__ = 'doc'
    id = Column(Integer, primary_key=True)
    body = Column(Text)
    version = Column(Integer, nullable=False)
    __mapper_args__ = {'version_id_col': version}


class Note(Base):
    """Has a version, which the trigger counts."""
    __tablename__ = 'note'
    id = Column(Integer, primary_key=True)
    body = Column(Text)
    version = Column(Integer, nullable=False, server_default='1',
                     server_onupdate=FetchedValue())
    __mapper_args__ = {'version_id_col': version,
                       'version_id_generator': False}


event.listen(Entry.__table__, 'after_create', DDL(
    'CREATE TRIGGER guarded BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE '
    'ON %(table)s FOR EACH STATEMENT '
    "EXECUTE FUNCTION dlock_require_guard('ledger')"))
for model in Doc, Note:
    event.listen(model.__table__, 'after_create', DDL(
        'CREATE TRIGGER versioned BEFORE UPDATE ON %(table)s '
        'FOR EACH ROW EXECUTE FUNCTION dlock_version_guard()'))


def setUpModule():
    ask('CREATE ROLE app LOGIN')
    ask('CREATE ROLE web LOGIN')
    ask('ALTER ROLE web SET dlock.session_locks = error')
    ask("SELECT dlock_reserve('reserved/', current_user::regrole)")
    ask('GRANT CREATE ON SCHEMA public TO app')
    Base.metadata.create_all(engine)


#
# What an application has to lock with.  A session is anything that executes: a
# Session, or a Connection.
#

def call(session, function):
    return session.scalar(select(function))


def xact_acquire(session, name, *timeout):
    return call(session, func.dlock_xact_acquire(name, *timeout))


def ttl_acquire(session, name, owner):
    # beyond the first arguments, by name
    return session.scalar(
        text('SELECT dlock_ttl_acquire(:name, :ttl, owner => :owner)'),
        {'name': name, 'ttl': LONG, 'owner': owner})


def backend_pid(session):
    return call(session, func.pg_backend_pid())


def deposit(amount, meanwhile=lambda: None):
    """Read, compute and write: without the lock, one of two is lost."""
    with Work.begin() as session:
        fence = xact_acquire(session, 'account/1')
        account = session.get(Account, 1)
        new_balance = account.balance + amount
        meanwhile()
        account.balance = new_balance
    return fence


#
# What the tests need
#

# start(function, ...) runs it beside the test; result() is what it returned.
start = ThreadPoolExecutor().submit


def ask(sql, **parameters):
    with admin.connect() as connection:
        result = connection.execute(text(sql), parameters)
        return result.scalar() if result.returns_rows else None


def wait_until(sql, **parameters):
    end = time.monotonic() + TIMEOUT
    while not ask(sql, **parameters):
        if time.monotonic() > end:
            raise TimeoutError(f'waited for: {sql} {parameters}')
        time.sleep(0.01)


def wait_for_waiter(name):
    wait_until('SELECT count(*) > 0 FROM dlock_locks '
               'WHERE name = :name AND NOT granted', name=name)


def is_free(name):
    """Can anybody else have it, at once?"""
    return ask('SELECT dlock_try_xact_acquire(:name) IS NOT NULL', name=name)


class TestCase(unittest.TestCase):
    def setUp(self):
        with Work.begin() as session:
            for table in Account, Doc, Note:
                session.execute(text(f'TRUNCATE {table.__tablename__}'))
            session.add(Account(id=1))
            session.add(Doc(id=1, body=''))
            session.add(Note(id=1, body=''))

    def tearDown(self):
        left = ask('SELECT array_agg(name) FROM dlock_locks')
        if left:
            # not in the way of the next test
            ask('SELECT count(dlock_force_release(ticket)) FROM dlock_locks')
        self.assertIsNone(left)

    @contextmanager
    def assertFails(self, error, sqlstate):
        """As assertRaises; the connection must still be usable."""
        with self.assertRaises(error) as failure:
            yield failure
        self.assertEqual(failure.exception.orig.pgcode, sqlstate)
        self.assertFalse(failure.exception.connection_invalidated)

    def assertBalance(self, balance):
        with Work() as session:
            self.assertEqual(session.get(Account, 1).balance, balance)


class TransactionScope(TestCase):
    def test_no_lost_update(self):
        """transaction scope: two units of work, no lost update"""
        workers = []

        def meanwhile():
            workers.append(start(deposit, 20))
            wait_for_waiter('account/1')

        first = deposit(10, meanwhile)
        self.assertGreater(workers[0].result(TIMEOUT), first)
        self.assertBalance(30)
        self.assertTrue(is_free('account/1'))

    def test_exception(self):
        """transaction scope: an exception rolls back, and frees the lock"""
        def meanwhile():
            self.assertFalse(is_free('account/1'))
            raise KeyError

        with self.assertRaises(KeyError):
            deposit(10, meanwhile)
        self.assertTrue(is_free('account/1'))
        self.assertBalance(0)

    def test_savepoint(self):
        """transaction scope: begin_nested() confines a failure"""
        with Work.begin() as other, Work.begin() as session:
            xact_acquire(other, 'busy')
            xact_acquire(session, 'outer')
            session.get(Account, 1).balance = 1
            with self.assertFails(OperationalError, '55P03'):
                with session.begin_nested():
                    xact_acquire(session, 'inner')
                    xact_acquire(session, 'busy', SHORT)
            self.assertTrue(is_free('inner'))
            self.assertFalse(is_free('outer'))
        self.assertTrue(is_free('outer'))
        self.assertBalance(1)

    def test_loaded_before(self):
        """transaction scope: what was loaded before the lock is old"""
        with Work.begin() as session:
            account = session.get(Account, 1)
            deposit(10)
            xact_acquire(session, 'account/1')
            # neither get() nor a query replaces the copy that is there
            self.assertEqual(session.get(Account, 1).balance, 0)
            self.assertEqual(session.scalar(select(Account)).balance, 0)
            session.refresh(account)
            account.balance += 20
        self.assertBalance(30)


class SessionScope(TestCase):
    """Pools of one connection, for which the next user has no choice"""

    def pool(self, role='app', **options):
        result = new_engine(role, max_overflow=0,
                            **{'pool_size': 1, **options})
        self.addCleanup(result.dispose)
        return result

    def test_stays_in_pool(self):
        """session scope: the ROLLBACK of a pool leaves the lock where it is"""
        pool = self.pool()
        with pool.connect() as forgetful:
            fence = call(forgetful, func.dlock_acquire('job'))
        self.assertFalse(is_free('job'))
        with pool.connect() as stranger:
            self.assertEqual(call(stranger, func.dlock_try_acquire('job')),
                             fence)
        pool.dispose()
        wait_until('SELECT count(*) = 0 FROM dlock_locks')

    def check_reset(self, pool):
        with pool.connect() as forgetful:
            pid = backend_pid(forgetful)
            call(forgetful, func.dlock_acquire('job'))
        self.assertTrue(is_free('job'))

        # one that SQLAlchemy has not rolled back, and that failed
        forgetful = pool.raw_connection()
        cursor = forgetful.cursor()
        cursor.execute("SELECT dlock_acquire('job')")
        with self.assertRaises(errors.DivisionByZero):
            cursor.execute('SELECT 1 / 0')
        forgetful.close()
        self.assertTrue(is_free('job'))

        with pool.connect() as stranger:
            self.assertEqual(backend_pid(stranger), pid)

    def test_release_all(self):
        """session scope: dlock_release_all() when a connection goes back"""
        pool = self.pool()

        @event.listens_for(pool, 'reset')
        def release_all(connection, *_):
            connection.rollback()
            connection.cursor().execute('SELECT dlock_release_all()')

        self.check_reset(pool)

    def test_discard_all(self):
        """session scope: DISCARD ALL when a connection goes back"""
        pool = self.pool(pool_reset_on_return=None)

        @event.listens_for(pool, 'reset')
        def discard_all(connection, *_):
            # SQLAlchemy 1.4 hands over a proxy, on which autocommit has no
            # effect.
            connection = connection.cursor().connection
            connection.rollback()
            connection.autocommit = True
            connection.cursor().execute('DISCARD ALL')
            connection.autocommit = False

        self.check_reset(pool)

    def test_forbidden(self):
        """session scope: forbidden by dlock.session_locks, others are not"""
        pool = self.pool('web')
        with pool.connect() as connection:
            with self.assertFails(OperationalError, '55000'):
                call(connection, func.dlock_acquire('job'))
        with Session(pool) as session, session.begin():
            xact_acquire(session, 'job')
            self.assertFalse(is_free('job'))

    def test_session_is_not_a_connection(self):
        """session scope: a Session changes its connection at a commit"""
        pool = self.pool(pool_size=2)
        with Session(pool) as session:
            call(session, func.dlock_acquire('job'))
            session.commit()
            with pool.connect() as stranger:
                self.assertFalse(call(session, func.dlock_is_held('job')))
                self.assertTrue(call(stranger, func.dlock_release('job')))

        with pool.connect() as connection, Session(connection) as session:
            call(session, func.dlock_acquire('job'))
            session.commit()
            with pool.connect() as stranger:
                self.assertTrue(call(session, func.dlock_is_held('job')))
            session.rollback()
            self.assertTrue(call(session, func.dlock_release('job')))
            session.commit()


class LeaseScope(TestCase):
    def test_any_connection(self):
        """lease scope: each step over another connection of the pool"""
        pool = new_engine(pool_size=3)
        self.addCleanup(pool.dispose)
        # The pool hands out what came back first.
        with pool.connect(), pool.connect(), pool.connect():
            pass
        work = sessionmaker(pool)
        pids = []

        def step(function, *arguments):
            with work.begin() as session:
                pids.append(backend_pid(session))
                return function(session, *arguments)

        def write(session, fence):
            call(session, func.dlock_guard('account/1', fence))
            session.get(Account, 1).balance += 1

        fence = step(ttl_acquire, 'account/1', 'job/17')
        self.assertFalse(is_free('account/1'))
        # the answer was lost
        self.assertEqual(step(ttl_acquire, 'account/1', 'job/17'), fence)
        self.assertEqual(step(call, func.dlock_renew(fence)), 1)
        step(write, fence)
        self.assertBalance(1)
        self.assertIs(step(call, func.dlock_release_ticket(fence)), True)
        self.assertTrue(is_free('account/1'))
        self.assertIsNone(step(call, func.dlock_renew(fence)))
        self.assertEqual(len(set(pids[:3])), 3)
        self.assertEqual(pids[3:], pids[:3])


class Guard(TestCase):
    def lose(self, fence):
        """Somebody else gets the lock, writes and commits."""
        self.assertTrue(ask('SELECT dlock_force_release(:fence)', fence=fence))
        deposit(20)

    def test_lost_at_commit(self):
        """guard: where it is not canceled, a stale holder cannot commit"""
        with Work.begin() as session:
            fence = ttl_acquire(session, 'account/1', 'job/17')
        flushed = False
        with self.assertFails(OperationalError, '55L01'):
            with Work.begin() as session:
                session.execute(text('SET LOCAL dlock.cancel_lost_guards = off'))
                call(session, func.dlock_guard('account/1', fence))
                session.get(Account, 1).balance += 10
                self.lose(fence)
                session.flush()
                flushed = True
        self.assertTrue(flushed)
        self.assertBalance(20)

    def test_canceled_at_flush(self):
        """guard: a holder that is stale by then is canceled at its flush"""
        with Work.begin() as session:
            fence = ttl_acquire(session, 'account/1', 'job/17')
        with self.assertFails(OperationalError, '57014'):
            with Work.begin() as session:
                call(session, func.dlock_guard('account/1', fence))
                session.get(Account, 1).balance += 10
                self.lose(fence)
                session.flush()
        self.assertBalance(20)

    def test_lost_before(self):
        """guard: a holder that is stale already gets no further"""
        with Work.begin() as session:
            fence = ttl_acquire(session, 'account/1', 'job/17')
        self.lose(fence)
        with self.assertFails(OperationalError, '55L01'):
            with Work.begin() as session:
                call(session, func.dlock_guard('account/1', fence))
                self.fail('guarded')
        self.assertBalance(20)

    def test_connection_replaced(self):
        """guard: a connection that the pool has replaced holds nothing"""
        pool = new_engine(pool_size=1, max_overflow=0, pool_pre_ping=True)
        self.addCleanup(pool.dispose)
        with Session(pool) as session:
            pid = backend_pid(session)
            fence = call(session, func.dlock_acquire('account/1'))
        ask('SELECT pg_terminate_backend(:pid, :timeout)', pid=pid,
            timeout=TIMEOUT * 1000)
        with Session(pool) as session:
            # no error here
            self.assertNotEqual(backend_pid(session), pid)
            with self.assertFails(OperationalError, '55L01'):
                call(session, func.dlock_guard('account/1', fence))

    def test_every_transaction(self):
        """guard: each transaction of a Session, by an event"""
        with self.assertFails(OperationalError, '55000'):
            with Work.begin() as session:
                session.add(Entry(body='forgot the guard'))

        guarded = sessionmaker(engine)

        @event.listens_for(guarded, 'after_begin')
        def guard(session, _transaction, connection):
            call(connection, func.dlock_guard(*session.info['lock']))

        with Work.begin() as session:
            fence = ttl_acquire(session, 'ledger', 'job/17')
        with guarded(info={'lock': ('ledger', fence)}) as session:
            for body in 'one', 'two':
                session.add(Entry(body=body))
                session.commit()
            self.assertTrue(ask('SELECT dlock_force_release(:fence)',
                                fence=fence))
            session.add(Entry(body='three'))
            with self.assertFails(OperationalError, '55L01'):
                session.commit()
        self.assertEqual(ask("SELECT string_agg(body, ' ' ORDER BY id) "
                             'FROM ledger'), 'one two')


class Version(TestCase):
    """Each with both ways to count"""

    def append(self, model, word, meanwhile=lambda: None):
        """As a person who edits: read, take some time, write."""
        with Work.begin() as session:
            row = session.get(model, 1)
            new_body = row.body + word
            meanwhile()
            row.body = new_body

    def append_until_done(self, model, word, meanwhile):
        """How often was it to be repeated?"""
        retries = 0
        while True:
            try:
                self.append(model, word, meanwhile)
                return retries
            except StaleDataError:
                retries += 1
                meanwhile = lambda: None

    def assertRow(self, model, body, version):
        with Work() as session:
            row = session.get(model, 1)
            self.assertEqual((row.body, row.version), (body, version))

    def check(self, meanwhile, body):
        for model in Doc, Note:
            self.assertEqual(1, self.append_until_done(
                model, 'b', lambda: meanwhile(model)))
            self.assertRow(model, body, 3)

    def test_stale_writer(self):
        """version: a stale writer gets StaleDataError, and repeats"""
        self.check(lambda model: self.append(model, 'a'), 'ab')

    def test_writer_without_version(self):
        """version: a writer that knows nothing of versions is noticed"""
        self.check(lambda model: ask(
            f"UPDATE {model.__tablename__} SET body = body || 'by hand '"),
            'by hand b')

    def test_bulk_update(self):
        """version: an update() in bulk is noticed"""
        def meanwhile(model):
            with Work.begin() as session:
                session.execute(update(model).values(body=model.body + 'all '))
        self.check(meanwhile, 'all b')

    def test_stale_bulk_update(self):
        """version: an update() that comes with an old version fails"""
        for model in Doc, Note:
            with Work() as session:
                seen = session.get(model, 1).version
            self.append(model, 'a')
            self.append(model, 'b')
            # without "version = seen" in WHERE, it finds the row
            with self.assertFails(OperationalError, '40001') as failure:
                with Work.begin() as session:
                    session.execute(
                        update(model).where(model.id == 1)
                        .values(body='stale', version=seen + 1))
            self.assertIsInstance(failure.exception.orig,
                                  errors.SerializationFailure)
            self.assertRow(model, 'ab', 3)


class Driver(TestCase):
    def test_timeout(self):
        """driver: a timeout is LockNotAvailable, and try returns None"""
        with Work.begin() as other:
            xact_acquire(other, 'busy')
            with self.assertFails(OperationalError, '55P03') as failure:
                with Work.begin() as session:
                    xact_acquire(session, 'busy', SHORT)
            self.assertIsInstance(failure.exception.orig,
                                  errors.LockNotAvailable)
            with Work.begin() as session:
                self.assertIsNone(call(
                    session, func.dlock_try_xact_acquire('busy', SHORT)))
                # and the transaction goes on
                xact_acquire(session, 'free')

    def test_deadlock(self):
        """driver: a deadlock is DeadlockDetected, and the other one goes on"""
        def other():
            with Work.begin() as session:
                xact_acquire(session, 'b')
                xact_acquire(session, 'a')

        with self.assertFails(OperationalError, '40P01') as failure:
            with Work.begin() as session:
                xact_acquire(session, 'a')
                worker = start(other)
                wait_for_waiter('a')
                # the youngest ticket is the victim
                xact_acquire(session, 'b')
        self.assertIsInstance(failure.exception.orig, errors.DeadlockDetected)
        worker.result(TIMEOUT)

    def test_errors(self):
        """driver: what is not allowed has its class, and its code"""
        with self.assertFails(ProgrammingError, '42501') as failure:
            with Work.begin() as session:
                xact_acquire(session, 'reserved/1')
        self.assertIsInstance(failure.exception.orig,
                              errors.InsufficientPrivilege)
        with self.assertFails(InternalError, '25006') as failure:
            with Work.begin() as session:
                session.execute(text('SET TRANSACTION READ ONLY'))
                call(session, func.dlock_version_bump('doc', 0))
        self.assertIsInstance(failure.exception.orig,
                              errors.ReadOnlySqlTransaction)

    def test_ticket(self):
        """driver: an enqueued ticket is awaited over a connection kept"""
        with engine.connect().execution_options(
                isolation_level='AUTOCOMMIT') as connection:
            with Work.begin() as other:
                xact_acquire(other, 'queue')
                ticket = call(connection, func.dlock_enqueue('queue'))
                granted = func.dlock_wait(ticket, timedelta())
                self.assertFalse(call(connection, granted))
            driver = connection.connection.cursor().connection
            while not driver.notifies:
                self.assertTrue(poll([driver], [], [], TIMEOUT)[0])
                driver.poll()
            self.assertIn('"granted"', driver.notifies.pop().payload)
            self.assertTrue(call(connection, granted))
            self.assertTrue(
                call(connection, func.dlock_release_ticket(ticket)))

    def test_names(self):
        """driver: names are bound, whatever characters they have"""
        for name in ('Straße/1', '数据/🔒', 'a:b %(c)s %s', 'it\'s "50%" \\'):
            with Work.begin() as session:
                xact_acquire(session, name)
                self.assertEqual(ask('SELECT name FROM dlock_locks'), name)
                self.assertFalse(is_free(name))

    def test_values(self):
        """driver: fences are int, intervals timedelta, lists arrays"""
        names = ['ö', 'a', 'ö']
        with Work.begin() as session:
            fences = session.scalar(
                text('SELECT dlock_xact_acquire_all(:names)'),
                {'names': names})
            self.assertEqual(fences, [xact_acquire(session, name)
                                      for name in names])
            self.assertTrue(all(type(fence) is int and fence > 2 ** 32
                                for fence in fences))
            fence = ttl_acquire(session, 'lease', 'job/17')
            remaining = session.scalar(
                text('SELECT remaining FROM dlock_locks '
                     'WHERE ticket = :fence'),
                {'fence': fence})
            self.assertGreater(remaining, LONG / 2)
            self.assertLessEqual(remaining, LONG)
            for function in (func.dlock_check('lease', fence),
                             func.dlock_release_ticket(fence)):
                self.assertIs(call(session, function), True)

    def test_bad_arguments(self):
        """driver: arguments that are none are DataError"""
        for sqlstate, *arguments in (('22004', None), ('22023', ''),
                                     ('22023', 'ö' * 128),
                                     ('22023', 'a', timedelta(-1))):
            with self.assertFails(DataError, sqlstate):
                with Work.begin() as session:
                    xact_acquire(session, *arguments)


if __name__ == '__main__':
    main()
