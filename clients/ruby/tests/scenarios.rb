# frozen_string_literal: true

# The scenarios of clients/scenarios.md, for the Ruby client: one block for each row, with its name
#
# test/t/client_ruby.pl starts this.

require 'rbconfig'
require 'stringio'
require 'timeout'
require 'dlock'

TIMEOUT = Integer(ENV.fetch('PG_TEST_TIMEOUT_DEFAULT'))
LONG = 3600
SHORT = 2 * [1, TIMEOUT / 180].max
KEPT = { ttl: LONG, interval: 0.5 }.freeze
ROWS = {} # rubocop:disable Style/MutableConstant

Thread.report_on_exception = false

def dsn(server, options = '')
  host, port = ENV.fetch("DLOCK_#{server}").split(':')
  "host=#{host} port=#{port} dbname=postgres user=app #{options}"
end

MAIN = dsn('MAIN')
OTHER = dsn('OTHER')
LOCKS = Dlock::Locks.new(MAIN, patience: TIMEOUT)

#
# Helpers for the rows
#

def row(name, &test)
  ROWS[name] = test
end

# Asks the test that started this program for an action.
def order(line)
  puts "! #{line}"
  $stdout.flush
  exit!(2) unless $stdin.gets == "done\n"
end

def wait_until(what = 'something')
  till = Dlock.now + TIMEOUT
  until yield
    raise "waited for #{what}" if Dlock.now > till

    sleep(0.01)
  end
end

# Another session, for queries
class Admin
  attr_reader :dsn

  def initialize(server = 'MAIN')
    host, port = ENV.fetch("DLOCK_#{server}").split(':')
    @dsn = "host=#{host} port=#{port} dbname=postgres user=admin application_name=admin"
    @mutex = Mutex.new
  end

  # The first row, or its only value
  def call(sql, *values)
    @mutex.synchronize do
      till = Dlock.now + TIMEOUT
      begin
        @connection ||= PG.connect(@dsn)
        row = @connection.exec_params(sql, values).values.first
        row && row.size == 1 ? row.first : row
      rescue PG::ConnectionBad, PG::UnableToSend, PG::AdminShutdown
        @connection = nil
        raise if Dlock.now > till

        sleep(0.01)
        retry
      end
    end
  end

  def until(sql, *values)
    wait_until("#{sql} #{values}") { call(sql, *values) == 't' }
  end

  def free?(name)
    call('SELECT dlock_try_xact_acquire($1) IS NOT NULL', name) == 't'
  end

  def until_free(name)
    self.until('SELECT dlock_try_xact_acquire($1) IS NOT NULL', name)
  end

  def left(name)
    Integer(call('SELECT count(*) FROM dlock_locks WHERE name = $1', name))
  end

  def until_waits(name)
    self.until('SELECT count(*) = 1 FROM dlock_locks WHERE name = $1 AND NOT granted', name)
  end

  def force(ticket)
    expect(call('SELECT dlock_force_release($1)', ticket), 't')
  end

  def renewed_at(lease)
    call('SELECT renewed_at FROM dlock_leases WHERE lease = $1', lease)
  end

  def until_renewed(lease, count = 1)
    count.times do
      self.until('SELECT renewed_at > $1 FROM dlock_leases WHERE lease = $2', renewed_at(lease), lease)
    end
  end

  # The process of the heartbeat's connection, as soon as there is one
  def heartbeat
    self.until("SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name = 'dlock heartbeat'")
    call("SELECT min(pid) FROM pg_stat_activity WHERE application_name = 'dlock heartbeat'")
  end

  def connections
    Integer(call("SELECT count(*) FROM pg_stat_activity WHERE usename = 'app'"))
  end

  def kill_sessions
    call("SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity WHERE usename = 'app'")
  end

  # Another session holds the lock meanwhile.
  def holds(name)
    connected(@dsn) do |holder|
      yield Integer(holder.exec_params('SELECT dlock_acquire($1)', [name]).getvalue(0, 0))
      holder.exec('SELECT dlock_release_all()')
    end
  end
end

ADMIN = Admin.new

def expect(got, wanted = true)
  raise "got #{got.inspect}, wanted #{wanted.inspect}" unless wanted == got
end

def raises(kind, code = nil)
  yield
rescue kind => e
  expect(e.class, kind)
  expect(e.sqlstate, code) if code
  e
else
  raise "no #{kind}"
end

def connected(dsn = MAIN)
  connection = PG.connect(dsn)
  yield connection
ensure
  connection&.close unless connection&.finished?
end

def start(&block)
  Thread.new(&block)
end

def ended(thread)
  raise 'still running' unless thread.join(TIMEOUT)

  thread.value
end

def told(kept)
  called = Dlock::Box.new
  kept.on_lost { called.put(true) }
  expect(called.see(Dlock.now + TIMEOUT))
  expect(kept.lost?)
end

def late(**options)
  Dlock::Locks.new(dsn('MAIN', "options='-c search_path=late,public'"), **options)
end

# Two locks of one owner, with little patience
def late_jobs
  impatient = late(patience: 0.1)
  Array.new(2) { impatient.lock('late', ttl: LONG, owner: 'job/1') }
end

def renewals_wait
  connected(ADMIN.dsn) do |other|
    other.exec('SELECT pg_advisory_lock(17)')
    yield
  end
end

def until_call_waits
  ADMIN.until("SELECT count(*) = 1 FROM pg_stat_activity WHERE usename = 'app' AND wait_event = 'advisory'")
end

# Calls of this function in the late schema wait. Yields a function that lets later calls return at once. At the end,
# the calls that have waited are executed, and their sessions have ended.
def abandoned(function)
  pids = nil
  wait_no_more = -> { ADMIN.call('DELETE FROM late.waits') }
  connected(ADMIN.dsn) do |other|
    other.exec('SELECT pg_advisory_lock(18)')
    ADMIN.call('INSERT INTO late.waits VALUES ($1)', function)
    yield wait_no_more
    pids = ADMIN.call("SELECT array_agg(pid) FROM pg_stat_activity WHERE usename = 'app' AND wait_event = 'advisory'")
    raise 'no call has waited' unless pids
  end
  ADMIN.until('SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = ANY ($1)', pids)
ensure
  wait_no_more.call
end

class Boom < StandardError; end

#
# Plain use
#

row :session_acquire_release do
  fence = nil
  LOCKS.lock('plain', info: 'me').synchronize do |lock|
    expect(ADMIN.free?('plain'), false)
    fence = lock.fence
    expect(ADMIN.call("SELECT ticket, info, scope FROM dlock_locks WHERE name = 'plain'"),
           [fence.to_s, 'me', 'session'])
  end
  expect(ADMIN.left('plain'), 0)
  LOCKS.lock('plain').synchronize { |lock| expect(lock.fence > fence) }
end

row :session_exception do
  raises(Boom) { LOCKS.lock('plain').synchronize { raise Boom } }
  expect(ADMIN.left('plain'), 0)
  catch(:out) { LOCKS.lock('plain').synchronize { throw :out } }
  expect(ADMIN.left('plain'), 0)
end

row :session_on_connection do
  connected do |db|
    Dlock::Lock.new(db, 'plain').synchronize do |outer|
      Dlock::Lock.new(db, 'plain').synchronize do |inner|
        expect(inner.fence, outer.fence)
        db.exec('SELECT 1')
      end
      expect(ADMIN.free?('plain'), false)
    end
    expect(ADMIN.free?('plain'))
    db.exec('SELECT 1')
  end
