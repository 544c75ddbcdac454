/*
 * journal.pml
 *	  Tickets that outlive their sessions: the journal, the worker that writes
 *	  it, the order of the WAL, and what a crash leaves.  src/shared/journal.c,
 *	  src/worker/writer.c, src/backend/durable.c, src/tables/load.c,
 *	  src/shared/lease_ticket.c, src/backend/lessee.c, and src/backend/change.c.
 *
 * CLIENTS ask for one lock, exclusively.  Each is one of these:
 *
 *	SESSION		waits, uses the lock in a transaction that commits, and releases it
 *	ACQUIRE		waits as a session; its lease adopts the ticket once it is granted,
 *				or at once as an heir: where nobody else waits, and the one holder
 *				has ended, and only the removal of its row is to come
 *	ENQUEUE		the lease has the ticket from the start; it may wait for the grant
 *	RESTORED	the ticket was read from the tables at the start (with -DRESTART)
 *
 * One worker writes what is marked, in transactions that commit
 * asynchronously. A number of times (FAILURES) its transaction fails, (DEATHS)
 * it is terminated before or after the commit, (ERRORS) it raises an error
 * after the commit, (CANCELS) a client is cancelled as it waits for
 * durability, and (ENDS) a ticket is ended by its lease's expiry or close, or
 * by force.  With -DRETRY one more session repeats the request of the first
 * client, for the same lease.  With -DASK somebody else is told, once, that a
 * session holds the lock.  With -DDOWNGRADE the others ask for a shared hold,
 * and the first client, which has a lease, makes its hold a shared one when it
 * has been told of it.
 *
 * The WAL is a list of prefixes, each with the rows that it leaves, from the
 * one that was flushed on.  A crash keeps any of these.  Instead of going on
 * after each crash from each prefix, what it would leave is checked whenever a
 * prefix is added or somebody is told something, in crash(); from a sound
 * state on life goes on as with -DRESTART, which begins with all that a crash
 * may leave.
 *
 * What stands for what:
 *
 *	join, take_out			dlock_queue_join(), take_out()
 *	adopt, mark				dlock_lease_ticket_adopt(), dlock_journal_mark()
 *	end_ticket				end(), dlock_lease_ticket_ended()
 *	settle					dlock_lease_settle(), dlock_queue_finish()
 *	inherit					is_heir(), dlock_lease_ticket_inherit()
 *	wait_until_durable		dlock_durable_wait(), dlock_lessee_make_durable()
 *	withdraw				dlock_lease_ticket_withdraw()
 *	worker					dlock_writer_begin(), dlock_writer_write():
 *							copy_marked(), note_removals(), unmark(), publish()
 *	downgrade				dlock_queue_downgrade(), dlock_lease_ticket_lower(),
 *							and downgrade_of_lease()
 *	share					dlock_queue_share()
 *	removed					DlockSpace.removed, dlock_journal_flush_removal()
 *	asker					dlock_check(), dlock_fence(), dlock_notify_send()
 *	crash, restore			dlock_load(), dlock_queue_restore()
 *
 * The entry's lock is a variable, as the worker copies what is marked under
 * the lease lock alone.  What is done under the lease lock is one step.
 *
 * Checked, for each prefix that a crash may leave:
 *
 *	- no two rows are granted, unless all are shared;
 *	- no row is granted whose number is smaller than that of a later holder, as
 *	  far as the WAL, or anybody who was told, knows of one, unless both are
 *	  shared; nor does one wait that would be granted later;
 *	- each ticket that was acknowledged as durable, waiting or granted, is there,
 *	  unless somebody has begun to end it;
 *
 * and in memory, that grants are in the order of the numbers, to one at a
 * time or to those who share, and that no run ends with somebody who waits: for a grant, or for the
 * journal.
 *
 * Left out: leases of several tickets, and the table of leases; renewals and
 * the time (guard.pml); delays; slots, sleeps and wakeups of sessions (queue.pml); the condition variable and the worker's latch, as
 * those who wait look again after a second; standbys, for which "flushed"
 * would read "acknowledged"; synchronous_commit = off, with which nobody is
 * told that anything is durable; NOTIFY; the reservation of numbers.
 *
 * Broken on purpose, and to be caught:
 *
 *	BROKEN_WAL_ORDER	the lock is handed on before the removal of the row of
 *						its holder is in the WAL
 *	BROKEN_LEAVING		... or past the place in the queue of one that had a row
 *	BROKEN_TELL			a session is told of its grant before that is flushed
 *	BROKEN_ASK			... or somebody else is
 *	BROKEN_NOTE			the worker tells what to flush after the hand-over
 *	BROKEN_ACK			a ticket is acknowledged before its row is flushed
 *	BROKEN_WRITTEN		a change counts as written when it has been copied
 *	BROKEN_UNMARK		what has changed since it was copied is unmarked, too
 *	BROKEN_FLIGHT		what is just being written counts as without a row
 *	BROKEN_DEATH		... or does when the worker has died at it
 *	BROKEN_FINISH		what is over is unmarked before it is finished
 *	BROKEN_SETTLE		who waits for a ticket that was taken back, unwritten, is
 *						not told
 *	BROKEN_CLAIM		who takes back what it has made does not look whether
 *						another call has returned it
 *	BROKEN_GRANT		the state of a ticket that is granted is written before
 *						it is marked, not at once
 *	BROKEN_ADOPT		a ticket that was granted is adopted without being marked
 *	BROKEN_HEIR			one is an heir though the holder has not ended
 *	BROKEN_HEIR_ORDER	an heir's row is written before the removal
 *	BROKEN_INHERIT		an heir's row does not say granted, and counts as if it did
 *	BROKEN_SHARE		a hold is shared before the WAL has a row that says so
 *	BROKEN_SHARE_NOTE	... or the others cannot know what to flush
 *	BROKEN_SHARE_MARK	what is to be shared is unmarked before it is
 *	BROKEN_SHARE_HEAD	who shares a hold does not grant from the head
 */

