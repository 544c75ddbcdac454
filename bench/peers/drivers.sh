# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # shared with the scripts that source it
#
# Build and use the drivers of bench/peers/run.  driver.c describes their
# commands.

declare -A to_driver from_driver driver_pid

join()
{
	local IFS=$1
	shift
	printf '%s' "$*"
}

# Debian's source of etcd's client is in GOPATH, and is not a module.
build_go()
{
	GO111MODULE=off GOPATH=/usr/share/gocode GOCACHE=$scratch/go GOFLAGS='' \
		quiet as_user go build -o "$scratch/etcd_driver" \
		bench/peers/driver.go bench/peers/etcd.go
}

build_java()
{
	quiet as_user javac -Xlint:all,-path -d "$scratch/java" \
		-cp "$(join : "${java_path[@]}")" \
		bench/peers/Driver.java bench/peers/ZooKeeperPeer.java
}

# build_c PEER...: build driver.c, with redis.c if Redis is one of the peers.
build_c()
{
	local redis=()
	if has redis "$@"; then
		redis=(-DWITH_REDIS bench/peers/redis.c -lhiredis)
	fi
	quiet as_user "$compiler" -O2 -Wall -pthread \
		-I"$("$pg_config" --includedir)" -o bench/peers/driver \
		bench/peers/driver.c bench/peers/postgres.c "${redis[@]}" \
		-L"$("$pg_config" --libdir)" -lpq -lm
}

# start_driver NAME PEER CLIENTS: returns while the driver still connects.
start_driver()
{
	local command fd
	case $2 in
		zookeeper)
			command=(java -Xss256k -cp
				"$scratch/java:$(join : "${java_path[@]}")" ZooKeeperPeer) ;;
		etcd) command=("$scratch/etcd_driver") ;;
		redis*)
			command=(env "REDIS_SOCKET=$scratch/$2.socket"
				bench/peers/driver redis) ;;
		*) command=(bench/peers/driver "$2") ;;
	esac
	mkfifo "$scratch/$1.in" "$scratch/$1.out"
	"${command[@]}" "$3" <"$scratch/$1.in" >"$scratch/$1.out" &
	driver_pid[$1]=$!
	exec {fd}>"$scratch/$1.in"
	to_driver[$1]=$fd
	exec {fd}<"$scratch/$1.out"
	from_driver[$1]=$fd
	rm "$scratch/$1.in" "$scratch/$1.out"
}

# tell NAME LINE: send a command to a driver.
tell()
{
	printf '%s\n' "$2" >&"${to_driver[$1]}"
}

# hear NAME WORD: sets heard to the rest of its next line after the word
hear()
{
	local line
	read -r -u "${from_driver[$1]}" line || die "the clients of $1 have failed"
	[ "${line%% *}" = "$2" ] || die "$1: $2 was expected, and not $line"
	heard=${line#* }
}

# end_driver NAME [SIGNAL]
end_driver()
{
	local in=${to_driver[$1]} out=${from_driver[$1]} pid=${driver_pid[$1]}
	unset "driver_pid[$1]"
	# closing the pipe would not end the driver: later drivers inherit the pipe
	if [ -n "${2-}" ]; then kill "-$2" "$pid" || true; else tell "$1" quit; fi
	wait "$pid" 2>/dev/null || true
	exec {in}>&- {out}<&-
}

end_drivers()
{
	local name
	for name in "${!driver_pid[@]}"; do end_driver "$name" KILL; done
}

# now_ms: milliseconds since 1970
now_ms()
{
	printf '%s' $((${EPOCHREALTIME/./} / 1000))
}
