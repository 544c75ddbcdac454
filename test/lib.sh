# shellcheck shell=bash
#
# Shared code of the scripts in test/, which source this file.
#
# A server never runs as root, and tests must not write to the source tree.  So
# the tree is copied into a scratch directory, which is removed at the end.
# root works there as nobody: unlike postgres, that user always exists, and
# cannot reach a real server by mistake.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The scripts parse the output of tools, and the tests must not depend on the
# caller's settings for PostgreSQL or the language.
unset LANG LANGUAGE "${!LC_@}"
export LC_ALL=C
for variable in "${!PG@}"; do
	case $variable in PG_*) ;; *) unset "$variable" ;; esac
done
unset MAKEFLAGS MAKELEVEL

# The majors that Debian has, and their suites.  experimental is used with sid.
# shellcheck disable=SC2034 # for the commands
majors=(15 17 18 19)
# shellcheck disable=SC2034
declare -A suites=(
	[15]=bookworm
	[17]=trixie
	[18]=sid
	[19]='sid experimental')

scratch=

die()
{
	printf '%s: %s\n' "${0##*/}" "$*" >&2
	exit 1
}

# sudo may ask for a password only at a terminal.
sudo=(sudo)
if [ ! -t 0 ]; then sudo+=(-n); fi

as_root()
{
	if [ "$(id -u)" -eq 0 ]; then "$@"; else "${sudo[@]}" "$@"; fi
}

# Does as_root work?  Asks for the password if necessary.
may_be_root()
{
	if [ "$(id -u)" -eq 0 ]; then return; fi
	command -v sudo >/dev/null || return
	sudo -n true 2>/dev/null || { [ -t 0 ] && sudo -v; }
}

as_user()
{
	if [ "$(id -u)" -eq 0 ]; then
		runuser -u nobody -- "$@"
	else
		"$@"
	fi
}

# As as_user, but with the right to enter and change networks.  Needs the
# scratch directory.  sudo keeps only the given part of the environment.
as_network_user()
{
	as_root setpriv --reuid "$(as_user id -u)" --regid "$(as_user id -g)" \
		--clear-groups --inh-caps +sys_admin,+net_admin \
		--ambient-caps +sys_admin,+net_admin \
		env "PATH=$PATH" "HOME=$HOME" "TMPDIR=$TMPDIR" LC_ALL=C \
		"PG_TEST_TIMEOUT_DEFAULT=${PG_TEST_TIMEOUT_DEFAULT:-180}" "$@"
}

# quiet COMMAND...: shows the output only if the command fails
quiet()
{
	local log status=0
	log=$(mktemp)
	"$@" >"$log" 2>&1 </dev/null || status=$?
	[ "$status" -eq 0 ] || cat "$log"
	rm "$log"
	return "$status"
}

# with_progress TITLE STATE COMMAND...: as quiet, but meanwhile shows the time
# taken, and the output of STATE, a command that reads the output so far.
#
# Shows one changing line at a terminal, or else a line every ten seconds.  The
# command runs in the foreground, so that an interrupt reaches it.  Until apt
# has printed something, the line stays, because sudo may ask for a password
# there.
with_progress()
{
	local title=$1 state=$2 log status=0 start=$SECONDS pid

	printf '%s ...' "$title"
	[ -t 1 ] || printf '\n'
	log=$(mktemp)
	show_progress "$title" "$state" "$log" &
	pid=$!
	# in a subshell, because output of this shell's traps must not go to the log
	("${@:3}") >"$log" 2>&1 </dev/null || status=$?
	kill "$pid" 2>/dev/null || true
	wait "$pid" 2>/dev/null || true
	if [ -t 1 ]; then printf '\r\033[K%s: ' "$title"; fi
	if [ "$status" -ne 0 ]; then
		[ ! -t 1 ] || printf 'failed\n'
		grep -Ev '^(dl|pm)status:' "$log" || true
	elif [ -t 1 ]; then
		printf '%d s\n' $((SECONDS - start))
	fi
	rm "$log"
	return "$status"
}

