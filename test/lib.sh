# shellcheck shell=bash
#
# What the scripts in test/ have in common; sourced by each.
#
# A server never runs as root, and tests don't belong into the source tree.
# So the tree is copied into a scratch directory, which goes away at the end,
# and root works in it as nobody: unlike postgres, nobody is always there, and
# could not get at a real server by mistake.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The answers of tools are read here, and none may depend on the caller's
# settings for PostgreSQL.
export LC_ALL=C
for variable in "${!PG@}"; do
	case $variable in PG_*) ;; *) unset "$variable" ;; esac
done
unset MAKEFLAGS MAKELEVEL

# The majors that Debian has, and the suite; experimental is none by itself, but
# goes with sid.
# shellcheck disable=SC2034 # for test/run and test/matrix
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

as_root()
{
	if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi
}

as_user()
{
	if [ "$(id -u)" -eq 0 ]; then
		runuser -u nobody -- "$@"
	else
		"$@"
	fi
}

# quiet COMMAND...: shows the output only of what fails
quiet()
{
	local log status=0
	log=$(mktemp)
	"$@" >"$log" 2>&1 </dev/null || status=$?
	[ "$status" -eq 0 ] || cat "$log"
	rm "$log"
	return "$status"
}

# Does this pg_config come with a server, and with what PGXS and tests need?
complete()
{
	local pgxs bin
	pgxs=$("$1" --pgxs 2>/dev/null) && bin=$("$1" --bindir) &&
		[ -e "$pgxs" ] && [ -x "$bin/initdb" ] && [ -x "$bin/postgres" ] &&
		[ -x "${pgxs%/makefiles/pgxs.mk}/test/regress/pg_regress" ]
}

# Set pg_config: the caller's PG_CONFIG, or else the first that is complete.
find_postgres()
{
	local candidates=(pg_config /usr/lib/postgresql/*/bin/pg_config)
	if [ -n "${PG_CONFIG-}" ]; then candidates=("$PG_CONFIG"); fi
	for pg_config in "${candidates[@]}"; do
		if complete "$pg_config"; then return 0; fi
	done
	return 1
}

# need COMMAND PACKAGE...: the packages have to be installed if COMMAND fails
need()
{
	if ! eval "$1" >/dev/null 2>&1; then
		packages+=("${@:2}")
	fi
}

install_packages()
{
	printf 'installing %s\n' "$*"
	command -v apt-get >/dev/null || die "missing: $*"
	quiet as_root apt-get -qq update
	quiet as_root env DEBIAN_FRONTEND=noninteractive \
		apt-get -qq -y -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0 \
		install --no-install-recommends "$@"
}

# install_missing build|tests [PACKAGE...]: the packages, and what is needed to
# build, or also to test
install_missing()
{
	packages=("${@:2}")
	need 'command -v make' make
	need 'command -v gcc && test -e /usr/include/stdio.h' gcc libc6-dev
	if [ "$1" = tests ]; then
		need 'command -v prove' perl
		need 'perl -MIPC::Run -e 1' libipc-run-perl
		need 'command -v pgbouncer || test -x /usr/sbin/pgbouncer' pgbouncer
		need 'command -v spin' spin
		need '/usr/bin/python3 -c "import sqlalchemy, psycopg2"' \
			python3-sqlalchemy python3-psycopg2
	fi
	if [ -z "${PG_CONFIG-}" ]; then
		need find_postgres postgresql postgresql-server-dev-all
	fi

	if [ ${#packages[@]} -gt 0 ]; then install_packages "${packages[@]}"; fi
	find_postgres || die "${PG_CONFIG:-pg_config} is not that of a whole server"
}

# The first mirror of Debian that apt uses, if it uses any
apt_mirror()
{
	# shellcheck disable=SC2016 # expanded by apt-get
	apt-get indextargets --format '$(LABEL) $(REPO_URI)' \
		'Created-By: Packages' | awk '/^Debian http/ && !n++ { print $2 }'
}

# Set mirror, to nothing where apt uses none, or is not there.
find_mirror()
{
	mirror=
	command -v apt-get >/dev/null || return 0
	mirror=$(apt_mirror) || true
	if [ -z "$mirror" ]; then
		# apt knows which source is Debian's only from the lists
		quiet as_root timeout 60 apt-get -qq update || true
		mirror=$(apt_mirror) || true
	fi
}

# The tree as an archive, without what was built there, perhaps for another
# server
pack_tree()
{
	tar -C "$top" --exclude-vcs --exclude='./tmp_*' \
		--exclude='*.o' --exclude='*.bc' --exclude='*.so' -cf - .
}

# Make the scratch directory, with a copy of the tree, and go to the copy.
make_scratch()
{
	scratch=$(mktemp -d "${TMPDIR:-/tmp}/dlock.XXXXXX")
	if [ "$(id -u)" -eq 0 ]; then chown nobody "$scratch"; fi
	export HOME=$scratch TMPDIR=$scratch
	as_user mkdir "$scratch/dlock"
	pack_tree | as_user tar -C "$scratch/dlock" -xf -
	cd "$scratch/dlock" || exit

	headers=$("$pg_config" --includedir-server)

	# With LLVM in the server, PGXS wants the clang that the server was built
	# with, for bitcode; do without where it is not installed.
	make=(make -s "PG_CONFIG=$pg_config")
	clang=$(expand "\$(CLANG)")
	if ! command -v "${clang:=clang}" >/dev/null; then
		clang=
		make+=(with_llvm=no)
	fi
}

# Remove it, after the servers that still run in it.
remove_scratch()
{
	local file

	cd /
	if [ -z "$scratch" ]; then return 0; fi
	find "$scratch" -name postmaster.pid | while read -r file; do
		as_user "$("$pg_config" --bindir)/pg_ctl" -D "${file%/*}" -w \
			-m immediate stop >/dev/null || true
	done
	rm -rf "$scratch"
}

# expand TEXT: with the variables of the Makefile and of PGXS
expand()
{
	"${make[@]}" --eval "expand: ; @echo $1" expand
}

# compile COMPILER [OPTIONS [ARGUMENT...]]: all anew, each warning an error
#
# PostgreSQL's headers don't pass -Wextra, and count as the system's therefore;
# its callbacks and PG_FUNCTION_ARGS bring parameters that not all need.
compile()
{
	local options="-Wall -Wextra -Werror -Wno-unused-parameter"

	# unknown to clang are some options that the server was built with
	case $1 in *clang*)
		options+=' -Wno-unknown-warning-option'
		options+=' -Wno-ignored-optimization-argument' ;;
	esac
	quiet as_user "${make[@]}" clean &&
		quiet as_user "${make[@]}" -j"$(nproc)" "CC=$1" "${@:3}" \
			COPT="$options -isystem $headers ${COPT-} ${2-}"
}