end

row :lock_used_twice do
  [{}, { ttl: LONG }].each do |options|
    lock = LOCKS.lock('twice', **options)
    winner = nil
    ADMIN.holds('twice') do
      waiting = Array.new(2) { start { lock.acquire } }
      wait_until { waiting.any? { |thread| !thread.alive? } }
      ADMIN.until_waits('twice')
      (winner,), (refused,) = waiting.partition(&:alive?)
      raises(Dlock::WrongState, '55000') { refused.value }
      expect(winner.alive?)
    end
    ended(winner)
    fence = lock.fence
    raises(Dlock::WrongState, '55000') { lock.acquire }
    raises(Dlock::WrongState, '55000') { lock.synchronize { raise 'let in' } }
    lock.check
    expect(lock.fence, fence)
    lock.release
    expect(ADMIN.left('twice'), 0)
    lock.synchronize { expect(lock.fence > fence) }
  end
end

row :check_unheld do
  refused = ->(kept) { raises(Dlock::WrongState, '55000') { kept.check } }
  connected do |db|
    db.transaction do
      [LOCKS.lock('plain'), LOCKS.lock('plain', ttl: LONG), Dlock::Lock.new(db, 'plain', transaction: true),
       LOCKS.lease(LONG)].each do |kept|
        refused.call(kept)
        kept.synchronize { kept.check }
        refused.call(kept)
      end
    end
  end

  session = LOCKS.lock('session').acquire
  lease = LOCKS.lease(LONG).open
  leased = lease.lock('leased').acquire
  # the child ends normally, with everything that Ruby does at an exit
  child = fork do
    $stdout.reopen(IO::NULL)
    unheld = [session, leased, lease].count do |kept|
      !kept.held? && (raises(Dlock::LockLost) { kept.check }) &&
        (kept.respond_to?(:release) ? raises(Dlock::WrongState) { kept.release } : kept.close.nil?)
    end
    exit(unheld)
  end
  expect(Process.wait2(child)[1].exitstatus, 3)
  [session, leased, lease].each(&:check)
  expect(ADMIN.left('session') + ADMIN.left('leased'), 2)
  session.info = 'still held'
  [leased, session].each(&:release)
  lease.close
end

[[:try_busy, 0], [:timeout, 0.05]].each do |name, timeout|
  row name do
    ADMIN.holds('busy') do
      connected do |db|
        [LOCKS.lock('busy', timeout: timeout), Dlock::Lock.new(db, 'busy', timeout: timeout),
         LOCKS.lock('busy', timeout: timeout, ttl: LONG)].each do |lock|
          raises(Dlock::LockTimeout, '55P03') { lock.acquire }
          expect(lock.try_acquire, nil)
          expect(ADMIN.left('busy'), 1)
        end
        db.transaction do
          raises(Dlock::LockTimeout, '55P03') do
            Dlock::Lock.new(db, 'busy', timeout: timeout, transaction: true).acquire
          end
        end
        LOCKS.lease(LONG).synchronize do |lease|
          raises(Dlock::LockTimeout, '55P03') { lease.lock('busy', timeout: timeout).acquire }
        end
      end
      expect(ADMIN.left('busy'), 1)
    end
  end
end

row :shared do
  LOCKS.lock('shared', shared: true).synchronize do |first|
    LOCKS.lock('shared', shared: true).synchronize do |second|
      expect(first.fence == second.fence, false)
      raises(Dlock::LockTimeout) { LOCKS.lock('shared', timeout: 0).acquire }
      expect(ADMIN.call("SELECT count(*) FROM dlock_locks WHERE name = 'shared' AND granted"), '2')
    end
  end
  LOCKS.lock('shared', timeout: 0).synchronize { nil }
end

row :slots do
  big = LOCKS.lock('slots', slots: 3, permits: 2).acquire
  LOCKS.lock('slots', slots: 3).synchronize do
    raises(Dlock::LockTimeout) { LOCKS.lock('slots', slots: 3, timeout: 0).acquire }
    raises(Dlock::WrongState, '55000') { LOCKS.lock('slots', slots: 4).acquire }
    big.release
    LOCKS.lock('slots', slots: 3, timeout: 0).synchronize { nil }
  end
end

row :resize do
  raises(Dlock::NotAllowed, '42501') { LOCKS.resize('slots', 1) }
  owner = Dlock::Locks.new(ADMIN.dsn)
  owner.resize('slots', 1)
  expect(ADMIN.call('SELECT name, slots FROM dlock_slots'), %w[slots 1])
  LOCKS.lock('slots', slots: 3).synchronize do
    raises(Dlock::LockTimeout) { LOCKS.lock('slots', slots: 3, timeout: 0).acquire }
  end
  owner.resize('slots', nil)
  expect(ADMIN.call('SELECT count(*) FROM dlock_slots'), '0')
end

row :transaction_commit do
  connected do |db|
    db.transaction do
      Dlock::Lock.new(db, 'plain', transaction: true).synchronize do |lock|
        expect(lock.fence.to_s, ADMIN.call("SELECT ticket FROM dlock_locks WHERE name = 'plain'"))
      end
      expect(ADMIN.free?('plain'), false)
    end
    expect(ADMIN.free?('plain'))
  end
end

row :transaction_rollback do
  connected do |db|
    raises(Boom) { db.transaction { Dlock::Lock.new(db, 'plain', transaction: true).synchronize { raise Boom } } }
    expect(ADMIN.free?('plain'))
  end
end

row :transaction_none do
  connected do |db|
    LOCKS.lock('lease', ttl: LONG).synchronize do |lease|
      raises(Dlock::WrongState, '55000') { Dlock::Lock.new(db, 'plain', transaction: true).acquire }
      raises(Dlock::WrongState, '55000') { Dlock.acquire_all(db, %w[plain], transaction: true) }
      raises(Dlock::WrongState, '55000') { lease.guard(db) }
    end
    expect(ADMIN.left('plain'), 0)
    db.exec('SELECT 1')
  end
end

row :lease_acquire_release do
  lock = LOCKS.lock('lease', ttl: LONG, owner: 'job/1', info: 'me')
  lock.synchronize do
    expect(ADMIN.call("SELECT ticket, scope, pid, owner, info FROM dlock_locks WHERE name = 'lease'"),
           [lock.fence.to_s, 'lease', nil, 'job/1', 'me'])
    expect(lock.lost?, false)
    expect(lock.deadline > Dlock.now)
    lock.check
  end
  expect([lock.lost?, ADMIN.left('lease')], [false, 0])
end

row :lease_renews do
  LOCKS.lock('lease', **KEPT).synchronize do |lock|
    deadline = lock.deadline
    ADMIN.until_renewed(lock.fence, 2)
    expect([ADMIN.free?('lease'), lock.lost?], [false, false])
    wait_until { lock.deadline > deadline }
  end
end

row :lease_deadline do
  lock = late.lock('lease', ttl: LONG)
  waiting = latest = nil
  renewals_wait do
    ADMIN.holds('lease') do
      waiting = start { lock.acquire }
      ADMIN.until_waits('lease')
    end
    until_call_waits
    expect(waiting.alive?)
    latest = Dlock.now + LONG * 0.99
  end
  ended(waiting)
  expect(lock.deadline.between?(latest - LONG, latest))
  lock.release
end

