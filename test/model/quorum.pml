/*
 * quorum.pml
 *	  A lease that standbys count for, on two servers.  look(),
 *	  dlock_lease_move_deadline() and dlock_lease_renew() in src/shared/lease.c,
 *	  src/shared/quorum.c, and
 *	  wait_for_quorum() in src/tables/load.c.
 *
 * One server is the primary, with a lease that somebody holds; the other one is
 * its standby, whose acknowledgement counts.  Messages both ways take as long as
 * they like.  With -DRESTART the primary may restart, once, and then loads the
 * lease.  The standby may be promoted, once, from when on it acknowledges
 * nothing, and it loads the lease.  The client renews on the old primary,
 * RENEWALS times, and knows of neither event; others ask there whether the lease
 * is gone.  Time passes at any step, in ticks: a ttl of two, and one more for
 * the "quarter".  The clocks of both servers go alike.
 *
 * With -DRAISE standbys do not count for the lease at first: its client has asked at
 * a low synchronous_commit, and a session keeps it alive.  Somebody asks for the
 * same at a high one, and is answered, or not.
 *
 * With -DENGINE an engine decides, as Patroni does with synchronous_mode, and
 * not with its strict form.  Each server has an agent; they share a store, which
 * changes things one at a time.  The primary has a key there, which runs out
 * when its agent does not renew it, for whatever reason: so at any time.  And the
 * store says whether the standby may be promoted, which its agent does once the
 * key is free.  The agent of the primary may take the standby out of
 * synchronous_standby_names, so that the primary goes on alone, and put it in
 * again: it tells the store before the one, and after the other.  Its server
 * goes on serving whatever becomes of the key, as one would whose agent is
 * stopped.
 *
 * What stands for what:
 *
 *	heartbeat, acked		dlock_quorum_send(), WalSndCtl->lsn; the number of a
 *							heartbeat is its position
 *	quorum					DlockSpace.quorum, by dlock_quorum_look()
 *	load					dlock_load(): wait_for_quorum() and
 *							dlock_lease_begin_anew()
 *	look, renew, ask		look(), dlock_lease_renew(), all that ask
 *	named					dlock_quorum_has_standbys()
 *	counts					is the durability of the lease remote_write or higher?
 *	raiser					dlock_lease_raise_durability(), and the wait for the
 *							row in wait_for_record() of src/backend/durable.c
 *
 * Each step of these is one of a process; what is read together is one step.
 *
 * Checked:
 *
 *	- the old primary does not honour the lease when its successor has ended it,
 *	  and so may have granted its lock (I21);
 *	- a lease that was called gone is not called alive later, by that server;
 *	- a renewal that succeeded holds for a ttl from when it was sent: nobody is
 *	  told before that the lease is gone, on that server or on its successor.
 *
 * Of a lease that is raised, the first and the third are promised to who has been
 * answered, and that the old primary ends no lease early.
 *
 * Left out: more standbys, of which a quorum that intersects is as one; the
 * worker, as it only does what others may do; delays.
 *
 * Broken on purpose, and to be caught:
 *
 *	BROKEN_LOAD		a lease counts from when the answer was seen, not from
 *					before what it answers was sent
 *	BROKEN_SENT		a heartbeat counts from when its sender goes on
 *	BROKEN_RENEW	a renewal does not look at the standbys
 *	BROKEN_LAST		... or looks after it has moved the deadline
 *	BROKEN_QUARTER	a server that begins honours leases for their ttl alone
 *	BROKEN_GONE		an answer leaves the deadline as it is
 *	BROKEN_RAISE	standbys count from when the lease began, though no heartbeat
 *					was sent for it
 *	BROKEN_ANSWER	... or from when the answer was seen
 *	BROKEN_ROW		who raises is answered before the row is acknowledged
 *
 * The engine, likewise:
 *
 *	BROKEN_DROP		the standby is taken out before the store is told
 *	BROKEN_ADD		the store is told before the standby is in
 *	BROKEN_STALE	the standby's agent reads the store, and is promoted by
 *					what it said then, though the primary's agent, which was
 *					stopped, has told it otherwise: what a watchdog is for
 *	BROKEN_FORCE	somebody promotes a standby that may not be
 */

#define TTL			2
#define QUARTER		1
#define HONOURED	(TTL + QUARTER)
#ifndef END
#define END			7			/* of time */
#endif
#define SENT		1			/* heartbeats of renewals and the worker */
#ifndef RENEWALS
#define RENEWALS	1
#endif

#define RAN_OUT		1

byte now = 1;

/* the old primary */
byte deadline;					/* of the lease; RAN_OUT */
byte confirmed;
byte quorum;
bool loaded = true;
byte busy;						/* calls under way, which a restart would end */

