# frozen_string_literal: true

require 'json'
require 'timeout'

module Dlock
  # For a ticket: granted, wanted (a request waits for the lock), released (by force), expired, lost. For a watched
  # lock: held, free. The details are the server's.
  Event = Struct.new(:event, :lock, :ticket, :details)

  # Places in many queues of one server, over one connection. Without a lease they end with the connection. One thread
  # may wait in next while others enqueue and release.
  class Tickets
    # Seconds between queries that make up for lost notifications
    ROUND = 60

    Place = Struct.new(:name, :statement, :owner, :heart, :granted)

    def initialize(locks, near: '', lease: nil)
      @locks = locks
      @near = near
      @lease = lease
      @line = locks.line(near)
      @alone = Mutex.new # protects the connection, and what follows
      @events = []
      @places = {}
      @watched = {}
      @round = Dlock.now + ROUND
      @pid = Process.pid
      @ears, @mouth = IO.pipe # ends the wait of next
    end

    # Returns the ticket, which is the fence once it is granted. The options are shared, slots, permits, info and, with
    # a lease, owner.
    def enqueue(name, owner: nil, **options)
      owner ||= SecureRandom.uuid if @lease
      place = ticket = nil # a place that the server may have
      undo = lambda do |answer|
        next unless place

        ticket ||= answer
        @places.delete(ticket)
        place.heart ? place.heart.owe(name, owner) : take_back(ticket)
      end
      use(name, undo) do
        asked = place_of(name, owner, options)
        place = asked unless ours?(asked)
        begin
          ticket = ask(asked.statement).first
        rescue Error => e
          place = nil unless e.doubt
          raise
        end
        @places[ticket] = asked
        confirm(ticket)
        ticket
      end
    end

    # Raises LockLost if the ticket was lost.
    def release(ticket)
      use(stops: false) do
        place = @places[ticket] or raise LockLost.new("ticket #{ticket} is not ours", '55L01')
        @places.delete(ticket) if place.heart # a new connection must not request it again
        released, doubt = ask(Wire.call('dlock_release_ticket', ticket))
        @places.delete(ticket)
        raise LockLost.new("ticket #{ticket} was lost", '55L01') unless released || doubt
      rescue LockLost
        raise
      rescue Error # the lease's heartbeat repeats the release
        place.heart&.owe(place.name, place.owner)
        raise
      end
    end

    # Reports the holder of a lock, now and at each change, with the events held and free.
    def watch(name)
      use(name) do
        ask(Wire.call('dlock_watch', name))
        @watched[name] = true
      end
    end

    def unwatch(name)
      use(name) do
        @watched.delete(name)
        ask(Wire.call('dlock_unwatch', name))
      end
    end

    # The next event; nil if none arrives within this many seconds
    def next(timeout = nil)
      till = timeout ? Dlock.now + timeout : FOREVER
      loop do
        listen if @events.empty? || !(@lease || @line.connection)
        event = @events.shift and return event
        return if Dlock.now >= till

        rest([till, @round].min)
      end
    end

    # Ends the session's tickets. A lease's tickets stay.
    def close
      use(stops: false) do
        @closed = true
        @line.drop
      end
    end

    private

    def place_of(name, owner, options)
      heart = @lease&.heart_for(name, owner)
      statement = if heart
                    Wire.call('dlock_lease_enqueue', name, heart.id, owner: owner, **options)
                  else
                    Wire.call('dlock_enqueue', name, **options)
                  end
      Place.new(name, statement, owner, heart)
    end

    # Does a ticket come from an earlier call with the same owner?
    def ours?(asked)
      asked.heart && @places.each_value.any? do |place|
        place.heart.equal?(asked.heart) && place.name == asked.name && place.owner == asked.owner
      end
    end

    # Yields the connection to one thread at a time, unless it is not free within this many seconds.
    def use(name = nil, undo = nil, stops: true, wakes: true, wait: nil)
      raise BadArgument.new("#{name.inspect} is on another server", '22023') unless
        name.nil? || @locks.source(name).equal?(@locks.source(@near))

      alone = lambda do |work|
        lock_alone(wait)
        work.call if @alone.owned?
      ensure
        @alone.unlock if @alone.owned?
      end
      Task.run(undo && ->(result) { alone.call(-> { undo.call(result) }) }, stops: stops) do
        alone.call(lambda do
          yield
        rescue Exception => e # rubocop:disable Lint/RescueException
          undo&.call((e.answer&.first if e.is_a?(Stop)))
          raise
        ensure
          @line.drop unless @line.connection.nil? || Wire.idle?(@line.connection)
          @mouth.write_nonblock('.', exception: false) if wakes
        end)
      end
    end

    def lock_alone(wait)
      @alone.try_lock || Timeout.timeout(wait) { @alone.lock }
    rescue Timeout::Error
      nil # the timer may also end right after the mutex is locked
    end

    # Undoes an interrupted enqueue for the session
    def take_back(ticket)
      return unless ticket.is_a?(Integer) && @line.connection

      @line.ask_once(Wire.call('dlock_release_ticket', ticket), Dlock.now + UNDO)
    rescue Error
      @line.drop
    end

    def rest(till)
      connection = @line.connection
      IO.select([@ears, connection&.socket_io].compact, nil, nil, [till - Dlock.now, GLANCE].min.clamp(0, GLANCE))
      @ears.read_nonblock(1000, exception: false)
    rescue IOError, PG::Error
      nil # another thread has closed it
    end

    # Takes all events that have arrived, unless another thread uses the connection for long.
    def listen
      use(wakes: false, wait: GRACE) do
        session
        begin
          ask_all if Dlock.now >= @round
          @line.connection&.consume_input
          while (notification = @line.connection&.notifies)
            hear(JSON.parse(notification[:extra]))
          end
        rescue PG::Error, ConnectionLost
          @line.drop
        end
        session
      end
    end

    # Asks for all grants. The first query finds a silent connection, also if there are only grants and watches.
    def ask_all
      @round = Dlock.now + ROUND
      say(['SELECT 1', []])
      @places.keys.each { |ticket| confirm(ticket) }
    end

    def hear(said)
      event, lock, ticket = said.values_at('event', 'lock', 'ticket')
      case event
      when 'granted' then confirm(ticket)
      when 'released', 'expired' then forget(ticket, event, said)
      when 'wanted' then @events << Event.new(event, lock, ticket, said) if @places[ticket]
      when 'held', 'free' then @events << Event.new(event, lock, ticket, said) if @watched[lock]
      end
    end

    # Connects again if the connection broke. Tickets of a lease stay; tickets of the session are lost.
    def session
      raise WrongState.new('the tickets are closed', '55000') if @closed
      raise LockLost.new("the tickets are the parent process's", '55L01') if @lease && @pid != Process.pid
      return if @line.connection

      if !@lease && !@places.empty?
        @events.select! { |event| %w[held free].include?(event.event) || !@places[event.ticket] }
        @places.clear
        raise LockLost.new('the tickets are gone with their connection', '55L01')
      end
      @line.ask(['SELECT 1', []])
      @watched.each_key { |name| say(Wire.call('dlock_watch', name)) }
      @places.to_a.each { |ticket, place| restore(ticket, place) }
    rescue Error
      @line.drop
      raise
    end

    def restore(ticket, place)
      again = say(place.statement).first
      return confirm(ticket) if again == ticket

      say(Wire.call('dlock_release_ticket', again))
      forget(ticket, 'lost')
    rescue LockLost, WrongState # the lease has ended, or another client holds the lock with other slots
      forget(ticket, 'lost')
    end

    def say(statement)
      @line.ask_once(statement, Dlock.now + GRACE)
    rescue ConnectionLost
      @line.drop
      raise
    end

    # Executes a call, once more over another connection if the first one breaks. Then the answer ends with the doubt:
    # whether the first attempt may have been executed.
    def ask(statement)
      session
      say(statement)
    rescue ConnectionLost => e
      begin
        session
        say(statement) << e.doubt
      rescue Error => again
        again.doubt ||= e.doubt
        raise
      end
    end

    # Asks for the grant, because a notification is only a hint. Each grant is reported once.
    def confirm(ticket)
      place = @places[ticket]
      return if place.nil? || place.granted || !say(Wire.call('dlock_wait', ticket, '0')).first

      place.granted = true
      @events << Event.new('granted', place.name, ticket, {})
    rescue LockLost
      forget(ticket, 'lost')
    rescue ConnectionLost
      nil # asks over the next connection
    end

    def forget(ticket, event, said = {})
      place = @places.delete(ticket)
      @events << Event.new(event, place.name, ticket, said) if place
    end
  end
end