row :lease_many do
  lease = LOCKS.lease(LONG, info: 'many')
  holds = lambda do |count|
    expect(ADMIN.call('SELECT count(*), min(held) FROM dlock_leases WHERE lease = $1', lease.id), ['1', count.to_s])
  end
  lease.synchronize do
    many = %w[a b c].map { |name| lease.lock(name).acquire }
    holds.call(3)
    many[0].release
    holds.call(2)
    expect([ADMIN.free?('a'), ADMIN.free?('b')], [true, false])
    raises(Dlock::LockTimeout) { lease.lock('b', timeout: 0).acquire }
  end
  expect(ADMIN.call('SELECT count(*) FROM dlock_leases'), '0')
  expect([ADMIN.free?('b'), ADMIN.free?('c')], [true, true])
end

row :acquire_all do
  LOCKS.lease(LONG).synchronize do |lease|
    ADMIN.holds('b') do
      raises(Dlock::LockTimeout, '55P03') { lease.acquire_all(%w[a b], timeout: 0) }
      expect([ADMIN.free?('a'), ADMIN.left('b')], [true, 1])
      waiting = start { lease.acquire_all(%w[a b]) }
      ADMIN.until_waits('b')
      waiting.raise(Boom)
      cancelled(waiting)
      ADMIN.until("SELECT count(*) = 1 FROM dlock_locks WHERE name IN ('a', 'b')")
    end
    wait_until { lease.heart.owed.empty? }
    one, two = lease.acquire_all(%w[b a b], info: 'me')
    expect([one.name, two.name, ADMIN.call("SELECT ticket, info FROM dlock_locks WHERE name = 'b'")],
           ['b', 'a', [one.fence.to_s, 'me']])
    raises(Dlock::WrongState, '55000') { lease.acquire_all(%w[c a]) }
    one.release
    expect([ADMIN.free?('a'), ADMIN.free?('b'), ADMIN.free?('c')], [false, true, true])
    ADMIN.force(two.fence)
    raises(Dlock::LockLost) { two.release }
    lease.acquire_all(%w[a b])
  end
  expect([ADMIN.free?('a'), ADMIN.free?('b')], [true, true])

  # on a connection of the program
  connected do |db|
    ADMIN.holds('b') do
      raises(Dlock::LockTimeout, '55P03') { Dlock.acquire_all(db, %w[a b], timeout: 0) }
      raises_timeout { Dlock.acquire_all(db, %w[a b]) }
      expect(ADMIN.free?('a'))
    end
    one, two = Dlock.acquire_all(db, %w[b a])
    expect([one.held_on_server?, two.held_on_server?], [true, true])
    one.release
    expect([ADMIN.free?('a'), ADMIN.free?('b')], [false, true])
    two.release
    db.transaction { Dlock.acquire_all(db, %w[a b], transaction: true).each(&:release) && expect(ADMIN.left('a'), 1) }
    expect([ADMIN.left('a'), ADMIN.left('b')], [0, 0])
  end
end

row :renew_ttl do
  [LOCKS.lock('lease', ttl: LONG), LOCKS.lease(LONG)].each { |kept| renews_with_ttl(kept) }
  renews_unanswered
  raises(Dlock::LockLost, '55L01') do
    LOCKS.lock('lease', ttl: LONG).synchronize do |lock|
      ADMIN.force(lock.fence)
      lock.renew
    end
  end
  LOCKS.lock('session').synchronize { |lock| raises(Dlock::WrongState, '55000') { lock.renew(LONG) } }
end

def renews_with_ttl(kept)
  kept.synchronize do
    lease = kept.is_a?(Dlock::Lease) ? kept.id : kept.fence
    ttl_is = lambda do |ttl|
      expect(ADMIN.call('SELECT extract(epoch FROM ttl)::integer FROM dlock_leases WHERE lease = $1', lease), ttl.to_s)
    end
    [2 * LONG, LONG / 2].each do |ttl|
      before = Dlock.now
      kept.renew(ttl)
      ttl_is.call(ttl)
      expect(kept.deadline.between?(before + 0.99 * ttl, Dlock.now + 0.99 * ttl))
    end
    deadline = kept.deadline
    kept.renew
    expect(kept.deadline.between?(deadline, Dlock.now + 0.99 * LONG / 2))
    deadline = kept.deadline
    [1e12, 0].each { |ttl| raises(Dlock::BadArgument, '22023') { kept.renew(ttl) } }
    ttl_is.call(LONG / 2)
    expect([kept.deadline, kept.instance_variable_get(:@heart).life], [deadline, 0.99 * LONG / 2])
  end
end

# Until the server answers, the shorter ttl counts.
def renews_unanswered
  lease = LOCKS.lease(LONG).open
  order('freeze')
  renewing = start { lease.renew(SHORT) }
  told(lease)
  raises(Dlock::ConnectionLost) { ended(renewing) }
  order('thaw')
  ADMIN.until('SELECT count(*) = 0 FROM dlock_leases')
end

row :change_held do
  connected do |db|
    LOCKS.lease(LONG).synchronize do |lease|
      [LOCKS.lock('held'), Dlock::Lock.new(db, 'held'), LOCKS.lock('held', ttl: LONG),
       lease.lock('held')].each { |lock| changes(lock) }
      lease.info = 'changed'
      expect(ADMIN.call('SELECT info FROM dlock_leases WHERE lease = $1', lease.id), 'changed')
    end
  end
end

def changes(lock)
  raises(Dlock::LockLost, '55L01') do
    lock.synchronize do
      fence = lock.fence
      expect(lock.held_on_server?)
      lock.info = 'changed'
      lock.downgrade
      lock.check
      expect(lock.fence, fence)
      expect(ADMIN.call("SELECT ticket, info, mode FROM dlock_locks WHERE name = 'held'"),
             [fence.to_s, 'changed', 'shared'])
      ADMIN.force(fence)
      expect(lock.held_on_server?, false)
      raises(Dlock::LockLost, '55L01') { lock.downgrade }
    end
  end
end

row :lease_closed_under_lock do
  lease = LOCKS.lease(LONG).open
  lock = lease.lock('closed').acquire
  lease.close
  expect(ADMIN.left('closed'), 0)
  told(lock)
  raises(Dlock::LockLost, '55L01') { lock.check }
  raises(Dlock::LockLost, '55L01') { lock.release }
  lease.close
  expect(lease.lost?, false)
end

row :lease_opened_twice do
  lease = LOCKS.lease(LONG)
  opening = Array.new(2) { start { lease.open } }
  refused = opening.count do |thread|
    ended(thread) && false
  rescue Dlock::WrongState
    true
  end
  expect(refused, 1)
  raises(Dlock::WrongState, '55000') { lease.open }
  expect(ADMIN.call('SELECT count(*) FROM dlock_leases'), '1')
  lease.close
  expect(ADMIN.call('SELECT count(*) FROM dlock_leases'), '0')
end

row :lease_closed_while_opening do
  lease = LOCKS.lease(LONG)
  order('freeze')
  opening = start { lease.open }
  wait_until { lease.instance_variable_get(:@state) == 'asked for' }
  raises(Dlock::WrongState, '55000') { lease.open }
  child = fork { exit!(lease.close.nil?) }
  expect(Process.wait2(child)[1].success?)
  closing = start { lease.close }
  wait_until { closing.stop? }
  expect(opening.alive?)
  order('thaw')
  ended(closing)
  expect(ADMIN.call('SELECT count(*) FROM dlock_leases'), '0')
  ended(opening)
  lease.synchronize { expect(ADMIN.call('SELECT count(*) FROM dlock_leases'), '1') }
