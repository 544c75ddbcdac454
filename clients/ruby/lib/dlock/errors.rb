# frozen_string_literal: true

require 'pg'

module Dlock
  # An error from the server. Its cause is the driver's error.
  class Error < StandardError
    attr_reader :sqlstate, :detail, :hint
    # For this package: may the server have executed the failed call, or an earlier attempt of it?
    attr_accessor :doubt

    def initialize(message = nil, sqlstate = nil, detail: nil, hint: nil)
      super(message)
      @sqlstate = sqlstate
      @detail = detail
      @hint = hint
    end
  end

  class LockTimeout < Error; end
  class Deadlock < Error; end
  class LockLost < Error; end
  class NotAllowed < Error; end
  class NotPrimary < Error; end
  class StaleVersion < Error; end
  class BadArgument < Error; end
  class WrongState < Error; end
  class NoRoom < Error; end
  class Cancelled < Error; end
  class QuorumLate < Error; end
  class ConnectionLost < Error; end

  ERRORS = {
    '55P03' => LockTimeout, '40P01' => Deadlock, '55L01' => LockLost, '42501' => NotAllowed, '25006' => NotPrimary,
    '40001' => StaleVersion, '22023' => BadArgument, '22004' => BadArgument, '55000' => WrongState,
    '53200' => NoRoom, '53400' => NoRoom, '57014' => Cancelled, '58030' => QuorumLate,
    '57P01' => ConnectionLost, '57P02' => ConnectionLost, '57P03' => ConnectionLost
  }.freeze

  # Converts a driver's error, or an error of ActiveRecord that wraps one, to an error of this package. Returns other
  # errors unchanged.
  def self.translate(error)
    driver = error
    driver = driver.cause while driver && !driver.is_a?(PG::Error) && !driver.is_a?(Error)
    return error if driver.nil?
    return driver if driver.is_a?(Error)

    code = driver.result&.error_field(PG::Result::PG_DIAG_SQLSTATE)
    kind = ERRORS[code] || (code.nil? || code.start_with?('08') ? ConnectionLost : Error)
    return error if code.nil? && !driver.is_a?(PG::ConnectionBad) && !driver.is_a?(PG::UnableToSend)

    kind.new(
      driver.result&.error_field(PG::Result::PG_DIAG_MESSAGE_PRIMARY) || driver.message, code,
      detail: driver.result&.error_field(PG::Result::PG_DIAG_MESSAGE_DETAIL),
      hint: driver.result&.error_field(PG::Result::PG_DIAG_MESSAGE_HINT)
    )
  end

  # Yields to statements of the program, and raises their errors as errors of this package.
  def self.translated
    yield
  rescue StandardError => e
    translated = translate(e)
    raise if translated.equal?(e)

    raise translated
  end
end
