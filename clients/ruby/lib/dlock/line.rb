# frozen_string_literal: true

require 'io/wait'
require 'pg'

module Dlock
  # Statements over connections of pg, each with a time limit
  module Wire
    STRINGS = PG::TypeMapAllStrings.new

    module_function

    # Is a statement in progress?
    def busy?(connection)
      !connection.finished? && connection.transaction_status == PG::PQTRANS_ACTIVE
    end

    # Can the next statement be sent?
    def idle?(connection)
      !connection.finished? && connection.status == PG::CONNECTION_OK && !busy?(connection)
    end

    # Returns the first row. If the task is stopped, cancels the statement on the server, too. After ConnectionLost, the
    # connection must not be used again.
    def ask(connection, statement, till)
      Stop.allow {} # before anything is sent
      sql, values = statement
      raise WrongState.new('the connection is busy', '55000') if busy?(connection)

      begin
        Dlock.translated do
          connection.send_query_params(sql, values.map { |value| value&.to_s }, 0, STRINGS)
          answer(connection, till)
        end
      rescue Stop => e
        e.answer = obey(connection)
        raise
      end
    end

    # SELECT function(...); for options that are nil, the server's defaults count
    def call(function, *values, **options)
      options = options.compact
      places = values.each_index.map { |n| "$#{n + 1}" }
      options.each_key.with_index(values.size + 1) { |key, n| places << "#{key} => $#{n}" }
      ["SELECT #{function}(#{places.join(', ')})", values + options.values]
    end

    def array(items)
      PG::TextEncoder::Array.new.encode(items)
    end

    # Reads the numbers of an array.
    def numbers(text)
      text.scan(/\d+/).map { |number| Integer(number) }
    end

    def row(result)
      return [] if result.nil? || result.ntuples.zero?

      result.type_map = STRINGS
      Array.new(result.nfields) { |n| decode(result.getvalue(0, n), result.ftype(n)) }
    end

    def decode(text, type)
      return if text.nil?

      case type
      when 16 then text == 't'
      when 20, 23 then Integer(text)
      when 701 then Float(text)
      else text
      end
    end

    def answer(connection, till)
      wait(connection, IO::READABLE | IO::WRITABLE, till) until connection.flush
      result = nil
      loop do
        while connection.is_busy
          wait(connection, IO::READABLE, till)
          connection.consume_input
        end
        break unless (got = connection.sync_get_result)

        result = got
      end
      result&.check
      row(result)
    end

    def wait(connection, events, till)
      left = Dlock.left(till)
      raise ConnectionLost, 'no answer in time' if left <= 0

      Stop.allow { connection.socket_io.wait(events, left) }
    rescue IOError => e
      # Another thread has closed this connection. Or libpq has closed an earlier socket with the same file descriptor,
      # and Ruby interrupts all waits for that descriptor; then the wait is repeated.
      raise ConnectionLost, e.message if connection.finished?
    end

    # Cancels an interrupted statement. Returns its row if the statement succeeded nevertheless; an empty row if that is
    # not known.
    def obey(connection)
      till = Dlock.now + OBEY
      cancel = Task.thread { connection.cancel }
      heard = cancel.join(OBEY)
      cancel.kill
      return [] unless heard # the cancel could hit the next statement

      answer(connection, till)
    rescue PG::Error, Error, IOError, SystemCallError
      nil
    end
  end

  # The source of connections: a DSN; a function that returns a DSN, or a connection of pg, which the client closes; or
  # a pool that lends connections to a block, from ActiveRecord or the gem connection_pool
  class Source
    # Detect dead connections. A DSN may set other values.
    DEFAULTS = { keepalives_idle: 30, keepalives_interval: 10, keepalives_count: 3, tcp_user_timeout: 60_000 }.freeze

    attr_reader :key

    def initialize(given)
      @given = given
      @key = given.is_a?(String) ? given : given.object_id
      return if @given.is_a?(String) || pooled? || @given.respond_to?(:call)

      raise BadArgument.new("no connections come from a #{given.class}", '22023')
    end

    def pooled?
      @given.respond_to?(:with_connection) || @given.respond_to?(:with)
    end

    # Yields a connection, and returns it when the block ends. If the block returns false, the connection's state is
    # unknown.
    def lend(name, patience)
      return from_pool { |raw, discard| yield(raw) || discard.call } if pooled?

      raw = @given.is_a?(String) ? @given : @given.call
      raw = Source.connect(raw, name, patience) if raw.is_a?(String)
      begin
        raw.setnonblocking(true)
        yield raw
      ensure
        raw.finish unless raw.finished?
      end
    end

    # Connects to the first host that is the primary. Each host gets its own time to answer.
    def self.connect(dsn, name, patience)
      hosts = hosts_of(dsn, name, patience)
      hosts.each_with_index do |host, n|
        return Dlock.translated { PG.connect(host) }
      rescue Error
        raise if n == hosts.size - 1
      end
    end

    def self.hosts_of(dsn, name, patience)
      options = [PG::Connection.conndefaults, PG::Connection.conninfo_parse(dsn)].flatten
                .select { |option| option[:val] }.to_h { |option| [option[:keyword].to_sym, option[:val]] }
      options = { **DEFAULTS, fallback_application_name: name, **options }
      lists = options.slice(:host, :hostaddr, :port).transform_values { |value| value.split(',') }
      count = lists.values.map(&:size).max || 1
      timeout = options[:connect_timeout].to_i
      timeout = 10 unless timeout.positive?
      options[:connect_timeout] = [timeout, 10, patience / count].min.clamp(2, 10).to_i
      options[:target_session_attrs] = 'read-write' if count > 1 && options.fetch(:target_session_attrs, 'any') == 'any'
      Array.new(count) { |n| options.merge(lists.transform_values { |values| values[n % values.size] }) }
    end

    private

    def from_pool
      @given.public_send(@given.respond_to?(:with_connection) ? :with_connection : :with) do |lent|
        raw = lent.respond_to?(:raw_connection) ? lent.raw_connection : lent
        yield raw, -> { lent.respond_to?(:throw_away!) ? lent.throw_away! : reset(raw) }
      end
    end

    # Reconnects, so that the pool gets a clean connection; if the server does not answer, the pool gets a closed one.
    def reset(raw)
      connecting = Task.thread { raw.reset }
      connecting.join(GRACE)
    ensure
      connecting&.kill
    end
  end

  # A connection that stays borrowed. Its thread remains in the pool's block until the connection is returned.
  class Loan
    attr_reader :connection

    @open = {}.compare_by_identity

    class << self
      # A child process must not close its parent's connections.
      def forked
        @open.each_key do |connection|
          connection.socket_io.reopen(IO::NULL)
        rescue IOError, SystemCallError, PG::Error
          next
        end
        @open.clear
      end

      attr_reader :open
    end

    def initialize(source, name, till, patience)
      lent = Box.new
      @back = Box.new
      @thread = Task.thread { serve(source, name, patience, lent) }
      begin
        got = lent.see(till)
      ensure
        @connection = got if got.is_a?(PG::Connection)
        @back.put(:bad) unless @connection
      end
      raise got || ConnectionLost.new('no connection in time') unless @connection
    end

    def end(good)
      @back.put(good ? :good : :bad)
      @thread.join(GLANCE)
    end

    private

    def serve(source, name, patience, lent)
      source.lend(name, patience) do |connection|
        Loan.open[connection] = true
        lent.put(connection)
        good = @back.see == :good
        good && !connection.finished? && connection.transaction_status == PG::PQTRANS_IDLE
      ensure
        Loan.open.delete(connection)
      end
    rescue Exception => e # rubocop:disable Lint/RescueException
      translated = Dlock.translate(e)
      lent.put(translated.is_a?(Error) ? translated : ConnectionLost.new("no connection: #{e.message}"))
    end
  end

  # A connection that is opened when needed, and opened again
  class Line
    CHECKED = ["SELECT set_config('client_connection_check_interval', '500ms', false)" \
               " WHERE current_setting('client_connection_check_interval') = '0'", []].freeze

    attr_reader :source, :connection, :sent, :doubt
    # Should the server check whether a waiting client is alive?
    attr_writer :checks

    def initialize(source, patience, name = 'dlock')
      @source = source
      @patience = patience
      @name = name
      @using = Mutex.new
    end

    # Executes a statement. If the connection breaks or does not answer within the limit, retries over a new one, until
    # the time `till`, or until the patience with an unreachable server ends. Without a limit, uses a connection until
    # it breaks.
    def ask(statement = nil, till: FOREVER, limit: GRACE)
      finish = [till, Dlock.now + @patience].min
      @doubt = false # may an earlier attempt have been executed?
      pause = Dlock.pauses
      begin
        once(till, finish, limit) { statement || yield }
      rescue QuorumLate
        raise if till == FOREVER || Dlock.now >= till

        Stop.sleep(pause.call)
        retry
      rescue ConnectionLost, NotPrimary
        finish = [till, Dlock.now + @patience].min if @loan && limit == FOREVER
        drop
        raise if Dlock.now >= finish

        Stop.sleep([pause.call, finish - Dlock.now].min)
        retry
      rescue Stop
        drop unless @connection && Wire.idle?(@connection)
        raise
      end
    end

    # Executes a statement once, over the existing connection. The time may be a function.
    def ask_once(statement, till)
      @using.synchronize do
        raise ConnectionLost, 'the connection is gone' unless @connection && Wire.idle?(@connection)

        @sent = Dlock.now
        Wire.ask(@connection, statement, till)
      rescue Cancelled, ConnectionLost, QuorumLate => e
        e.doubt = true
        raise
      end
    end

    # Has the server closed the connection? For a connection that is not in use.
    def broken?
      return false unless @using.try_lock

      begin
        @connection.consume_input if @connection&.socket_io&.wait_readable(0)
        false
      rescue IOError
        @connection.nil? || @connection.finished?
      rescue PG::Error
        true
      ensure
        @using.unlock
      end
    end

    def open(till, patience)
      @loan = Loan.new(@source, @name, till, patience)
      @connection = @loan.connection
      return if !@checks || @source.pooled?

      begin
        Wire.ask(@connection, CHECKED, Dlock.now + GRACE)
      rescue ConnectionLost
        raise
      rescue Error
        nil # not every platform can check
      end
    end

    # Returns the connection to its pool, or closes it.
    def close(good: true)
      loan = @loan
      @loan = @connection = nil
      loan&.end(good)
    end

    # Closes a connection in an unknown state, so that no pool keeps it.
    def drop
      close(good: false)
    end

    private

    def once(till, finish, limit)
      unless @loan
        left = [till - Dlock.now, [GRACE, finish - Dlock.now].max].min
        open(Dlock.now + left, left)
      end
      ask_once(yield, [till, Dlock.now + limit].min)
    rescue Error => e
      e.doubt = @doubt ||= e.doubt
      raise
    end
  end

  # A child process must not use its parent's state.
  module Forks
    def _fork
      pid = super
      Dlock.forked if pid.zero?
      pid
    end

    def daemon(...)
      super.tap { Dlock.forked }
    end
  end
  Process.singleton_class.prepend(Forks)

  def self.forked
    Loan.forked
    Heart.forked
  end
end