#ifndef CLIENTS
#define CLIENTS		3
#endif
#ifndef FAILURES
#define FAILURES	0
#endif
#ifndef DEATHS
#define DEATHS		0
#endif
#ifndef ERRORS
#define ERRORS		0
#endif
#ifndef CANCELS
#define CANCELS		0
#endif
#ifndef ENDS
#define ENDS		0
#endif

#define MAX_WAL		10

mtype = { SESSION, ACQUIRE, ENQUEUE, RESTORED };
mtype = { NEW, WAITING, LEAVING, GRANTED, ENDING, GONE };

/* how a row is, in order of what can be acknowledged */
#define NO_ROW			0
#define ROW_WAITING		1
#define ROW_GRANTED		2
#define ROW_SHARED		3

/* protected by the entry's lock */
bool entry_locked;
byte queue[CLIENTS];
byte waiters;
byte holders;
bool exclusive;
byte next_ticket = 1;
byte to_mark;					/* granted, and still to be marked: a set */

typedef Ticket
{
	mtype state;
	byte number;
	bool of_session;
	byte claims;
	bool heir;
#ifdef DOWNGRADE
	bool shares;
	bool lowers;
#endif

	/* its record, protected by the lease lock */
	bool listed;
	bool in_flight;
	bool has_row;
	bool finished;
	bool inherited;
	byte marked;
	byte written;
	byte lsn;

	/* not in the program: what its client was told, and whether it has ended */
	byte told;
	bool ended;

	/* the worker's image of it */
	bool in_batch;
	byte copied;
	bool over;
	bool had_row;
#ifdef DOWNGRADE
	bool to_share;
#endif
	byte row
};
Ticket t[CLIENTS];

byte journal[CLIENTS];			/* listed records, the oldest mark first */
byte num_journal;

byte failures;

typedef Prefix
{
	byte row[CLIENTS];
	byte fence					/* the greatest that a commit was made with */
};
Prefix wal[MAX_WAL];			/* from the one that is flushed on, at 0 */
byte inserted;
byte removed;					/* position of the latest removal; 0: flushed */

/* not in the program, but for what is checked */
byte last_granted;
byte known;						/* the greatest fence that anybody was told of */
#ifdef DOWNGRADE
byte known_alone;				/* ... and the greatest of an exclusive holder */
#endif

/* used within a step only */
hidden byte i, j, p, fence;
#ifdef DOWNGRADE
hidden byte sharing;
#endif

