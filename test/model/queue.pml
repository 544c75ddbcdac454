/*
 * queue.pml
 *	  A lock's queue, and the sleep of its waiters: src/shared/queue.c,
 *	  src/backend/wait.c, and src/backend/request.c for a wait that fails.
 *
 * BACKENDS sessions request one lock ROUNDS times each, exclusively or shared,
 * or, with -DSLOTS=n, 1 or all of its n permits.  Each may give up at any
 * moment, at its timeout or by a cancel, and may end at any moment of its wait.
 * An administrator ends a ticket by force, FORCES times.  With -DDOWNGRADE, an
 * exclusive holder may make its hold a shared one.  With -DSET_SLOTS, the slots
 * become fewer once, while requests ask for more than are left, and then become
 * more again.
 *
 * What stands for what:
 *
 *	join					dlock_queue_join(), dlock_ticket_draw()
 *	grant, take_out			grant(), take_out()
 *	grant_from_queue		grant_from_queue()
 *	leave					dlock_queue_leave(), called by settle() and at_exit()
 *	wake_all				wake_all(): SetLatch(), once the entry's lock is free
 *	backend, from "look" on	sleep_until_granted()
 *	administrator			dlock_queue_force()
 *	downgrade				dlock_queue_downgrade(), of a session's
 *	set_slots				dlock_queue_finish_slots()
 *
 * What is done under the entry's lock is one step.  A waiter's looks at its
 * state, and each setting and resetting of a latch, are steps of their own,
 * because no lock is held there.
 *
 * Checked:
 *
 *	- no session uses the lock beside an exclusive holder, and the permits given
 *	  out are at most the slots (I1), at the moment of the grant;
 *	- grants are in the order of the numbers (I3), and whenever the entry's lock
 *	  is free, the head of the queue does not fit (I2);
 *	- each waiter is granted the lock, or leaves (I11, I12): no run ends with a
 *	  sleeper, and a formula says the same.
 *
 * Left out: other locks, so deadlocks; the timer for deadlock checks, which
 * would hide a lost wakeup for a while; reentrance, which is not decided here;
 * memory and its release; numbers that run out; tickets of leases (journal.pml)
 * and pins (guard.pml); reordering of memory accesses.
 *
 * Broken on purpose, and to be caught:
 *
 *	BROKEN_FITS		the head is granted even if it does not fit
 *	BROKEN_FREE		a request checks without the entry's lock if it fits
 *	BROKEN_ORDER	the number is drawn before the entry is locked
 *	BROKEN_BARGE	a request that fits passes the waiters
 *	BROKEN_RULE		a waiter that leaves the queue does not grant from its head
 *	BROKEN_WAKEUP	the latch is set before the state
 *	BROKEN_RESET	the latch is reset after the look at the state
 *	BROKEN_LEAVE	a waiter that gives up after its grant keeps the lock
 *	BROKEN_LOOK		a waiter that gives up checks without a lock if it was granted
 *	BROKEN_EXIT		a session that ends keeps a lock that it was just granted
 *	BROKEN_SHARE	a downgrade does not grant from the head
 *	BROKEN_HOLD		... or does not check if the session still holds
 *	BROKEN_SET		a setter of more slots does not grant from the head
 *	BROKEN_SET_LOCK	... or sets them without the entry's lock
 */

#ifndef BACKENDS
#define BACKENDS	3
#endif
#ifndef ROUNDS
#define ROUNDS		1
#endif
#ifndef FORCES
#define FORCES		0
#endif

mtype = { WAITING, GRANTED, GONE };

/* protected by the entry's lock */
byte queue[BACKENDS];			/* waiting tickets, by backend */
byte waiters;
byte holders;
bool exclusive;
#ifdef SLOTS
byte permits_out;
#endif
#ifdef SET_SLOTS
byte there = SLOTS;
#else
#define there SLOTS
#endif
byte next_ticket = 1;