end

row :connections do
  LOCKS.lease(LONG).synchronize do |lease|
    many = Array.new(1000) { |n| lease.lock("many/#{n}") } + Array.new(10) { |n| LOCKS.lock("own/#{n}", ttl: LONG) }
    many.each(&:acquire)
    wait_until { ADMIN.connections <= 4 }
    many.each(&:release)
    wait_until { ADMIN.connections <= 4 }
    expect(ADMIN.call('SELECT count(*) FROM dlock_locks'), '0')
  end
end

row :connections_waiting do
  connected(ADMIN.dsn) do |holder|
    holder.exec("SELECT count(dlock_acquire('many/' || n)) FROM generate_series(0, 19) AS n")
    LOCKS.lease(LONG).synchronize do |lease|
      many = (0..9).map { |n| lease.lock("many/#{n}") } + (10..19).map { |n| LOCKS.lock("many/#{n}", ttl: LONG) }
      waiting = many.map { |lock| start { lock.acquire } }
      ADMIN.until('SELECT count(*) = 20 FROM dlock_locks WHERE NOT granted')
      expect(ADMIN.connections <= 22)
      holder.exec('SELECT dlock_release_all()')
      waiting.each { |thread| ended(thread) }
      wait_until { ADMIN.connections <= 4 }
      many.each(&:release)
    end
  end
end

row :lease_same_owner do
  fence = connected { |db| db.exec("SELECT dlock_ttl_acquire('lease', '1 h', owner => 'job/1')").getvalue(0, 0) }
  LOCKS.lock('lease', ttl: 2 * LONG, owner: 'job/1', timeout: 0).synchronize do |lock|
    expect(lock.fence.to_s, fence)
    expect(lock.deadline < Dlock.now + LONG)
    raises(Dlock::LockTimeout) { LOCKS.lock('lease', ttl: LONG, owner: 'job/2', timeout: 0).acquire }
  end
  expect(ADMIN.left('lease'), 0)
end

row :guard_commits do
  LOCKS.lock('lease', ttl: LONG).synchronize do |lock|
    connected do |db|
      db.transaction do
        lock.guard(db)
        db.exec('INSERT INTO data VALUES (1)')
      end
    end
  end
  expect(ADMIN.call('SELECT count(*) FROM data WHERE n = 1'), '1')
end

row :guard_refuses do
  raises(Dlock::LockLost) do
    LOCKS.lock('lease', ttl: LONG).synchronize do |lock|
      ADMIN.force(lock.fence)
      raises(Dlock::LockLost, '55L01') do
        connected do |db|
          db.transaction do
            lock.guard(db)
            db.exec('INSERT INTO data VALUES (2)')
          end
        end
      end
    end
  end
  expect(ADMIN.call('SELECT count(*) FROM data WHERE n = 2'), '0')
end

def during(tickets)
  yield tickets
ensure
  tickets.close
end

def event(tickets, timeout = TIMEOUT)
  tickets.next(timeout).to_a.first(3)
end

row :enqueue_free do
  during(LOCKS.tickets) do |tickets|
    ticket = tickets.enqueue('queue')
    expect(event(tickets), ['granted', 'queue', ticket])
    another = tickets.enqueue('another')
    expect(event(tickets), ['granted', 'another', another])
    expect(tickets.next(0), nil)
    tickets.release(ticket)
    expect([ADMIN.free?('queue'), ADMIN.free?('another')], [true, false])

    # while another thread waits
    coming = start { event(tickets) }
    wait_until { coming.status == 'sleep' }
    third = tickets.enqueue('third')
    expect(ended(coming), ['granted', 'third', third])
  end
end

row :enqueue_waits do
  during(LOCKS.tickets) do |tickets|
    ticket = nil
    ADMIN.holds('queue') do
      ticket = tickets.enqueue('queue')
      expect(tickets.next(0), nil)
    end
    expect(event(tickets), ['granted', 'queue', ticket])
    # not even after a query that makes up for lost notifications
    tickets.instance_variable_set(:@round, Dlock.now)
    expect(tickets.next(0), nil)
  end
end

row :enqueue_thousands do
  count = 2000
  connected(ADMIN.dsn) do |holder|
    holder.exec("SELECT count(dlock_acquire('job/' || n)) FROM generate_series(1, #{count}) AS n")
    during(LOCKS.tickets) do |tickets|
      waiting = (1..count).map { |n| tickets.enqueue("job/#{n}") }
      expect(waiting.uniq.size, count)
      expect(ADMIN.call("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dlock'"), '1')
      holder.exec('SELECT dlock_release_all()')
      granted = Array.new(count) do
        event = tickets.next(TIMEOUT)
        expect(event.event, 'granted')
        event.ticket
      end
      expect(granted.sort, waiting.sort)
      expect(tickets.next(0), nil)
    end
  end
end

row :enqueue_connection_killed do
  LOCKS.lease(LONG).synchronize do |lease|
    ours = LOCKS.tickets
    unread = LOCKS.tickets
    released = LOCKS.tickets
    kept = lease.tickets
    held = waits = nil
    ADMIN.holds('busy') do
      ours.enqueue('free')
      expect(event(ours)[0], 'granted')
      unread.enqueue('unread')
      gone = released.enqueue('released')
      held = kept.enqueue('kept')
      waits = kept.enqueue('busy')
      expect(event(kept), ['granted', 'kept', held])
      ADMIN.kill_sessions
      raises(Dlock::LockLost) { ours.next(TIMEOUT) }
      again = ours.enqueue('free')
      expect(event(ours), ['granted', 'free', again])
      raises(Dlock::LockLost) { unread.enqueue('other') }
      other = unread.enqueue('other')
      expect(event(unread), ['granted', 'other', other])
      raises(Dlock::LockLost) { released.release(gone) }
      again = released.enqueue('released')
      expect(event(released), ['granted', 'released', again])
      expect(kept.next(0), nil)
      expect(ADMIN.call('SELECT array_agg(ticket ORDER BY ticket) FROM dlock_locks WHERE lease = $1', lease.id),
             "{#{held},#{waits}}")
    end
    expect(event(kept), ['granted', 'busy', waits])
    kept.release(waits)
    kept.release(held)
    [ours, unread, released, kept].each(&:close)
  end
end

row :enqueue_released do
  during(LOCKS.tickets) do |tickets|
    ticket = tickets.enqueue('queue')
    expect(event(tickets)[0], 'granted')
    ADMIN.force(ticket)
    expect(event(tickets), ['released', 'queue', ticket])
    raises(Dlock::LockLost) { tickets.release(ticket) }
  end
end

row :election_hand_over do
  leaving = Array.new(2) { Dlock::Box.new }
  led = []
  work = lambda do |n|
    lambda do |lock|
      led << [n, lock.fence]
      expect(leaving[n].see(Dlock.now + TIMEOUT))
      n
    end
  end
  first = start { LOCKS.election('leader', ttl: LONG, info: 'node-1').run(&work.call(0)) }
  wait_until { led.any? }
  second = start { LOCKS.election('leader', ttl: LONG, info: 'node-2').run(&work.call(1)) }
  ADMIN.until_waits('leader')
  expect(ADMIN.call("SELECT info FROM dlock_locks WHERE name = 'leader' AND granted"), 'node-1')
  expect(led.size, 1)
  leaving[0].put(true)
  expect(ended(first), 0)
  wait_until { led.size == 2 }
  leaving[1].put(true)
  expect(ended(second), 1)
  expect(led[0][1] < led[1][1])