#define of_lease(c)			(!t[c].of_session)
#define is_queued(c)		(t[c].state == WAITING || t[c].state == LEAVING)
#define is_over(c)			(t[c].state == ENDING || t[c].state == LEAVING || \
							 t[c].state == GONE)
#define is_there(c)			(t[c].state == WAITING || t[c].state == GRANTED)
#ifdef DOWNGRADE
#define shares(c)			t[c].shares
#define to_share(c)			t[c].to_share
#else
#define shares(c)			false
#define to_share(c)			false
#endif
#define fits(c)				(holders == 0 || (shares(c) && !exclusive))

#define lock_entry()		atomic { !entry_locked -> entry_locked = true }

/*
 * The WAL
 */

/* What would a crash leave at this moment?  Any of the prefixes. */
inline crash()
{
	p = 0;
	do
	:: p <= inserted ->
		fence = 0;
#ifdef DOWNGRADE
		sharing = 0;
#endif
		i = 0;
		do
		:: i < CLIENTS ->
			assert(t[i].ended || wal[p].row[i] >= t[i].told);
			if
			:: wal[p].row[i] == ROW_GRANTED ->
				assert(fence == 0);
				fence = t[i].number
#ifdef DOWNGRADE
			:: wal[p].row[i] == ROW_SHARED ->
				assert(t[i].number >= known_alone);
				sharing = t[i].number
#endif
			:: else
			fi;
			i++
		:: else -> break
		od;
		assert(fence == 0 || (fence >= known && fence >= wal[p].fence));
#ifdef DOWNGRADE
		assert(fence == 0 || sharing == 0);
#endif
		i = 0;
		do
		:: i < CLIENTS ->
#ifdef DOWNGRADE
			/* those who share may be granted once more, in another order */
			assert(wal[p].row[i] != ROW_WAITING || !t[i].shares ||
				(t[i].number > fence && t[i].number > known_alone));
			assert(wal[p].row[i] != ROW_WAITING || t[i].shares ||
				(t[i].number > fence && t[i].number > known &&
					t[i].number > wal[p].fence && t[i].number > sharing));
#else
			assert(wal[p].row[i] != ROW_WAITING || (t[i].number > fence &&
				t[i].number > known && t[i].number > wal[p].fence));
#endif
			i++
		:: else -> break
		od;
		p++
	:: else -> break
	od;
	p = 0;
	i = 0;
#ifdef DOWNGRADE
	sharing = 0;
#endif
	fence = 0
}

/* Somebody is told that this ticket holds. */
inline tell_of(c)
{
	if
	:: t[c].number > known -> known = t[c].number
	:: else
	fi;
#ifdef DOWNGRADE
	if
	:: !t[c].shares && t[c].number > known_alone ->
		known_alone = t[c].number
	:: else
	fi
#endif
}

/* The next record, still without its contents */
inline insert()
{
	assert(inserted < MAX_WAL - 1);
	i = 0;
	do
	:: i < CLIENTS -> wal[inserted + 1].row[i] = wal[inserted].row[i]; i++
	:: else -> break
	od;
	wal[inserted + 1].fence = wal[inserted].fence;
	inserted++;
	i = 0
}

inline move(position)
{
	if
	:: position > p -> position = position - p
	:: else -> position = 0
	fi
}

/*
 * XLogFlush().  What comes before is forgotten, and all positions are moved,
 * so that 0 is where the WAL is flushed up to.
 */
inline flush(up_to)
{
	p = up_to;
	if
	:: p > 0 ->
		j = 0;
		do
		:: j <= inserted ->
			i = 0;
			do
			:: i < CLIENTS ->
				if
				:: j + p <= inserted -> wal[j].row[i] = wal[j + p].row[i]
				:: else -> wal[j].row[i] = 0
				fi;
				i++
			:: else -> break
			od;
			if
			:: j + p <= inserted -> wal[j].fence = wal[j + p].fence
			:: else -> wal[j].fence = 0
			fi;
			j++
		:: else -> break
		od;
		inserted = inserted - p;
		move(removed);
		i = 0;
		do
		:: i < CLIENTS -> move(t[i].lsn); i++
		:: else -> break
		od
	:: else
	fi;
	i = 0;
	j = 0;
	p = 0
}

