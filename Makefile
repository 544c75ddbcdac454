# dlock: a lock service inside PostgreSQL
#
#   make && make install    build, and install into the server of pg_config
#                           (another one: PG_CONFIG=/path/to/pg_config)
#   make installcheck       test the installed version, not as root; each kind
#                           of test starts a private server
#   test/run                all of this with one command, on a bare machine
#   make dist               archive the source of the last commit, for PGXN

EXTENSION = dlock
MODULE_big = dlock
PGFILEDESC = "dlock - distributed locks"

OBJS = \
	src/module.o \
	src/backend/api.o \
	src/backend/api_admin.o \
	src/backend/api_all.o \
	src/backend/api_lease.o \
	src/backend/arguments.o \
	src/backend/blockers.o \
	src/backend/cancel.o \
	src/backend/change.o \
	src/backend/channel.o \
	src/backend/deadlock.o \
	src/backend/durable.o \
	src/backend/errors.o \
	src/backend/force.o \
	src/backend/graph.o \
	src/backend/held.o \
	src/backend/lease_open.o \
	src/backend/lessee.o \
	src/backend/lone_call.o \
	src/backend/request.o \
	src/backend/reserve.o \
	src/backend/result.o \
	src/backend/session.o \
	src/backend/slots.o \
	src/backend/stats.o \
	src/backend/triggers.o \
	src/backend/version.o \
	src/backend/watches.o \
	src/backend/views.o \
	src/backend/wait.o \
	src/backend/xact.o \
	src/worker/due.o \
	src/worker/expiry.o \
	src/worker/grants.o \
	src/worker/heartbeat.o \
	src/worker/notify.o \
	src/worker/process.o \
	src/worker/sender.o \
	src/worker/worker.o \
	src/worker/writer.o \
	src/tables/load.o \
	src/tables/load_rows.o \
	src/tables/locked.o \
	src/tables/owner.o \
	src/tables/read.o \
	src/tables/shape.o \
	src/tables/slots.o \
	src/tables/vacuum.o \
	src/tables/value.o \
	src/tables/write.o \
	src/shared/account.o \
	src/shared/announcement.o \
	src/shared/buckets.o \
	src/shared/catalog.o \
	src/shared/clock.o \
	src/shared/contention.o \
	src/shared/counter.o \
	src/shared/id_table.o \
	src/shared/journal.o \
	src/shared/json.o \
	src/shared/launcher.o \
	src/shared/lease.o \
	src/shared/lease_end.o \
	src/shared/lease_ticket.o \
	src/shared/lease_ttl.o \
	src/shared/lock_table.o \
	src/shared/memory.o \
	src/shared/purge.o \
	src/shared/queue.o \
	src/shared/queue_change.o \
	src/shared/queue_slots.o \
	src/shared/queue_view.o \
	src/shared/quorum.o \
	src/shared/record.o \
	src/shared/report.o \
	src/shared/shmem.o \
	src/shared/space.o \
	src/shared/ticket.o \
	src/shared/watch.o

# The command, a program: PGXS makes either a library or a program.
BIN_OBJS = \
	src/bin/main.o \
	src/bin/options.o \
	src/bin/server.o \
	src/bin/front.o \
	src/bin/run.o \
	src/bin/command.o \
	src/bin/list.o \
	src/bin/top.o \
	src/bin/watch.o \
	src/bin/end.o

# Only the control file has the version.  The build directory can differ from
# the source directory.
source := $(dir $(firstword $(MAKEFILE_LIST)))
EXTVERSION := $(shell sed -n "s/^default_version *= *'\(.*\)'/\1/p" \
	$(source)dlock.control)
PG_CPPFLAGS = -DDLOCK_VERSION=\"$(EXTVERSION)\" -I$(source)src

# Make calls faster.  Calls between these files are direct, because no other
# library may replace their functions.  Calls to PostgreSQL need no stub,
# because all addresses are looked up when the library is loaded.
ifeq ($(shell uname -s),Linux)
PG_CFLAGS = -fno-semantic-interposition -fno-plt
SHLIB_LINK = -Wl,-Bsymbolic
endif

DATA = sql/dlock--1.0.sql

# Tests are listed by name, because a wildcard would not notice a lost file.
# test/run fails if these lists and the files in test/ differ.

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
	watch \
	counts \
	lease \
	lease_rights \
	change \
	slots \
	planted \
	reserve

# test/specs/*.spec; isolation_setup comes first, because the others need it
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
	isolation_downgrade \
	isolation_slots \
	isolation_set_slots \
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
	isolation_guard_lost \
	isolation_version \
	isolation_reserve \
	isolation_lease_fifo \
	isolation_lease_same \
	isolation_lease_enqueue \
	isolation_lease_expiry \
	isolation_lease_delay \
	isolation_lease_attach \
	isolation_lease_guard

