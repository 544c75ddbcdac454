# dlock: a lock service inside PostgreSQL
#
#   make && make install    build, and install into the server of pg_config
#                           (another one: PG_CONFIG=/path/to/pg_config)
#   make installcheck       run the installed version's tests, each kind on a
#                           private server of its own; not as root
#   test/run                all of this with one command, on a bare machine

EXTENSION = dlock
MODULE_big = dlock
PGFILEDESC = "dlock - distributed locks"

OBJS = \
	src/api.o \
	src/deadlock.o \
	src/dlock.o \
	src/graph.o \
	src/heartbeat.o \
	src/held.o \
	src/journal.o \
	src/launcher.o \
	src/lease.o \
	src/lease_ticket.o \
	src/lessee.o \
	src/load.o \
	src/notify.o \
	src/process.o \
	src/queue.o \
	src/record.o \
	src/replicated.o \
	src/request.o \
	src/reserve.o \
	src/rows.o \
	src/sender.o \
	src/session.o \
	src/shmem.o \
	src/stats.o \
	src/ticket.o \
	src/version.o \
	src/wait.o \
	src/worker.o \
	src/xact.o

# The version has one source, the control file.
EXTVERSION := $(shell sed -n "s/^default_version *= *'\(.*\)'/\1/p" dlock.control)
PG_CPPFLAGS = -DDLOCK_VERSION=\"$(EXTVERSION)\"

# What was released once never changes: a version is its predecessor's scripts,
# and one more.
DATA = \
	sql/dlock--1.0.sql \
	sql/dlock--1.0--1.1.sql

# Tests are listed by name: a wildcard would not miss a lost one.  test/run
# fails where these lists and the files in test/ do not agree.

# test/sql/*.sql, which share test/include/*.sql
REGRESS = \
	acquire \
	names \
	modes \
	xact \
	all \
	views \
	guard \
	versions \
	discard \
	settings \
	rights \
	restricted \
	extension \
	tickets \
	counts \
	lease \
	lease_rights \
	planted \
	reserve

# test/specs/*.spec; isolation_setup comes first, the others need it
ISOLATION = \
	isolation_setup \
	isolation_fifo \
	isolation_timeout \
	isolation_lock_timeout \
	isolation_statement_timeout \
	isolation_cancel \
	isolation_terminate \
	isolation_try \
	isolation_shared \
	isolation_slots \
	isolation_xact \
	isolation_release_at_commit \
	isolation_force \
	isolation_all \
	isolation_deadlock \
	isolation_deadlock_three \
	isolation_deadlock_shared \
	isolation_deadlock_slots \
	isolation_deadlock_knot \
	isolation_deadlock_row \
	isolation_deadlock_table \
	isolation_deadlock_advisory \
	isolation_deadlock_xact \
	isolation_deadlock_all \
	isolation_nosnapshot \
	isolation_guard \
	isolation_version \
	isolation_lease_fifo \
	isolation_lease_same \
	isolation_lease_enqueue \
	isolation_lease_expiry \
	isolation_lease_delay \
	isolation_lease_attach \
	isolation_lease_guard

# test/t/*.pl
TAP = \
	001_restart \
	002_exit \
	003_crash \
	004_standby \
	005_databases \
	006_dump \
	007_stress \
	008_limits \
	009_caught \
	010_many \
	011_undo \
	012_flush \
	020_deadlock \
	021_waits \
	022_handover \
	023_looks \
	030_model \
	040_tickets \
	041_notify \
	042_pinned \
	043_long_queue \
	044_answers \
	045_repeat \
	046_same_request \
	050_guard \
	060_crash \
	061_promotion \
	062_wal_order \
	063_worker \
	064_expiry \
	065_quorum \
	066_lease_notify \
	067_tickets \
	068_pgbouncer \
	069_paused_holder \
	070_vacuum \
	071_unwritten \
	072_load \
	073_memory \
	074_worker_start \
	075_segments \
	076_suspended \
	077_promise \
	078_replaced \
	080_orm \
	085_restore \
	086_logical \
	087_tables \
	088_reset \
	093_update \
	094_layouts \
	095_dropped \
	096_small_memory \
	100_settings \
	101_worker_deaths \
	102_held_up \
	103_sender \
	104_worker_goes \
	115_rewind \
	116_cascade \
	117_event_triggers \
	118_commit_timestamp \
	130_messages

# Both expect their outputs in expected/.  The servers' directories must not
# be tmp_check, which the TAP tests delete.
instance = --temp-config=test/dlock.conf --no-locale --encoding=UTF8
REGRESS_OPTS = --inputdir=test --temp-instance=./tmp_regress $(instance)
ISOLATION_OPTS = --inputdir=test --outputdir=. \
	--temp-instance=./tmp_isolation $(instance)

# Seconds until isolationtester cancels a step that neither ends nor waits
# for another session.
export PGISOLATIONTIMEOUT ?= 60

ifneq ($(strip $(TAP)),)
TAP_TESTS = 1
PROVE_TESTS ?= $(TAP:%=test/t/%.pl)
endif

EXTRA_CLEAN = tmp_regress tmp_isolation

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

# PGXS does not know which headers an object needs: all of them, then; and the
# version.
$(OBJS) $(OBJS:.o=.bc): $(wildcard src/*.h) dlock.control