/*
 * The journal
 */

inline list_record(c)
{
	if
	:: !t[c].listed -> journal[num_journal] = c; num_journal++
	:: else
	fi;
	t[c].listed = true
}

inline unlist(c)
{
	if
	:: t[c].listed ->
		i = 0;
		do
		:: journal[i] != c -> i++
		:: else -> break
		od;
		num_journal--;
		do
		:: i < num_journal -> journal[i] = journal[i + 1]; i++
		:: else -> break
		od;
		journal[i] = 0;
		i = 0
	:: else
	fi;
	t[c].listed = false
}

inline mark(c)
{
	if
	:: !t[c].finished -> list_record(c); t[c].marked++
	:: else
	fi
}

/*
 * The queue
 */

inline grant(c)
{
	assert(fits(c) && t[c].number > last_granted);
	last_granted = t[c].number;
	holders++;
	exclusive = !shares(c);
#ifdef BROKEN_GRANT
	t[c].state = GRANTED;
	if
	:: of_lease(c) -> to_mark = to_mark | (1 << c);
	:: else
	fi
#else
	if
	:: of_lease(c) -> to_mark = to_mark | (1 << c)
	:: else -> t[c].state = GRANTED
	fi
#endif
}

/*
 * The entry's lock is let go, but not before a lease's ticket that was granted
 * is marked: that takes the lease lock, and is a step of its own.
 */
inline mark_granted()
{
	i = 0;
	do
	:: !(to_mark & (1 << i)) -> i++
	:: else -> break
	od;
	t[i].state = GRANTED;
	if
	:: !t[i].inherited -> mark(i)
	:: else
	fi;
	to_mark = to_mark & ~(1 << i);
	i = 0
}

inline let_go()
{
#ifdef DOWNGRADE
	do
	:: to_mark & (to_mark - 1) -> d_step { mark_granted() }
	:: else -> break
	od;
#endif
	if
	:: to_mark != 0 ->
		d_step {				/* dlock_lease_ticket_granted() */
			mark_granted();
			entry_locked = false
		}
	:: else -> entry_locked = false
	fi
}

inline dequeue(c)
{
	i = 0;
	do
	:: queue[i] != c -> i++
	:: else -> break
	od;
	waiters--;
	do
	:: i < waiters -> queue[i] = queue[i + 1]; i++
	:: else -> break
	od;
	queue[i] = 0;
	i = 0
}

inline grant_from_queue()
{
	do
	:: waiters > 0 && fits(queue[0]) && t[queue[0]].state == WAITING ->
		j = queue[0];
		dequeue(j);
		grant(j);
		j = 0
	:: else -> break
	od
}

inline take_out(c)
{
	if
	:: is_queued(c) -> dequeue(c)
	:: else -> holders--; exclusive = exclusive && shares(c)
	fi;
	t[c].state = GONE;
	grant_from_queue()
}

/*
 * End a lease's ticket.  Called with the entry's lock, which is free
 * afterwards; "at_once" is the caller's.
 */
inline end_ticket(c)
{
	if
	:: is_there(c) ->
		t[c].state = (t[c].state == WAITING -> LEAVING : ENDING);
		atomic {				/* the lease lock; and take_out() follows */
#if defined(BROKEN_LEAVING)
			at_once = t[c].state == LEAVING ||
				(!t[c].has_row && !t[c].in_flight);
#elif defined(BROKEN_WAL_ORDER)
			at_once = true;
#elif defined(BROKEN_FLIGHT)
			at_once = !t[c].has_row;
#else
			at_once = !t[c].has_row && !t[c].in_flight;
#endif
			mark(c);
			if
			:: at_once -> take_out(c)
			:: else
			fi;
			at_once = false
		};
		let_go()
	:: else -> entry_locked = false
	fi
}

/* An exclusive hold becomes a shared one.  Called with the entry's lock. */
inline share(c)
{
#ifdef DOWNGRADE
	if
	:: t[c].state == GRANTED && !t[c].shares ->
		t[c].shares = true;
		exclusive = false;
#ifndef BROKEN_SHARE_HEAD
		grant_from_queue()
#endif
	:: else
	fi
#endif
}

