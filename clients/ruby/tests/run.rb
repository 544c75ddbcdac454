# frozen_string_literal: true

# Tests of the Ruby gem: locks on connections of pg, leases, tickets, and with_advisory_lock in ActiveRecord
#
# A test for a row of clients/scenarios.md has the row's name. test/t/client_ruby.pl runs this program. libpq's
# environment variables name the server.

require 'timeout'
require 'active_record'
require 'dlock/active_record'

ActiveRecord::Base.establish_connection(adapter: 'postgresql', username: 'app', pool: 2)

class Account < ActiveRecord::Base
  self.table_name = 'account'
end

# Has connections of its own
class Other < ActiveRecord::Base
  establish_connection(adapter: 'postgresql', username: 'app', pool: 1)
end

ADMIN = PG.connect
ROWS = {} # rubocop:disable Style/MutableConstant
PATIENCE = Integer(ENV.fetch('PG_TEST_TIMEOUT_DEFAULT'))

def row(name, &test)
  ROWS[name] = test
end

def ask(sql, *values)
  ADMIN.exec_params(sql, values).getvalue(0, 0)
end

def expect(got, wanted = true)
  raise "got #{got.inspect}, wanted #{wanted.inspect}" unless wanted == got
end

def raises(kind, sqlstate = nil)
  yield
rescue kind => e
  expect(e.class, kind)
  expect(e.sqlstate, sqlstate) if sqlstate
  e
else
  raise "no #{kind}"
end

def free?(name)
  ask('SELECT dlock_try_xact_acquire($1) IS NOT NULL', name) == 't'
end

def left(name)
  Integer(ask('SELECT count(*) FROM dlock_locks WHERE name = $1', name))
end

def wait_until(sql, *values)
  Timeout.timeout(PATIENCE) { sleep(0.01) until ask(sql, *values) == 't' }
end

def wait_until_waiting(name)
  wait_until('SELECT count(*) = 1 FROM dlock_locks WHERE name = $1 AND NOT granted', name)
end

# Another session holds the lock meanwhile.
def holds(name)
  connected do |holder|
    holder.exec_params('SELECT dlock_acquire($1)', [name])
    yield
    holder.exec('SELECT dlock_release_all()')
  end
end

def connected(**options)
  connection = PG.connect(**options)
  yield connection
ensure
  connection&.close unless connection&.finished?
end

def app(&block)
  connected(user: 'app', &block)
end

def lock(*arguments, **options)
  Dlock::Lock.new(*arguments, **options)
end

class Boom < StandardError; end

#
# Locks on a connection of pg
#

row :session_acquire_release do
  app do |db|
    plain = lock(db, 'plain', info: 'me')
    plain.acquire
    fence = plain.fence
    expect(ask("SELECT ticket || ' ' || info || ' ' || scope FROM dlock_locks WHERE name = 'plain'"),
           "#{fence} me session")
    expect(plain.held?)
    plain.release
    expect(left('plain'), 0)
    expect(plain.synchronize { |held| held.fence > fence })
    expect(left('plain'), 0)
  end
end

row :session_exception do
  app do |db|
    raises(Boom) { lock(db, 'plain').synchronize { raise Boom } }
    catch(:out) { lock(db, 'plain').synchronize { throw :out } }
    expect(left('plain'), 0)
  end
end

row :session_on_connection do
  app do |db|
    lock(db, 'plain').synchronize do |outer|
      lock(db, 'plain').synchronize { |inner| expect(inner.fence, outer.fence) }
      db.exec('SELECT 1')
      expect(free?('plain'), false)
    end
    expect(free?('plain'))
  end
end

row :lock_used_twice do
  app do |db|
    twice = lock(db, 'twice')
    raises(Dlock::WrongState, '55000') { twice.release }
    twice.synchronize { raises(Dlock::WrongState, '55000') { twice.acquire } }
    twice.synchronize { expect(free?('twice'), false) }
  end
end

[[:try_busy, 0], [:timeout, 0.05]].each do |name, timeout|
  row name do
    holds('busy') do
      app do |db|
        raises(Dlock::LockTimeout, '55P03') { lock(db, 'busy', timeout: timeout).acquire }
        db.transaction do
          expect(lock(db, 'busy', timeout: timeout, transaction: true).try_acquire, nil)
          db.exec('SELECT 1') # the transaction goes on
        end
      end
      expect(left('busy'), 1)
    end
  end
end

row :shared do
  app do |one|
    app do |two|
      lock(one, 'shared', shared: true).synchronize do
        lock(two, 'shared', shared: true).synchronize { expect(left('shared'), 2) }
        raises(Dlock::LockTimeout) { lock(two, 'shared', timeout: 0).acquire }
      end
    end
  end
end

row :slots do
  app do |one|
    app do |two|
      lock(one, 'slots', slots: 3, permits: 3).synchronize do
        raises(Dlock::LockTimeout) { lock(two, 'slots', slots: 3, timeout: 0).acquire }
        raises(Dlock::WrongState, '55000') { lock(two, 'slots', slots: 4).acquire }
      end
      lock(two, 'slots', slots: 3, timeout: 0).synchronize { expect(left('slots'), 1) }
    end
  end