end

row :election_lost do
  led = []
  result = LOCKS.election('leader', **KEPT).run do |lock|
    led << lock.fence
    if led.size == 1
      ADMIN.force(lock.fence)
      told(lock)
    end
    led.size
  end
  expect(result, 2)
  expect(led[0] < led[1])
end

row :election_restart do
  running = nil
  LOCKS.lease(LONG, interval: 0.5).synchronize do |lease|
    lease.lock('leader').acquire
    hasty = Dlock::Locks.new(MAIN, patience: 0)
    running = start { hasty.election('leader', ttl: LONG).run { 'led' } }
    ADMIN.until_waits('leader')
    order('restart')
    ADMIN.until_renewed(lease.id)
    expect(running.alive?)
  end
  expect(ended(running), 'led')
end

row :election_outage do
  fences = []
  failed = Dlock::Box.new
  hasty = Dlock::Locks.new(MAIN, patience: 0, observer: ->(seen) { failed.put(true) if seen.what == 'failed' })
  running = start do
    hasty.election('leader', ttl: SHORT).run do |lock|
      fences << lock.fence
      told(lock) if fences.size == 1
    end
  end
  wait_until { fences.any? }
  order('freeze')
  expect(failed.see(Dlock.now + TIMEOUT)) # after the work, to acquire the lock again
  order('thaw')
  ended(running)
  expect([fences.size, fences[0] < fences[-1]], [2, true])
end

row :watch do
  during(LOCKS.watch('leader')) do |events|
    expect(event(events)[0, 2], %w[free leader])
    connected(ADMIN.dsn) do |db|
      ticket = Integer(db.exec("SELECT dlock_acquire('leader', info => 'node-1')").getvalue(0, 0))
      held = events.next(TIMEOUT)
      expect(held.to_a.first(3), ['held', 'leader', ticket])
      expect(held.details['info'], 'node-1')
      ADMIN.kill_sessions
      # over a new connection, the first event is the current holder
      expect(event(events), ['held', 'leader', ticket])
      db.exec('SELECT dlock_release_all()')
    end
    expect(event(events)[0, 2], %w[free leader])
  end
end

row :observer do
  $stderr = StringIO.new
  seen = Queue.new
  locks = Dlock::Locks.new(MAIN, observer: lambda do |observation|
    seen << [observation.what, observation.name, observation.error.class]
    exit(1)
  end)
  saw = lambda do |*wanted|
    wait_until("#{wanted} of the observer") { seen.size >= wanted.size }
    expect(Array.new(seen.size) { seen.pop }.sort_by(&:first), wanted)
  end
  [{}, { ttl: LONG }].each do |options|
    lock = locks.lock('seen', timeout: 0, **options)
    lock.synchronize { saw.call(['waited', 'seen', NilClass]) }
    saw.call(['held', 'seen', NilClass])
    ADMIN.holds('seen') { raises(Dlock::LockTimeout, '55P03') { lock.acquire } }
    saw.call(['failed', 'seen', Dlock::LockTimeout])
    raises(Dlock::LockLost, '55L01') { lock.synchronize { ADMIN.force(lock.fence) } }
    saw.call(['lost', 'seen', NilClass], ['waited', 'seen', NilClass])
    expect(ADMIN.left('seen'), 0)
  end
ensure
  $stderr = STDERR
end

row :errors do
  fails = lambda do |kind, code, sql, *values|
    connected { |db| raises(kind, code) { Dlock.translated { db.exec_params(sql, values) } } }
  end

  ADMIN.holds('busy') do
    raises(Dlock::LockTimeout, '55P03') { LOCKS.lock('busy', timeout: 0).acquire }
    waiting = start { LOCKS.lock('busy').acquire }
    ADMIN.until_waits('busy')
    ADMIN.call('SELECT pg_cancel_backend(pid) FROM dlock_locks WHERE NOT granted')
    raises(Dlock::Cancelled, '57014') { ended(waiting) }
  end
  connected do |one|
    connected do |two|
      Dlock::Lock.new(one, 'a').acquire
      Dlock::Lock.new(two, 'b').acquire
      waiting = [start { Dlock::Lock.new(one, 'b').acquire }, start { Dlock::Lock.new(two, 'a').acquire }]
      wait_until { waiting.any? { |thread| !thread.alive? } }
      victim = waiting.find { |thread| !thread.alive? }
      raises(Dlock::Deadlock, '40P01') { victim.value }
      (waiting - [victim]).each(&:kill).each { |thread| thread.join(TIMEOUT) }
    end
  end
  fails.call(Dlock::LockLost, '55L01', "SELECT dlock_guard('gone', 1)")
  raises(Dlock::NotAllowed, '42501') { LOCKS.lock('reserved/1').acquire }
  raises(Dlock::NotPrimary, '25006') { Dlock::Locks.new(dsn('STANDBY'), patience: 0).lock('standby').acquire }
  fails.call(Dlock::StaleVersion, '40001', "SELECT dlock_version_bump('doc', 7)")
  raises(Dlock::BadArgument, '22023') { LOCKS.lock('slots', slots: 0).acquire }
  raises(Dlock::BadArgument, '22004') { LOCKS.lock(nil).acquire }
  LOCKS.lock('slots', slots: 2).synchronize do
    raises(Dlock::WrongState, '55000') { LOCKS.lock('slots', slots: 3).acquire }
  end
  { '53200' => Dlock::NoRoom, '53400' => Dlock::NoRoom, '58030' => Dlock::QuorumLate,
    '22012' => Dlock::Error }.each do |code, kind|
    error = fails.call(kind, code, 'SELECT raise($1, $2)', code, 'do this')
    expect([error.hint, error.message], ['do this', 'raised'])
  end
  raises(Dlock::ConnectionLost) { Dlock::Locks.new('host=127.0.0.1 port=1', patience: 0).lock('x').acquire }
end

row :sharding do
  names = Array.new(20) { |n| "shard/#{n}" }
  both = Dlock::Locks.new(MAIN, OTHER, keys: %w[main other])
  turned = Dlock::Locks.new(OTHER, MAIN, keys: %w[other main])
  third = Dlock::Locks.new(MAIN, OTHER, 'host=nowhere', keys: %w[main other third])
  other = Admin.new('OTHER')
  held = names.map { |name| both.lock(name).acquire }
  here, there = [ADMIN, other].map { |server| names.select { |name| server.left(name) == 1 } }
  expect([here.any?, there.any?, here & there, (here | there).sort], [true, true, [], names.sort])
  names.each do |name|
    raises(Dlock::LockTimeout) { turned.lock(name, timeout: 0).acquire }
    expect(['third', both.key(name)].include?(third.key(name)))
  end
  expect(names.any? { |name| third.key(name) == 'third' })
  # by the same rule as in all clients
  expect(both.key('shard/0'), %w[main other].max_by { |key| Digest::SHA256.hexdigest("#{key}\0shard/0") })
  raises(Dlock::BadArgument, '22023') { both.lease(LONG, near: here[0]).lock(there[0]) }
  held.each(&:release)
end

#
# Faults
#

row :session_connection_killed do
  raises(Dlock::LockLost) do
    LOCKS.lock('killed').synchronize do |lock|
      ADMIN.kill_sessions
      ADMIN.holds('killed') { |fence| expect(fence > lock.fence) }
      wait_until { lock.lost? }
    end
  end
  raises(Dlock::LockLost) { LOCKS.lock('killed').synchronize { ADMIN.kill_sessions } }
