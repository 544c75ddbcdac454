# shellcheck shell=bash
#
# The networks of test/ha/run and of the test ha_patroni.  Both source this
# file, after as_root is defined.
#
# make_networks PREFIX: a network for each member, PREFIX-1 to PREFIX-3, and
# PREFIX-0 with a bridge between them.  Their names are in the array
# namespaces.
namespaces=()

make_networks()
{
	local i hub=$1-0

	for i in 0 1 2 3; do
		as_root ip netns add "$1-$i" || return
		namespaces+=("$1-$i")
		as_root ip -n "$1-$i" link set lo up || return
	done
	as_root ip -n "$hub" link add hub type bridge &&
		as_root ip -n "$hub" address add 10.0.0.100/24 dev hub &&
		as_root ip -n "$hub" link set hub up || return
	for i in 1 2 3; do
		as_root ip -n "$hub" link add "to$i" type veth \
			peer name eth0 netns "$1-$i" &&
			as_root ip -n "$hub" link set "to$i" master hub up &&
			as_root ip -n "$1-$i" address add "10.0.0.$i/24" dev eth0 &&
			as_root ip -n "$1-$i" address add "10.0.0.1$i/24" dev eth0 &&
			as_root ip -n "$1-$i" link set eth0 up || return
	done
}
