# frozen_string_literal: true

require 'securerandom'

module Dlock
  # A lock, for one thread at a time. On a connection of the program: in session or transaction scope. From Locks: in
  # session scope on its own connection, or with a ttl in lease scope. From a Lease: in lease scope.
  class Lock < Kept
    attr_reader :name, :fence

    # Times are in seconds. A timeout of nil waits without limit, and 0 only tries. In lease scope, a repeated request
    # of one owner, such as a job's number, gets the same lock. The interval is the time between renewals.
    def initialize(source, name, transaction: false, timeout: nil, shared: nil, slots: nil, permits: nil, info: nil,
                   ttl: nil, interval: nil, owner: nil)
      @name = name
      @transaction = transaction
      @timeout = timeout
      @options = { shared: shared, slots: slots, permits: permits, info: info }
      @ttl = ttl
      @interval = interval || (ttl && ttl / 3.0)
      @owner = owner
      super(connect(source))
      raise BadArgument.new('there is no such ttl or interval', '22023') if
        ttl && (!@line || @lease || @interval <= 0 || @interval >= ttl)
      raise BadArgument.new('no owner without a lease', '22023') if owner && !lease?

      @account = [@line.source.key, name.to_s, owner.to_s] if ttl && owner
    end

    # Waits until the lock is granted. Raises LockTimeout when the timeout has passed.
    def acquire
      take(Object.new)
      self
    end

    # Returns nil, instead of an error, when the timeout has passed. A transaction can then continue.
    def try_acquire
      acquire
    rescue LockTimeout
      nil
    end

    # Raises LockLost if the lock was lost. A lock in transaction scope ends with its transaction. If a connection of the
    # program refuses the release, as in a failed transaction, the lock stays held: release it again.
    def release
      return release_here if @database

      Task.run(stops: false) do
        turn('held', 'being released')
        begin
          let_go
        ensure
          end_hold
          observe('held', @since) unless @loss
          @fence = nil
        end
      end
      nil
    end

    # Acquires the lock, yields it, and releases it. A loss does not hide an exception that has ended the block.
    def synchronize
      mine = Object.new
      leaving(-> { release if @mine.equal?(mine) && unreleased? }) do
        take(mine)
        yield self
      end
    end

    # The connection's transaction can commit only while the lock is held.
    def guard(connection = @database)
      database = Database.for(connection)
      database.check_transaction
      database.call('dlock_guard', @name, @fence)
      nil
    end

    # Makes an exclusive hold shared, without releasing it.
    def downgrade
      confirm(Wire.call('dlock_downgrade', @fence))
    end

    # Asks the server. The answer can be outdated on arrival; to be sure, guard.
    def held_on_server?
      held? && send_held(Wire.call('dlock_is_held', @name, lease: @heart&.id)).first
    end

    def to_s
      "lock #{@name.inspect}"
    end

    # For this package: holds a lock that acquire_all has acquired.
    def hold(fence, heart = nil)
      turn('not held', 'asked for')
      begin_wait
      @fence = fence
      Dlock.guarded { (@heart = heart).join(self, @name, fence) } if heart
      begin_hold
      self
    end

    private

    def connect(source)
      case source
      when Locks
        @locks = source
        @line = source.line(@name)
        source.observer
      when Lease
        @lease = source
        @line = source.new_line
        source.locks.observer
      else
        @database = Database.for(source)
        nil
      end
    end

    # Notices the end of the lock's session without asking the server.
    def look
      super
      return unless @state == 'held' && @line && !lease? && @line.broken?

      lose('its connection is gone') if @state == 'held'
    end

    def lease?
      @lease || @ttl
    end

    def take(mine)
      return take_here(mine) if @database

      Task.run(->(_) { withdraw(nil) }) do
        turn('not held', 'asked for', mine)
        begin
          begin_wait
          @until = @timeout ? Dlock.now + @timeout : FOREVER
          @line.checks = @timeout != 0
          request
          begin_hold
        rescue Exception => e # rubocop:disable Lint/RescueException
          observe('failed', @since, e)
          withdraw(e)
          raise
        end
      end
    end

    # Acquires the lock on the program's connection. An exception can arrive at each step.
    def take_here(mine)
      @database.check_transaction if @transaction
      turn('not held', 'asked for', mine)
      begin_wait
      @fence = nil
      @database.request("dlock_#{'try_' if @timeout}#{'xact_' if @transaction}acquire", @name,
                        timeout: Seconds.of(@timeout), **@options) { |fence| @fence = fence }
      raise LockTimeout.new("#{self} is not free", '55P03') unless @fence

      begin_hold
    ensure
      if @mine.equal?(mine) && @state == 'asked for'
        @state = 'not held'
        fence, @fence = @fence, nil
        @database.undo(fence) if fence
      end
    end

    # Releases the lock even if an exception arrives before the release is sent.
    def release_here
      before, mine = @mine, Object.new
      turn('held', 'being released', mine)
      nil
    ensure
      let_go_here(before) if @mine.equal?(mine)
    end

    def let_go_here(before)
      return if @transaction

      released = begin
        @database.call('dlock_release_ticket', @fence)
      rescue ConnectionLost => e
        lose(e.message)
      rescue Error => e
        refused = !e.is_a?(LockLost)
        raise
      end
      lose('the server has ended its ticket') unless released
      raise LockLost.new(@loss, '55L01') if @loss
    ensure
      if refused
        turn('being released', 'held', before)
      else
        end_hold
        @fence = nil
      end
    end

    def request
      @fence = @asked = nil
      @doubt = false
      return ask('dlock_acquire') unless lease?

      pay
      owner = @owner || SecureRandom.uuid
      @heart = @lease.heart_for(@name, owner) if @lease
      @asked = owner
      @lease ? request_of_lease : request_with_ttl
      @line.close # a held lock needs no connection
      @line.checks = false
    end

    # Releases what the owner must not get again.
    def pay
      while (debt = Debt.of(@account))
        next undo(@owner, nil, @until + GRACE, debt) unless debt.ticket

        @line.ask(Wire.call('dlock_release_ticket', debt.ticket), till: @until + GRACE)
        debt.paid
      end
    end

    # Releases what a request has acquired, unless another request has paid the debt.
    def undo(owner, lease, till, debt)
      pause = Dlock.pauses
      loop do
        undone = Pulse.take_back(@name, owner, lease) do |statement|
          return nil if debt && !debt.owed?

          @line.ask(statement, till: till)
        end
        return debt&.paid if undone
        raise ConnectionLost, 'its session continues to wait' if Dlock.now >= till

        Stop.sleep(pause.call)
      end
    end

    # A repeated request gets the remaining time.
    def statement(function, till, values)
      timeout = Seconds.of(till - Dlock.now) if till < FOREVER
      Wire.call(function, @name, *values, timeout: timeout, owner: (@asked if lease?), **@options)
    end

    def ask(function, *values)
      @fence = @line.ask(till: @until + GRACE, limit: FOREVER) { statement(function, @until, values) }.first
    end

    # Requests the lock over the lease's connection, if it need not wait.
    def request_of_lease
      begin
        @lease.use(@until + GRACE) do |line|
          @fence = line.ask(till: @until + GRACE) { statement('dlock_lease_acquire', 0, [@heart.id]) }.first
        end
      rescue LockTimeout => e
        raise if @timeout == 0

        @doubt = e.doubt
        ask('dlock_lease_acquire', @heart.id)
      end
      Dlock.guarded { @heart.join(self, @name, @fence) }
      check_heart(@heart)
    end

    # After a long wait, only a renewal makes the deadline known. A repeated request keeps its earlier ttl.
    def request_with_ttl
      ask('dlock_ttl_acquire', Seconds.of(@ttl))
      renewal = if @owner
                  ['SELECT dlock_renew(lease), extract(epoch FROM ttl)::float8 FROM dlock_leases WHERE lease = $1',
                   [@fence]]
                else
                  ['SELECT dlock_renew($1), $2::float8', [@fence, @ttl]]
                end
      renewed, ttl = @line.ask(renewal, till: [Dlock.now + @ttl, @until + GRACE].min, limit: @interval)
      raise LockLost.new("#{self} was lost: the server has ended its lease at once", '55L01') unless renewed

      ttl = [ttl, @ttl].min
      @heart = Heart.new(@line.source, self, @fence, @line.sent, ttl, @interval * ttl / @ttl)
    end

    # Undoes an interrupted request, because the server may have executed it. If the lease continues, its heartbeat
    # undoes the request as soon as the server answers.
    def withdraw(error)
      Stop.over
      refused = error.is_a?(Error) && !error.doubt && !@doubt && @fence.nil?
      heart = @heart
      Dlock.guarded { heart.leave(self, @lease.nil?) } if heart
      unsure = @asked && !refused
      debt = owe(@fence) if unsure
      @line.drop
      take_back(heart, debt) if unsure
    ensure
      @line.drop
      end_hold
      @fence = @asked = nil
    end

    def take_back(heart, debt)
      @line.checks = false
      undo(@asked, (heart.id if @lease), Dlock.now + UNDO, debt)
    rescue Error
      # without a Lease, the lock expires, or the owner's next request releases it
      heart.owe(@name, @asked) if @lease
    end

    def let_go
      heart = @heart
      release = Wire.call('dlock_release_ticket', @fence)
      return let_session_go(release) unless lease?
      return give_back(@line, release, true) unless @lease

      # over the lease's connection; if that fails, the lease's heartbeat repeats the release
      begin
        @lease.use(deadline) { |line| give_back(line, release, false) }
      rescue LockLost
        raise
      rescue Error
        heart.owe(@name, @asked)
        raise
      ensure
        Dlock.guarded { heart.together.delete(@name) } unless @asked
      end
    ensure
      @line.close
    end

    def let_session_go(release)
      begin
        released = @line.ask_once(release, Dlock.now + GRACE).first
        lose('the server has ended its ticket') unless released
      rescue ConnectionLost => e
        lose("its connection is gone: #{e.message}")
      ensure
        @line.drop unless released
      end
      raise LockLost.new(@loss, '55L01') if @loss
    end

    def lease_id
      @fence
    end

    # Returns the answer, when the statement was sent, and whether an abandoned attempt may be executed later.
    def send_held(statement)
      return [@database.ask(statement)] if @database
      return @lease.send_held(statement, deadline) if @lease

      Task.run(stops: false) do
        next [@line.ask_once(statement, Dlock.now + GRACE).first] unless @ttl

        line = @locks.line(@name) # of its own, because several threads may call this
        [line.ask(statement, till: deadline).first, line.sent, line.doubt]
      ensure
        line&.close
      end
    end
  end

  # Acquires all locks or none, on a connection of the program, in an order that prevents deadlocks. Release each of
  # them, unless they end with the transaction.
  def self.acquire_all(connection, names, transaction: false, timeout: nil, shared: nil, info: nil)
    names = names.uniq
    database = Database.for(connection)
    database.check_transaction if transaction
    locks = names.map { |name| Lock.new(database, name, transaction: transaction) }
    fences = held = nil
    database.request("dlock_#{'try_' if timeout}#{'xact_' if transaction}acquire_all", Wire.array(names),
                     timeout: Seconds.of(timeout), shared: shared, info: info) { |answer| fences = answer }
    raise LockTimeout.new("not all of #{names} are free", '55P03') unless fences

    held = locks.zip(Wire.numbers(fences)).map { |lock, fence| lock.hold(fence) }
  ensure
    database.undo(fences) if fences && !held
  end

  # For a pool that gets a connection back: rolls back, and releases forgotten locks
  def self.reset(connection)
    translated do
      connection.exec('ROLLBACK') unless connection.transaction_status == PG::PQTRANS_IDLE
      connection.exec('SELECT dlock_release_all()')
    end
    nil
  end
end
