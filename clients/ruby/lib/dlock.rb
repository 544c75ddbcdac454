# frozen_string_literal: true

# Locks of dlock, the lock service inside PostgreSQL
module Dlock
end

require_relative 'dlock/errors'
require_relative 'dlock/database'
require_relative 'dlock/lock'
