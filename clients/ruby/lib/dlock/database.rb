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

    def ask(statement)
      Task.run(stops: false) { Wire.ask(@connection, statement, FOREVER).first }
    end

    # Calls a function that requests locks. If an exception interrupts this, cancels the request on the server, too, and
    # releases a lock that was granted nevertheless.
    def request(function, *values, **options)
      statement = Wire.call(function, *values, **options)
      Task.run(method(:release)) do
        Wire.ask(@connection, statement, FOREVER).first
      rescue Stop => e
        clear(e.answer)
        raise
      end
    end

    # Releases one ticket, or an array of tickets.
    def undo(answer)
      Task.run(stops: false) { release(answer) }
    end

    private

    # Undoes an interrupted request, or closes the connection.
    def clear(answer)
      Wire.idle?(raw) ? release(answer&.first) : raw.finish
    end

    def release(answer)
      Wire.numbers(answer.to_s).each do |ticket|
        Wire.ask(raw, Wire.call('dlock_release_ticket', ticket), Dlock.now + UNDO)
      end
    rescue Error
      nil # the connection is closed
    end

    def raw
      @connection
    end
  end

  # Over ActiveRecord, without its query cache
  class RecordDatabase < Database
    def ask(statement)
      Dlock.translated { execute(*statement) }
    end

    def request(function, *values, **options)
      answered = false
      value = call(function, *values, **options)
      answered = true
      value
    rescue Error
      answered = true
      raise
    ensure
      Task.run(stops: false) { clear(Wire.obey(raw)) } unless answered
    end

    private

    def raw
      @connection.raw_connection
    end

    def execute(sql, values)
      values = values.map { |value| value.is_a?(Seconds) ? value.to_s : value }
      sql = sql.gsub(/\$(\d+)/) { @connection.quote(values[Regexp.last_match(1).to_i - 1]) }
      @connection.uncached { @connection.select_value(sql, 'dlock') }
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