/* what was sent, when; what the standby has, and what of that is acknowledged */
byte sent_at[SENT + 3];
byte sent, has, acked;

/* its successor */
bool promoted;
byte next_deadline;

/* the lease, as its durability is: may be raised */
#ifdef RAISE
bool counts;
bool answered;					/* who has raised it */
byte row = 100;					/* which says so, as a position */
byte rows;						/* 1: it is written */
#define can_raise		true
#else
bool counts = true;
#define answered		true
#define row				0
#define rows			0
#define can_raise		false
#endif

/* the engine */
bool named = true;				/* does the old primary wait for the standby? */
bool leads = true;				/* has it the key? */
bool may_follow = true;			/* by the store, may the standby be promoted? */

/* not in the program, but for what is checked */
bool told_gone;					/* by the old primary */
byte promised;					/* until then, by the latest success */

#define heard			(confirmed > quorum -> confirmed : quorum)
#define by_quorum		(named && counts -> heard + HONOURED : 100)
#define due				(deadline < by_quorum -> deadline : by_quorum)

inline heard_of()
{
	do
	:: !named && quorum < now -> quorum = now
	:: seen < acked ->
		if
		:: sent_at[seen] > quorum -> quorum = sent_at[seen]
		:: else
		fi;
		seen++
	:: else -> seen = 0; break
	od
}

/* Take the time, and write a heartbeat. */
inline send()
{
#ifdef BROKEN_SENT
	d_step { sending = sent; sent++ };
	d_step { sent_at[sending] = now; sending = 0 }
#else
	d_step { sent_at[sent] = now; sent++ }
#endif
}

inline may_send()
{
#ifdef BROKEN_SENT
	sent < SENT + rows && loaded -> send()
#else
	atomic { sent < SENT + rows && loaded -> send() }
#endif
}

/*
 * Look whether the lease is open; "found" is the deadline that was read, or
 * RAN_OUT.
 */
inline look()
{
	found = deadline;
	do
	:: found > RAN_OUT ->
		/* the quorum is read after the deadline */
		d_step {
			if
			:: by_quorum <= now -> heard_of()
			:: else
			fi;
			until = (found < by_quorum -> found : by_quorum)
		};
		if
		:: now < until -> break
		:: else ->
#ifdef BROKEN_GONE
			found = RAN_OUT
#else
			d_step {
				if
				:: deadline == found -> deadline = RAN_OUT; found = RAN_OUT
				:: else -> found = deadline
				fi
			}
#endif
		fi
	:: else -> break
	od;
	until = 0
}

/*
 * Move the deadline on; "found" is RAN_OUT where the lease is gone.  Where that
 * is "final", the renewal has succeeded.
 */
inline move(final)
{
	moved = false;
	do
	:: !moved ->
		look();
		if
		:: found > RAN_OUT ->
			to = now + TTL;
			d_step {
				if
				:: deadline == found ->
					deadline = (to > found -> to : found + 1);
					moved = true;
					if
					:: final && start + TTL > promised -> promised = start + TTL
					:: else
					fi
				:: else
				fi;
				to = 0
			}
		:: else -> break
		fi
	:: else -> break
	od;
	moved = false
}

/* The client of the old primary */
proctype renewer()
{
	byte found, until, to, seen, start, renewals;
#ifdef BROKEN_SENT
	byte sending;
#endif
	bool moved, was_told;

	do
	:: atomic {
			renewals < RENEWALS && loaded ->
			renewals++;
			busy++;
			was_told = told_gone;
			start = now
		};
#ifdef BROKEN_LAST
		move(false);
		if
		:: found > RAN_OUT -> skip
		:: else -> goto gone
		fi;
#endif
#ifndef BROKEN_RENEW
		d_step { heard_of() };
		if
		:: !counts || heard + QUARTER >= start
		:: else ->
			move(false);
			if
			:: found == RAN_OUT -> goto gone
			:: else
			fi;
			if
			:: may_send()
			:: true
			fi;
			/* until it is acknowledged, or the renewal fails */
			if
			:: atomic {
					(acked == sent && sent > 0) || !named ->
					heard_of()
				}
			:: true
			fi;
			if
			:: heard + QUARTER >= start
			:: else -> goto again	/* 58030 */
			fi
		fi;
#endif
#ifdef BROKEN_LAST
		d_step {
			if
			:: start + TTL > promised -> promised = start + TTL
			:: else
			fi
		};
#else
		move(true);
#endif
		if
		:: found > RAN_OUT -> assert(!was_told)
		:: else -> goto gone
		fi;
		goto again;
gone:
		atomic { assert(now >= promised); told_gone = true };
again:
		atomic { found = 0; start = 0; was_told = false; busy-- }
	:: true -> break
	od
}