/* Finish a record if it is over and has no row; "done" is the caller's. */
inline settle(c)
{
	d_step {
		done = !t[c].has_row && !t[c].in_flight && is_over(c) &&
			!t[c].finished;
		if
		:: done -> unlist(c); t[c].finished = true
		:: else
		fi
	};
	if
	:: done ->
		atomic {				/* dlock_queue_finish() */
			!entry_locked -> entry_locked = true;
			done = false;
			if
			:: t[c].state == ENDING || t[c].state == LEAVING -> take_out(c)
			:: else
			fi;

			/* for fewer states: nobody asks for these any more */
			t[c].marked = 0;
			t[c].written = 0;
			t[c].lsn = 0;
			t[c].claims = 0;
			t[c].told = 0
		};
		let_go()
	:: else
	fi
}

/*
 * The worker
 */

byte deaths, errors, cancels, ends, faults;

/* An image of a record, as it is */
inline copy_record(c)
{
	t[c].in_batch = true;
	t[c].copied = t[c].marked;
	t[c].had_row = t[c].has_row || t[c].in_flight;
	t[c].over = is_over(c);
	t[c].row = (t[c].state == WAITING && !t[c].heir -> ROW_WAITING :
		(is_over(c) -> NO_ROW : ROW_GRANTED));
#ifdef DOWNGRADE
	t[c].row = (t[c].row == ROW_GRANTED && (t[c].shares || t[c].lowers) ->
		ROW_SHARED : t[c].row);
	t[c].to_share = !t[c].over && t[c].lowers && !t[c].shares;
#endif
	t[c].in_flight = !t[c].over || t[c].had_row;
#ifdef BROKEN_INHERIT
	t[c].row = (t[c].state == WAITING -> ROW_WAITING : t[c].row);
#endif
#ifdef BROKEN_WRITTEN
	t[c].lsn = inserted;
	t[c].written = t[c].marked
#endif
}

/* The rows of the batch.  Where there are none, nothing is written. */
inline write_rows()
{
	p = 0;
	do
	:: p < CLIENTS ->
		if
		:: t[p].in_batch && (t[p].had_row || !t[p].over) ->
			if
			:: j == 0 -> insert(); j = 1
			:: else
			fi;
			wal[inserted].row[p] = t[p].row
		:: else
		fi;
		p++
	:: else -> break
	od;
	j = 0;
	crash()
}

inline note_removals()
{
	i = 0;
	do
	:: i < CLIENTS ->
		if
		:: t[i].in_batch && t[i].over && t[i].had_row -> removed = inserted
#ifndef BROKEN_SHARE_NOTE
		:: t[i].in_batch && to_share(i) -> removed = inserted
#endif
		:: else
		fi;
		i++
	:: else -> break
	od;
	i = 0
}

inline unmark(committed)
{
	p = 0;
	do
	:: p < CLIENTS ->
		if
		:: t[p].in_batch ->
			t[p].in_flight = false;
			t[p].has_row = (committed -> !t[p].over : t[p].had_row)
		:: else
		fi;
		if
		:: t[p].in_batch && committed ->
			t[p].inherited = t[p].inherited ||
				(t[p].heir && t[p].state == WAITING);
			t[p].lsn = inserted;
			t[p].written = t[p].copied;
			if
#if defined(BROKEN_UNMARK)
			:: !t[p].over ->
#elif defined(BROKEN_FINISH)
			:: t[p].marked == t[p].copied ->
#elif defined(BROKEN_SHARE_MARK)
			:: t[p].marked == t[p].copied && !t[p].over ->
#else
			:: t[p].marked == t[p].copied && !t[p].over && !to_share(p) ->
#endif
				unlist(p)
			:: else
			fi
		:: else
		fi;
		p++
	:: else -> break
	od;
	p = 0
}

inline commit_is_done()
{
	atomic {
#ifndef BROKEN_NOTE
		note_removals();
#endif
		unmark(true)
	}
}

inline forget_image(c)
{
	t[c].in_batch = false;
	t[c].copied = 0;
	t[c].over = false;
	t[c].had_row = false;
#ifdef DOWNGRADE
	t[c].to_share = false;
#endif
	t[c].row = 0
}

inline forget_images()
{
	i = 0;
	do
	:: i < CLIENTS -> forget_image(i); i++
	:: else -> break
	od;
	i = 0
}