end

row :session_restart do
  fence = nil
  raises(Dlock::LockLost) do
    LOCKS.lock('restart').synchronize do |lock|
      fence = lock.fence
      order('restart')
    end
  end
  LOCKS.lock('restart').synchronize { |again| expect(again.fence > fence) }
end

row :lease_connection_killed do
  LOCKS.lock('lease', **KEPT).synchronize do |lock|
    fence = lock.fence
    2.times do
      ADMIN.heartbeat
      ADMIN.kill_sessions
      ADMIN.until_renewed(fence)
    end
    expect([lock.lost?, lock.fence], [false, fence])
    expect(ADMIN.call("SELECT dlock_check('lease', $1)", fence), 't')
  end
end

row :lease_acquire_killed do
  lock = LOCKS.lock('lease', ttl: LONG, owner: 'job/1')
  waiting = nil
  ADMIN.holds('lease') do
    waiting = start { lock.acquire }
    ADMIN.until_waits('lease')
    pid = ADMIN.call('SELECT pid FROM dlock_locks WHERE NOT granted')
    ADMIN.call('SELECT pg_terminate_backend($1, 60000)', pid)
    ADMIN.until_waits('lease')
  end
  ended(waiting)
  expect(ADMIN.call("SELECT array_agg(ticket), min(owner) FROM dlock_locks WHERE name = 'lease'"),
         ["{#{lock.fence}}", 'job/1'])
  lock.release
end

row :lease_backend_stopped do
  LOCKS.lock('lease', **KEPT).synchronize do |lock|
    pid = ADMIN.heartbeat
    order("stop #{pid}")
    ADMIN.until_renewed(lock.fence, 2)
    expect(lock.lost?, false)
    order("continue #{pid}")
    expect(ADMIN.free?('lease'), false)
  end
  expect(ADMIN.left('lease'), 0)
end

row :lease_server_stopped do
  raises(Dlock::LockLost, '55L01') do
    LOCKS.lock('lease', ttl: SHORT).synchronize do |lock|
      ADMIN.heartbeat
      order('freeze')
      told(lock)
      raises(Dlock::LockLost) { lock.check }
      order('thaw')
      expect([ADMIN.call('SELECT true'), lock.lost?], ['t', true])
    end
  end
  ADMIN.until_free('lease')
end

row :lease_client_stopped do
  raises(Dlock::LockLost) do
    LOCKS.lock('lease', ttl: SHORT).synchronize do |lock|
      called = Dlock::Box.new
      lock.on_lost { called.put(true) }
      order("suspend #{Process.pid} SELECT dlock_try_xact_acquire('lease') IS NOT NULL")
      expect(lock.lost?)
      expect(called.see(Dlock.now + TIMEOUT))
      expect([ADMIN.call('SELECT true'), lock.lost?], ['t', true])
      ADMIN.holds('lease') { |fence| expect(fence > lock.fence) }
    end
  end
end

row :lease_restart do
  LOCKS.lock('lease', **KEPT).synchronize do |lock|
    fence = lock.fence
    order('restart')
    ADMIN.until_renewed(fence, 2)
    expect([lock.lost?, lock.fence], [false, fence])
    expect(ADMIN.call("SELECT dlock_check('lease', $1)", fence), 't')
  end
  expect(ADMIN.left('lease'), 0)
end

row :lease_worker_killed do
  successor = LOCKS.lock('lease', ttl: LONG)
  waiting = fence = nil
  LOCKS.lock('lease', **KEPT).synchronize do |lock|
    fence = lock.fence
    waiting = start { successor.acquire }
    ADMIN.until_waits('lease')
    expect(ADMIN.call('SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity ' \
                      "WHERE backend_type = 'dlock worker'"), 't')
    ADMIN.until_renewed(fence, 2)
    expect(lock.lost?, false)
  end
  expect(ended(waiting).fence > fence)
  successor.release
end

row :lease_forced_release do
  raises(Dlock::LockLost) do
    LOCKS.lock('lease', **KEPT).synchronize do |lock|
      ADMIN.force(lock.fence)
      told(lock)
      expect([lock.lost?, lock.held?], [true, false])
    end
  end
end

row :lease_forced_one_of_many do
  LOCKS.lease(LONG, interval: 0.5).synchronize do |lease|
    lease.lock('kept').synchronize do |kept|
      raises(Dlock::LockLost) do
        lease.lock('forced').synchronize do |forced|
          ADMIN.force(forced.fence)
          told(forced)
          expect([kept.lost?, lease.lost?], [false, false])
        end
      end
    end
  end
  expect(ADMIN.left('kept'), 0)
end

row :lease_quorum_late do
  late.lock('lease', **KEPT).synchronize do |lock|
    ADMIN.heartbeat
    ADMIN.until_renewed(lock.fence)
    ADMIN.call('UPDATE late.quorum SET late = true')
    called = ADMIN.call('SELECT last_value FROM late.calls')
    # the first call may have been sent before the update
    ADMIN.until('SELECT last_value > $1 + 1 FROM late.calls', called)
    deadline = lock.deadline
    ADMIN.until('SELECT last_value > $1 + 3 FROM late.calls', called)
    expect([lock.deadline, lock.lost?], [deadline, false])
    ADMIN.call('UPDATE late.quorum SET late = false')
    wait_until { lock.deadline > deadline }
    expect(lock.lost?, false)
  end
end

row :lease_opened_late do
  raises(Dlock::LockLost) { late.lease(1).synchronize(&:check) }
  ADMIN.until('SELECT count(*) = 0 FROM dlock_leases')
  wait_until { ADMIN.connections.zero? }
end

row :lease_callback do
  called = Queue.new
  lock = LOCKS.lock('lease', **KEPT)
  raises(Dlock::LockLost) do
    lock.synchronize do
      $stderr = StringIO.new
      lock.on_lost do |lost|
        called << [:bad, lost]
        exit(1)
      end
      lock.on_lost { |lost| called << [:good, lost] }
      ADMIN.force(lock.fence)
      told(lock)
      wait_until { called.size == 2 }
      lock.on_lost { |lost| called << [:late, lost] }
      wait_until { called.size == 3 }
    ensure
      $stderr = STDERR
    end
  end
  got = Array.new(called.size) { called.pop }
  expect(got.map(&:first).sort, %i[bad good late])
  expect(got.all? { |_, lost| lost.equal?(lock) })
end

row :lease_callback_hangs do
  may_return = Dlock::Box.new
  raises(Dlock::LockLost) do
    LOCKS.lease(SHORT, interval: 0.2).synchronize do |lease|
      called = Dlock::Box.new
      lock = lease.lock('lease').acquire
      lock.on_lost do
        called.put(true)
        may_return.see(Dlock.now + 2 * TIMEOUT)
      end
      ADMIN.force(lock.fence)
      expect(called.see(Dlock.now + TIMEOUT))
      order('freeze')
      told(lease)
      may_return.put(true)
      order('thaw')
    end
  end
end

row :acquire_client_timeout do
  [{}, { ttl: LONG }].each do |options|
    ADMIN.holds('busy') do
      raises_timeout { LOCKS.lock('busy', **options).acquire }
      expect(ADMIN.left('busy'), 1)
      raises_timeout { LOCKS.lock('busy', **options).synchronize { raise 'let in' } }
      expect(ADMIN.left('busy'), 1)
    end
    ADMIN.until_free('busy')
  end
