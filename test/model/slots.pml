/*
 * slots.pml
 *	  How the slots of a lock in shared memory follow its row of dlock_slots:
 *	  src/backend/slots.c, src/tables/slots.c, and what src/shared/queue.c does
 *	  for them.
 *
 * The server has just been started: the table may have a row, and the memory
 * has nothing.  SETTERS transactions write or remove the row, and commit or
 * roll back.  READERS sessions request the lock, and before that load the table
 * if it is not loaded.
 *
 * What stands for what:
 *
 *	setter			dlock_slots_note(), and the end of its transaction
 *	finish			dlock_queue_finish_slots()
 *	reader			load_slots() and dlock_slots_read()
 *	put_back		dlock_queue_load_slots()
 *
 * The row's lock is free as soon as a commit is visible.  From before its commit
 * until it has changed the memory, a transaction keeps other commits waiting.
 * What is done under the entry's lock is one step.
 *
 * Checked: a request finds in memory what the row says (I27), except for
 * changes of visible commits that are about to be put there.  At the end, both
 * are equal.
 *
 * A transaction that writes no row, or rolls back to a savepoint, may have noted
 * the name all the same.  It sets the slots that it reads.
 *
 * Left out: several changes by one transaction; more than one name; TRUNCATE;
 * waiters for the lock (queue.pml).
 *
 * Broken on purpose, and to be caught:
 *
 *	BROKEN_EARLY	slots are put into memory before the commit
 *	BROKEN_WAIT		a setter overtakes one that has committed
 *	BROKEN_SETTLED	a setter does not note its change before others load
 *	BROKEN_KEPT		... or the entry with the note is removed
 *	BROKEN_LOADED	a loader does not check whether the slots were set meanwhile
 */

#ifndef SETTERS
#define SETTERS	2
#endif
#ifndef READERS
#define READERS	2
#endif

byte row;						/* slots; 0: no row */
bool row_locked;
bool table_locked;				/* against other commits */
byte behind;					/* setters with visible commits, not finished */

/* protected by the entry's lock */
byte set_slots;
bool settled;

bool loaded;

inline finish(n)
{
	d_step {
		set_slots = n;
#ifndef BROKEN_SETTLED
		settled = settled || !loaded;
#endif
#ifdef BROKEN_KEPT
		settled = settled && n > 0
#endif
	}
}

inline put_back(n)
{
	d_step {
		if
#ifdef BROKEN_LOADED
		:: !settled -> set_slots = n
#else
		:: !settled && !loaded -> set_slots = n
#endif
		:: else
		fi
	}
}

proctype setter(byte me)
{
	byte slots;
	bool changed;

	if
	:: slots = me
	:: slots = 0
	fi;
	atomic { !row_locked -> row_locked = true };
#ifdef BROKEN_EARLY
	finish(slots);
#endif
	if
	:: row_locked = false;
		goto done				/* the transaction rolls back */
	:: changed = true
	:: row_locked = false		/* it wrote nothing, or not in the end */
	fi;
#ifndef BROKEN_WAIT
	atomic { !table_locked -> table_locked = true };
#endif
	if
	:: changed ->
		d_step { row = slots; row_locked = false; behind++ }
	:: else ->
		d_step { slots = row; behind++ }
	fi;
	finish(slots);
	d_step { behind--; table_locked = false };
done:
	slots = 0;
	changed = false
}

proctype reader()
{
	byte seen;

	if
	:: loaded
	:: else ->
		seen = row;				/* a snapshot */
		if
		:: seen > 0 -> put_back(seen)
		:: else
		fi;
		loaded = true
	fi;
	assert(behind > 0 || set_slots == row);
	seen = 0
}

init
{
	byte i;

	atomic {
		if
		:: row = 0
		:: row = 9
		fi;
		do
		:: i < SETTERS -> i++; run setter(i)
		:: else -> break
		od;
		i = 0;
		do
		:: i < READERS -> i++; run reader()
		:: else -> i = 0; break
		od
	}
	_nr_pr == 1;
	assert(set_slots == row)
}