proctype worker()
{
	byte c;
	bool done, failed;

begin:
	/* dlock_writer_begin(): what was in flight counts as written */
	atomic {
		forget_images();
		c = 0;
		do
		:: c < CLIENTS ->
			if
			:: t[c].listed ->
#ifndef BROKEN_DEATH
				t[c].has_row = t[c].has_row || t[c].in_flight;
#endif
				t[c].in_flight = false
			:: else
			fi;
			c++
		:: else -> break
		od;
		c = 0
	};

end:
	do
	:: num_journal > 0 ->

		/* copy_marked(): all, or the older part */
		atomic {
			do
			:: c < num_journal -> copy_record(journal[c]); c++
			:: c > 0 || num_journal == 0 -> break
			od;
			c = 0
		};

		/* the transaction */
		if
		:: atomic { write_rows() }
		:: deaths < DEATHS -> deaths++; goto begin
		:: atomic {
				faults < FAILURES ->
				faults++;
				failed = true;
				unmark(false);
				failures++
			};
			goto publish
		fi;

		/* it has committed */
		if
		:: commit_is_done()
		:: deaths < DEATHS -> deaths++; goto begin
		:: errors < ERRORS -> errors++; commit_is_done(); c = CLIENTS
		fi;

publish:
		atomic {
			do
			:: c < CLIENTS && !(t[c].in_batch &&
					(t[c].over || failed || to_share(c))) -> c++
			:: else -> break
			od
		};
		if
#ifdef DOWNGRADE
		:: c < CLIENTS && to_share(c) && !failed ->
			atomic { !entry_locked -> entry_locked = true; share(c) };
			let_go();
			d_step {
				if
				:: t[c].marked == t[c].copied -> unlist(c)
				:: else
				fi
			};
			c++;
			goto publish
		:: c < CLIENTS && (!to_share(c) || failed) ->
#else
		:: c < CLIENTS ->
#endif
			settle(c); c++; goto publish
		:: else
		fi;
		atomic {
#ifdef BROKEN_NOTE
			note_removals();
#endif
			c = 0;
			failed = false;
			forget_images()
		}
	od
}

/*
 * The clients
 */

inline enqueue(c)
{
	queue[waiters] = c;
	waiters++;
	t[c].state = WAITING
}

/* The only holder, if it has ended, and somebody may be its heir; or CLIENTS */
inline find_ended()
{
	i = 0;
	do
	:: i < CLIENTS && !(of_lease(i) && t[i].state == ENDING) -> i++
	:: else -> break
	od;
#ifdef BROKEN_HEIR
	i = (i == CLIENTS -> 0 : i)
#endif
}

inline inherit(c)
{
	find_ended();
	if
	:: i < CLIENTS && waiters == 1 && holders == 1 && !shares(c) ->
		t[c].heir = true;
		t[c].of_session = false;
		mark(c);
#ifdef BROKEN_HEIR_ORDER
		i = num_journal - 1;
		do
		:: i > 0 -> journal[i] = journal[i - 1]; i--
		:: else -> break
		od;
		journal[0] = c
#endif
	:: else
	fi;
	i = 0
}

inline join(c)
{
	atomic {
		!entry_locked;
		t[c].number = next_ticket;
		next_ticket++;
		t[c].of_session = (kind != ENQUEUE);
		t[c].claims = 1;
		if
		:: waiters == 0 && fits(c) ->
			grant(c);
			t[c].state = GRANTED;
			to_mark = 0
		:: else -> enqueue(c)
		fi;
		if
		:: of_lease(c) -> mark(c)	/* adopted at once */
		:: kind == ACQUIRE && t[c].state == WAITING -> inherit(c)
		:: else
		fi
	}
}

/* A session ends its ticket, held or waiting. */
inline leave(c)
{
	atomic { !entry_locked -> entry_locked = true; take_out(c) };
	let_go()
}

/*
 * A call has failed: end the ticket that it has claimed, if no other call has.
 */
