# frozen_string_literal: true

module Dlock
  # Goes on while the machine sleeps, if there is such a clock
  CLOCK = Process.const_defined?(:CLOCK_BOOTTIME) ? Process::CLOCK_BOOTTIME : Process::CLOCK_MONOTONIC
  FOREVER = Float::INFINITY

  # The client allows an answer so many seconds more than the statement may take. Then it drops the connection.
  GRACE = 5
  # The server has so many seconds to obey a cancel, and the client so many more to take a request back.
  OBEY = 1
  UNDO = 2
  # Timers may stand still while the machine sleeps, so that all waits look at the clock each second.
  GLANCE = 1

  def self.now
    Process.clock_gettime(CLOCK)
  end

  # Pauses before retries: they grow, and are varied at random by up to a half.
  def self.pauses(most = 2)
    pause = 0.05
    -> { (pause = [2 * pause, most].min) * (0.5 + rand) }
  end

  # Interrupts a task where it waits, and nowhere else. The answer is that of the statement that it has interrupted.
  class Stop < Exception # rubocop:disable Lint/InheritException
    attr_accessor :answer

    # Yields to a wait that a stop may end, once.
    def self.allow(&wait)
      return yield if Thread.current[:dlock_stopped]

      Thread.handle_interrupt(Stop => :immediate, &wait)
    rescue Stop
      over
      raise
    end

    # From now on, this thread undoes what it has done.
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

    # Nil if there is none until then. The time may be a function, whose value may change.
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

  # How long to wait before the next look at the clock
  def self.left(till)
    till.respond_to?(:call) ? [till.call - now, 0.1].min : [till - now, GLANCE].min
  end

  # Work in a thread of its own. An exception that breaks off the caller's wait, of Timeout, of Thread#raise or of a
  # signal, stops the work at once but lets it undo what it has done. The undoing takes a function the result.
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
        task.leave # another exception may have arrived at the begin of the first
      end
    end

    # A thread that serves the whole process. What masks exceptions here must not keep it from ending with the process.
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
      value = @work.call
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

    # The exception came after the work, and before the caller had the result.
    def undo_late
      value, error = @outcome.see
      return if error || @undo.nil? || @undone

      @undone = true
      undo = Task.new(nil, false, -> { @undo.call(value) })
      undo.start
      @outcome = undo.outcome
    end

    # Exceptions of signal handlers come in spite of the mask.
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
