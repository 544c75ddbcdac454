# Rails' dump of a database's schema, and what loads it.
#
#   rails_tool.rb DATABASE dump|structure_dump|load|structure_load FILE [advised]
#
# "advised" is what the pages advise.  libpq's environment variables say where
# the server is; test/t/client_schema_tools.pl sets them.

require 'active_record'

database, action, file, how = ARGV
base = ActiveRecord::Base
config = ActiveRecord::DatabaseConfigurations::HashConfig.new(
  'test', 'primary', { adapter: 'postgresql', database: database })
base.establish_connection(config.configuration_hash)
tasks = ActiveRecord::Tasks::PostgreSQLDatabaseTasks
ActiveRecord::SchemaDumper.ignore_tables = [/^dlock_/] if how == 'advised'
ActiveRecord::Migration.verbose = false

case action
when 'dump'
  # since 7.2, it takes a pool
  dumped = ActiveRecord::VERSION::STRING.to_f < 7.2 ? base.connection : base.connection_pool
  File.open(file, 'w') { |out| ActiveRecord::SchemaDumper.dump(dumped, out) }
when 'load' then load file
when 'structure_dump' then tasks.new(config).structure_dump(file, nil)
when 'structure_load' then tasks.new(config).structure_load(file, nil)
end
