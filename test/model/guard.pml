/*
 * guard.pml
 *	  The guarded commit: pins, and all that may end the guarded ticket
 *	  meanwhile.  dlock_queue_pin(), end() and dlock_queue_unpin() in
 *	  src/shared/queue.c, pin_guards() and unpin_guards() in
 *	  src/backend/xact.c, deadlines in src/shared/lease.c, and how
 *	  src/shared/lease_end.c decides what is over.
 *
 * A lease has the ticket, TRANSACTIONS transactions have guarded it, and one
 * session waits for the lock behind it.  Time passes; RENEWALS times somebody
 * renews the lease; somebody may release the ticket, close the lease, or be
 * the administrator who ends the ticket by force; and the worker writes the
 * ticket's row, ends the lease when it is due, removes the row, and hands on.
 * With
 * -DSESSION the ticket is a session's own instead, with one transaction of that
 * session, and only force can end it.
 *
 * What stands for what:
 *
 *	transaction				at_xact_end() and pin_guards(), PostgreSQL's commit,
 *							at_resource_release() and unpin_guards()
 *	end_ticket				end(); of it "ended", dlock_lease_ticket_ended()
 *	renewer					extend()
 *	ender					dlock_queue_end() or dlock_queue_force(), and before it
 *							perhaps dlock_lease_claim(), as in
 *							dlock_lease_release()
 *	worker					dlock_lease_expire() and dlock_writer_write(), with
 *							copy_marked(), unmark(), dlock_lease_settle() and
 *							dlock_queue_finish()
 *
 * The entry's lock is a variable here, as the worker copies what is marked
 * under the lease lock alone: it may look at the state and the pins in the
 * middle of end_ticket.  What is done under the lease lock is one step.
 *
 * Checked:
 *
 *	- when a guarded transaction's commit record is written, and when its writes
 *	  become visible, nobody has been granted the lock after its holder (I24);
 *	- whoever renewed a lease keeps it for a ttl, unless it is closed: a renewal
 *	  and an expiry never both succeed (I13);
 *	- the successor is granted the lock in the end (no run ends without that).
 *
 * Left out: several locks in one transaction; subtransactions, which only move
 * a mark; the rights to guard; delays of a lease; standbys, which only make a
 * commit last longer; failures of the worker and crashes (journal.pml).
 *
 * Broken on purpose, and to be caught:
 *
 *	BROKEN_PIN			looks whether the ticket holds, and does not pin it
 *	BROKEN_CHECK		pins without looking whether the ticket still holds
 *	BROKEN_EARLY		unpins before the commit is visible
 *	BROKEN_OVER			the worker takes a pinned ticket for over
 *	BROKEN_AT_ONCE		a pinned ticket without a row is taken out at once
 *	BROKEN_COUNT		the first unpinning counts for all
 *	BROKEN_UNPIN		what has ended meanwhile is not ended by the unpinning
 *	BROKEN_MARK			... or the worker is not told of it
 *	BROKEN_RENEW		renews without compare-and-exchange
 *	BROKEN_EXPIRE		expires without compare-and-exchange
 */

#ifdef SESSION
#define TRANSACTIONS	1
#define of_lease		false
#else
#define of_lease		true
#endif
#ifndef TRANSACTIONS
#define TRANSACTIONS	2
#endif
#ifndef RENEWALS
#define RENEWALS		1
#endif

#define TTL				1

mtype = { GRANTED, ENDING, GONE };

/* of the ticket, protected by the entry's lock */
bool entry_locked;
mtype state = GRANTED;
byte pins;

/* of its lease and its record, protected by the lease lock */
bool listed = of_lease;			/* just granted, so marked */
bool marked_again;				/* since it was copied */
bool in_flight;
bool has_row;

/* atomic; 0: over */
byte deadline = 1 + TTL;
byte now = 1;

bool worker_latch;

/* not in the program, but for what is checked */
bool successor_granted;
bool closed;
byte kept_until;				/* what the latest renewal has promised */

#define is_open			(deadline != 0 && now < deadline)
#define is_due			(deadline != 0 && now >= deadline)
#define is_holding		(!of_lease || pins > 0 || is_open)

#ifdef BROKEN_OVER
#define is_over			(state != GRANTED)
#else
#define is_over			(state == GONE || (state == ENDING && pins == 0))
#endif

#define lock_entry()	atomic { !entry_locked -> entry_locked = true }
#define unlock_entry()	entry_locked = false

inline mark()
{
	listed = true;
	marked_again = true
}

inline take_out()
{
	state = GONE;
	successor_granted = true
}

/* Called with the entry's lock, which is free afterwards. */
inline end_ticket()
{
	state = ENDING;
	if
	:: of_lease ->
		d_step {				/* the lease lock */
#ifdef BROKEN_AT_ONCE
			at_once = !has_row && !in_flight;
#else
			at_once = !has_row && !in_flight && pins == 0;
#endif
			mark()
		}
	:: else -> at_once = (pins == 0)
	fi;
	atomic {
		if
		:: at_once -> take_out()
		:: else
		fi;
		at_once = false;
		unlock_entry();
		worker_latch = true
	}
}

