# frozen_string_literal: true

module Dlock
  # Protects everything in this file. No thread holds it for long, because no input or output happens under it.
  GUARD = Mutex.new
  MOVED = ConditionVariable.new

  # For the program's threads, which an exception could interrupt while they hold GUARD
  def self.guarded(&work)
    Thread.handle_interrupt(Object => :never) { GUARD.synchronize(&work) }
  end

  # Passed to the observer of Locks. It reports a wait for a lock, successful or not, and a hold that ended by the
  # release or by the loss.
  Observation = Struct.new(:what, :name, :seconds, :error)

  # A lock or a lease, which may be lost
  class Kept
    LEAST_TTL = 0.1 # the server's

    def initialize(observer = nil)
      @observer = observer
      @state = 'not held'
      @callbacks = []
    end

    # False after a loss, too. Sends nothing.
    def held?
      unreleased? && !@loss
    end

    # Checks the clock, too. Once true, it stays true.
    def lost?
      look
      !@loss.nil?
    end

    # Raises LockLost after a loss, and WrongState if it is not held. Sends nothing.
    def check
      raise LockLost.new(@loss, '55L01') if lost?
      raise WrongState.new("#{self} is #{@state}", '55000') unless @state == 'held'
    end

    # The time of Dlock.now until which the program may work without an answer from the server
    def deadline
      @heart&.deadline || FOREVER
    end

    # Renews now, in addition to the heartbeat. A ttl replaces the lease's ttl. Until the server answers, the shorter
    # ttl counts.
    def renew(ttl = nil)
      check
      heart = @heart
      raise WrongState.new("#{self} has no lease of its own", '55000') unless heart && @ttl

      heart.renewing.synchronize { renew_alone(heart, ttl) }
    end

    # Changes the info, which others can read.
    def info=(info)
      confirm(Wire.call('dlock_set_info', lease_id, info))
    end

    # Calls the block once with the lock or lease when it is lost, in a new thread; at once if it is already lost.
    def on_lost(&callback)
      look
      Dlock.guarded { @loss ? tell(callback) : @callbacks << callback }
      self
    end

    # The caller holds GUARD.
    def set_lost(why)
      return if @loss

      @loss = "#{self} was lost: #{why}"
      observe('lost', @since)
      tell(@callbacks.shift) until @callbacks.empty?
    end

    def lose(why)
      Dlock.guarded { set_lost(why) }
    end

    private

    # Must it still be released, although it may be lost?
    def unreleased?
      look
      @state == 'held'
    end

    def look
      heart = @heart
      if heart&.over && !@loss
        Dlock.guarded { set_lost(heart.over) if @heart.equal?(heart) }
      elsif @state != 'not held' && @pid != Process.pid
        @state = 'not held'
        @heart = nil
        @loss ||= "#{self} is the parent process's"
      end
    end

    # An exception can arrive right after the change. The token tells the caller whether it has made the change.
    def turn(before, after, mine = @mine)
      look
      Dlock.guarded do
        raise WrongState.new("#{self} is #{@state}", '55000') unless @state == before

        @pid = Process.pid
        @state = after
        @mine = mine
      end
    end

    def renew_alone(heart, ttl)
      check_hold(heart)
      raise BadArgument.new('there is no such ttl', '22023') if ttl && ttl < LEAST_TTL

      life, interval, most, before = heart.life, heart.interval, heart.most, heart.deadline
      heart.change(ttl, @interval * ttl / @ttl) if ttl
      debt = owe(heart.id) if ttl
      statement = Wire.call('dlock_renew', heart.id, ttl: Seconds.of(ttl))
      begin
        kept, sent, doubt = send_held(statement)
      rescue Error => e
        unless e.doubt # it was answered, or not sent
          heart.limit(most)
          debt&.paid
          # otherwise the server may have changed the ttl
          if [BadArgument, NotAllowed, ConnectionLost].any? { |kind| e.is_a?(kind) }
            heart.changed(before - life, life, interval, most, heart.due)
          end
        end
        raise
      end
      most = heart.most if doubt
      debt&.paid unless doubt
      Dlock.guarded { set_lost('the server has ended its lease') if @heart.equal?(heart) } unless kept
      check_hold(heart)
      @interval, @ttl = @interval * ttl / @ttl, ttl if ttl
      life, interval = heart.life_of(ttl), @interval if ttl
      heart.changed(sent, life, interval, most)
      nil
    end

    # For a request of this heart, which may be over already
    def check_heart(heart)
      raise LockLost.new("#{self} was lost: #{heart.over}", '55L01') if heart.over
    end

    def check_hold(heart)
      check
      raise WrongState.new("#{self} was released", '55000') unless @heart.equal?(heart) # and acquired again
    end

    # Sends a call that returns false after a loss, or after a release meanwhile.
    def confirm(statement)
      check
      since = @since # a later hold has another
      return check if send_held(statement).first

      loss = Dlock.guarded do
        if @state == 'held' && @since.equal?(since)
          set_lost('the server has ended it')
          @loss
        end
      end
      raise loss ? LockLost.new(loss, '55L01') : WrongState.new("#{self} was released", '55000')
    end

    def begin_wait
      Dlock.guarded do
        @heart = @loss = nil
        @callbacks.clear
        @since = Dlock.now
      end
    end

    def begin_hold
      observe('waited', @since)
      Dlock.guarded do
        @since = Dlock.now
        @state = 'held'
      end
    end

    def end_hold
      Dlock.guarded do
        @heart = nil
        @state = 'not held'
      end
    end

    # Releases what this object holds, if it still holds it. Raises LockLost if it was lost. Notes the debt before it
    # sends the release, because an interrupted caller does not wait for the answer.
    def give_back(line, statement, last)
      heart = @heart
      gone = lost?
      till = deadline
      Dlock.guarded do
        heart.leave(self, last)
        @heart = nil
      end
      unless gone
        debt = owe(@fence)
        begin
          released = line.ask(statement, till: till).first || line.doubt
          # the owner's next request may have paid the debt
          lose('the server has ended it') unless released || (debt && !debt.owed?)
          debt&.paid
        rescue ConnectionLost, NotPrimary => e
          debt&.paid unless e.doubt
          raise if Dlock.now < till

          lose("there is no connection: #{e.message}")
        end
      end
      raise LockLost.new(@loss, '55L01') if @loss
    end

    # Only a lock with a ttl and an owner has an account.
    def owe(ticket)
      Debt.note(@account, ticket) if @account
    end

    # Yields, and then calls `leave` to release. A loss does not hide an exception that has ended the work.
    def leaving(leave)
      completed = false
      result = yield
      completed = true
      result
    ensure
      begin
        leave.call
      rescue Error
        raise if completed
      end
    end

    # Calls back in a new thread. If there can be none, the watcher tries again.
    def tell(callback, news = self)
      Task.thread do
        callback.call(news)
      rescue Exception => e # rubocop:disable Lint/RescueException
        warn "dlock: callback of #{self}: #{e.full_message(highlight: false)}"
      end
    rescue ThreadError
      Heart.untold << -> { tell(callback, news) }
    end

    def observe(what, since, error = nil)
      tell(@observer, Observation.new(what, name, Dlock.now - since, error)) if @observer
    end
  end

  # The client's state of a lease. One thread watches the deadlines of all leases, and waits for nothing else.
  class Heart
    MARGIN = 0.01

    attr_reader :id, :life, :most, :interval, :deadline, :members, :owed, :together, :renewing
    attr_accessor :due

    @all = {}.compare_by_identity
    @untold = []

    class << self
      attr_reader :all, :untold

      # The caller holds GUARD.
      def watch
        @watcher = Task.thread { GUARD.synchronize { look_at_all } } unless @watcher&.alive?
        MOVED.broadcast
      end

      def forked
        @all.clear
        @untold.clear
        Pulse.all.clear
        @watcher = nil
      end

      private

      def look_at_all
        loop do
          @all.keys.each(&:look)
          @untold.shift(@untold.size).each(&:call)
          next_one = @all.each_key.map(&:deadline).min || FOREVER
          MOVED.wait(GUARD, (next_one - Dlock.now).clamp(0.001, GLANCE))
        end
      end
    end

    def initialize(source, kept, id, sent, ttl, interval)
      @id = id
      @interval = interval
      @life = life_of(ttl)
      @most = FOREVER # the longest life
      @deadline = sent + @life
      @due = Dlock.now + interval
      @members = { kept => nil }.compare_by_identity
      @owed = {}
      @together = {} # the names of locks that were acquired together
      @renewing = Mutex.new # one thread at a time is in renew
      Dlock.guarded do
        @pulse = Pulse.all[source.key] ||= Pulse.new(source) # there may be no thread for it
        Heart.watch
        Heart.all[self] = true
        @pulse.hearts[self] = true
      end
    end

    # How long the client relies on a lease of this ttl
    def life_of(ttl)
      ttl * (1 - MARGIN)
    end

    # Prepares for a request of another ttl. Until the server answers, the shorter ttl counts. The server may execute an
    # abandoned request at any later time, so without an answer no later change gives the lease a longer life.
    def change(ttl, interval)
      Dlock.guarded do
        @most = [@most, life_of(ttl)].min
        @life = [@life, @most].min
        @interval = [@interval, interval].min
        @deadline = [@deadline, Dlock.now + @life].min
        @due = [@due, Dlock.now + @interval].min
        MOVED.broadcast
      end
    end

    def limit(most)
      Dlock.guarded { @most = most }
    end

    # After a refusal, the heartbeat stays due when it was.
    def changed(sent, life, interval, most, due = FOREVER)
      Dlock.guarded do
        @most = most
        @life = [life, most].min
        @interval = interval * (@life / life)
        @deadline = [@deadline, sent + @life].max unless over
        @due = [due, Dlock.now + @interval].min
        MOVED.broadcast
      end
    end

    # Lets the heartbeat undo a request that the server may have executed. Requests for several locks have no owner.
    def owe(name, owner)
      Dlock.guarded do
        @owed[[name, owner]] = true
        MOVED.broadcast
      end
    end

    # The reason if the lease is over. Checks the clock, because a stopped process may ask before its watcher has run.
    def over
      @over ||= ('its deadline has passed' if Dlock.now >= @deadline)
    end

    # The caller holds GUARD, here and in all methods below.
    def look
      finish(over) if over
    end

    def finish(why)
      @over ||= why
      return unless Heart.all.delete(self)

      @pulse.hearts.delete(self)
      MOVED.broadcast
      @members.each_key { |kept| kept.set_lost(@over) }
    end

    def join(kept, name, fence)
      @members[kept] = [name, fence]
    end

    # Stops notifying a lock or the lease. `last` ends the lease, and with it all of its remaining locks.
    def leave(kept, last)
      @members.delete(kept)
      finish('its lease is closed') if last
    end

    def renewed(sent, tickets, gone, asked)
      return if over
      return finish('the server has ended its lease') unless tickets

      @deadline = [@deadline, sent + @life].max
      asked.each do |kept, hold|
        kept.set_lost('the server has ended its ticket') if hold && gone[hold[1]] && @members[kept].equal?(hold)
      end
    end
  end

  # A release, an undo or a renewal without an answer. The server may execute it at any later time, and then ends what
  # the owner has. So the owner's next request must not get the same ticket: it first releases that ticket. Each call
  # owes for itself, because an answer to one call does not settle another call. Only a lock with a ttl of its own,
  # whose owner the program gives, has debts. A forked child keeps its parent's debts.
  class Debt
    MOST = 10_000 # accounts; the newest ones are kept

    @all = {} # arrays by account: source, name and owner

    class << self
      attr_reader :all

      def of(account)
        Dlock.guarded { @all[account]&.first }
      end

      def note(account, ticket)
        Dlock.guarded do
          (@all[account] ||= []) << (debt = new(account, ticket))
          @all.shift while @all.size > MOST
          debt
        end
      end
    end

    attr_reader :ticket # nil if it may be any ticket of the owner

    def initialize(account, ticket)
      @account = account
      @ticket = ticket
    end

    def owed?
      Dlock.guarded { Debt.all.fetch(@account, []).include?(self) }
    end

    # After any answer to the release of this ticket, or after an undo
    def paid
      Dlock.guarded do
        debts = Debt.all[@account]
        Debt.all.delete(@account) if debts&.delete(self) && debts.empty?
      end
    end
  end

  # Renews all leases on one server, over one connection.
  class Pulse
    RENEW = 'SELECT array(SELECT dlock_renew(id) FROM unnest($1::bigint[]) AS leases (id))::text,' \
            ' array(SELECT fence FROM unnest($2::text[], $3::bigint[]) AS held (name, fence)' \
            ' WHERE NOT dlock_check(name, fence))::text'

    # Finds the tickets that a request of this owner for this lease may have left. The lease is NULL for a lock with a
    # ttl.
    FIND = 'SELECT array(SELECT ticket FROM dlock_locks($1)' \
           ' WHERE owner IS NOT DISTINCT FROM $2 AND lease = coalesce($3, ticket)' \
           " AND scope = 'lease' AND role = current_user)::text"
    TAKE_BACK = 'SELECT bool_and(dlock_release_ticket(ticket)) FROM unnest($1::bigint[]) AS found (ticket)'

    @all = {}

    class << self
      attr_reader :all

      # Undoes a request. Yields each statement, for its answer. False if the request's session still waits, because it
      # has not noticed yet that the client is gone. An abandoned statement may be executed late, so the one that
      # releases names the tickets: it cannot release what the owner acquires later.
      def take_back(*request)
        tickets = yield([FIND, request]).first
        tickets == '{}' || yield([TAKE_BACK, [tickets]]).first != false
      end
    end

    attr_reader :hearts

    def initialize(source)
      @source = source
      @hearts = {}.compare_by_identity
      @line = Line.new(source, 0, 'dlock heartbeat')
      Task.thread { beat }
    end

    private

    def beat
      waits = Dlock.pauses
      pause = 0
      while (due = rest(pause))
        begin
          settled = serve(due)
          waits = Dlock.pauses if settled
          pause = settled ? 0 : waits.call
        rescue StandardError => e # does not prove a loss: retry
          @line.drop unless e.is_a?(QuorumLate)
          pause = waits.call
        end
      end
    ensure
      @line.close
    end

    # Waits, and returns the leases that are due now or soon; nil if no lease is left.
    def rest(pause)
      GUARD.synchronize do
        earliest = Dlock.now + [pause, shortest / 2].min
        until @hearts.empty?
          now = Dlock.now
          at = @hearts.each_key.to_h { |heart| [heart, heart.owed.empty? ? heart.due : now] }
          soonest = [at.values.min, earliest].max
          return at.select { |heart, due| due <= now + heart.interval / 4 }.keys if soonest <= now

          MOVED.wait(GUARD, [soonest - now, GLANCE].min)
        end
        Pulse.all.delete(@source.key) if Pulse.all[@source.key].equal?(self)
        nil
      end
    end

    def shortest
      @hearts.each_key.map(&:interval).min || 0
    end

    # Raises ConnectionLost if there is no answer for the shortest interval, which may become shorter meanwhile.
    def ask(statement)
      patience = GUARD.synchronize { shortest }.clamp(4, 20)
      @line.open(Dlock.now + patience, patience) unless @line.connection
      sent = Dlock.now
      @line.ask_once(statement, -> { sent + GUARD.synchronize { shortest } })
    end

    # Renews the leases, and undoes owed requests. False if a request is still owed.
    def serve(due)
      renew(due)
      due.map do |heart|
        GUARD.synchronize { heart.owed.keys }.map do |name, owner|
          next false unless Pulse.take_back(name, owner, heart.id) { |statement| ask(statement) }

          GUARD.synchronize { heart.owed.delete([name, owner]) }
        end.all?
      end.all?
    end

    def renew(due)
      asked = GUARD.synchronize { due.to_h { |heart| [heart, heart.members.dup] } }
      holds = asked.values.flat_map(&:values).compact
      leases, gone = ask([RENEW, [Wire.array(due.map(&:id)), Wire.array(holds.map(&:first)),
                                  Wire.array(holds.map(&:last))]])
      gone = gone.scan(/\d+/).to_h { |fence| [fence.to_i, true] }
      GUARD.synchronize do
        due.zip(leases.scan(/\w+/)) do |heart, tickets|
          heart.due = @line.sent + heart.interval
          heart.renewed(@line.sent, tickets != 'NULL', gone, asked[heart])
        end
      end
    end
  end
end
