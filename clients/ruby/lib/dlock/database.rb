# frozen_string_literal: true

module Dlock
  # What executes SQL: a PG::Connection, or a connection of ActiveRecord
  class Database
    # A cancelled statement has so many seconds to end. Then its connection is closed.
    OBEY = 1

    def self.for(source)
      return source if source.is_a?(Database)

      source.respond_to?(:exec_params) ? Database.new(source) : RecordDatabase.new(source)
    end

    def initialize(connection)
      @connection = connection
    end

    # The value of SELECT function(...). The server chooses options that are nil.
    def call(function, *values, **options)
      Dlock.translated { execute(*statement(function, values, options.compact)) }
    end

    # The same for a request that may be broken off from outside: by Timeout, which throws, or by Thread#kill. Then the
    # server cancels the request, too, and a lock that came all the same is released.
    def request(function, *values, **options)
      answered = false
      value = call(function, *values, **options)
      answered = true
      value
    rescue Error
      answered = true
      raise
    ensure
      abandon(raw) unless answered
    end

    private

    def raw
      @connection
    end

    def statement(function, values, options)
      places = values.each_index.map { |n| "$#{n + 1}" }
      options.each_key.with_index(values.size + 1) { |key, n| places << "#{key} => $#{n}" }
      ["SELECT #{function}(#{places.join(', ')})", values + options.values]
    end

    def execute(sql, values)
      decode(@connection.exec_params(sql, values.map { |value| value&.to_s }))
    end

    def decode(result)
      return if result.ntuples.zero? || result.getisnull(0, 0)

      text = result.getvalue(0, 0)
      case result.ftype(0)
      when 16 then text.to_s.start_with?('t')
      when 20, 23 then Integer(text)
      else text
      end
    end

    def abandon(connection)
      connection.cancel
      return connection.finish unless connection.block(OBEY)

      ticket = connection.get_last_result&.then { |result| decode(result) }
      call('dlock_release_ticket', ticket) if ticket.is_a?(Integer)
    rescue PG::Error, Error
      # the request is cancelled, or its connection is gone
    end
  end

  # Over ActiveRecord. Nothing comes from its query cache.
  class RecordDatabase < Database
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

  # An interval
  Seconds = Struct.new(:seconds) do
    def self.of(time)
      time && new([Float(time), 0].max)
    end

    def to_s
      format('%.6f s', seconds)
    end
  end
end