# Runs in the background until it is killed, or its shell has exited.
show_progress()
{
	local start=$SECONDS next=10 line

	while sleep 0.5 && kill -0 $$ 2>/dev/null; do
		line="$1: $((SECONDS - start)) s$("$2" "$3" || true)"
		if [ ! -t 1 ]; then
			if [ $((SECONDS - start)) -ge "$next" ]; then
				printf '%.79s\n' "$line"
				next=$((next + 10))
			fi
		elif [ -s "$3" ] || [ "$2" != apt_state ]; then
			printf '\r\033[K%.79s' "$line"
		fi
	done
}

# States for with_progress: none, and that of apt_install, from its last line
# like
#	dlstatus:1:20.6:Retrieving file 7 of 34 (9s remaining)
#	pmstatus:gcc-12:43.1:Unpacking gcc-12 (amd64)
no_state() { :; }

apt_state()
{
	tac "$1" | sed -nE '/^(dl|pm)status:/ {
		s/^..status:[^:]*(:[^:0-9][^:]*)?:([0-9]+)[^:]*:(.*)/, \2%: \3/p; q }'
}

# lacking PG_CONFIG: prints the first missing file of a server, PGXS and the
# tests, or nothing if all exist.
#
# Debian's client package has PGXS and pg_regress; only the headers are in the
# development package.
lacking()
{
	local pgxs bin headers file

	if ! pgxs=$("$1" --pgxs 2>/dev/null); then
		printf '%s\n' "$1"
		return
	fi
	bin=$("$1" --bindir)
	headers=$("$1" --includedir-server)
	for file in "$bin"/{postgres,initdb,pg_ctl,psql} "$headers/postgres.h" \
		"$("$1" --includedir)/libpq-fe.h" \
		"$pgxs" "${pgxs%/makefiles/pgxs.mk}/test/regress/pg_regress"; do
		if [ ! -e "$file" ]; then
			printf '%s\n' "$file"
			return
		fi
	done
}

complete()
{
	[ -z "$(lacking "$1")" ]
}

# Set pg_config to the caller's PG_CONFIG, or else to the first complete one.
find_postgres()
{
	local candidates=(pg_config "$debian"/*/bin/pg_config)
	if [ -n "${PG_CONFIG-}" ]; then candidates=("$PG_CONFIG"); fi
	for pg_config in "${candidates[@]}"; do
		if complete "$pg_config"; then return 0; fi
	done
	return 1
}

# Set pg_config to the caller's PG_CONFIG, or else to that of the first server
# that has dlock, even if files to build dlock are missing.
find_installed()
{
	local candidates=(pg_config "$debian"/*/bin/pg_config)
	if [ -n "${PG_CONFIG-}" ]; then candidates=("$PG_CONFIG"); fi
	for pg_config in "${candidates[@]}"; do
		if [ -x "$("$pg_config" --bindir 2>/dev/null)/postgres" ] &&
			[ -e "$("$pg_config" --sharedir)/extension/dlock.control" ]; then
			return 0
		fi
	done
	return 1
}

# The directory of Debian's servers, by major
debian=/usr/lib/postgresql

# Set compiler to the first compiler that is installed.
find_compiler()
{
	for compiler in gcc clang cc; do
		if command -v "$compiler" >/dev/null; then return 0; fi
	done
	return 1
}

# need COMMAND PACKAGE...: note the packages as missing if COMMAND fails.
need()
{
	if ! eval "$1" >/dev/null 2>&1; then
		packages+=("${@:2}")
	fi
}

need_compiler()
{
	need find_compiler gcc
	need 'test -e /usr/include/stdio.h' libc6-dev
}