proctype transaction()
{
	bool pinned, at_once;

	lock_entry();				/* at_xact_end(), before the commit */
#ifdef BROKEN_CHECK
	pinned = state != GONE;
#else
	pinned = state == GRANTED && is_holding;
#endif
	d_step {
#ifndef BROKEN_PIN
		if
		:: pinned -> pins++
		:: else
		fi;
#endif
		unlock_entry()
	};
	if
	:: pinned ->
		if
		:: assert(!successor_granted)	/* the commit record is written */
		:: goto unpin			/* or an error comes, and a rollback */
		fi;
#ifndef BROKEN_EARLY
		assert(!successor_granted)	/* its writes are visible */
#endif
	:: else -> goto done		/* raise_lost() */
	fi;

unpin:
#ifndef BROKEN_PIN
	lock_entry();
#ifdef BROKEN_COUNT
	pins = 0;
#else
	pins--;
#endif
	if
#ifndef BROKEN_UNPIN
	:: pins == 0 && state == ENDING ->
#ifdef BROKEN_MARK
		unlock_entry()
#else
		end_ticket()
#endif
	:: !(pins == 0 && state == ENDING) ->
#else
	:: true ->
#endif
		unlock_entry()
	fi;
#endif
#ifdef BROKEN_EARLY
	assert(!successor_granted);
#endif

done:
	pinned = false
}

#ifdef SESSION
#define ends_first		false
#else
#define ends_first		true
#endif

/* Somebody ends the ticket; or closes the lease, which is claimed first. */
proctype ender()
{
	bool at_once;

	if
	:: goto none
	:: true
	:: ends_first -> d_step { deadline = 0; closed = true }
	fi;
	lock_entry();
	if
	:: state == GRANTED -> end_ticket()
	:: else -> unlock_entry()
	fi;
none:
	skip
}

#ifndef SESSION

proctype renewer()
{
	byte found, renewals;

	do
	:: renewals < RENEWALS ->
		renewals++;
		found = deadline;
again:	if
		:: d_step { found == 0 || now >= found -> found = 0 }
		:: d_step { found != 0 && now < found -> skip };
#ifdef BROKEN_RENEW
			d_step { deadline = now + TTL; kept_until = deadline }
#else
			d_step {			/* compare and exchange */
				if
				:: deadline == found ->
					deadline = now + TTL;
					kept_until = deadline;
					found = 0
				:: else -> found = deadline
				fi
			};
			if
			:: found != 0 -> goto again
			:: else
			fi
#endif
		fi
	:: true -> break
	od;
	found = 0;
	renewals = 0
}

proctype worker()
{
	byte found;
	bool at_once, over, had_row;

end:
	do
	:: d_step { worker_latch || listed || is_due -> worker_latch = false };

		/* dlock_lease_expire() */
		found = deadline;
		if
		:: found != 0 && now >= found ->
#ifdef BROKEN_EXPIRE
			d_step { deadline = 0; found = 0 };
#else
			d_step {			/* compare and exchange */
				if
				:: deadline == found -> deadline = 0; found = 0
				:: else			/* renewed at the last moment */
				fi
			};
#endif
		:: else
		fi;
		if
		:: found == 0 && state == GRANTED ->	/* end_tickets() */
			assert(closed || now >= kept_until);
			lock_entry();
			if
			:: state == GRANTED -> end_ticket()
			:: else -> unlock_entry()
			fi
		:: else
		fi;
		found = 0;

		/* dlock_writer_write() */
		if
		:: listed ->
			d_step {			/* copy_marked() */
				marked_again = false;
				over = is_over;
				had_row = has_row || in_flight;
				in_flight = !over || had_row
			};
			d_step {			/* after the commit: unmark() */
				in_flight = false;
				has_row = !over;
				listed = marked_again
			};
			if
			:: over && !has_row ->	/* dlock_queue_finish() */
				lock_entry();
				d_step {
					if
					:: state == ENDING -> take_out()
					:: else
					fi;
					unlock_entry()
				}
			:: else
			fi;
			d_step { over = false; had_row = false }
		:: else
		fi
	od
}

#endif

/* The time goes on, and so a lease that is not renewed is due in the end. */
proctype clock()
{
end:
	do
	:: is_open -> now++
	od
}

/* A session that waits for the lock, whatever ends the ticket before it */
proctype successor()
{
	successor_granted || (!of_lease && state == GRANTED)
}

init
{
	byte t;

	atomic {
		do
		:: t < TRANSACTIONS -> run transaction(); t++
		:: else -> t = 0; break
		od;
		run ender();
		run successor();
#ifndef SESSION
		run renewer();
		run worker();
		run clock()
#endif
	}
}