# test/t/*.pl
TAP = \
	session_exit \
	session_crash \
	session_stress \
	session_many \
	session_table \
	session_undo \
	session_flush \
	session_waits \
	session_handover \
	session_model \
	session_deadlock \
	session_looks \
	session_sight \
	ticket_session \
	ticket_lease \
	ticket_long_queue \
	ticket_repeat \
	ticket_unpublished \
	notify_session \
	notify_lease \
	notify_turn \
	notify_wanted \
	notify_watch \
	guard_commit \
	guard_pinned \
	guard_paused_holder \
	guard_lost \
	guard_managed \
	lease_crash \
	lease_wal_order \
	lease_unwritten \
	lease_load \
	lease_change \
	lease_expiry \
	lease_suspended \
	lease_promise \
	lease_gone \
	lease_tables \
	lease_databases \
	worker_failures \
	worker_start \
	worker_none \
	worker_deaths \
	worker_held_up \
	worker_goes \
	worker_parked \
	worker_vacuum \
	worker_settings \
	memory_limits \
	memory_tenants \
	memory_caught \
	memory_exhausted \
	memory_unmapped \
	memory_injected \
	memory_small \
	ha_restart \
	ha_standby \
	ha_promotion \
	ha_quorum \
	ha_replaced \
	ha_stopped \
	ha_rewind \
	ha_cascade \
	ha_logical \
	ha_move \
	ha_reset \
	ha_patroni \
	module_databases \
	module_dump \
	module_update \
	module_schema \
	module_renamed \
	module_pg_upgrade \
	module_layouts \
	module_dropped \
	module_event_triggers \
	module_hooks \
	module_messages \
	module_minor \
	module_log \
	module_observers \
	module_monitoring \
	command_run \
	command_lost \
	command_tty \
	command_lists \
	client_go \
	client_java \
	client_javascript \
	client_node \
	client_node_own \
	client_pgbouncer \
	client_python \
	client_python_own \
	client_python_stacks \
	client_ruby \
	client_schema_tools \
	client_sqlalchemy \
	client_stacks \
	client_tooz \
	example_nightly \
	example_leader \
	example_booking \
	example_store \
	example_tickets \
	example_limited

# Both kinds find their expected outputs in expected/.  The servers' directories
# must not be tmp_check, which the TAP tests delete.
instance = --temp-config=test/dlock.conf --no-locale --encoding=UTF8
REGRESS_OPTS = --inputdir=test --temp-instance=./tmp_regress $(instance)
ISOLATION_OPTS = --inputdir=test --outputdir=. \
	--temp-instance=./tmp_isolation $(instance)

# Seconds until isolationtester cancels a step that neither ends nor waits
# for another session.
export PGISOLATIONTIMEOUT ?= 20

ifneq ($(strip $(TAP)),)
TAP_TESTS = 1
PROVE_TESTS ?= $(TAP:%=test/t/%.pl)
endif

EXTRA_CLEAN = tmp_regress tmp_isolation $(OBJS:.o=.d) src/bin/dlock $(BIN_OBJS) \
	$(BIN_OBJS:.o=.d)

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

# The command, its manual page, and a completion.  bash looks for the completion
# in "share" beside the command's "bin".
completionsdir ?= $(patsubst %/bin,%,$(bindir))/share/bash-completion/completions

all: src/bin/dlock

# from 17 on, libpq_pgport names libpq alone
src/bin/dlock: $(BIN_OBJS)
	$(CC) $(CFLAGS) $(BIN_OBJS) $(LDFLAGS) $(LDFLAGS_EX) -L$(pkglibdir) \
		-lpgfeutils -lpgcommon -lpgport $(libpq) $(call ncurses,libs) -lm -o $@

$(BIN_OBJS): $(source)dlock.control
$(BIN_OBJS): override CPPFLAGS += -I$(includedir)

# dlock top, with ncurses if it is installed
ncurses = $(if $(filter no,$(with_ncurses)),,$(shell pkg-config --$(1) ncursesw 2>/dev/null))
src/bin/top.o: override CPPFLAGS += \
	$(if $(call ncurses,libs),-DDLOCK_NCURSES $(call ncurses,cflags))

install: install-bin
install-bin: src/bin/dlock
	$(MKDIR_P) '$(DESTDIR)$(bindir)' '$(DESTDIR)$(mandir)/man1' \
		'$(DESTDIR)$(completionsdir)'
	$(INSTALL_PROGRAM) src/bin/dlock '$(DESTDIR)$(bindir)'
	$(INSTALL_DATA) $(source)src/bin/dlock.1 '$(DESTDIR)$(mandir)/man1'
	$(INSTALL_DATA) $(source)src/bin/dlock.bash '$(DESTDIR)$(completionsdir)/dlock'

uninstall: uninstall-bin
uninstall-bin:
	rm -f '$(DESTDIR)$(bindir)/dlock' '$(DESTDIR)$(mandir)/man1/dlock.1' \
		'$(DESTDIR)$(completionsdir)/dlock'

# PGXN names an archive and its directory after the version.  .gitattributes
# lists the files that are not in the archive.
release = $(shell sed -n 's/^   "version": "\(.*\)",$$/\1/p' $(source)META.json)

dist:
	git -C '$(source)' archive --prefix=dlock-$(release)/ \
		--output='$(CURDIR)/dlock-$(release).zip' HEAD

.PHONY: dist install-bin uninstall-bin

# The compiler lists the headers of an object.  Bitcode depends on all headers,
# because it has no list.  Both need the version, from the control file.
$(OBJS) $(BIN_OBJS): override CFLAGS += -MMD -MP
-include $(OBJS:.o=.d) $(BIN_OBJS:.o=.d)
$(OBJS:.o=.bc): $(wildcard $(source)src/*.h $(source)src/*/*.h)
$(OBJS) $(OBJS:.o=.bc): $(source)dlock.control

# In a separate build directory, make the directories of the objects.
ifneq ($(source),./)
$(shell mkdir -p $(dir $(OBJS) $(BIN_OBJS)))
endif