# Note the missing packages of a server: PG_CONFIG's, an incomplete server, or
# Debian's default.  postgresql-server-dev-all may be for many majors.
need_server()
{
	local path major=

	path=$("${PG_CONFIG-}" --bindir 2>/dev/null) || path=${PG_CONFIG-}
	if [ -n "$path" ]; then
		major=${path#"$debian"/}
		major=${major%%/*}
		# this server is not from a package
		if [ "$path" = "${path#"$debian"/}" ]; then return; fi
	fi
	if may_be_root; then update_lists; fi
	if [ -z "$path" ]; then
		for path in $(printf '%s\n' "$debian"/*/bin/postgres | sort -V); do
			if [ -x "$path" ]; then major=$(basename "${path%/bin/*}"); fi
		done
		# this server may be from a source that apt does not have
		if ! apt-cache show "postgresql-server-dev-$major" >/dev/null 2>&1 &&
			[ -n "$(debians_major)" ]; then
			major=
		fi
	fi

	: "${major:=$(debians_major)}"
	if [ -z "$major" ]; then
		# do as without apt
		packages+=(postgresql postgresql-server-dev-all)
		return
	fi
	need "test -x $debian/$major/bin/postgres" "postgresql-$major"
	need "test -e \"\$('$debian/$major/bin/pg_config' \
		--includedir-server)/postgres.h\"" "postgresql-server-dev-$major"
}

# Prints the major of the package postgresql, or nothing if apt has no lists.
debians_major()
{
	apt-cache depends postgresql 2>/dev/null |
		sed -n 's/^ *Depends: postgresql-\([0-9]*\)$/\1/p'
}

# Updates apt's lists once.  A source that fails may not be needed.
updated=
update_lists()
{
	if [ -z "$updated" ] && command -v apt-get >/dev/null; then
		with_progress 'Reading the lists of packages' apt_state \
			as_root apt-get -q update ||
			printf 'going on with the lists of packages that are there\n'
	fi
	updated=yes
}

# Runs as root, and does not change the machine's services.  Debian's packages
# would start their services, and create and start a cluster.
#
# Two files prevent that, and are removed at the end.  If the machine is
# already configured to create a cluster or not, the configuration stays.
apt_install()
{
	local apt conf=/etc/postgresql-common/createcluster.conf
	local policy=/usr/sbin/policy-rc.d

	apt=(apt-get -qq -y -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0
		-o APT::Status-Fd=3 install --no-install-recommends)
	export DEBIAN_FRONTEND=noninteractive
	# use a separate descriptor: dpkg closes it for the packages' own scripts
	exec 3>&1
	undo=:
	trap 'eval "$undo"' EXIT
	trap 'exit 130' INT
	trap 'exit 143' TERM
	trap 'exit 129' HUP

	if [ ! -e "$policy" ]; then
		undo+="; rm -f $policy"
		printf '#!/bin/sh\nexit 101\n' >"$policy"
		chmod +x "$policy"
	fi
	if [[ " $* " =~ ' postgresql'(-[0-9]+)?' ' ]]; then
		# the file exists, and nothing is started
		"${apt[@]}" postgresql-common || return
		if ! grep -Eqs '^[[:space:]]*create_main_cluster' "$conf"; then
			cp -p "$conf" "$conf.dlock" || return
			undo+="; mv -f $conf.dlock $conf"
			printf '\ncreate_main_cluster = false\n' >>"$conf"
		fi
	fi
	"${apt[@]}" "$@" || return
	# do not start them at the machine's next start, either
	if [[ " $* " == *' pgbouncer '* ]]; then
		update-rc.d pgbouncer disable || return
	fi
}

install_packages()
{
	local line="apt-get install --no-install-recommends $*"

	command -v apt-get >/dev/null ||
		die "missing is what Debian has in these packages: $*"
	may_be_root || die "packages are missing, and installing them needs root." \
		"As root, type

  apt-get update && $line
"
	update_lists
	printf 'These packages are missing: %s\n' "$*" | fold -s -w 79
	with_progress 'Installing packages' apt_state as_root \
		bash -c "$(declare -f apt_install); apt_install \"\$@\"" bash "$@"
}

# install_missing [TOOL...]: install missing build packages, and these tools.
#
# Some of these are optional for tests, because not every Debian has them.
install_missing()
{
	local tool optional=()

	packages=()
	for tool; do
		case $tool in
			python_stacks)
				need '/usr/bin/python3 -c "import psycopg_pool"' \
					python3-psycopg-pool
				need '/usr/bin/python3 -c "import asyncpg"' python3-asyncpg
				need '/usr/bin/python3 -c "import django"' python3-django
				;;
			mypy) need '/usr/bin/python3 -c "import mypy"' python3-mypy ;;
			alembic)
				need '/usr/bin/python3 -c "import alembic, psycopg2"' \
					python3-alembic python3-psycopg2
				;;
			activerecord)
				need 'ruby -e "require %q(active_record); require %q(pg)"' \
					ruby-activerecord ruby-pg
				;;
			golang)
				need 'command -v go &&
					ls -d /usr/share/gocode/src/github.com/{lib/pq,jackc/pgx/v4}' \
					golang-go golang-github-lib-pq-dev \
					golang-github-jackc-pgx-v4-dev
				;;
			java)
				need 'command -v javac' default-jdk-headless
				need 'test -e /usr/share/java/postgresql.jar' \
					libpostgresql-jdbc-java
				need 'test -e /usr/share/java/HikariCP.jar' libhikaricp-java
				;;
		esac
	done
	optional=("${packages[@]}")

	packages=()
	need 'command -v make' make
	need_compiler
	for tool; do
		case $tool in
			gcc) need 'command -v gcc' gcc ;;
			tap)
				need 'command -v prove' perl
				need 'perl -MIPC::Run -e 1' libipc-run-perl
				need 'perl -MIO::Pty -e 1' libio-pty-perl
				need 'command -v ps' procps
				;;
			pgbouncer)
				need 'command -v pgbouncer || test -x /usr/sbin/pgbouncer' \
					pgbouncer
				;;
			sqlalchemy)
				need '/usr/bin/python3 -c "import sqlalchemy, psycopg2"' \
					python3-sqlalchemy python3-psycopg2
				;;
			psycopg)
				need '/usr/bin/python3 -c "import setuptools, wheel, pip, psycopg"' \
					python3-psycopg python3-pip python3-setuptools python3-wheel
				;;
			tooz)
				need '/usr/bin/python3 -c "import tooz.tests.test_coordination"' \
					python3-tooz python3-fixtures python3-testtools python3-sysv-ipc
				;;
			psycopg2)
				need '/usr/bin/python3 -c "import psycopg2"' python3-psycopg2
				;;
			python_stacks | mypy | alembic | activerecord | golang | java | drizzle | \
				javascript) ;;
			*) need "command -v $tool" "$tool" ;;
		esac
	done
	if ! find_postgres; then need_server; fi

	if [ ${#packages[@]} -gt 0 ]; then install_packages "${packages[@]}"; fi
	if [ ${#optional[@]} -gt 0 ]; then
		(install_packages "${optional[@]}") || printf 'going on without them\n'
	fi
	find_postgres ||
		die "no whole server: $(lacking "${PG_CONFIG:-pg_config}") is missing"
	find_compiler
}

# tools_of regress|isolation|tap|docs [NAME...]: the tools that the tests need
tools_of()
{
	local names=("${@:2}") files

	if [ "$1" = docs ]; then printf 'tap\npsycopg2\npsycopg\njavascript\n'; fi
	[ "$1" = tap ] || return 0
	names=("${names[@]##*/}")
	files=("${names[@]/#/$top/test/t/}")
	files=("${files[@]%.pl}")
	files=("${files[@]/%/.pl}")
	[ ${#names[@]} -gt 0 ] || files=("$top"/test/t/*.pl)
	printf 'tap\n'
	if grep -qs pgbouncer "${files[@]}"; then printf 'pgbouncer\n'; fi
	if grep -qs sqlalchemy "${files[@]}"; then printf 'sqlalchemy\n'; fi
	if grep -qs Dlock::Python "${files[@]}"; then printf 'psycopg\n'; fi
	if grep -qs mypy "${files[@]}"; then printf 'mypy\n'; fi
	if grep -qs Dlock::Java "${files[@]}"; then printf 'java\n'; fi
	if grep -qs tooz "${files[@]}"; then printf 'tooz\n'; fi
	if grep -qs asyncpg "${files[@]}"; then printf 'psycopg2\npython_stacks\n'; fi
	if grep -qs active_record "${files[@]}"; then printf 'activerecord\n'; fi
	if grep -qs -e jackc/pgx -e Dlock::Go "${files[@]}"; then printf 'golang\n'; fi
	if grep -qs -e DLOCK_JAVASCRIPT -e Dlock::JavaScript "${files[@]}"; then
		printf 'javascript\n'
	fi
	if grep -qs DLOCK_DRIZZLE "${files[@]}"; then printf 'alembic\ndrizzle\n'; fi
}

# start_npm VARIABLE DIRECTORY: installs the packages of DIRECTORY's
# package.json into the scratch directory, in the background.  finish_npm
# waits, and sets the variable to the packages' directory.  Without npm, which
# is too large to install here, the variable stays unset, and the test says so.
npm_jobs=()
start_npm()
{
	local to=$scratch/${2##*/}

	if ! command -v npm >/dev/null; then return 0; fi
	as_user mkdir "$to"
	as_user cp "$top/test/clients/$2"/package*.json "$to"
	quiet as_user env "HOME=$to" \
		timeout -k 5 300 npm install --prefix "$to" \
		--ignore-scripts --no-audit --no-fund --no-save \
		--fetch-timeout=15000 --fetch-retries=1 &
	npm_jobs+=("$! $1 $to")
}

finish_npm()
{
	local job pid variable to

	for job in "${npm_jobs[@]}"; do
		read -r pid variable to <<<"$job"
		if wait "$pid"; then export "$variable=$to"; fi
	done
	npm_jobs=()
}

# The first mirror of Debian that apt uses, if any, and the keys with which apt
# checks the mirror
apt_mirror()
{
	# shellcheck disable=SC2016 # expanded by apt-get
	apt-get indextargets --format '$(LABEL) $(REPO_URI) $(SIGNED_BY)' \
		'Created-By: Packages' | awk '/^Debian http/ && !n++ { print $2, $3 }'
}

# Set mirror and keyring.  mirror stays empty if apt uses no mirror of Debian
# or is not installed, as on another system with Debian packages.
find_mirror()
{
	local keys=/usr/share/keyrings/debian-archive-keyring.gpg

	mirror=
	command -v apt-get >/dev/null || return 0
	read -r mirror keyring < <(apt_mirror) || true
	if [ -z "$mirror" ]; then
		# apt knows only from its lists which source is Debian's
		quiet as_root timeout 60 apt-get -qq update || true
		read -r mirror keyring < <(apt_mirror) || true
	fi
	# a source may be for one suite, with its own keys, or may keep the keys in
	# its own file
	if [ -e "$keys" ] || [ ! -e "$keyring" ]; then keyring=$keys; fi
}

# cache NAME: prints the directory for files that later runs can use again.
cache()
{
	if [ "$(id -u)" -eq 0 ]; then
		printf '/var/cache/dlock-%s\n' "$1"
	else
		printf '%s/dlock-%s\n' "${XDG_CACHE_HOME:-$HOME/.cache}" "$1"
	fi
}

# Writes the tree as an archive.  Objects, which may not fit, are left out.
pack_tree()
{
	tar -C "$top" --exclude-vcs --exclude='./tmp_*' --exclude='./dlock-*.zip' \
		--exclude='*.o' --exclude='*.d' --exclude='*.bc' --exclude='*.so' \
		--exclude=./src/bin/dlock -cf - .
}

# Make the scratch directory, for the user that runs the servers, and go there.
make_empty_scratch()
{
	scratch=$(mktemp -d "${TMPDIR:-/tmp}/dlock.XXXXXX")
	if [ "$(id -u)" -eq 0 ]; then chown nobody "$scratch"; fi
	export HOME=$scratch TMPDIR=$scratch
	as_user test -x "$("$pg_config" --bindir)/postgres" ||
		die "$(as_user id -un) has no access to $("$pg_config" --bindir)"
	cd "$scratch" || exit
}

# Make the scratch directory with a copy of the tree, and go to the copy.
make_scratch()
{
	make_empty_scratch
	as_user mkdir "$scratch/dlock"
	pack_tree | as_user tar -C "$scratch/dlock" -xf -
	cd "$scratch/dlock" || exit

	headers=$("$pg_config" --includedir-server)

	# If the server has LLVM, PGXS needs the server's clang for bitcode.  Build without
	# bitcode if that clang is not installed.
	make=(make -s "PG_CONFIG=$pg_config")
	internal=$(expand "\$(includedir_internal)")
	compiler=$(expand "\$(CC)")
	if ! command -v "${compiler%% *}" >/dev/null; then
		# a clang other than the server's works, too
		find_compiler
		make+=("CC=$compiler")
	fi
	clang=$(expand "\$(CLANG)")
	if ! command -v "${clang:=clang}" >/dev/null; then
		clang=
		make+=(with_llvm=no)
	fi
}

# Stop the servers that still run in the scratch directory.
stop_servers()
{
	local file

	find "$scratch" -name postmaster.pid | while read -r file; do
		# the server may be gone, and its process's number be another's
		if ! [ "/proc/$(head -n 1 "$file")/cwd" -ef "${file%/*}" ]; then continue; fi
		as_user "$("$pg_config" --bindir)/pg_ctl" -D "${file%/*}" -w \
			-m immediate stop >/dev/null || true
	done
}

# Stop these servers, and remove the directory.
remove_scratch()
{
	cd /
	finish_npm
	if [ -z "$scratch" ]; then return 0; fi
	stop_servers
	rm -rf "$scratch"
}

# Install the build, as root only if necessary.
install_dlock()
{
	local lib share dir as=()

	lib=$("$pg_config" --pkglibdir)
	share=$("$pg_config" --sharedir)/extension
	for dir in "$lib" "$share" "$("$pg_config" --bindir)"; do
		if [ ! -w "$dir" ]; then as=(as_root); fi
	done
	if [ ${#as[@]} -gt 0 ] && ! may_be_root; then
		die "installing into $lib and $share needs root;" \
			"with PG_CONFIG of a server of your own, it does not"
	fi
	quiet "${as[@]}" "${make[@]}" install
}

# expand TEXT: expand the variables of the Makefile and of PGXS.
expand()
{
	"${make[@]}" --eval "expand: ; @echo $1" expand
}

# build COMPILER [OPTIONS [ARGUMENT...]]: build changed files, with -Werror.
#
# PostgreSQL's headers fail with -Wextra, so they count as system headers.  Its
# callbacks and PG_FUNCTION_ARGS cause unused parameters.
build()
{
	local options="-Wall -Wextra -Werror -Wno-unused-parameter"

	# clang does not know some of the server's build options
	case $1 in
		*clang*)
			options+=' -Wno-unknown-warning-option'
			options+=' -Wno-ignored-optimization-argument' ;;
		# as PostgreSQL 19 compiles: no comment allows a fall through
		*gcc*) options+=' -Wimplicit-fallthrough=5' ;;
	esac
	quiet as_user "${make[@]}" -j"$(nproc)" "CC=$1" "${@:3}" \
		COPT="$options -isystem $headers -isystem $internal ${COPT-} ${2-}"
}

# compile COMPILER [OPTIONS [ARGUMENT...]]: build all files.
compile()
{
	quiet as_user "${make[@]}" clean && build "$@"
}

# build_changed DIR: builds only the files changed since the last time.  The
# objects are kept in DIR for the next time, by server, compiler and options.
#
# A changed file may be older than its object, for example in an archive or on
# another branch.  So the sums of the sources are kept with the objects, and a
# file has changed if its sum has changed.
build_changed()
{
	local kept new
	local sources='find src dlock.control -name "*.[ch]" -o -name "*.control"'

	kept=$1/$({
		"$pg_config"
		"$compiler" --version
		printf '%s\n' "${make[@]}" "${COPT-}"
		cat Makefile
	} | sha256sum | cut -c 1-16).tar
	if [ -r "$kept" ]; then
		as_user sh -c "$sources | xargs touch -d @0"
		as_user tar -xf - <"$kept"
		as_user sh -c 'sha256sum -c --quiet sums 2>/dev/null |
			sed "s/: FAILED.*//" | xargs -r touch -c'
	fi
	as_user sh -c "$sources | xargs sha256sum >sums"
	build "$compiler" || return

	# store all objects or none; it is not an error if they cannot be stored
	if mkdir -p "$1" 2>/dev/null && new=$(mktemp "$kept.XXXXXX" 2>/dev/null); then
		find . -path './src/*.[od]' -o -path './src/*.bc' -o -path './*.so' -o \
			-path ./src/bin/dlock -o -path ./sums |
			tar -cf "$new" -T -
		mv "$new" "$kept"
		find "$1" -name '*.tar' -mtime +7 -delete
	fi
}
