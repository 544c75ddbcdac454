# frozen_string_literal: true

require 'dlock'
require 'active_support/concern'

module Dlock
  # The interface of the gem with_advisory_lock, over locks of dlock
  #
  # A name means the same lock in each method. Locks nest: a thread that holds a lock acquires it again at once.
  module WithAdvisoryLock
    extend ActiveSupport::Concern

    Result = Struct.new(:lock_was_acquired, :result) do
      alias_method :lock_was_acquired?, :lock_was_acquired
    end

    class FailedToAcquireLock < StandardError
      def initialize(name)
        super("Failed to acquire lock #{name}")
      end
    end

    OPTIONS = %i[timeout_seconds shared transaction disable_query_cache slots permits info].freeze

    # The locks that this thread holds, innermost last
    def self.stack
      Thread.current[:dlock_stack] ||= []
    end

    def self.held(pool, name)
      stack.select { |lock| lock.pool == pool && lock.name == name.to_s }
    end

    def self.options(given)
      given = { timeout_seconds: given } unless given.respond_to?(:fetch)
      given = given.to_h.transform_keys(&:to_sym)
      unknown = given.keys - OPTIONS
      raise ArgumentError, "unknown options: #{unknown.join(', ')}" if unknown.any?

      given
    end

    class_methods do
      # Returns the block's result, or false if the lock was not acquired in time. The options are a number of seconds,
      # or a hash: timeout_seconds (nil waits without limit, 0 only tries), shared, transaction, disable_query_cache,
      # and dlock's own slots, permits, info.
      def with_advisory_lock(lock_name, options = {}, &block)
        result = with_advisory_lock_result(lock_name, options, &block)
        result.lock_was_acquired? ? result.result : false
      end

      def with_advisory_lock!(lock_name, options = {}, &block)
        result = with_advisory_lock_result(lock_name, options, &block)
        raise FailedToAcquireLock, lock_name unless result.lock_was_acquired?

        result.result
      end

      def with_advisory_lock_result(lock_name, options = {}, &block)
        options = WithAdvisoryLock.options(options)
        return uncached { with_advisory_lock_result(lock_name, options.except(:disable_query_cache), &block) } if
          options[:disable_query_cache]
        held = WithAdvisoryLock.held(connection_pool, lock_name)
        return Result.new(true, yield) if held.any? { |lock| lock.shared? == (options[:shared] ? true : false) }

        connection_pool.with_connection do |connection|
          AdvisoryLock.new(connection, lock_name, options).run(&block)
        end
      end

      # Must an acquire wait?
      def advisory_lock_exists?(lock_name)
        return true if WithAdvisoryLock.held(connection_pool, lock_name).any?

        !with_advisory_lock_result(lock_name, timeout_seconds: 0) {}.lock_was_acquired?
      end

      # The name of the innermost lock of this thread
      def current_advisory_lock
        WithAdvisoryLock.stack.last&.name
      end

      def current_advisory_locks
        WithAdvisoryLock.stack.map(&:name)
      end

      # The number of that lock, greater than that of each earlier holder. The block can compare it in other systems.
      def current_advisory_fence
        WithAdvisoryLock.stack.last&.fence
      end
    end

    # The same for instances
    ClassMethods.instance_methods.each do |name|
      define_method(name) { |*arguments, &block| self.class.public_send(name, *arguments, &block) }
    end

    # A lock for a block, on the connection of this thread
    class AdvisoryLock < Lock
      def initialize(connection, name, options)
        if options[:transaction] && !connection.transaction_open?
          raise ArgumentError, 'transaction: true needs an open transaction'
        end

        @connection = connection
        @shared = options[:shared] ? true : false
        super(connection, name.to_s, transaction: options[:transaction], timeout: options[:timeout_seconds],
                                     shared: @shared || nil, **options.slice(:slots, :permits, :info))
      end

      def shared?
        @shared
      end

      def pool
        @connection.pool
      end

      # Returns a Result. Raises LockLost if the lock was lost during the block.
      def run
        leaving(-> { release if unreleased? }) do
          next Result.new(false, nil) unless try_acquire

          WithAdvisoryLock.stack.push(self)
          Result.new(true, yield)
        end
      ensure
        WithAdvisoryLock.stack.delete_if { |lock| lock.equal?(self) }
      end

      # In a failed transaction, rolls back before the release, and begins another transaction for the caller to end.
      def release
        super
      rescue Error => e
        raise unless e.sqlstate == '25P02'

        begin
          @connection.rollback_db_transaction
          super
        ensure
          @connection.begin_db_transaction
        end
      end
    end
  end
end

ActiveSupport.on_load(:active_record) { include Dlock::WithAdvisoryLock }