end

row :transaction_commit do
  app do |db|
    db.transaction do
      lock(db, 'plain', transaction: true).synchronize { expect(left('plain'), 1) }
      expect(free?('plain'), false)
    end
    expect(free?('plain'))
    raises(Boom) { db.transaction { lock(db, 'plain', transaction: true).synchronize { raise Boom } } }
    expect(free?('plain'))
  end
end

row :guard_refuses do
  app do |db|
    held = lock(db, 'guarded').acquire
    db.transaction { held.guard }
    ask('SELECT dlock_force_release($1)', held.fence)
    raises(Dlock::LockLost, '55L01') { db.transaction { held.guard } }
    raises(Dlock::LockLost, '55L01') { held.release }
  end
end

row :errors do
  app do |db|
    fails = ->(kind, code, sql) { raises(kind, code) { Dlock.translated { db.exec(sql) } } }

    raises(Dlock::NotAllowed, '42501') { lock(db, 'reserved/1').acquire }
    raises(Dlock::BadArgument, '22023') { lock(db, 'slots', slots: 0).acquire }
    raises(Dlock::BadArgument, '22004') { lock(db, nil).acquire }
    fails.call(Dlock::LockLost, '55L01', "SELECT dlock_guard('gone', 1)")
    fails.call(Dlock::StaleVersion, '40001', "SELECT dlock_version_bump('doc', 7)")
    { '40P01' => Dlock::Deadlock, '25006' => Dlock::NotPrimary, '53200' => Dlock::NoRoom, '53400' => Dlock::NoRoom,
      '58030' => Dlock::QuorumLate, '57014' => Dlock::Cancelled, '57P01' => Dlock::ConnectionLost,
      '22012' => Dlock::Error }.each do |code, kind|
      error = fails.call(kind, code, "DO $$BEGIN RAISE 'raised' USING ERRCODE = '#{code}', HINT = 'do this'; END$$")
      expect([error.hint, error.message, error.cause.is_a?(PG::Error)], ['do this', 'raised', true])
    end
    raises(ZeroDivisionError) { Dlock.translated { 1 / 0 } }
  end
end

row :session_connection_killed do
  app do |db|
    raises(Dlock::LockLost, '55L01') do
      lock(db, 'killed').synchronize { ask('SELECT pg_terminate_backend($1, 60000)', db.backend_pid) }
    end
  end
end

# An exception from outside ends the wait: Timeout's, or the kill of the thread
row :acquire_broken_off do
  app do |db|
    holds('busy') do
      raises(Timeout::Error) { Timeout.timeout(0.1) { lock(db, 'busy').acquire } }
      expect(left('busy'), 1)
      waiter = Thread.new { lock(db, 'busy').acquire }
      wait_until_waiting('busy')
      waiter.kill
      waiter.join
      expect(left('busy'), 1)
      expect(db.exec('SELECT 1').getvalue(0, 0), '1')
    end
    expect(free?('busy'))
  end
end

# The end of a block releases what an earlier release could not.
row :block_release_refused do
  app do |db|
    lock(db, 'a').synchronize do |held|
      db.exec('BEGIN')
      raises(PG::DivisionByZero) { db.exec('SELECT 1 / 0') }
      raises(Dlock::Error, '25P02') { held.release }
      db.exec('ROLLBACK')
    end
    expect(free?('a'))
  end
end

