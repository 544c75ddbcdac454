# frozen_string_literal: true

# Locks of dlock, the lock service inside PostgreSQL
module Dlock
end

require_relative 'dlock/errors'
require_relative 'dlock/task'
require_relative 'dlock/line'
require_relative 'dlock/database'
require_relative 'dlock/heart'
require_relative 'dlock/lock'
require_relative 'dlock/locks'
require_relative 'dlock/tickets'
