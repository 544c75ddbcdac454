"""A driver of tooz over dlock: dlock://user@host/database?timeout=30

A coordinator has one lease, which heartbeat() renews.  The lease holds its
locks, its memberships, which are shared locks of their groups, and its
leadership of groups.  A group is a row of the table tooz_group.
"""

import base64
import threading
import urllib.parse
import uuid
from contextlib import contextmanager

import tooz
from tooz import coordination, locking, utils

import dlock
from dlock.callers import Blocking, run
from dlock.heart import take_back
from dlock.lines import GRACE, Line, call, delta, now
from dlock.sources import Dsn


def text_of(prefix, name):
    if isinstance(name, bytes):
        name = urllib.parse.quote(name)
    return f'tooz/{prefix}/{name}'


def encode(value):
    return base64.b85encode(utils.dumps(value)).decode()


def decode(value):
    return utils.loads(base64.b85decode(value))


@contextmanager
def translated():
    """Converts errors of dlock to errors of tooz, except for timeouts."""
    try:
        yield
    except dlock.LockTimeout:
        raise
    except dlock.ConnectionLost as error:
        raise coordination.ToozConnectionError(str(error)) from error
    except dlock.Error as error:
        raise tooz.ToozError(f'{error} ({error.sqlstate})') from error


class Done(coordination.CoordAsyncResult):
    """The result of a call that is already complete"""

    def __init__(self, function, *arguments):
        self._error = None
        try:
            self._result = function(*arguments)
        except tooz.ToozError as error:
            self._error = error

    def get(self, timeout=None):
        if self._error:
            raise self._error
        return self._result

    @staticmethod
    def done():
        return True


class DlockLock(locking.Lock):
    """A shared lock is reentrant, as tooz requires: each acquire has a ticket
    of its own."""

    def __init__(self, driver, name):
        super().__init__(name)
        self._driver = driver
        self._lock = text_of('lock', name)
        self._tickets = []

    @property
    def acquired(self):
        return bool(self._tickets)

    @property
    def fence(self):
        return self._tickets[-1] if self._tickets else None

    def acquire(self, blocking=True, shared=False, timeout=None):
        """`blocking` may be a number of seconds, as in older tooz versions."""
        if blocking is not True:
            timeout = float(blocking)
        owner = str(uuid.uuid4())
        try:
            self._tickets.append(self._driver.acquire(
                self._lock, owner, timeout, shared=bool(shared)))
        except dlock.LockTimeout:
            return False
        except BaseException:
            self._driver.take_back(self._lock, owner)
            raise
        return True

    def release(self):
        """After an error, the lock counts as held, and can be released
        again."""
        if not self._tickets:
            return False
        released = self._driver.ask(
            call('dlock_release_ticket', self._tickets[-1]))
        self._tickets.pop()
        return released

    def break_(self):
        return self._driver.ask((
            'SELECT count(dlock_release_ticket(ticket)) > 0 '
            'FROM dlock_locks(%s) WHERE granted', (self._lock,)))

    def is_still_owner(self):
        return self.acquired and self._driver.ask(
            call('dlock_check', self._lock, self.fence))

    def heartbeat(self):
        return self.is_still_owner() and bool(self._driver.heartbeat())