inline withdraw(c)
{
	lock_entry();
#ifdef BROKEN_CLAIM
	if
	:: created && is_there(c) -> t[c].ended = false; end_ticket(c)
#else
	if
	:: is_there(c) && t[c].claims == 1 ->
		d_step { t[c].claims = 0; t[c].ended = true };
		end_ticket(c)
#endif
	:: else ->
		d_step {
			if
			:: t[c].claims > 0 -> t[c].claims--
			:: else
			fi;
			entry_locked = false
		}
	fi;
	settle(c)
}

/*
 * Wait until all that is known of a ticket is durable, and tell the client.
 * Where that fails, "told_now" is NO_ROW, and the ticket withdrawn if
 * "or_withdraw", as it is in the call that has made it.
 */
inline wait_until_durable(c, wanted, or_withdraw)
{
	d_step { wait_for = t[c].marked; failures_before = failures };
	if
#ifndef BROKEN_SETTLE
	:: t[c].written >= wait_for || t[c].finished ->
#else
	:: t[c].written >= wait_for ->
#endif
		atomic {				/* the last look, and the answer */
#ifndef BROKEN_ACK
			flush(t[c].lsn);
#endif
			told_now = NO_ROW;
			if
			:: t[c].state == GRANTED || (t[c].state == WAITING &&
					wanted == ROW_WAITING) -> told_now = wanted
			:: else				/* raise_lost() */
			fi;
			if
			:: told_now == ROW_GRANTED -> tell_of(c)
			:: else
			fi;
			if
			:: told_now > t[c].told -> t[c].told = told_now
			:: else
			fi;
			crash()
		}
	:: failures != failures_before -> told_now = NO_ROW
	:: cancels < CANCELS -> cancels++; told_now = NO_ROW
	fi;
	d_step { wait_for = 0; failures_before = 0 };
	if
	:: told_now == NO_ROW && or_withdraw -> withdraw(c)
	:: else
	fi
}

/* The mode of a hold is changed, and its row: durable when the call returns. */
inline downgrade(c)
{
	lock_entry();
	if
	:: t[c].state == GRANTED && !t[c].shares ->
		atomic {				/* the lease lock; and share() follows */
			t[c].lowers = true;
#ifdef BROKEN_SHARE
			at_once = true;
#else
			at_once = !t[c].has_row && !t[c].in_flight;
#endif
			mark(c);
			if
			:: at_once -> share(c)
			:: else
			fi;
			at_once = false;
			wait_for = t[c].marked;
			failures_before = failures
		};
		let_go();
		if
		:: t[c].written >= wait_for || t[c].finished ->
			atomic {
				flush(t[c].lsn);
				if
				:: t[c].state == GRANTED -> t[c].told = ROW_SHARED
				:: else
				fi;
				crash()
			};
			atomic { !entry_locked -> entry_locked = true; share(c) };
			let_go()
		:: failures != failures_before
		:: cancels < CANCELS -> cancels++
		fi;
		d_step { wait_for = 0; failures_before = 0; lowered = true }
	:: else -> entry_locked = false
	fi
}

proctype client(byte me; mtype kind)
{
	bool at_once, done, created = true;
	byte wait_for, failures_before, told_now, wanted;
#ifdef DOWNGRADE
	bool lowered;
#endif

	if
	:: kind == RESTORED -> told_now = t[me].told; goto answered
	:: else -> join(me)
	fi;
	if
	:: kind == ENQUEUE -> wanted = ROW_WAITING; goto ask
	:: kind != ENQUEUE && !t[me].heir ->
		t[me].state == GRANTED	/* for as long as it takes */
	:: kind != ENQUEUE && !t[me].heir -> goto give_back	/* it gives up */
	:: t[me].heir -> t[me].state != WAITING
	:: t[me].heir -> withdraw(me); goto done_
	fi;
	if
	:: kind == SESSION ->
		/* it is told its fence, and tells others */
		atomic {
#ifndef BROKEN_TELL
			flush(removed);
#endif
			tell_of(me);
			crash()
		};
		/* its commit */
		atomic { insert(); wal[inserted].fence = t[me].number; crash() };
		goto give_back
	:: else						/* ACQUIRE */
	fi;
	atomic {					/* let_adopt() */
		!entry_locked;
#ifndef BROKEN_ADOPT
		if
		:: t[me].of_session -> mark(me)
		:: else
		fi;
#endif
		t[me].of_session = false;
		wanted = ROW_GRANTED
	};

	/* the call that makes the ticket, or a dlock_wait() after it */
ask:
	wait_until_durable(me, wanted, t[me].told == NO_ROW);
answered:
	if
	:: told_now == ROW_WAITING ->
		t[me].state != WAITING;	/* for as long as it takes */
		wanted = ROW_GRANTED;
		goto ask
	:: true
	fi;

#ifdef DOWNGRADE
	if
	:: told_now == ROW_GRANTED && me == 0 -> downgrade(me)
	:: else
	fi;
	if
	:: lowered -> goto done_	/* and keeps it; others come in beside it */
	:: true
	fi;
#endif
	/* it is released, at the latest when its lease runs out */
	atomic { !entry_locked -> entry_locked = true; t[me].ended = true };
	end_ticket(me);
	goto done_;

give_back:
	leave(me);

done_:
	atomic { told_now = 0; wanted = 0; created = false; kind = 0 }
}