row :block_release_busy do
  app do |db|
    held = lock(db, 'a')
    raises(Boom) do
      held.synchronize do
        db.send_query('SELECT pg_sleep(1000)')
        raise Boom
      end
    end
    raises(Dlock::WrongState, '55000') { held.release }
    # a cancel before that would do nothing
    wait_until("SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
    db.cancel
    raises(PG::QueryCanceled) { db.get_last_result }
    expect(!free?('a'))
    held.release
    expect(free?('a'))
  end
  # a connection of the client, after a call without an answer
  held = Dlock::Locks.new('').lock('a').acquire
  held.instance_variable_get(:@line).connection.send_query('SELECT pg_sleep(1000)')
  raises(Dlock::LockLost, '55L01') { held.release }
  wait_until('SELECT count(*) = 0 FROM dlock_locks')
end

row :pool_returned do
  app do |db|
    lock(db, 'pool').acquire
    db.exec('BEGIN')
    raises(PG::DivisionByZero) { db.exec('SELECT 1 / 0') }
    Dlock.reset(db)
    expect(free?('pool'))
    expect(db.exec("SELECT dlock_is_held('pool')").getvalue(0, 0), 'f')
  end
end

# The pool does not get a connection that may still hold the lock.
row :pool_release_refused do
  lent = Struct.new(:raw_connection) { def throw_away! = raw_connection.close }.new(PG.connect)
  pool = Object.new
  pool.define_singleton_method(:with_connection) { |&work| work.call(lent) }
  held = Dlock::Locks.new(pool).lock('pool').acquire
  held.instance_variable_get(:@line).define_singleton_method(:ask_once) do |*|
    raise Dlock::Cancelled.new('cancelled', '57014')
  end
  raises(Dlock::Cancelled, '57014') { held.release }
  wait_until('SELECT count(*) = 0 FROM dlock_locks')
end

#
# Leases
#

def lease
  Dlock::Locks.new('').lease(3600)
end

# The connection for calls that need not wait, unless a call uses it
def line_of(lease)
  lease.instance_variable_get(:@free).see(0)
end

row :renew_refused do
  lease.synchronize do |lease|
    lease.define_singleton_method(:send_held) { |*| raise Boom }
    raises(Dlock::BadArgument, '22023') { lease.renew(0.09) }
    lease.define_singleton_method(:send_held) { |*| raise Dlock::BadArgument.new('refused', '22023') }
    due = lease.heart.due
    raises(Dlock::BadArgument, '22023') { lease.renew(7200) }
    expect(lease.heart.due, due)
  end
end

# Yields an open lease that cannot connect again until the block ends.
def without_server(patience)
  away = false
  locks = Dlock::Locks.new(-> { away ? raise(Dlock::ConnectionLost, 'away') : '' }, patience: patience)
  lease = locks.lease(3600).open
  away = true
  yield lease
  away = false
  lease.close
end

def no_answer
  Dlock::ConnectionLost.new('no answer').tap { |error| error.doubt = true }
end

# A renewal whose answer is lost may have changed the ttl, although the server refuses the repetition.
row :renew_in_doubt do
  lease.synchronize do |lease|
    errors = [no_answer, Dlock::BadArgument.new('refused', '22023')]
    line_of(lease).define_singleton_method(:ask_once) do |*values|
      raise errors.shift unless errors.empty?

      super(*values)
    end
    raises(Dlock::BadArgument, '22023') { lease.renew(1800) }
    expect(errors.empty?)
    expect(lease.deadline <= Dlock.now + 1800)

    # the server may execute the first call later
    lease.renew(7200)
    expect([lease.heart.life, lease.heart.interval], [0.99 * 1800, 600.0])
    lease.renew
    expect(lease.deadline <= Dlock.now + 1800)
  end
end

# The same if the source refuses the next connection.
row :renew_reconnect_refused do
  connections = 0
  source = lambda do
    connections += 1
    raise Dlock::NotAllowed.new('refused', '42501') if connections == 2

    ''
  end
  Dlock::Locks.new(source).lease(3600).synchronize do |lease|
    errors = [no_answer]
    line_of(lease).define_singleton_method(:ask_once) do |*values|
      raise errors.shift unless errors.empty?

      super(*values)
    end
    raises(Dlock::NotAllowed, '42501') { lease.renew(1800) }
    expect(connections, 2)
    expect(lease.deadline <= Dlock.now + 1800)
  end
end

# The answer to a renewal does not concern a lease that was opened since.
row :renew_reopened do
  [nil, 0].each do |kept|
    lease.synchronize do |lease|
      lease.define_singleton_method(:send_held) do |*|
        close
        open
        [kept, Dlock.now]
      end
      raises(Dlock::WrongState, '55000') { lease.renew(7200) }
      lease.check
      expect(lease.instance_variable_get(:@ttl), 3600)
      lease.close
    end
  end
end

# Nor does the answer to a change.
row :change_reopened do
  lease.synchronize do |lease|
    lease.define_singleton_method(:send_held) do |*|
      close
      open
      [false, Dlock.now]
    end
    raises(Dlock::WrongState, '55000') { lease.info = 'one' }
    lease.check
    lease.close
  end
end

# The debt of one call stays when another call is settled, also in a child, and the oldest of too many is forgotten.
row :debts do
  debt, settled = Array.new(2) { Dlock::Debt.note(0, 7) }
  settled.paid
  expect([debt, settled].map(&:owed?), [true, false])
  child = fork { exit!(debt.owed?) }
  expect(Process.wait2(child)[1].success?)
  (1..Dlock::Debt::MOST).each { |account| Dlock::Debt.note(account, nil) }
  expect([debt.owed?, Dlock::Debt.of(1).owed?], [false, true])
  (1..Dlock::Debt::MOST).each { |account| Dlock::Debt.of(account).paid }
  expect(Dlock::Debt.all, {})
end

# A release notes its debt before it is sent, and an answer settles it.
row :release_noted do
  job = Dlock::Locks.new('').lock('job', ttl: 3600, owner: 7)
  job.acquire
  noted = nil
  job.instance_variable_get(:@line).define_singleton_method(:ask_once) do |*values|
    noted = Dlock::Debt.all.values.flatten.map(&:ticket) if values[0][0].include?('dlock_release_ticket')
    super(*values)
  end
  fence = job.fence
  job.release
  expect([noted, Dlock::Debt.all], [[fence], {}])
end

# An undo ends when another request has paid its debt, and may have the ticket.
row :undo_paid do
  job, again = Array.new(2) { Dlock::Locks.new('').lock('job', ttl: 3600, owner: 'me') }
  job.acquire
  again.instance_variable_get(:@line).define_singleton_method(:ask_once) do |*values|
    raise Boom if values[0][0].include?('dlock_renew')

    super(*values).tap { Dlock::Debt.all.clear if values[0][0] == Dlock::Pulse::FIND }
  end
  raises(Boom) { again.acquire }
  job.release
  expect(left('job'), 0)
end

# One renewal waits for the other, until an exception ends that one.
row :renew_alone do
  lease.synchronize do |lease|
    sent = Queue.new
    answer = Queue.new
    lease.define_singleton_method(:send_held) do |*|
      sent << Thread.current
      answer.pop
    end
    one = Thread.new { raises(Boom) { lease.renew } }
    expect(sent.pop, one)
    two = Thread.new { lease.renew }
    sleep(0.01) until two.stop?
    expect(sent.empty?)
    one.raise(Boom)
    expect(sent.pop, two)
    answer << [0, Dlock.now]
    [one, two].each(&:join)
  end
end

# A renewal does not wait for a renewal of an earlier opening.
row :renew_stuck do
  lease.synchronize do |lease|
    sent = Queue.new
    answer = Queue.new
    lease.define_singleton_method(:send_held) do |*|
      singleton_class.remove_method(:send_held)
      sent << true
      answer.pop
    end
    stuck = Thread.new { raises(Dlock::WrongState, '55000') { lease.renew } }
    sent.pop
    lease.close
    lease.open
    lease.renew
    answer << [0, Dlock.now]
    stuck.join
    lease.close
  end
end

# A stuck call keeps the connection of its opening.
row :open_past_stuck do
  lease = lease().open
  used = Queue.new
  answer = Queue.new
  stuck = Thread.new do
    lease.use(Dlock::FOREVER) do |line|
      used << line
      answer.pop
      line.ask(['SELECT 1', []])
    end
  end
  earlier = used.pop
  free = lease.instance_variable_get(:@free)
  free.define_singleton_method(:take) { |*| nil } # the close does not wait
  lease.close
  free.singleton_class.remove_method(:take)
  lease.open
  expect(line_of(lease).nil?, false)
  connection = line_of(lease).connection
  answer << true
  stuck.join
  expect(earlier.connection, nil)
  expect(line_of(lease).connection, connection)
  lease.close
end

# The undo of an open does not close a lease that another thread has opened since.
row :open_broken_off do
  opener = Thread.current
  first = true
  lease = lease()
  lease.define_singleton_method(:begin_hold) do
    super()
    next unless first

    first = false
    close
    open
    opener.raise(Boom)
    sleep(0.001) until Thread.pending_interrupt?
  end
  raises(Boom) { lease.open }
  expect(lease.held?)
  lease.close
end

# A lock does not become a lock of the lease that was opened after the request.
row :acquire_reopened do
  reopen = lambda do |lease|
    lease.close
    lease.open
  end
  lease.synchronize do |lease|
    lock = lease.lock('plain')
    lease.define_singleton_method(:use) do |till, &work|
      super(till, &work).tap do
        singleton_class.remove_method(:use)
        reopen.call(self)
      end
    end
    raises(Dlock::LockLost, '55L01') { lock.acquire }
    expect([lock.held?, left('plain')], [false, 0])

    lease.define_singleton_method(:new_line) do
      lease = self
      super().tap do |line|
        line.define_singleton_method(:ask) do |**options, &work|
          lease.singleton_class.remove_method(:new_line)
          super(**options, &work).tap { reopen.call(lease) }
        end
      end
    end
    raises(Dlock::LockLost, '55L01') { lease.acquire_all(%w[a b]) }
    expect([left('a'), left('b')], [0, 0])
    lease.close
  end
end

# The undo of a request does not release the ticket that another lease has with the same owner.
row :acquire_same_owner do
  lease.synchronize do |one|
    lease.synchronize do |two|
      held = one.lock('owned', owner: 'me').acquire
      waiter = Thread.new { raises(Boom) { two.lock('owned', owner: 'me').acquire } }
      wait_until_waiting('owned')
      waiter.raise(Boom)
      waiter.join
      expect(left('owned'), 1)
      two.heart.owe('owned', 'me')
      sleep(0.01) until two.heart.owed.empty?
      held.release
    end
  end
end

# The timeout counts even if the server does not answer.
row :acquire_server_away do
  without_server(3600) do |lease|
    line_of(lease).drop
    raises(Dlock::ConnectionLost) { lease.lock('plain', timeout: 0).acquire }
  end
end

# It counts even if another call uses the lease's connection. So does the deadline.
row :connection_busy do
  lease.synchronize do |lease|
    limit = nil
    lease.instance_variable_get(:@free).define_singleton_method(:take) do |till|
      limit = till
      nil
    end
    deadline = Dlock.now + Dlock::GRACE - 0.01
    lock = lease.lock('plain', timeout: 0).acquire
    expect(limit < deadline)
    deadline = Dlock.now + Dlock::GRACE - 0.01
    [lock, lease].each { |kept| kept.define_singleton_method(:deadline) { deadline } }
    [-> { lease.renew }, -> { lock.release }, -> { lease.close }].each do |call|
      limit = nil
      call.call
      expect(limit < deadline)
    end
  end
end

# The heartbeat need not undo a request that was never sent.
row :request_not_sent do
  without_server(0) do |lease|
    [-> { lease.acquire_all(%w[a b]) }, -> { lease.tickets.enqueue('queue') }].each do |request|
      raises(Dlock::ConnectionLost) { request.call }
      expect(lease.heart.owed, {})
    end
  end
end

# Each change of a held lock has a connection of its own.
row :changes_at_once do
  opened = []
  locks = Dlock::Locks.new(lambda do
    PG.connect.tap do |connection|
      opened << connection
      sleep(0.001) until [1, 3, 4].include?(opened.size)
    end
  end)
  locks.lock('plain', ttl: 3600).synchronize do |lock|
    [Thread.new { lock.renew }, Thread.new { lock.info = 'me' }].each(&:join)
    expect(opened.size, 3)
    sleep(0.01) until opened.all?(&:finished?)
  end
end

# An exception arrives while the call waits to change the state of its object.
def break_off(ready = -> { true })
  locked = Queue.new
  free = Queue.new
  locking = Thread.new do
    Dlock::GUARD.synchronize do
      locked << true
      free.pop
    end
  end
  locked.pop
  calling = Thread.new { raises(Boom) { yield } }
  sleep(0.01) until calling.stop? && ready.call
  calling.raise(Boom)
  free << true
  [locking, calling].each(&:join)
end

# Then no state remains that only the call could end.
row :state_broken_off do
  locks = Dlock::Locks.new('')
  over = lambda do |kept|
    sleep(0.01) until kept.instance_variable_get(:@state) == 'not held'
    wait_until('SELECT count(*) = 0 FROM dlock_locks')
  end
  app do |db|
    [lock(db, 'plain'), locks.lock('plain'), locks.lock('plain', ttl: 3600)].each do |lock|
      break_off { lock.acquire }
      over.call(lock)
      lock.acquire
      break_off { lock.release }
      over.call(lock)
      lock.synchronize { expect(left('plain'), 1) }
    end
    break_off(-> { left('a') == 1 }) { Dlock.acquire_all(db, %w[a b]) }
    wait_until('SELECT count(*) = 0 FROM dlock_locks')
  end
  lease = lease()
  break_off { lease.open }
  over.call(lease)
  lease.open
  break_off { lease.close }
  over.call(lease)
  lease.define_singleton_method(:open_for) { |mine| super(mine).tap { raise Boom } }
  raises(Boom) { lease.synchronize { raise 'let in' } }
  expect(lease.held?, false)
end

# The same if the exception arrives when the request has returned.
row :request_broken_off do
  app do |db|
    [db, Account.connection].each do |source|
      held = lock(source, 'plain')
      held.instance_variable_get(:@database).define_singleton_method(:request) do |*values, **options, &keep|
        super(*values, **options, &keep)
        raise Boom
      end
      raises(Boom) { held.acquire }
      expect(left('plain'), 0)
    end
  end
end

# The same if there can be no thread for the call.
row :no_thread do
  thread = Dlock::Task.method(:thread)
  without = lambda do |&call|
    Dlock::Task.define_singleton_method(:thread) { raise ThreadError }
    raises(ThreadError) { call.call }
  ensure
    Dlock::Task.define_singleton_method(:thread, thread)
  end
  app do |db|
    held = lock(db, 'plain')
    without.call { held.acquire }
    held.synchronize { nil }
  end
  held = Dlock::Locks.new('').lock('plain', ttl: 3600)
  without.call { held.acquire }
  held.acquire
  without.call { held.release }
  held.release
  lease = lease()
  without.call { lease.open }
  lease.open
  without.call { lease.close }
  lease.close
end

# If the server does not answer an interrupted call, its connection is closed.
row :release_broken_off do
  connected(user: 'app', options: '-c search_path=late,public') do |db|
    held = lock(db, 'plain').acquire
    ADMIN.exec("INSERT INTO late.waits VALUES ('dlock_release_ticket'); SELECT pg_advisory_lock(18)")
    releasing = Thread.new { raises(Boom) { held.release } }
    wait_until("SELECT count(*) = 1 FROM pg_stat_activity WHERE usename = 'app' AND wait_event = 'advisory'")
    releasing.raise(Boom)
    releasing.join
    sleep 0.01 until db.finished?
  ensure
    ADMIN.exec('DELETE FROM late.waits; SELECT pg_advisory_unlock(18)')
  end
  wait_until('SELECT count(*) = 0 FROM dlock_locks')
end

# If there can be no thread for a callback, the watcher goes on, and calls back later.
row :callback_no_thread do
  thread = Dlock::Task.method(:thread)
  refused = Queue.new
  told = Queue.new
  raises(Dlock::LockLost, '55L01') do
    lease.synchronize do |lease|
      2.times { lease.on_lost { |lost| told << lost.id } }
      Dlock::Task.define_singleton_method(:thread) do
        refused << true
        raise ThreadError
      end
      lease.heart.instance_variable_set(:@deadline, 0)
      2.times { refused.pop }
    ensure
      Dlock::Task.define_singleton_method(:thread, thread)
    end
  end
  expect(Array.new(2) { ask('SELECT dlock_lease_close($1)', told.pop) }, ['0', nil])
end

# No heartbeat renews a lease that was not opened.
row :open_failed do
  lease = Dlock::Locks.new(-> { '' }).lease(3600)
  failing = lambda do |object, method|
    object.define_singleton_method(method) { |*| raise ThreadError }
    raises(ThreadError) { lease.open }
    expect(Dlock::Heart.all.keys.none? { |heart| heart.members.key?(lease) })
  ensure
    object.singleton_class.remove_method(method)
  end
  failing.call(Dlock::Pulse, :new)
  failing.call(lease, :begin_hold)
  lease.synchronize { nil }
  ask('SELECT count(dlock_lease_close(lease)) FROM dlock_leases') # they would expire
end

# A daemon has a heartbeat of its own.
row :daemon do
  reader, writer = IO.pipe
  child = fork do
    earlier = lease.open
    Process.daemon(true, true)
    expect(earlier.lost?)
    Dlock::Locks.new('').lease(3600, interval: 0.1).synchronize do |lease|
      before = lease.deadline
      Timeout.timeout(PATIENCE) { sleep(0.01) until lease.deadline > before }
    end
    writer.write(earlier.id)
  ensure
    exit!
  end
  writer.close
  Process.wait(child)
  expect(ask('SELECT dlock_lease_close($1)', reader.read), '0')
end

#
# Tickets
#

# The heartbeat undoes an enqueue that was interrupted or has failed after the server had executed it.
row :enqueue_broken_off do
  lease.synchronize do |lease|
    tickets = lease.tickets
    asking = fails = answered = nil
    tickets.instance_variable_get(:@line).define_singleton_method(:ask_once) do |*values|
      super(*values).tap { fails.call if values[0][0].include?(answered) }
    end
    failures = [-> { raise Boom }, -> { asking.raise(Boom) || Dlock::Stop.sleep(3600) }]
    failures.product(%w[dlock_lease_enqueue dlock_wait]) do |failure, statement|
      fails = failure
      answered = statement
      asking = Thread.new { raises(Boom) { tickets.enqueue('queue') } }
      asking.join
      wait_until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'queue'")
      expect(tickets.instance_variable_get(:@places), {})
    end
    tickets.close
  end
end

# A repeated request that is refused, or broken off, leaves the ticket alone.
row :enqueue_again do
  lease.synchronize do |lease|
    tickets = lease.tickets
    ticket = tickets.enqueue('queue', owner: 'me')
    raises(Dlock::WrongState, '55000') { tickets.enqueue('queue', owner: 'me', slots: 3) }
    raises(Dlock::BadArgument, '22023') { tickets.enqueue('', owner: 'me') }
    tickets.instance_variable_get(:@line).define_singleton_method(:ask_once) do |*values|
      super(*values).tap { raise Boom if values[0][0].include?('dlock_lease_enqueue') }
    end
    raises(Boom) { tickets.enqueue('queue', owner: 'me', info: 'again') }
    expect(lease.heart.owed, {})
    expect(tickets.instance_variable_get(:@places).keys, [ticket])
    tickets.close
  end
end

# A ticket that the server does not give again is lost, and the others stay.
row :ticket_refused do
  lease.synchronize do |lease|
    tickets = lease.tickets
    gone = tickets.enqueue('queue', slots: 2)
    kept = tickets.enqueue('kept')
    2.times { expect(tickets.next(0).event, 'granted') }
    tickets.instance_variable_get(:@line).drop
    ask('SELECT dlock_force_release($1)', gone)
    app do |db|
      lock(db, 'queue', slots: 3).synchronize do
        event = tickets.next(0)
        expect([event.event, event.ticket], ['lost', gone])
      end
    end
    tickets.release(kept)
    tickets.close
  end
end

# A child does not end its parent's tickets.
row :tickets_forked do
  lease.synchronize do |lease|
    tickets = lease.tickets
    ticket = tickets.enqueue('queue')
    child = fork do
      raises(Dlock::LockLost, '55L01') { tickets.release(ticket) }
      exit!(true)
    ensure
      exit!(false)
    end
    expect(Process.wait2(child)[1].success?)
    expect(left('queue'), 1)
    tickets.close
  end
end

# The heartbeat repeats a release that has failed. A ticket of the session can be released again.
row :ticket_release_failed do
  fail_once = lambda do |tickets|
    tickets.instance_variable_get(:@line).define_singleton_method(:ask_once) do |*|
      singleton_class.remove_method(:ask_once)
      raise Dlock::Cancelled.new('cancelled', '57014')
    end
  end
  lease.synchronize do |lease|
    tickets = lease.tickets
    ticket = tickets.enqueue('queue')
    fail_once.call(tickets)
    raises(Dlock::Cancelled, '57014') { tickets.release(ticket) }
    wait_until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'queue'")
    tickets.close
  end
  tickets = Dlock::Locks.new('').tickets
  ticket = tickets.enqueue('queue')
  fail_once.call(tickets)
  raises(Dlock::Cancelled, '57014') { tickets.release(ticket) }
  tickets.release(ticket)
  expect(left('queue'), 0)
  tickets.close
end

# A release whose first answer was lost has not lost the ticket.
row :ticket_release_repeated do
  lease.synchronize do |lease|
    tickets = lease.tickets
    ticket = tickets.enqueue('queue')
    tickets.instance_variable_get(:@line).define_singleton_method(:ask_once) do |*values|
      singleton_class.remove_method(:ask_once)
      super(*values)
      raise no_answer
    end
    tickets.release(ticket)
    expect(left('queue'), 0)
    tickets.close
  end
end

# The timeout counts even if another thread waits for an event.
row :next_twice do
  tickets = Dlock::Locks.new('').tickets
  other = Thread.new { tickets.next }
  sleep(0.01) until other.stop?
  expect(tickets.next(0), nil)
  other.kill
  other.join
  tickets.close
end

# The same if another thread uses the connection.
row :next_connection_busy do
  tickets = Dlock::Locks.new('').tickets
  limit = nil
  tickets.define_singleton_method(:lock_alone) do |wait|
    limit = wait
    super(0.01)
  end
  tickets.instance_variable_get(:@alone).synchronize { expect(tickets.next(0), nil) }
  expect(limit, Dlock::GRACE)
  tickets.close
end

# If the connection has become silent, the next round connects again.
row :round_silent do
  silent = lambda do |tickets|
    line = tickets.instance_variable_get(:@line)
    old = line.connection
    line.define_singleton_method(:ask_once) do |*values|
      raise Dlock::ConnectionLost, 'no answer in time' if connection.equal?(old)

      super(*values)
    end
    tickets.instance_variable_set(:@round, Dlock.now)
  end
  lease.synchronize do |lease|
    holds('queue') do
      kept = lease.tickets
      ticket = kept.enqueue('queue')
      silent.call(kept)
      expect(kept.next(0), nil)
      ask('SELECT dlock_force_release(ticket) FROM dlock_locks WHERE granted')
      event = kept.next(PATIENCE)
      expect([event.event, event.ticket], ['granted', ticket])
      kept.close
    end
  end

  ours = Dlock::Locks.new('').tickets
  ours.enqueue('queue')
  expect(ours.next(0).event, 'granted')
  silent.call(ours)
  raises(Dlock::LockLost, '55L01') { ours.next(0) }
  ours.close
  wait_until('SELECT count(*) = 0 FROM dlock_locks')

  watching = Dlock::Locks.new('').watch('queue')
  expect(watching.next(PATIENCE).event, 'free')
  silent.call(watching)
  watching.next(0)
  holds('queue') do
    event = watching.next(PATIENCE).event until event == 'held'
  end
  watching.close
end

# No grant of the session is reported after its connection is gone.
row :granted_then_lost do
  tickets = Dlock::Locks.new('').tickets
  line = tickets.instance_variable_get(:@line)
  tickets.enqueue('a')
  %w[free lost].each { |event| tickets.instance_variable_get(:@events) << Dlock::Event.new(event, 'other', nil, {}) }
  line.drop
  raises(Dlock::LockLost, '55L01') { tickets.next(0) }
  expect([tickets.next(0).event, tickets.next(0).event, tickets.next(0)], ['free', 'lost', nil])

  # between two grants
  holds('a') { holds('b') { %w[a b].each { |name| tickets.enqueue(name) } } }
  waits = 0
  line.define_singleton_method(:ask_once) do |*values|
    raise no_answer if values[0][0].include?('dlock_wait') && (waits += 1) == 2

    super(*values)
  end
  tickets.instance_variable_set(:@round, Dlock.now)
  raises(Dlock::LockLost, '55L01') { tickets.next(0) }
  expect(tickets.next(0), nil)
  tickets.close
end

#
# with_advisory_lock
#

row :with_advisory_lock do
  expect(Account.with_advisory_lock('model') { free?('model') ? 'free' : 'held' }, 'held')
  expect(Account.new.with_advisory_lock('model', timeout_seconds: 1) { 7 }, 7)
  expect(free?('model'))
  expect(Account.with_advisory_lock('model') { nil }, nil)
  expect(Account.with_advisory_lock!('model', 0) { 7 }, 7)
end

row :with_advisory_lock_busy do
  called = false
  holds('model') do
    [0, 0.05, { timeout_seconds: 0 }, { 'timeout_seconds' => 0.05 }].each do |options|
      expect(Account.with_advisory_lock('model', options) { called = true }, false)
    end
    result = Account.with_advisory_lock_result('model', 0) { called = true }
    expect([result.lock_was_acquired?, result.result], [false, nil])
    raises(Dlock::WithAdvisoryLock::FailedToAcquireLock) { Account.with_advisory_lock!('model', 0) { called = true } }
    expect(Account.advisory_lock_exists?('model'))
    expect([called, left('model')], [false, 1])
  end
  result = Account.with_advisory_lock_result('model', timeout_seconds: nil) { 7 }
  expect([result.lock_was_acquired?, result.result], [true, 7])
  expect(Account.advisory_lock_exists?('model'), false)
  expect(left('model'), 0)
end

row :with_advisory_lock_waits do
  waiter = nil
  holds('model') do
    waiter = Thread.new { Account.with_advisory_lock('model') { 7 } }
    wait_until_waiting('model')
  end
  expect(waiter.value, 7)
end

row :with_advisory_lock_nested do
  expect(Account.current_advisory_lock, nil)
  fences = []
  Account.with_advisory_lock('outer') do
    fences << Account.current_advisory_fence
    Account.with_advisory_lock('inner') do
      expect(Account.current_advisory_lock, 'inner')
      expect(Account.current_advisory_locks, %w[outer inner])
      Account.with_advisory_lock('outer', 0) { expect(left('outer'), 1) }
      expect(Account.advisory_lock_exists?('outer'))
    end
    expect([Account.new.current_advisory_lock, free?('inner'), free?('outer')], ['outer', true, false])
    # another thread has its own stack
    Thread.new { expect(Account.current_advisory_locks, []) }.join
  end
  Account.with_advisory_lock('outer') { fences << Account.current_advisory_fence }
  expect(fences[0] < fences[1])
end

# A nested call does not rely on the lock of another connection.
row :with_advisory_lock_nested_elsewhere do
  Account.with_advisory_lock('model') do
    expect([Other.with_advisory_lock('model', 0) { 7 }, Other.advisory_lock_exists?('model')], [false, true])
  end
end

row :with_advisory_lock_shared do
  Account.with_advisory_lock('model', shared: true) do
    Thread.new do
      expect(Account.with_advisory_lock('model', shared: true, timeout_seconds: 0) { 7 }, 7)
      expect(Account.with_advisory_lock('model', 0) { 7 }, false)
    end.join
  end
end

row :with_advisory_lock_transaction do
  raises(ArgumentError) { Account.with_advisory_lock('model', transaction: true) { 7 } }
  raises(ArgumentError) { Account.with_advisory_lock('model', wait: 7) { 7 } }
  Account.transaction do
    expect(Account.with_advisory_lock('model', transaction: true) { 7 }, 7)
    expect(free?('model'), false)
  end
  expect(free?('model'))
end

row :with_advisory_lock_exception do
  raises(Boom) { Account.with_advisory_lock('model') { raise Boom } }
  expect(free?('model'))
  # in a failed transaction
  raises(ActiveRecord::StatementInvalid) do
    Account.transaction { Account.with_advisory_lock('model') { Account.connection.execute('SELECT 1 / 0') } }
  end
  expect([free?('model'), Account.current_advisory_lock, Account.count], [true, nil, 1])
end

row :with_advisory_lock_lost do
  raises(Dlock::LockLost, '55L01') do
    Account.with_advisory_lock('model') do
      ask('SELECT dlock_force_release($1)', Account.current_advisory_fence)
    end
  end
  expect(Account.current_advisory_lock, nil)
end

row :with_advisory_lock_query_cache do
  Account.cache do
    holds('model') { expect(Account.with_advisory_lock('model', 0) { 7 }, false) }
    expect(Account.with_advisory_lock('model', 0) { 7 }, 7)
    Account.with_advisory_lock('model', disable_query_cache: true) { expect(Account.connection.query_cache_enabled, false) }
    expect(Account.connection.query_cache_enabled)
  end
end

row :with_advisory_lock_broken_off do
  holds('model') do
    raises(Timeout::Error) { Timeout.timeout(0.1) { Account.with_advisory_lock('model') { 7 } } }
    expect(left('model'), 1)
    expect(Account.count, 1)
  end
  expect(free?('model'))

  # before the block
  kind = Dlock::WithAdvisoryLock::AdvisoryLock
  kind.define_method(:try_acquire) { super().tap { raise Boom } }
  raises(Boom) { Account.with_advisory_lock('model') { 7 } }
  kind.remove_method(:try_acquire)
  expect(free?('model'))
end

# The block has one connection, which returns to the pool without locks.
row :with_advisory_lock_pool do
  ActiveRecord::Base.connection_pool.release_connection
  pids = Array.new(2) do
    pid = nil
    Account.with_advisory_lock('model') do
      # Account.connection would keep the connection after the block
      pid = Account.connection_pool.with_connection { |lent| lent.select_value('SELECT pg_backend_pid()') }
      expect(ask("SELECT pid FROM dlock_locks WHERE name = 'model'"), pid.to_s)
    end
    expect(ActiveRecord::Base.connection_pool.stat[:busy], 0)
    pid
  end
  expect(pids.uniq.size, 1)
end

failed = false
ROWS.each do |name, test|
  Timeout.timeout(PATIENCE, RuntimeError) { test.call }
  expect(ask('SELECT count(*) FROM dlock_locks'), '0')
  puts "ok #{name}"
rescue StandardError => e
  failed = true
  puts e.full_message(highlight: false, order: :top).lines.first(6).join.gsub(/^/, '# ')
  puts "not ok #{name}"
  ask('SELECT count(dlock_force_release(ticket)) FROM dlock_locks')
end
exit(!failed)
