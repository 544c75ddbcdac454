# Locks of dlock in an application that uses ActiveRecord.
#
# Each test does what an application would, as docs/ruby.md advises; and
# each trap that the page warns of is sprung once, so that the advice can go if
# the trap does.
#
# What would break it: a result, an error or an argument that the library takes
# for something else; a lock that stays after an exception, or in the pool; an
# answer from the query cache where nobody has asked the server.
#
# libpq's environment variables say where the server is;
# test/t/client_stacks.pl sets them, and reads what is printed here.

require 'active_record'
require 'timeout'

PATIENCE = Integer(ENV.fetch('PG_TEST_TIMEOUT_DEFAULT', '180'))

class Account < ActiveRecord::Base
  self.table_name = 'account'
end

# The application's pool
ActiveRecord::Base.establish_connection(adapter: 'postgresql', username: 'app', pool: 5)

# The one with which the tests look at it
ADMIN = PG.connect

def ask(sql, *arguments)
  ADMIN.exec_params(sql, arguments).getvalue(0, 0)
end

def expect(what, got, wanted)
  raise "#{what}: got #{got.inspect}, wanted #{wanted.inspect}" unless got == wanted
end

def free?(name)
  ask('SELECT dlock_try_xact_acquire($1) IS NOT NULL', name) == 't'
end

def wait_until(sql, *arguments)
  sleep(0.01) until ask(sql, *arguments) == 't'
end

# Another session holds the lock.
def hold(name)
  holder = PG.connect
  holder.exec_params('SELECT dlock_acquire($1)', [name])
  yield holder
ensure
  holder.close
end

# What it raises, whose connection must still be usable
def failure
  yield
  raise 'it did not fail'
rescue ActiveRecord::ActiveRecordError => e
  connection.select_value('SELECT 1')
  e
end

# What docs/ruby.md has
def sqlstate(error)
  cause = error.cause
  cause.result&.error_field(PG::Result::PG_DIAG_SQLSTATE) if cause.is_a?(PG::Error)
end

def connection
  ActiveRecord::Base.connection
end

# ask_for('dlock_acquire(?)', 'report')
def ask_for(call, *arguments)
  ActiveRecord::Base.uncached do
    connection.select_value(ActiveRecord::Base.sanitize_sql(["SELECT #{call}", *arguments]))
  end
end

def with_lock(name)
  fence = ask_for('dlock_acquire(?)', name)
  begin
    yield fence
  ensure
    raise "lock #{name} was lost" unless ask_for('dlock_release_ticket(?)', fence)
  end
end

# In a connection of its own, which then goes back to the pool
#
# Not by with_connection, which keeps it from Rails 7.2 on, if it is asked for by
# "connection".
def start
  Thread.new do
    yield
  ensure
    ActiveRecord::Base.connection_pool.release_connection
  end
end

def elsewhere(&work)
  start(&work).value
end

