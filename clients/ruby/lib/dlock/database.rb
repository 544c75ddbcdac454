# frozen_string_literal: true

module Dlock
  # Executes SQL for the program, over a PG::Connection or a connection of ActiveRecord. Its statements have no time
  # limit.
  class Database
    def self.for(source)
      return source if source.is_a?(Database)
      return Database.new(source) if source.respond_to?(:exec_params)
      return RecordDatabase.new(source) if source.respond_to?(:select_value)

      raise BadArgument.new("no locks on a #{source.class}", '22023')
    end

    def initialize(connection)
      @connection = connection
    end

    # Returns the value of SELECT function(...). For options that are nil, the server's defaults count.
    def call(function, *values, **options)
      ask(Wire.call(function, *values, **options))
    end

    # If an exception interrupts this, and the server does not answer soon, closes the connection. Otherwise the task's
    # thread would read the answers to the program's statements.
    def ask(statement)
      Task.run(stops: false) do |till|
        Wire.ask(@connection, statement, till).first
      ensure
        @connection.finish if till.call < FOREVER && Wire.busy?(@connection)
      end
    end

    # Calls a function that requests locks, and yields its value. If an exception interrupts this, cancels the request
    # on the server, too, and releases a lock that was granted nevertheless. The caller releases the value that was
    # yielded last.
    def request(function, *values, **options, &keep)
      statement = Wire.call(function, *values, **options)
      undo = lambda do |answer|
        keep.call(nil)
        release(answer, @connection)
      end
      Task.run(undo) do
        Wire.ask(@connection, statement, FOREVER).first.tap(&keep)
      rescue Stop => e
        clear(e.answer, @connection)
        raise
      end
    end

    # For what lasts until the end of the transaction
    def check_transaction
      raise WrongState.new('there is no open transaction', '55000') unless transaction?
    end

    # Releases one ticket, or an array of tickets.
    def undo(answer)
      connection = raw
      Task.run(stops: false) { release(answer, connection) }
    end

    private

    # Undoes an interrupted request. Closes the connection if the answer is not known.
    def clear(answer, connection)
      return release(answer&.first, connection) if Wire.idle?(connection) && answer != []

      connection.finish unless connection.finished?
    end

    # Closes the connection if it may still hold the lock.
    def release(answer, connection)
      Wire.numbers(answer.to_s).each do |ticket|
        Wire.ask(connection, Wire.call('dlock_release_ticket', ticket), Dlock.now + UNDO)
      end
    rescue Error
      connection.finish unless connection.finished?
    end

    def raw
      @connection
    end

    def transaction?
      Dlock.translated { raw.transaction_status } != PG::PQTRANS_IDLE
    end
  end

  # Over ActiveRecord, without its query cache
  class RecordDatabase < Database
    def ask(statement)
      select(quote(*statement))
    end

    def request(function, *values, **options)
      sql = quote(*Wire.call(function, *values, **options))
      answered = false
      value = select(sql)
      yield value
      answered = true
      value
    rescue Error
      answered = true
      raise
    ensure
      unless answered
        connection = raw
        Task.run(stops: false) { clear(Wire.obey(connection), connection) }
      end
    end

    private

    def raw
      @connection.raw_connection
    end

    def transaction?
      @connection.transaction_open? || super
    end

    def quote(sql, values)
      values = values.map { |value| value.is_a?(Seconds) ? value.to_s : value }
      Dlock.translated { sql.gsub(/\$(\d+)/) { @connection.quote(values[Regexp.last_match(1).to_i - 1]) } }
    end

    def select(sql)
      Dlock.translated { @connection.uncached { @connection.select_value(sql, 'dlock') } }
    end
  end

  # A number of seconds as an interval
  Seconds = Struct.new(:seconds) do
    def self.of(time)
      time && new([Float(time), 0].max)
    end

    def to_s
      format('%.6f s', seconds)
    end
  end
end