/* protected by the entry's lock: the state of each backend's ticket */
mtype state[BACKENDS] = GONE;
byte number[BACKENDS];
bool shared[BACKENDS];
#ifdef SLOTS
byte permits[BACKENDS];
#endif

bool latch[BACKENDS];

hidden byte i, head;			/* used within a step only */

/* not in the program, only for the checks */
byte last_granted;				/* the greatest number */
bool uses[BACKENDS];			/* has come back from its acquire */

#ifdef SLOTS
#define fits(p)		(permits_out + permits[p] <= there)
#else
#define fits(p)		((!shared[p] && holders == 0) || (shared[p] && !exclusive))
#endif

inline grant(p)
{
	assert(number[p] > last_granted);
	last_granted = number[p];
	number[p] = 0;
	holders++;
#ifdef SLOTS
	permits_out = permits_out + permits[p];
	assert(permits_out <= there);
#else
	exclusive = exclusive || !shared[p];
#endif
	state[p] = GRANTED
}

inline dequeue(p)
{
	i = 0;
	do
	:: queue[i] != p -> i++
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

/* "wakeups" is a set of backends, to be woken when the lock is free */
inline grant_from_queue()
{
	do
	:: waiters > 0 ->
		head = queue[0];
		if
#ifdef BROKEN_FITS
		:: true ->
#else
		:: fits(head) ->
#endif
			dequeue(head);
			grant(head);
			wakeups = wakeups | (1 << head)
		:: else -> break
		fi
	:: else -> break
	od;
	head = 0
}

inline let_go()
{
	assert(waiters == 0 || !fits(queue[0]));

	/* For fewer states: numbers start over if no ticket has one. */
	if
	:: waiters == 0 && holders == 0 -> last_granted = 0;
#ifndef BROKEN_ORDER
		next_ticket = 1
#endif
	:: else
	fi
}

inline take_out(p)
{
	if
	:: state[p] == WAITING ->
		dequeue(p);
		number[p] = 0;
		state[p] = GONE;
#ifndef BROKEN_RULE
		grant_from_queue()
#endif
	:: state[p] == GRANTED ->
		holders--;
#ifdef SLOTS
		permits_out = permits_out - permits[p];
#else
		exclusive = exclusive && shared[p];
#endif
		state[p] = GONE;
		grant_from_queue()
	:: else						/* ended by force before */
	fi;
	let_go()
}

inline wake_all()
{
	do
	:: wakeups & 1 -> d_step { latch[0] = true; wakeups = wakeups & ~1 }
	:: wakeups & 2 -> d_step { latch[1] = true; wakeups = wakeups & ~2 }
	:: wakeups & 4 -> d_step { latch[2] = true; wakeups = wakeups & ~4 }
	:: wakeups & 8 -> d_step { latch[3] = true; wakeups = wakeups & ~8 }
	:: wakeups == 0 -> break
	od
}

inline leave()
{
#ifdef BROKEN_WAKEUP
	if							/* whoever comes next is woken first */
	:: waiters > 0 -> latch[queue[0]] = true
	:: else
	fi;
	d_step { uses[me] = false; take_out(me); wakeups = 0 }
#else
	d_step { uses[me] = false; take_out(me) };
	wake_all()
#endif
}

inline downgrade()
{
	d_step {
		if
#ifdef BROKEN_HOLD
		:: !shared[me] ->
#else
		:: state[me] == GRANTED && !shared[me] ->
#endif
			shared[me] = true;
			exclusive = false;
#ifndef BROKEN_SHARE
			grant_from_queue()
#endif
		:: else
		fi;
		let_go()
	};
	wake_all()
}

#ifdef SET_SLOTS
inline set_slots(n)
{
#ifdef BROKEN_SET_LOCK
	there = n;
#endif
	d_step {
		there = n;
#ifndef BROKEN_SET
		grant_from_queue();
#endif
		let_go()
	};
	wake_all()
}

proctype setter()
{
	byte wakeups;

	set_slots(1);
	set_slots(SLOTS)
}
#endif

inline give_up()
{
#if defined(BROKEN_LEAVE)
	d_step {
		if
		:: state[me] == WAITING -> take_out(me)
		:: else -> state[me] = GONE
		fi
	};
	wake_all()
#elif defined(BROKEN_LOOK)
	if
	:: state[me] == GRANTED -> leave()
	:: state[me] == WAITING ->
		d_step {
			if
			:: state[me] == WAITING -> take_out(me)
			:: else -> state[me] = GONE
			fi
		};
		wake_all()
	:: state[me] == GONE
	fi
#else
	leave()
#endif
}

inline draw()
{
	number[me] = next_ticket;
	next_ticket++
}

inline choose_mode()
{
#ifdef SLOTS
	if
	:: permits[me] = 1
	:: permits[me] = SLOTS
	fi
#else
	if
	:: shared[me] = false
	:: shared[me] = true
	fi
#endif
}

inline enter(free)
{
	if
	:: free -> grant(me)
	:: else ->
		queue[waiters] = me;
		waiters++;
		state[me] = WAITING
	fi;
	let_go()
}

inline join()
{
#if defined(BROKEN_ORDER)
	atomic { choose_mode(); draw() };
	d_step { enter(waiters == 0 && fits(me)) }
#elif defined(BROKEN_FREE)
	atomic { choose_mode(); found_free = (waiters == 0 && fits(me)) };
	d_step { draw(); enter(found_free) }
#elif defined(BROKEN_BARGE)
	atomic { choose_mode(); draw(); enter(fits(me)) }
#else
	atomic { choose_mode(); draw(); enter(waiters == 0 && fits(me)) }
#endif
}

inline begin_use()
{
	i = 0;
	do
	:: i < BACKENDS ->
#ifndef SLOTS
		assert(!uses[i] || (shared[i] && shared[me]));
#endif
		i++
	:: else -> break
	od;
	i = 0;
	uses[me] = true
}

proctype backend(byte me)
{
	byte round, wakeups;
#ifdef BROKEN_FREE
	bool found_free;
#endif

	do
	:: round < ROUNDS ->
		round++;
		join();

		/*
	 * Interrupts and the timeout are checked at several places.  Giving up
	 * does not depend on what was read before, so one place will do.
		 */
look:	if
		:: state[me] == WAITING ->
#ifdef BROKEN_RESET
			latch[me] = false;
#endif
asleep:		latch[me];			/* WaitLatch(), for as long as it takes */
#ifndef BROKEN_RESET
			latch[me] = false;
#endif
			goto look
		:: atomic { state[me] == GRANTED -> begin_use() };
#ifdef DOWNGRADE
			if
			:: downgrade()
			:: true
			fi;
#endif
			leave()
		:: state[me] == GONE	/* raise_lost_place() */
		:: give_up()
		:: true ->				/* the session ends: at_exit() */
#ifndef BROKEN_EXIT
			leave();
#endif
			break
		fi
	:: else -> break
	od;
	atomic { round = 0; latch[me] = false; shared[me] = false }
}

proctype administrator()
{
	byte victim, wakeups, forces;

	do
	:: forces < FORCES ->
		select (victim : 0 .. BACKENDS - 1);
		forces++;
		d_step {
			if
			:: state[victim] != GONE ->
				take_out(victim);
				uses[victim] = false;
				wakeups = wakeups | (1 << victim)
			:: else
			fi;
			victim = 0
		};
		wake_all()
	:: true -> break			/* or fewer */
	od;
	forces = 0
}

init
{
	byte b;

	atomic {
		do
		:: b < BACKENDS -> run backend(b); b++
		:: else -> b = 0; break
		od;
		if
		:: FORCES > 0 -> run administrator()
		:: else
		fi;
#ifdef SET_SLOTS
		run setter()
#endif
	}
}

/* The backends are alike, so the formula follows one. */
ltl granted_or_gone { [] (backend[1]@asleep -> <> !backend[1]@asleep) }
