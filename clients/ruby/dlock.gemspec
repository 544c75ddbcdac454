Gem::Specification.new do |spec|
  spec.name = 'dlock'
  spec.version = '1.0.0'
  spec.summary = 'Locks of dlock, the lock service inside PostgreSQL'
  spec.description = 'Locks, leases, elections and tickets of dlock, and with_advisory_lock for ActiveRecord'
  spec.authors = ['dlock contributors']
  spec.license = 'PostgreSQL'
  spec.required_ruby_version = '>= 3.1'
  spec.files = Dir['lib/**/*.rb', 'LICENSE', 'README.md']
  spec.add_runtime_dependency 'pg', '~> 1.4'
end