/* The request of the first client once more, in another session */
proctype retry()
{
	bool at_once, done, created;
	byte wait_for, failures_before, told_now;

	atomic {
		!entry_locked && (t[0].state == NEW || t[0].of_session || is_over(0) ||
			is_there(0));
		if
		:: is_there(0) && of_lease(0) -> t[0].claims++; told_now = 1
		:: else
		fi
	};
	if
	:: told_now == 1 -> wait_until_durable(0, ROW_WAITING, true)
	:: else
	fi;
	told_now = 0
}

/* A lease runs out or is closed; or an administrator ends a ticket. */
proctype ender()
{
	byte c;
	bool at_once;

	do
	:: ends < ENDS ->
		select (c : 0 .. CLIENTS - 1);
		ends++;
		lock_entry();
		if
		:: is_there(c) && of_lease(c) -> t[c].ended = true; end_ticket(c)
		:: else -> entry_locked = false
		fi;
		c = 0
	:: true -> break
	od;
	c = 0
}

/*
 * Somebody else is told that a session holds the lock, as an answer or by an
 * announcement, whether the session has learned of it or not.
 */
proctype asker()
{
	byte number, c;

	select (c : 0 .. CLIENTS - 1);
	if
	:: atomic {
			!entry_locked && t[c].of_session && t[c].state == GRANTED ->
			number = t[c].number
		};
		atomic {
#ifndef BROKEN_ASK
			flush(removed);
#endif
			if
			:: number > known -> known = number
			:: else
			fi;
			crash();
			number = 0;
			c = 0
		}
	:: true						/* or nobody asks */
	fi
}

/* A ticket as dlock_journal_load() puts it back */
inline restore(c)
{
	t[c].number = next_ticket;
	next_ticket++;
	t[c].has_row = true;
	t[c].claims = 1;
	if
	:: holders == 0 && waiters == 0 ->
		t[c].state = GRANTED;
		t[c].told = ROW_GRANTED;
		holders = 1;
		exclusive = true;
		last_granted = t[c].number
	:: true ->
		enqueue(c);
		t[c].told = ROW_WAITING
	fi;
	wal[0].row[c] = t[c].told
}

init
{
	byte c;

	atomic {
		do
		:: c < CLIENTS ->
			t[c].state = NEW;
#ifdef DOWNGRADE
			t[c].shares = (c > 0);
#endif
			c++
		:: else -> c = 0; break
		od;
		do
		:: c < CLIENTS ->
			if
#ifdef RESTART
			:: restore(c); run client(c, RESTORED)
#else
			:: run client(c, ENQUEUE)
#if defined(DOWNGRADE)			/* for fewer states */
			:: c == 0 -> run client(c, ACQUIRE)
#elif !defined(RETRY)
			:: run client(c, ACQUIRE)
#endif
#endif
#if defined(RETRY) || defined(DOWNGRADE)
			:: c > 0 -> run client(c, SESSION)
#else
			:: run client(c, SESSION)
#endif
			fi;
			c++
		:: else -> c = 0; break
		od;
#ifdef RESTART
		grant_from_queue();		/* dlock_queue_resume() */
		let_go();
#endif
#ifdef RETRY
		run retry();
#endif
#ifdef ASK
		run asker();
#endif
		if
		:: ENDS > 0 -> run ender()
		:: else
		fi;
		run worker()
	}
}