end

def raises_timeout(&block)
  Timeout.timeout(0.1, &block)
rescue Timeout::Error
  nil
else
  raise 'no Timeout::Error'
end

row :acquire_cancelled do
  [->(thread) { thread.raise(Boom) }, :kill.to_proc].each do |cancel|
    [{}, { ttl: LONG }].each do |options|
      ADMIN.holds('busy') do
        waiting = start { LOCKS.lock('busy', **options).acquire }
        ADMIN.until_waits('busy')
        cancel.call(waiting)
        cancelled(waiting)
        expect(ADMIN.left('busy'), 1)
      end
      ADMIN.until_free('busy')
    end

    # already granted when it is canceled
    renewals_wait do
      waiting = start { late.lock('busy', ttl: LONG).acquire }
      until_call_waits
      cancel.call(waiting)
      cancelled(waiting)
      expect(ADMIN.left('busy'), 0)
    end
  end
end

def cancelled(thread)
  expect(ended(thread), nil)
rescue Boom
  nil
end

# Exceptions of signal handlers, during the wait, and while the client undoes the request. The signals differ, because
# Ruby runs a handler only once for two signals in quick succession.
def alarms(twice)
  signals = twice ? %w[USR1 USR2] : %w[USR1]
  came = []
  over = false
  before = signals.map do |signal|
    trap(signal) do
      came << signal
      raise Boom, 'of a signal' unless over
    end
  end
  sender = fork do
    sleep(0.2)
    signals.each do |signal|
      Process.kill(signal, Process.ppid)
      sleep(0.002)
    end
    exit!(0)
  end
  begin
    yield
    raise 'not broken off'
  rescue Boom
    over = true
  end
  Process.wait(sender)
  wait_until { came.size == signals.size }
ensure
  signals.zip(before) { |signal, handler| trap(signal, handler) }
end

row :acquire_broken_off do
  LOCKS.lease(LONG).synchronize do |lease|
    kept = lease.lock('kept').acquire
    [false, true].each do |twice|
      connected do |db|
        [LOCKS.lock('busy'), LOCKS.lock('busy', ttl: LONG), lease.lock('busy'),
         Dlock::Lock.new(db, 'busy')].each do |lock|
          ADMIN.holds('busy') do
            alarms(twice) { lock.acquire }
            ADMIN.until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy'")
          end
          ADMIN.until_free('busy')
          db.exec('SELECT 1') unless db.finished?
          # as soon as the request is undone, the lock can be used again
          wait_until { lock.instance_variable_get(:@state) == 'not held' }
        end
      end
    end
    kept.check
    kept.release
  end

  # canceled at each moment, an acquire leaves no ticket
  ADMIN.holds('busy') do
    [{}, { ttl: LONG }].each do |options|
      (0..20).each do |n|
        waiting = start { LOCKS.lock('busy', **options).acquire }
        sleep(n / 1000.0)
        waiting.raise(Boom)
        cancelled(waiting)
      end
    end
    ADMIN.until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy'")
  end
  (0..40).each do |n|
    waiting = start { LOCKS.lock('free', ttl: LONG).synchronize { Thread.stop } }
    sleep(n / 2000.0)
    waiting.raise(Boom)
    cancelled(waiting)
  end
  ADMIN.until_free('free')
end

row :waiter_killed do
  ADMIN.holds('busy') do
    waiter = spawn(RbConfig.ruby, '-I', $LOAD_PATH.first, '-e',
                   "require 'dlock'; Dlock::Locks.new(ARGV[0]).lock('busy', ttl: #{LONG}).acquire", MAIN)
    ADMIN.until_waits('busy')
    Process.kill('KILL', waiter)
    Process.wait(waiter)
    ADMIN.until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy'")
  end
end

row :server_silent do
  hasty = Dlock::Locks.new(MAIN, patience: 1)
  session = LOCKS.lock('mine').acquire
  ADMIN.holds('busy') do
    waiting = start { LOCKS.lock('busy', ttl: LONG).acquire }
    ADMIN.until_waits('busy')
    order('freeze')
    asked = [{}, { ttl: LONG }].map { |options| start { hasty.lock('x', timeout: 0.05, **options).acquire } }
    asked << start { hasty.lease(LONG).open }
    released = start { session.release }
    connecting = start { raises_timeout { LOCKS.lock('y', ttl: LONG).acquire } }
    waiting.raise(Boom)
    asked.each { |thread| raises(Dlock::ConnectionLost) { ended(thread) } }
    raises(Dlock::LockLost) { ended(released) }
    raises(Boom) { ended(waiting) }
    ended(connecting)
    order('thaw')
  end
  ADMIN.until('SELECT count(*) = 0 FROM dlock_locks')
end

row :release_silent do
  LOCKS.lease(LONG, interval: 0.5).synchronize do |lease|
    held = [lease.lock('silent'), LOCKS.lock('own', **KEPT)].each(&:acquire)
    pids = ADMIN.call("SELECT string_agg(pid::text, ' ') FROM pg_stat_activity WHERE application_name = 'dlock'").split
    pids.each { |pid| order("stop #{pid}") }
    held.each do |lock|
      lock.release
      expect(ADMIN.left(lock.name), 0)
    end
    expect(lease.lost?, false)
    pids.each { |pid| order("continue #{pid}") }
  end
end

row :release_owed do
  Dlock::Locks.new(MAIN, patience: 0.1).lease(LONG, interval: 0.5).synchronize do |lease|
    lock = lease.lock('owed').acquire
    ADMIN.kill_sessions
    order('freeze')
    raises(Dlock::ConnectionLost) { lock.release }
    order('thaw')
    ADMIN.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'owed'")
    expect(lease.lost?, false)
    lease.lock('owed', timeout: 0).synchronize { nil }
  end
end

row :acquire_owed do
  Dlock::Locks.new(MAIN, patience: 0.1).lease(LONG, interval: 0.5).synchronize do |lease|
    ADMIN.holds('owed') do
      waiting = start { lease.lock('owed').acquire }
      ADMIN.until_waits('owed')
      order('freeze')
      waiting.raise(Boom)
      cancelled(waiting)
      wait_until { lease.heart.owed.any? }
      order('thaw')
    end
    ADMIN.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'owed'")
    wait_until { lease.heart.owed.empty? }
    expect(lease.lost?, false)
    lease.lock('owed', timeout: 0).synchronize { nil }
  end
end

row :release_late do
  first, second = late_jobs
  unanswered = -> { raises(Dlock::ConnectionLost) { first.release } }
  # the release goes on when its caller has left
  interrupted = lambda do
    releasing = start { first.release }
    until_call_waits
    releasing.raise(Boom)
    cancelled(releasing)
  end
  [unanswered, interrupted].each do |release|
    fence = first.acquire.fence
    abandoned('dlock_release_ticket') do |wait_no_more|
      release.call
      wait_no_more.call
      expect(second.acquire.fence > fence)
    end
    expect(second.held_on_server?)
    second.release
  end
end

row :release_repeated do
  late.lease(LONG).synchronize do |lease|
    during(lease.tickets) do |tickets|
      ticket = tickets.enqueue('queue')
      abandoned('dlock_release_ticket') do |wait_no_more|
        releasing = start { tickets.release(ticket) }
        until_call_waits
        ADMIN.call('SELECT dlock_release_ticket($1)', ticket)
        wait_no_more.call
        releasing.value
      end
    end
  end
