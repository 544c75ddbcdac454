# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # shared with the scripts that source it
#
# The private servers of bench/peers/run: in its scratch directory, on Unix
# sockets and loopback ports, as an unprivileged user.
#
# Each server is configured as its manual advises for important data, and all
# are on one disk.  Redis makes no snapshots, because these would disturb the
# measurement.  Redis's durable server flushes its log before each answer, as
# ZooKeeper and etcd always do.

servers=()

# The jars of ZooKeeper and Curator in Debian's packages
java_path=()
for jar in curator-client curator-framework curator-recipes zookeeper \
	zookeeper-jute guava slf4j-api slf4j-nop postgresql; do
	java_path+=("/usr/share/java/$jar.jar")
done

# Set port to a free port.
find_port()
{
	while port=$((20000 + RANDOM % 12000)); do
		if ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then return; fi
	done
}

# serve NAME COMMAND...: run a server in the background, in its own directory.
serve()
{
	as_user mkdir "$scratch/$1"
	(cd "$scratch/$1" && exec_as_user "${@:2}" >"$scratch/$1.log" 2>&1) &
	servers+=($!)
}

# Like as_user, but replaces this process, so that its id is the server's.  The
# server is in its own session, like PostgreSQL, because the kernel may divide
# the processors between sessions.
exec_as_user()
{
	if [ "$(id -u)" -eq 0 ]; then
		exec setsid setpriv --reuid=nobody --regid="$(id -g nobody)" \
			--clear-groups -- "$@"
	fi
	exec setsid "$@"
}

# until_up NAME COMMAND...: wait until the command succeeds.
until_up()
{
	local tries=0
	until "${@:2}" >/dev/null 2>&1; do
		if [ $((tries += 1)) -ge 300 ]; then
			tail "$scratch/$1.log" >&2
			die "$1 does not come up"
		fi
		sleep 0.1
	done
}

# End all servers except PostgreSQL, which remove_scratch ends.
end_servers()
{
	if [ ${#servers[@]} -gt 0 ]; then
		kill "${servers[@]}" 2>/dev/null || true
		wait "${servers[@]}" 2>/dev/null || true
	fi
}

start_postgres()
{
	quiet as_user "$bin/initdb" -D "$scratch/data" -U admin -A trust \
		--no-locale -E UTF8
	find_port
	as_user tee -a "$scratch/data/postgresql.conf" >/dev/null <<-END
		listen_addresses = '127.0.0.1'
		port = $port
		unix_socket_directories = '$scratch'
		max_connections = $((waiters + 100))
		log_min_messages = fatal
	END
	quiet as_user "$bin/pg_ctl" -D "$scratch/data" -l "$scratch/server.log" \
		-w start
	export PGHOST=$scratch PGPORT=$port PGUSER=admin PGDATABASE=bench
	export JDBC="jdbc:postgresql://127.0.0.1:$port/bench?user=admin&prepareThreshold=1"
	export POSTGRES="host=127.0.0.1 port=$port user=admin dbname=bench sslmode=disable"
	"$bin/createdb" bench
	quiet "$bin/psql" -Xq -v ON_ERROR_STOP=1 -f "$top/bench/peers/setup.sql"
}

# start_redis NAME OPTION...
start_redis()
{
	serve "$1" redis-server --port 0 --unixsocket "$scratch/$1.socket" \
		--save '' --maxclients $((waiters + 100)) \
		--tcp-backlog $((waiters + 100)) "${@:2}"
	until_up "$1" redis-cli -s "$scratch/$1.socket" ping
}

start_zookeeper()
{
	find_port
	export ZOOKEEPER=127.0.0.1:$port
	as_user tee "$scratch/zoo.cfg" >/dev/null <<-END
		tickTime=2000
		dataDir=$scratch/zookeeper
		clientPort=$port
		clientPortAddress=127.0.0.1
		maxClientCnxns=0
		admin.enableServer=false
	END
	serve zookeeper java -Xmx1000m -cp "$(join : "${java_path[@]}")" \
		org.apache.zookeeper.server.ZooKeeperServerMain "$scratch/zoo.cfg"
	until_up zookeeper bash -c ": <'/dev/tcp/127.0.0.1/$port'"
}

start_etcd()
{
	local peers
	find_port
	peers=$port
	find_port
	export ETCD=127.0.0.1:$port
	serve etcd etcd --data-dir "$scratch/etcd/data" --log-level error \
		--listen-client-urls "http://$ETCD" \
		--advertise-client-urls "http://$ETCD" \
		--listen-peer-urls "http://127.0.0.1:$peers" \
		--initial-advertise-peer-urls "http://127.0.0.1:$peers" \
		--initial-cluster "default=http://127.0.0.1:$peers"
	until_up etcd bash -c ": <'/dev/tcp/127.0.0.1/$port'"
}
