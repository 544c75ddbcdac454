# frozen_string_literal: true

require 'digest'

module Dlock
  # The lock service: one server, or several servers over which names are spread
  class Locks
    attr_reader :observer

    # Each source is a DSN, which may name several hosts; a function that returns a DSN, or a connection, which the
    # client closes; or a pool that lends connections to a block. With several servers, each needs a key that stays the
    # same when the server moves. By default, the key is the DSN. Calls wait for an unreachable server for `patience`
    # seconds. The observer is called with each Observation.
    def initialize(*sources, keys: nil, patience: 30, observer: nil)
      @patience = patience
      @observer = observer
      servers = sources.map { |source| Source.new(source) }
      keys ||= servers.map(&:key)
      if servers.empty? || keys.uniq.size != servers.size || (servers.size > 1 && !keys.all?(String))
        raise BadArgument.new('each server needs a key of its own', '22023')
      end

      @servers = keys.zip(servers).to_h
    end

    # A lock in session scope or, with a ttl, in lease scope
    def lock(name, **options)
      Lock.new(self, name, **options)
    end

    # One heartbeat for any number of locks, all on the server that has the name `near`
    def lease(ttl, **options)
      Lease.new(self, ttl, **options)
    end

    def election(name, ttl: 15, **options)
      Election.new(lock(name, ttl: ttl, **options))
    end

    # Sets the number of permits of a lock, which replaces the number in requests; nil restores that number.
    def resize(name, slots)
      line = line(name)
      Task.run do
        line.ask(Wire.call('dlock_set_slots', name, slots))
        nil
      ensure
        line.close
      end
    end

    def tickets(near: '')
      Tickets.new(self, near: near)
    end

    # Tickets whose events report the holder of a lock, now and at each change
    def watch(name)
      watching = tickets(near: name)
      watching.watch(name)
      watching
    end

    # The key of the server that has this name
    def key(name)
      @servers.keys.max_by { |key| Digest::SHA256.digest("#{key}\0#{name}") }
    end

    def source(name)
      @servers.fetch(key(name))
    end

    def line(name)
      Line.new(source(name), @patience)
    end
  end

  # One heartbeat for any number of locks
  class Lease < Kept
    attr_reader :id, :locks, :heart, :near

    def initialize(locks, ttl, interval: nil, info: nil, delay: nil, near: '')
      super()
      @locks = locks
      @ttl = ttl
      @interval = interval || (ttl / 3.0)
      raise BadArgument.new('there is no such ttl or interval', '22023') if @interval <= 0 || @interval >= ttl

      @near = near
      @options = { info: info, delay: Seconds.of(delay) }
    end

    def open
      open_for(Object.new)
      self
    end

    # Ends all locks of the lease. If the lease is already closed, does nothing. If another thread is opening it, waits
    # until the open has ended.
    def close
      look
      pause = Dlock.pauses(0.1)
      sleep(pause.call) while @state == 'asked for'
      return if @state == 'not held'

      Task.run(stops: false) do
        turn('held', 'being released')
        shut
      end
      nil
    end

    # Opens the lease, yields it, and closes it, but not a later opening.
    def synchronize
      mine = Object.new
      leaving(-> { close if @mine.equal?(mine) && unreleased? }) do
        open_for(mine)
        yield self
      end
    end

    def lock(name, **options)
      raise BadArgument.new("#{name.inspect} is on another server", '22023') unless
        @locks.source(name.to_s).equal?(@locks.source(@near))

      Lock.new(self, name, **options)
    end

    # Acquires all or none, in an order that prevents deadlocks. Release each of them, or close the lease.
    def acquire_all(names, timeout: nil, shared: nil, info: nil)
      names = names.uniq
      all = names.map { |name| lock(name) }
      till = timeout ? Dlock.now + timeout : FOREVER
      heart = nil
      # as soon as the server answers, the heartbeat undoes locks that may have been acquired
      Task.run(->(_) { give_up(heart, names, true) }) do
        heart = claim(names)
        take_all(heart, all, timeout, till, shared: shared, info: info)
      end
    end

    # Tickets that keep their places when the connection breaks
    def tickets
      Tickets.new(@locks, near: @near, lease: self)
    end

    def to_s
      "lease #{@id}"
    end

    # The methods below are for this package.

    def new_line
      @locks.line(@near)
    end

    # Yields the lease's connection to one thread at a time. If it is not free soon, yields another one, and leaves half
    # of the time to it.
    def use(till)
      free = @free
      kept = free.take(Dlock.now + [GRACE, (till - Dlock.now) / 2].min)
      line = kept || new_line
      yield line
    ensure
      line&.close unless kept && @state == 'held' && @free.equal?(free) && !kept.source.pooled?
      free.put(kept) if kept
    end

    # Requests keep this heart, because another thread may close the lease, and open the next one.
    def heart_for(name, owner)
      heart = open_heart
      raise WrongState.new("#{name.inspect} is being taken back from #{owner}", '55000') if
        Dlock.guarded { heart.owed.key?([name, owner]) }

      heart
    end

    # Returns the answer, when the statement was sent, and whether an abandoned attempt may be executed later.
    def send_held(statement, till = deadline)
      Task.run(stops: false) { use(till) { |line| [line.ask(statement, till: till).first, line.sent, line.doubt] } }
    end

    private

    def lease_id
      @id
    end

    def open_for(mine)
      # If the answer is lost, the lease has no locks, and expires. Another thread may have opened the next one already.
      Task.run(->(id) { close if @state == 'held' && @id == id }) do
        turn('not held', 'asked for', mine)
        line = new_line
        begin
          begin_wait
          @id = id = line.ask(Wire.call('dlock_lease_open', Seconds.of(@ttl), **@options)).first
          @heart = Heart.new(line.source, self, @id, line.sent, @ttl, @interval)
          @free = Box.new(line) # of this opening, for one call at a time that need not wait
          begin_hold
          id
        rescue Exception # rubocop:disable Lint/RescueException
          line.drop
          Dlock.guarded { @heart&.leave(self, true) }
          end_hold
          raise
        end
      end
    end

    def open_heart
      check
      @heart or raise WrongState.new("#{self} is being closed", '55000')
    end

    def claim(names)
      heart = open_heart
      Dlock.guarded do
        names.each do |name|
          raise WrongState.new("#{self} has #{name.inspect} already", '55000') if
            heart.together[name] || heart.owed.key?([name, nil])
        end
        names.each { |name| heart.together[name] = true }
      end
      heart
    end

    def take_all(heart, all, timeout, till, **options)
      names = all.map(&:name)
      line = new_line
      line.checks = timeout != 0
      fences = line.ask(till: till + GRACE, limit: FOREVER) do
        left = Seconds.of(till - Dlock.now) if till < FOREVER
        Wire.call('dlock_lease_acquire_all', Wire.array(names), heart.id, timeout: left, **options)
      end.first
      all.zip(Wire.numbers(fences)) { |lock, fence| lock.hold(fence, heart) }
      check_heart(heart)
      all
    rescue Exception => e # rubocop:disable Lint/RescueException
      give_up(heart, names, fences || !e.is_a?(Error) || e.doubt)
      raise
    ensure
      line.close
    end

    def give_up(heart, names, owed)
      names.each do |name|
        heart.owe(name, nil) if owed
        Dlock.guarded { heart.together.delete(name) }
      end
    end

    def shut
      use(deadline) { |line| give_back(line, Wire.call('dlock_lease_close', @id), true) }
    ensure
      end_hold
    end
  end

  # Runs work while this process leads, and campaigns again after a loss
  class Election
    PAUSE = 15

    def initialize(lock)
      @lock = lock
    end

    # Yields the lock while this process leads, and returns the result of the block. The block must check the lock, and
    # end when it is lost. Then the process campaigns again. It waits for an unreachable server without limit.
    def run
      pause = Dlock.pauses(PAUSE)
      while true # loop would end at a StopIteration of the work
        led = done = false
        result = nil
        begin
          return @lock.synchronize do |lock|
            led = true
            result = yield lock
            done = true
            result
          end
        rescue LockLost
          raise if led && !@lock.lost?
        rescue ConnectionLost, NotPrimary
          return result if done # the work ended while this process led; the lock expires
          raise if led

          sleep(pause.call)
        end
        pause = Dlock.pauses(PAUSE) if led
      end
    end
  end
end