/* Somebody else asks the old primary. */
proctype asker()
{
	byte found, until, seen;
	bool was_told;

	do
	:: atomic { loaded -> busy++; was_told = told_gone };
		look();
		if
		:: found == RAN_OUT ->
			d_step { assert(now >= promised); told_gone = true }
		:: else -> assert(!was_told)
		fi;
		d_step { found = 0; was_told = false; busy-- }
	:: now == END -> break
	od
}

/*
 * The server restarts, with the same lease in its table, which nobody has ended.
 */
proctype restarter()
{
	byte seen, start;
#ifdef BROKEN_SENT
	byte sending;
#endif

	if
	:: atomic {
			busy == 0 && deadline > RAN_OUT ->
			loaded = false;
			deadline = 100;		/* no time passes */
			confirmed = 100
		};
		start = now;
		send();
		/* for as long as it takes, which may be for ever */
end:	acked == sent;
#ifdef BROKEN_LOAD
		start = now;
#endif
		/* the loader may be stopped here */
		d_step {
			quorum = 0;
			heard_of();
			confirmed = start;
			deadline = now + HONOURED;
			loaded = true;
			start = 0
		}
	:: true
	fi
}

#ifdef RAISE
/* Somebody asks for the same at a level at which standbys count. */
proctype raiser()
{
	if
	:: atomic {
			deadline > RAN_OUT ->
#ifdef BROKEN_ANSWER
			confirmed = 100;
#endif
#if !defined(BROKEN_RAISE) && !defined(BROKEN_ANSWER)
			confirmed = now;
#endif
			counts = true
		};
		/* no heartbeat: it confirms nothing */
		d_step { sent_at[sent] = 0; row = sent; rows = 1; sent++ };
#ifndef BROKEN_ROW
		/* for as long as it takes, which may be for ever */
end:	acked > row;
#endif
#ifdef BROKEN_ANSWER
		confirmed = now;
#endif
		answered = true
	:: true
	fi
}
#endif

/* The network, both ways; the worker, that sends; and time */
proctype world()
{
#ifdef BROKEN_SENT
	byte sending;
#endif

	do
	:: d_step { now < END -> now++ }
	:: d_step { !promoted && has < sent -> has++ }
	:: d_step { acked < has -> acked++ }
	:: may_send()
	:: now == END -> break
	od
}

/* The agent of the primary */
proctype agent()
{
	do
	:: leads && named ->
#ifdef BROKEN_DROP
		named = false;
		may_follow = false
#else
		/* which the store refuses if it has changed */
		if
		:: atomic { !promoted -> may_follow = false };
			named = false
		:: promoted
		fi
#endif
	:: leads && !named ->
#ifdef BROKEN_ADD
		may_follow = true;
		named = true
#else
		named = true;
		if
		:: has == sent ->
			if
			:: atomic { !promoted -> may_follow = true }
			:: promoted
			fi
		:: true
		fi
#endif
	:: !leads -> break
	od
}

/* The key runs out. */
proctype key()
{
	leads = false
}

/* The standby is promoted, and loads the lease; then it ends it. */
proctype successor()
{
#if defined(ENGINE) && !defined(BROKEN_FORCE)
	if
	:: atomic {
			!leads && may_follow ->
#ifdef BROKEN_STALE
			skip
		};
		d_step {
#endif
			promoted = true
		}
	:: now == END -> goto done
	fi;
#else
	promoted = true;
#endif
#ifdef BROKEN_QUARTER
	next_deadline = now + TTL;
#else
	next_deadline = now + (has > row || !can_raise -> HONOURED : TTL);
#endif
end:
	now >= next_deadline;
	d_step {
		/* from now on nobody may be told by the old one that it is open */
		assert(!answered || now >= promised);
		assert(!answered || !loaded || deadline <= RAN_OUT || due <= now)
	};
	if
	:: atomic {
			answered && loaded && deadline > RAN_OUT && due > now ->
			assert(false)
		}
	:: now == END
	fi;
done:
	skip
}

init
{
	atomic {
#ifdef RAISE
		deadline = 100;			/* attached: none but that by the quorum */
#else
		deadline = now + TTL;
#endif
		confirmed = now;
		run renewer();
#if !defined(ENGINE) && !defined(RAISE)
		run asker();
#endif
#ifdef RESTART
		run restarter();
#endif
#ifdef RAISE
		run raiser();
#endif
#ifdef ENGINE
		run agent();
		run key();
#endif
		run world();
		run successor()
	}
}