TESTS = {
  'a transaction that commits, is rolled back or raises frees the lock' => lambda do
    deposit = lambda do |amount, &work|
      Account.transaction do
        ask_for('dlock_xact_acquire(?)', 'account/1')
        account = Account.find(1)
        expect('is free', free?('account/1'), false)
        work&.call
        account.update!(balance: account.balance + amount)
      end
    end
    deposit.call(10)
    expect('is free', free?('account/1'), true)
    begin
      deposit.call(20) { raise KeyError }
    rescue KeyError
      expect('is free', free?('account/1'), true)
    end
    deposit.call(30) { raise ActiveRecord::Rollback }
    expect('is free', free?('account/1'), true)
    expect('balance', Account.find(1).balance, 10)
  end,

  'a savepoint confines a failure' => lambda do
    hold('busy') do
      Account.transaction do
        ask_for('dlock_xact_acquire(?)', 'outer')
        error = failure do
          Account.transaction(requires_new: true) do
            ask_for('dlock_xact_acquire(?)', 'inner')
            ask_for('dlock_xact_acquire(?, timeout => ?)', 'busy', '10 ms')
          end
        end
        expect('class', error.class, ActiveRecord::LockWaitTimeout)
        expect('inner is free', free?('inner'), true)
        expect('outer is free', free?('outer'), false)
      end
    end
  end,

  'whoever holds it in a session, and raises, frees it' => lambda do
    begin
      with_lock('report') do |fence|
        expect('fence', fence, Integer(ask("SELECT dlock_fence('report')")))
        raise KeyError
      end
    rescue KeyError
      expect('is free', free?('report'), true)
    end
    lost = begin
      with_lock('report') { |fence| ask('SELECT dlock_force_release($1)', fence) }
    rescue RuntimeError => e
      e.message
    end
    expect('error', lost, 'lock report was lost')
  end,

  'a timeout is LockWaitTimeout, try is nil' => lambda do
    hold('busy') do
      error = failure { ask_for('dlock_acquire(?, timeout => ?)', 'busy', '10 ms') }
      expect('class', error.class, ActiveRecord::LockWaitTimeout)
      expect('code', sqlstate(error), '55P03')
      expect('try', ask_for('dlock_try_acquire(?)', 'busy'), nil)
    end
  end,

  'errors are told apart by their class, or the code of their cause' => lambda do
    {
      'dlock_guard(\'report\', 1)' =>
        ['55L01', ActiveRecord::StatementInvalid, PG::ObjectNotInPrerequisiteState],
      'dlock_acquire(\'reserved/1\')' =>
        ['42501', ActiveRecord::StatementInvalid, PG::InsufficientPrivilege],
      'dlock_version_bump(\'doc\', 7)' =>
        ['40001', ActiveRecord::SerializationFailure, PG::TRSerializationFailure]
    }.each do |call, (code, of, by)|
      error = failure { ask_for(call) }
      expect(call, [sqlstate(error), error.class, error.cause.class], [code, of, by])
    end

    error = failure do
      Account.transaction do
        connection.execute('SET TRANSACTION READ ONLY')
        ask_for('dlock_version_bump(\'doc\', 0)')
      end
    end
    expect('read only', [sqlstate(error), error.class, error.cause.class],
           ['25006', ActiveRecord::StatementInvalid, PG::ReadOnlySqlTransaction])

    other = nil
    error = failure do
      Account.transaction do
        ask_for('dlock_xact_acquire(?)', 'a')
        other = start do
          Account.transaction do
            ask_for('dlock_xact_acquire(?)', 'b')
            ask_for('dlock_xact_acquire(?)', 'a')
          end
        end
        wait_until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'a' AND NOT granted")
        # the youngest ticket is the victim
        ask_for('dlock_xact_acquire(?)', 'b')
      end
    end
    expect('deadlock', [sqlstate(error), error.class], ['40P01', ActiveRecord::Deadlocked])
    other.value
  end,

  'a Duration in a statement is refused' => lambda do
    refused = begin
      ask_for('dlock_acquire(?, timeout => ?)', 'report', 30.seconds)
    rescue TypeError
      # by the library, in Rails 7.2
      '42883'
    rescue ActiveRecord::StatementInvalid => e
      sqlstate(e)
    end
    expect('code', refused, '42883')
    # what is advised
    { "?::interval = '30 s'" => 30.seconds.iso8601,
      "make_interval(secs => ?) = '500 ms'" => 0.5.seconds.to_f }.each do |comparison, value|
      expect(comparison, ask_for(comparison, value), true)
    end
  end,

  'the query cache answers a repeated question, and locks nothing' => lambda do
    depth = -> { ask("SELECT coalesce(sum(depth), 0) FROM dlock_locks WHERE name = 'report'") }
    acquire = "SELECT dlock_try_acquire('report')"
    Account.cache do
      fence = connection.select_value(acquire)
      # the trap
      expect('answer', connection.select_value(acquire), fence)
      expect('depth', depth.call, '1')
      connection.select_value("SELECT dlock_release('report')")
      expect('answer', connection.select_value(acquire), fence)
      expect('is free', free?('report'), true)
      # what is advised: ask_for() does it
      ask_for('dlock_try_acquire(?)', 'report')
      ask_for('dlock_try_acquire(?)', 'report')
      expect('depth', depth.call, '2')
      ask_for('dlock_release_all()')
      # and these are never answered from memory
      connection.execute(acquire)
      connection.raw_connection.exec(acquire)
      expect('depth', depth.call, '2')
      ask_for('dlock_release_all()')
    end
  end,

  'a lease, each step over another connection' => lambda do
    acquire = "dlock_ttl_acquire(?, '1h', owner => ?)"
    fence = ask_for(acquire, 'report', 'job/17')
    elsewhere do
      expect('asked again', ask_for(acquire, 'report', 'job/17'), fence)
      expect('kept', ask_for('dlock_renew(?)', fence), 1)
    end
    Account.transaction { ask_for('dlock_guard(?, ?)', 'report', fence) }
    elsewhere { expect('released', ask_for('dlock_release_ticket(?)', fence), true) }
    expect('renewed', ask_for('dlock_renew(?)', fence), nil)
  end,

  'a place in the queue, and what is announced' => lambda do
    hold('report') do |holder|
      ticket = ask_for('dlock_enqueue(?)', 'report')
      granted = -> { ask_for("dlock_wait(?, '0')", ticket) }
      expect('granted', granted.call, false)
      holder.exec("SELECT dlock_release('report')")
      connection.raw_connection.wait_for_notify(PATIENCE) until granted.call
      expect('released', ask_for('dlock_release_ticket(?)', ticket), true)
    end
  end,

  'the pool gives a lock to a stranger' => lambda do
    pid = elsewhere do
      ask_for('dlock_acquire(?)', 'report')
      ask_for('pg_backend_pid()')
    end
    expect('is free', free?('report'), false)
    elsewhere do
      expect('session', ask_for('pg_backend_pid()'), pid)
      expect('held', ask_for('dlock_is_held(?)', 'report'), true)
      connection.reset!                   # DISCARD ALL, which the pool does not send
    end
    expect('is free', free?('report'), true)
  end,

  'a callback of checkin releases what was forgotten' => lambda do
    ActiveRecord::ConnectionAdapters::PostgreSQLAdapter.set_callback(:checkin, :before) do |adapter|
      adapter.execute('SELECT dlock_release_all()')
    end
    pid = elsewhere do
      ask_for('dlock_acquire(?)', 'report')
      ask_for('pg_backend_pid()')
    end
    expect('is free', free?('report'), true)
    elsewhere { expect('session', ask_for('pg_backend_pid()'), pid) }
  end
}.freeze

passed = TESTS.map do |name, test|
  Timeout.timeout(PATIENCE) do
    test.call
    wait_until('SELECT count(*) = 0 FROM dlock_locks')
  end
  puts "ok ActiveRecord: #{name}"
  true
rescue StandardError => e
  puts e.full_message(highlight: false)
  puts "not ok ActiveRecord: #{name}"
  # not in the way of the next one
  ask('SELECT count(dlock_force_release(ticket)) FROM dlock_locks')
  false
end
exit(passed.all?)
