# frozen_string_literal: true

module Dlock
  # A lock in session scope, or in transaction scope, on a connection of the program's
  class Lock
    attr_reader :name, :fence

    # timeout in seconds: nil waits without limit, 0 only tries
    def initialize(source, name, transaction: false, timeout: nil, shared: nil, slots: nil, permits: nil, info: nil)
      @database = Database.for(source)
      @name = name
      @transaction = transaction
      @timeout = timeout
      @options = { shared: shared, slots: slots, permits: permits, info: info }
      @guard = Mutex.new
      @state = 'not held'
    end

    # Waits for its turn. LockTimeout when the timeout has passed.
    def acquire
      try_acquire or raise LockTimeout.new("#{self} is not free", '55P03')
    end

    # Nil, not an error, when the timeout has passed. A transaction continues after that.
    def try_acquire
      turn('not held', 'asked for')
      begin
        @fence = @database.request(function, @name, timeout: Seconds.of(@timeout), **@options)
      ensure
        @state = @fence ? 'held' : 'not held'
      end
      @fence && self
    end

    # Raises LockLost if the lock was lost. A lock in transaction scope ends with its transaction.
    def release
      turn('held', 'being released')
      begin
        return if @transaction

        released = begin
          @database.call('dlock_release_ticket', @fence)
        rescue ConnectionLost => e
          raise LockLost.new("#{self} was lost: #{e.message}", '55L01')
        end
        raise LockLost.new("#{self} was lost", '55L01') unless released
      ensure
        @state = 'not held'
        @fence = nil
      end
    end

    # Acquires the lock, yields it, and releases it. A loss does not hide the exception that has ended the block.
    def synchronize
      acquire
      during { yield self }
    end

    def held?
      @state == 'held'
    end

    # The transaction of the connection commits only while the lock holds.
    def guard
      @database.call('dlock_guard', @name, @fence)
      nil
    end

    # For others to read
    def info=(info)
      @database.call('dlock_set_info', @fence, info)
    end

    # From exclusive to shared
    def downgrade
      @database.call('dlock_downgrade', @fence)
    end

    def to_s
      "lock #{@name.inspect}"
    end

    private

    def during
      completed = false
      result = yield
      completed = true
      result
    ensure
      begin
        release if held?
      rescue Error
        raise if completed
      end
    end

    def function
      "dlock_#{'try_' if @timeout}#{'xact_' if @transaction}acquire"
    end

    def turn(before, after)
      @guard.synchronize do
        raise WrongState.new("#{self} is #{@state}", '55000') unless @state == before

        @state = after
      end
    end
  end

  # For a pool when a connection comes back: rolls back, and releases what was forgotten
  def self.reset(connection)
    translated do
      connection.exec('ROLLBACK') unless connection.transaction_status == PG::PQTRANS_IDLE
      connection.exec('SELECT dlock_release_all()')
    end
    nil
  end
end
