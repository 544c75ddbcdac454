# shellcheck shell=bash
#
# Chroots of Debian, made by debootstrap.  test/matrix, test/fresh and
# test/upgrade source this file after lib.sh.
#
# Root runs each chroot's commands in separate namespaces for mounts, processes
# and shared memory.  If the script ends, even by SIGKILL, the first process in
# the namespaces dies.  With it end all servers and mounts of the chroot.  So
# no mount is left that an rm -r could follow.
#
# shellcheck disable=SC2154 # what lib.sh and those scripts set
#
# The script that sources this file sets dir, the directory of its chroots;
# self, its own command without arguments; and, in the namespaces, isolated.
# Its function clean_up removes temporary files from dir.

# Commands of root are not in everyone's PATH, and a chroot does not have every
# TMPDIR.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
unset TMPDIR

# A shell lets what it starts in the background ignore SIGINT and SIGQUIT; the
# tests send these, and the terminal shall not.
isolate=(setpriv --pdeathsig KILL setsid env
	--default-signal=INT --default-signal=QUIT nice
	unshare --mount --pid --ipc --fork --kill-child --mount-proc)

inside=

end_inside()
{
	local first=
	trap '' INT TERM HUP
	if [ -n "$inside" ]; then
		# the first process in there, as unshare then waits for all the others
		read -r first 2>/dev/null <"/proc/$inside/task/$inside/children" || true
		kill -KILL "${first:-$inside}" 2>/dev/null || true
		wait "$inside" 2>/dev/null || true
	fi
	clean_up
}

# as_root_again ARGUMENT...: run the script again as root; returns if that is
# not possible or not necessary
as_root_again()
{
	if [ -z "$isolated" ] && [ "$(id -u)" -ne 0 ] && may_be_root; then
		exec "${sudo[@]}" env ${COPT+"COPT=$COPT"} \
			${http_proxy+"http_proxy=$http_proxy"} "${self[@]}" "$@"
	fi
}

# go_inside ARGUMENT...: run the script in its own namespaces, and exit with
# its status; returns inside, or if namespaces are not allowed
go_inside()
{
	local status=0

	if [ -n "$isolated" ] || [ "$(id -u)" -ne 0 ] ||
		! "${isolate[@]}" true 2>/dev/null; then
		return 0
	fi
	trap end_inside EXIT
	trap 'exit 130' INT
	trap 'exit 143' TERM
	trap 'exit 129' HUP

	command -v debootstrap >/dev/null ||
		(install_packages debootstrap debian-archive-keyring) || true

	# In the background, because only then a signal ends the wait; and without
	# unshare's message about a killed child.
	"${isolate[@]}" "${self[@]}" --isolated "$@" </dev/null 2>/dev/null &
	inside=$!
	wait "$inside" || status=$?
	inside=
	exit "$status"
}

# Can chroots be made and used?  If not, sets obstacle to the reason.
# Otherwise sets mirror, and the proxy for debootstrap.
able()
{
	obstacle=
	if [ "$(id -u)" -ne 0 ]; then
		obstacle='needs root, or sudo'
	elif [ -z "$isolated" ]; then
		obstacle='may not mount here, not even in a namespace of its own'
	elif ! command -v debootstrap >/dev/null; then
		obstacle='debootstrap is missing, and cannot be installed'
	else
		find_mirror
		if [ -z "$mirror" ]; then
			obstacle='apt has no source that is Debian'
		fi
	fi
	[ -z "$obstacle" ] || return

	if [ -z "${http_proxy-}" ]; then
		eval "$(apt-config shell http_proxy Acquire::http::Proxy)"
	fi
	export http_proxy
}

# bootstrap SUITE CHROOT
bootstrap()
{
	local etc=$2/etc

	rm -rf "$2"
	debootstrap --variant=minbase --force-check-gpg --keyring="$keyring" \
		"$1" "$2" "$mirror"

	# some lists are valid for a week, and mirrors may lag behind; the chroot
	# need not survive a power failure
	printf 'Acquire::Check-Valid-Until "false";\n' \
		>"$etc/apt/apt.conf.d/90dlock"
	if [ -n "${http_proxy-}" ]; then
		printf 'Acquire::http::Proxy "%s";\n' "$http_proxy" \
			>>"$etc/apt/apt.conf.d/90dlock"
	fi
	printf 'force-unsafe-io\n' >"$etc/dpkg/dpkg.cfg.d/90dlock"
}

# in_chroot DIR COMMAND...: with mounts that end with the command
in_chroot()
{
	# shellcheck disable=SC2016 # expanded in there
	unshare --mount sh -ec '
		mount -t proc proc "$0/proc"
		mount -t tmpfs -o mode=1777 tmpfs "$0/dev/shm"
		mount --bind /dev/pts "$0/dev/pts" 2>/dev/null || true
		exec chroot "$0" "$@"' "$@"
}

# copy_tree TO: from the archive in dir, so that all chroots get the same tree,
# even if it is being changed
copy_tree()
{
	rm -rf "$1"
	mkdir "$1"
	tar -C "$1" --no-same-owner --exclude=./results -xf "$dir/dlock.tar"
}

# The last error in a log
reason()
{
	grep '^E: ' "$1" | tail -n 1 | grep . || tail -n 1 "$1"
}