end

row :release_refused do
  connected do |db|
    lock = Dlock::Lock.new(db, 'plain').acquire
    fence = lock.fence
    db.exec('BEGIN')
    raises_division(db)
    raises(Dlock::Error, '25P02') { lock.release }
    lock.check
    expect([lock.fence, ADMIN.free?('plain')], [fence, false])
    db.exec('ROLLBACK')
    lock.release
    expect(ADMIN.free?('plain'))
  end
end

row :undo_late do
  first, second = late_jobs
  cancel = lambda do |waiting|
    waiting.raise(Boom)
    cancelled(waiting)
  end
  abandoned('dlock_locks') do |wait_no_more|
    ADMIN.holds('late') do
      waiting = start { first.acquire }
      ADMIN.until_waits('late')
      cancel.call(waiting)
      wait_no_more.call
    end
    second.acquire
  end
  expect(second.held_on_server?)
  second.release

  # already granted when it is canceled
  abandoned('dlock_release_ticket') do |wait_no_more|
    renewals_wait do
      waiting = start { first.acquire }
      until_call_waits
      cancel.call(waiting)
      wait_no_more.call
    end
    second.acquire
  end
  expect(second.held_on_server?)
  second.release
end

row :renew_late do
  late(patience: 0.1).lock('late', ttl: LONG).synchronize do |lock|
    abandoned('dlock_renew') do |wait_no_more|
      raises(Dlock::ConnectionLost) { lock.renew(LONG / 2) }
      wait_no_more.call
      lock.renew(LONG)
      expect(lock.deadline <= Dlock.now + LONG / 2)
    end
    lock.check
  end
end

row :renew_lost do
  [true, false].each do |after|
    first, second = late_jobs
    fence = first.acquire.fence
    abandoned('dlock_renew') do |wait_no_more|
      raises(Dlock::ConnectionLost) { first.renew(SHORT) }
      order('freeze')
      told(first) if after
      begin
        first.release
        raise 'released'
      rescue Dlock::LockLost, Dlock::ConnectionLost
        order('thaw')
      end
      wait_no_more.call
      expect(second.acquire.fence > fence)
    end
    expect(second.held_on_server?)
    second.release
  end
end

# Like the gem connection_pool: a pool of one connection
class Pool
  attr_reader :idle

  def initialize
    @idle = Queue.new
    @idle << PG.connect(MAIN)
  end

  def with
    db = @idle.pop
    result = yield db
    Dlock.reset(db) unless db.finished?
    result
  ensure
    @idle << db
  end
end

row :pool_returned do
  pool = Pool.new
  pid = pool.with do |db|
    Dlock::Lock.new(db, 'pool').acquire
    db.exec('BEGIN')
    raises_division(db)
    db.backend_pid
  end
  expect(ADMIN.free?('pool'))
  pool.with do |db|
    expect([db.backend_pid, db.exec("SELECT dlock_is_held('pool')").getvalue(0, 0)], [pid, 'f'])
  end

  # Locks over this pool: a lock in session scope keeps the connection
  locks = Dlock::Locks.new(pool)
  locks.lock('pool').synchronize do
    expect(ADMIN.call("SELECT pid FROM dlock_locks WHERE name = 'pool'"), pid.to_s)
    expect(pool.idle.empty?)
  end
  expect(ADMIN.free?('pool'))
  expect(pool.with(&:backend_pid), pid)
  ADMIN.holds('pool') do
    raises_timeout { locks.lock('pool').acquire }
    expect(ADMIN.left('pool'), 1)
  end
  # the connection's state was unknown, so this is a new connection
  pool.with { |db| expect(db.exec("SELECT dlock_is_held('pool')").getvalue(0, 0), 'f') }

  # if the server does not answer, a connection in an unknown state stays out of its pool for some seconds only
  pool = Pool.new
  silent = Dlock::Locks.new(pool, patience: 0)
  ADMIN.holds('pool') do
    waiting = start { silent.lock('pool').acquire }
    ADMIN.until_waits('pool')
    order('freeze')
    waiting.raise(Boom)
    cancelled(waiting)
    wait_until { !pool.idle.empty? }
    order('thaw')
  end

  # a function that gives a new password for each connection
  Dlock::Locks.new(-> { MAIN }).lock('pool', ttl: LONG).synchronize { expect(ADMIN.left('pool'), 1) }
  Dlock::Locks.new(-> { PG.connect(MAIN) }).lock('pool').synchronize { expect(ADMIN.left('pool'), 1) }
  raises(Dlock::BadArgument, '22023') { Dlock::Locks.new(7) }
end

def raises_division(db)
  db.exec('SELECT 1 / 0')
rescue PG::DivisionByZero
  nil
end

row :clock_stepped do
  day = 86_400
  LOCKS.lock('lease', **KEPT).synchronize do |lock|
    before = Time.now
    deadline = lock.deadline
    [day, -day].each do |seconds|
      order("clock #{seconds}")
      expect((Time.now - before - seconds).abs < day / 2)
      expect([lock.lost?, lock.deadline < deadline + LONG], [false, true])
      ADMIN.until_renewed(lock.fence)
    end
    wait_until { lock.deadline > deadline }
    expect(lock.deadline < Dlock.now + LONG)
  end
  raises(Dlock::LockLost) do
    LOCKS.lock('lease', ttl: SHORT).synchronize do |lock|
      ADMIN.heartbeat
      order('freeze')
      told(lock)
      order('thaw')
    end
  end
  order('clock 0')
end

row :lease_promotion do
  hosts, ports = %w[OTHER STANDBY].map { |server| ENV.fetch("DLOCK_#{server}").split(':') }.transpose
  pair = Dlock::Locks.new("host=#{hosts.join(',')} port=#{ports.join(',')} dbname=postgres user=app")
  promoted = Admin.new('STANDBY')
  fence = nil
  pair.lock('lease', **KEPT).synchronize do |lock|
    fence = lock.fence
    order('promote')
    promoted.until('SELECT count(*) = 1 FROM dlock_leases WHERE lease = $1', fence)
    promoted.until_renewed(fence, 2)
    expect([lock.lost?, lock.fence], [false, fence])
    expect(promoted.call("SELECT dlock_check('lease', $1)", fence), 't')
  end
  expect(promoted.left('lease'), 0)
  pair.lock('lease', ttl: LONG).synchronize { |lock| expect(lock.fence > fence) }
end

failed = false
names = ARGV.empty? ? ROWS.keys : ARGV.map(&:to_sym)
names.each do |name|
  began = Dlock.now
  begin
    ROWS.fetch(name).call
    ADMIN.until('SELECT count(*) = 0 FROM dlock_locks')
    # the next row must see only its own connections
    ADMIN.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name IN ('dlock', 'dlock heartbeat')")
    puts "ok #{name}"
  rescue Exception => e # rubocop:disable Lint/RescueException
    failed = true
    puts e.full_message(highlight: false, order: :top).gsub(/^/, '# ')
    puts "not ok #{name}"
    order('thaw')
    order('clock 0')
    ADMIN.call('SELECT count(dlock_force_release(ticket)) FROM dlock_locks')
  end
  puts format('# %<name>s: %<seconds>.1f s', name: name, seconds: Dlock.now - began)
  $stdout.flush
end
# do not wait for threads that a failed row has left
exit!(failed ? 1 : 0)
