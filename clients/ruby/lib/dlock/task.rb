# frozen_string_literal: true

module Dlock
  # A clock that runs while the machine sleeps, if the system has one
  CLOCK = Process.const_defined?(:CLOCK_BOOTTIME) ? Process::CLOCK_BOOTTIME : Process::CLOCK_MONOTONIC
  FOREVER = Float::INFINITY

  # The client waits this many seconds longer than the statement may take. Then it drops the connection.
  GRACE = 5
  # The server has OBEY seconds to obey a cancel. Then the client has UNDO seconds to undo the request.
  OBEY = 1
  UNDO = 2
  # Timers may stop while the machine sleeps, so all waits check the clock every second.
  GLANCE = 1

  def self.now
    Process.clock_gettime(CLOCK)
  end

  # Pauses before retries. They grow, and vary at random by up to a half.
  def self.pauses(most = 2)
    pause = 0.05
    -> { (pause = [2 * pause, most].min) * (0.5 + rand) }
  end

  # Interrupts a task, but only in a wait. The answer is that of the interrupted statement.
  class Stop < Exception # rubocop:disable Lint/InheritException
    attr_accessor :answer

    # Yields to a wait that a stop may end once.
    def self.allow(&wait)
      return yield if Thread.current[:dlock_stopped]

      Thread.handle_interrupt(Stop => :immediate, &wait)
    rescue Stop
      over
      raise
    end

    # No further stop interrupts this thread, because it undoes its work.
    def self.over
      Thread.current[:dlock_stopped] = true
    end

    def self.sleep(seconds)
      allow { Kernel.sleep(seconds) } if seconds.positive?
    end
  end

  # A value that other threads wait for
  class Box
    def initialize(value = nil)
      @mutex = Mutex.new
      @filled = ConditionVariable.new
      @value = value
    end

    def put(value)
      @mutex.synchronize do
        @value = value
        @filled.broadcast
      end
    end

    # Nil if there is no value by that time. The time may be a function, whose value may change.
    def see(till = FOREVER, keep: true)
      @mutex.synchronize do
        while @value.nil? && (left = Dlock.left(till)).positive?
          Stop.allow { @filled.wait(@mutex, left) }
        end
        value = @value
        @value = nil unless keep
        value
      end
    end

    def take(till)
      see(till, keep: false)
    end
  end

  # The time until the next check of the clock
  def self.left(till)
    till.respond_to?(:call) ? [till.call - now, 0.1].min : [till - now, GLANCE].min
  end

  # Work in its own thread. If an exception of Timeout, Thread#raise or a signal interrupts the caller's wait, the work
  # stops at once, but can undo what it has done. The function that undoes it gets the result.
  class Task
    def self.run(undo = nil, stops: true, &work)
      task = new(undo, stops, work)
      begin
        begin
          task.start
          task.value
        ensure
          task.leave
        end
      ensure
        task.leave # again: another exception may have interrupted the first leave
      end
    end

    # Starts a thread that ends with the process, even if the caller masks exceptions.
    def self.thread
      Thread.new do
        Thread.current.report_on_exception = false
        Thread.handle_interrupt(Object => :immediate) { yield }
      end
    end

    def initialize(undo, stops, work)
      @undo = undo
      @stops = stops
      @work = work
      @mutex = Mutex.new
      @outcome = Box.new
    end

    def start
      Task.thread do
        Thread.handle_interrupt(Stop => :never) { execute }
      ensure
        @outcome.put([nil, ConnectionLost.new('the thread was killed')]) unless @outcome.see(0)
      end
    rescue ThreadError => e
      @outcome.put([nil, e])
    end

    def value
      value, error = @outcome.see
      @returned = true
      raise error if error

      value
    end

    def leave
      return if @returned

      Thread.handle_interrupt(Object => :never) do
        ended = @mutex.synchronize do
          @left ||= Dlock.now
          @thread.raise(Stop.new) if @stops && !@stopped && @thread && !@ended
          @stopped = true if @stops
          @ended
        end
        undo_late if ended
        wait_for_end(@left + OBEY + UNDO)
        @returned = true
      end
    end

    protected

    attr_reader :outcome

    private

    def execute
      @mutex.synchronize do
        return @outcome.put([nil, Stop.new]) if @stopped

        @thread = Thread.current
      end
      @outcome.put(conclude)
    end

    def conclude
      value = @work.call(method(:till))
      stopped = @mutex.synchronize do
        @ended = true unless @stopped
        @stopped
      end
      return [value, nil] unless stopped

      Stop.over
      @undo&.call(value)
      [nil, Stop.new]
    rescue Exception => e # rubocop:disable Lint/RescueException
      @mutex.synchronize { @ended = true }
      [nil, e]
    end

    # The time until which the work may wait, which changes when the caller is interrupted
    def till
      @left ? @left + UNDO : FOREVER
    end

    # The exception arrived after the work, but before the caller had the result.
    def undo_late
      value, error = @outcome.see
      return if error || @undo.nil? || @undone

      @undone = true
      undo = Task.new(nil, false, ->(_) { @undo.call(value) })
      undo.start
      @outcome = undo.outcome
    end

    # Exceptions of signal handlers arrive in spite of the mask.
    def wait_for_end(till)
      late = nil
      until @outcome.see(0) || Dlock.now >= till
        begin
          @outcome.see(till)
        rescue Exception => e # rubocop:disable Lint/RescueException
          late = e
        end
      end
      raise late if late
    end
  end
end
