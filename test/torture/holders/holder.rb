# frozen_string_literal: true

# One of the holders of ../clients.pl: holder.rb PROXY SERVER END

require 'dlock'

$stdout.sync = true
PROXY, SERVER = ARGV.first(2).map do |address|
  host, port = address.split(':')
  "host=#{host} port=#{port} dbname=postgres user=app"
end
LOCKS = Dlock::Locks.new(PROXY, patience: 5)

def write(scope, fence)
  db = PG.connect("#{SERVER} connect_timeout=10")
  count = db.transaction do
    db.exec_params("SELECT dlock_guard('mixed', $1)", [fence]) unless scope == 'session'
    db.exec_params('UPDATE proof SET fence = $1 WHERE fence < $1', [fence]).cmd_tuples
  end
  puts "wrote #{scope} #{fence} #{count}"
rescue PG::Error => e
  puts "failed #{e.class}"
ensure
  db&.finish
end

def work(scope, lock)
  3.times do |turn|
    now = Time.now
    lock.check
    puts "held #{scope} #{lock.fence} #{(now.to_r * 1_000_000).to_i}"
    write(scope, lock.fence) if turn == 1
    sleep(0.01)
  end
end

SCOPES = [
  -> { LOCKS.lock('mixed', timeout: 10).synchronize { |lock| work('session', lock) } },
  -> { LOCKS.lock('mixed', ttl: 3, timeout: 10).synchronize { |lock| work('ttl', lock) } },
  lambda do
    LOCKS.lease(3).synchronize do |lease|
      lease.lock('mixed', timeout: 10).synchronize { |lock| work('lease', lock) }
    end
  end
].cycle

while Time.now.to_f < Float(ARGV[2])
  begin
    SCOPES.next.call
    puts 'done'
  rescue Dlock::Error => e
    puts "failed #{e.class}"
  end
end