class DlockDriver(coordination.CoordinationDriverCachedRunWatchers):
    CHARACTERISTICS = (
        coordination.Characteristics.DISTRIBUTED_ACROSS_THREADS,
        coordination.Characteristics.DISTRIBUTED_ACROSS_PROCESSES,
        coordination.Characteristics.DISTRIBUTED_ACROSS_HOSTS,
        coordination.Characteristics.LINEARIZABLE,
        coordination.Characteristics.SAME_VIEW_ACROSS_CLIENTS,
    )

    def __init__(self, member_id, parsed_url, options):
        super().__init__(member_id, parsed_url, options)
        options = utils.collapse(options)
        self._ttl = float(options.get('timeout', 30))
        rest = [option for option in urllib.parse.parse_qsl(parsed_url.query)
                if option[0] != 'timeout']
        self._dsn = f'postgresql://{parsed_url.netloc}{parsed_url.path}?'
        self._dsn += urllib.parse.urlencode(
            rest, quote_via=urllib.parse.quote)
        self._mutex = threading.Lock()
        self._beating = threading.Lock()
        self._owed = []     # requests to undo
        self._leads = {}

    def _new_line(self):
        return Line(Blocking(), Dsn(self._dsn), 0)

    def ask(self, statement):
        """Executes one statement at a time."""
        with self._mutex, translated():
            return run(self._line.ask(statement))

    def acquire(self, name, owner, timeout, **options):
        """Returns the ticket.  A wait has a connection of its own."""
        statement = call('dlock_lease_acquire', name, self._lease,
                         owner=owner, timeout=delta(timeout), **options)
        if timeout == 0:
            return self.ask(statement)
        line = self._new_line()
        until = float('inf') if timeout is None else now() + timeout + GRACE
        try:
            with translated():
                return run(line.ask(statement, until, None))
        finally:
            run(line.close())

    def take_back(self, *request):
        """Lets the next heartbeats undo a request, until the server has done
        it."""
        self._owed.append((*request, self._lease))

    def _start(self):
        self._line, self._pulse = self._new_line(), self._new_line()
        if self.ask(("SELECT to_regclass('tooz_group') IS NULL", ())):
            with self._turn(b'') as ask:
                ask(('CREATE TABLE IF NOT EXISTS tooz_group '
                     '(id bytea PRIMARY KEY)', ()))
        self._lease = self.ask(call('dlock_lease_open', delta(self._ttl),
                                    info=encode(self._member_id)))

    def _stop(self):
        self.ask(call('dlock_lease_close', self._lease))
        self._leads.clear()
        with self._mutex, self._beating:
            run(self._line.close())
            run(self._pulse.close())

    def heartbeat(self):
        """Renews over a connection of its own, which no other call delays."""
        with self._beating, translated():
            if run(self._pulse.ask(call('dlock_renew', self._lease))) is None:
                raise tooz.ToozError(
                    'the lease has run out, and all its locks')
            for request in list(self._owed):
                if run(take_back(self._pulse.ask, request)):
                    self._owed.remove(request)
        return self._ttl / 2

    def get_lock(self, name):
        return DlockLock(self, name)

    #
    # Groups
    #

    @contextmanager
    def _turn(self, group_id):
        """Begins a transaction that changes a group or its members, one at a
        time for each group.  It has a connection of its own, so that other
        calls need not wait for it."""
        line = self._new_line()

        def ask(statement, limit=GRACE):
            return run(line.ask(statement, limit=limit))

        try:
            with translated():
                ask(('BEGIN', ()))
                line.fixed = True       # another session has no transaction
                try:
                    ask(call('dlock_xact_acquire', text_of('turn', group_id),
                             timeout=delta(self._ttl)), self._ttl + GRACE)
                except dlock.LockTimeout as error:
                    raise coordination.OperationTimedOut(str(error)) from error
                yield ask
                ask(('COMMIT', ()))
        finally:
            run(line.close())

    def _check(self, ask, group_id):
        if not ask(('SELECT count(*) FROM tooz_group WHERE id = %s',
                    (group_id,))):
            raise coordination.GroupNotCreated(group_id)

    @staticmethod
    def _members(ask, group_id):
        """Returns the ticket and the capabilities of each member."""
        rows = ask((
            'SELECT coalesce(json_agg(json_build_array(owner, ticket, info)'
            ' ORDER BY ticket), %s) FROM dlock_locks(%s) WHERE granted',
            ('[]', text_of('group', group_id))))
        return {urllib.parse.unquote_to_bytes(owner): rest
                for owner, *rest in rows}

    def create_group(self, group_id):
        def create():
            with self._turn(group_id) as ask:
                if not ask(('INSERT INTO tooz_group VALUES (%s) '
                            'ON CONFLICT DO NOTHING RETURNING true',
                            (group_id,))):
                    raise coordination.GroupAlreadyExist(group_id)
        return Done(create)

    def delete_group(self, group_id):
        def delete():
            with self._turn(group_id) as ask:
                self._check(ask, group_id)
                if self._members(ask, group_id):
                    raise coordination.GroupNotEmpty(group_id)
                ask(('DELETE FROM tooz_group WHERE id = %s', (group_id,)))
        return Done(delete)

    def _destroy_group(self, group_id):
        """Removes the group and its members, as tooz's tests require."""
        with self._turn(group_id) as ask:
            for ticket, _ in self._members(ask, group_id).values():
                ask(call('dlock_release_ticket', ticket))
            ask(('DELETE FROM tooz_group WHERE id = %s', (group_id,)))

    def get_groups(self):
        return Done(lambda: self.ask(
            ('SELECT coalesce(array_agg(id), %s) FROM tooz_group', ([],))))

    def join_group(self, group_id, capabilities=b''):
        def join():
            with self._turn(group_id) as ask:
                self._check(ask, group_id)
                if self._member_id in self._members(ask, group_id):
                    raise coordination.MemberAlreadyExist(
                        group_id, self._member_id)
                ask(call('dlock_lease_acquire', text_of('group', group_id),
                         self._lease, shared=True,
                         owner=urllib.parse.quote(self._member_id),
                         info=encode(capabilities)))
            self._joined_groups.add(group_id)
        return Done(join)

    def leave_group(self, group_id):
        def leave():
            with self._turn(group_id) as ask:
                self._check(ask, group_id)
                ask(call('dlock_release_ticket', self._mine(ask, group_id)))
            self._joined_groups.discard(group_id)
        return Done(leave)

    def update_capabilities(self, group_id, capabilities):
        def update():
            with self._turn(group_id) as ask:
                self._check(ask, group_id)
                ask(call('dlock_set_info', self._mine(ask, group_id),
                         encode(capabilities)))
        return Done(update)

    def _mine(self, ask, group_id):
        # perhaps of an earlier coordinator, which this one replaces
        members = self._members(ask, group_id)
        if self._member_id not in members:
            raise coordination.MemberNotJoined(group_id, self._member_id)
        return members[self._member_id][0]

    def get_members(self, group_id):
        def get():
            self._check(self.ask, group_id)
            return set(self._members(self.ask, group_id))
        return Done(get)

    def get_members_with_capabilities(self, group_id):
        def get():
            self._check(self.ask, group_id)
            return {member_id: decode(info) or None for member_id, (_, info)
                    in self._members(self.ask, group_id).items()}
        return Done(get)

    def _capabilities(self, group_id, member_id):
        self._check(self.ask, group_id)
        members = self._members(self.ask, group_id)
        if member_id not in members:
            raise coordination.MemberNotJoined(group_id, member_id)
        return decode(members[member_id][1])

    def get_member_capabilities(self, group_id, member_id):
        return Done(self._capabilities, group_id, member_id)

    def get_member_info(self, group_id, member_id):
        return Done(lambda: {
            'capabilities': self._capabilities(group_id, member_id)})

    #
    # Leaders
    #

    def get_leader(self, group_id):
        def get():
            leader = self.ask((
                'SELECT owner FROM dlock_locks(%s) WHERE granted',
                (text_of('leader', group_id),)))
            return leader and urllib.parse.unquote_to_bytes(leader)
        return Done(get)

    def run_elect_coordinator(self):
        for group_id, hooks in list(self._hooks_elected_leader.items()):
            try:
                # if this coordinator leads, it gets the same ticket again
                ticket = self.acquire(text_of('leader', group_id),
                                      urllib.parse.quote(self._member_id), 0)
            except dlock.LockTimeout:
                continue
            if self._leads.get(group_id) != ticket:
                self._leads[group_id] = ticket
                hooks.run(coordination.LeaderElected(group_id, self._member_id))

    def run_watchers(self, timeout=None):
        result = super().run_watchers(timeout)
        self.run_elect_coordinator()
        return result

    def stand_down_group_leader(self, group_id):
        """After an error, this coordinator counts as the leader, and can stand
        down again."""
        ticket = self._leads.get(group_id)
        if ticket is None:
            return False
        released = self.ask(call('dlock_release_ticket', ticket))
        # another thread may have been elected meanwhile
        if self._leads.get(group_id) == ticket:
            self._leads.pop(group_id)
        return released
