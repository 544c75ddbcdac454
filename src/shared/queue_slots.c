/*-------------------------------------------------------------------------
 *
 * queue_slots.c
 *	  The slots of a lock that dlock_slots sets.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/queue.h"

/*
 * What dlock_slots says of a lock has become another number, or 0 for none: that
 * counts.  Where requests count again, it is the one of who has held longest, or of
 * the head of the queue.
 */
static void
follow_slots(DlockLock *lock)
{
	const DlockTicket *holder = ticket_at(lock->holders.head);
	const DlockTicket *head = ticket_at(lock->queue.head);

	if (holder)
		lock->holders_slots = slots_for(lock, holder->slots);
	if (lock->slots > 0)
	{
		if (holder && holder->slots > 0)
			lock->slots = lock->holders_slots;
		else if (head && head->slots > 0)
			lock->slots = slots_for(lock, head->slots);
	}
}

/* Set what dlock_slots says, and grant to those who fit now. */
static void
change_slots(DlockSpace *space, DlockLock *lock, int32 slots,
			 DlockWakeups *wakeups)
{
	lock->set_slots = slots;
	follow_slots(lock);
	dlock_queue_grant_waiters(space, lock, wakeups);
}

/*
 * So that whoever is reading dlock_slots does not put back what he has found there:
 * it has changed since.  The count comes first: see dlock_queue_unsettle().
 */
static void
settle(DlockSpace *space, DlockLock *lock)
{
	if (pg_atomic_read_u32(&space->slots_loaded) != 0 || lock->settled)
		return;
	pg_atomic_fetch_add_u32(&space->settled, 1);
	lock->settled = pg_atomic_read_u32(&space->slots_loaded) == 0;
}

/*
 * A transaction has changed what dlock_slots says of a lock: the entry stays until
 * the transaction is over, and is counted to a role if it has to be made.  Returns
 * it, so that it need not be searched for then.  Raises 53200, with nothing changed.
 */
DlockLock *
dlock_queue_expect_slots(const DlockKey *key, Oid role)
{
	DlockLock  *lock = dlock_lock_insert(key, 0, role);

	/* each has the row locked, or is about to end */
	Assert(lock->setters < PG_UINT16_MAX);
	lock->setters++;
	dlock_queue_let_go(lock);
	return lock;
}

/*
 * Such a transaction is over.  Its commit is visible, and this is what dlock_slots
 * says from now on (I27); or there is no change, because it was rolled back.
 */
void
dlock_queue_finish_slots(DlockSpace *space, const DlockKey *key,
						 DlockLock *lock, bool changed, int32 slots)
{
	DlockWakeups wakeups = {0};

	dlock_lock_enter(key);
	Assert(dlock_key_equal(&lock->key, key) && lock->setters > 0);
	lock->setters--;
	if (changed)
	{
		settle(space, lock);
		change_slots(space, lock, slots, &wakeups);
	}
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
}

/*
 * The table dlock_slots was emptied.  The locks that the same transaction has said
 * it changes, it tells of by themselves; is_told() says which, with an entry locked.
 * What others have said so of, they have rolled back to a savepoint, for else they
 * would still have the table locked.  Raises nothing.
 */
void
dlock_queue_forget_slots(DlockSpace *space,
						 bool (*is_told) (const DlockKey *key))
{
	DlockLockScan scan;
	DlockWakeups wakeups = {0};
	DlockLock  *lock;

	dlock_lock_scan_begin(&scan, true, &space->key, false);
	while ((lock = dlock_lock_scan_next(&scan)) != NULL)
	{
		if (lock->set_slots == 0 ||
			(lock->setters > 0 && is_told(&lock->key)))
			continue;
		settle(space, lock);
		change_slots(space, lock, 0, &wakeups);
		if (dlock_lock_is_unused(lock))
			dlock_lock_scan_remove(&scan);
	}
	dlock_lock_scan_end(&scan);
	dlock_wakeups_send(&wakeups);
}

/*
 * Put back what dlock_slots says of a lock, unless that was changed meanwhile, or
 * somebody else has read all of it.  Raises 53200, with nothing changed.
 */
void
dlock_queue_load_slots(DlockSpace *space, const DlockKey *key, int32 slots,
					   Oid role)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_insert(key, 0, role);

	if (pg_atomic_read_u32(&space->slots_loaded) == 0 && !lock->settled)
		change_slots(space, lock, slots, &wakeups);
	dlock_queue_let_go(lock);
	dlock_wakeups_send(&wakeups);
}

/*
 * Somebody has read all of dlock_slots, and said so: no entry is kept for the others
 * who are reading it.  Whoever settles one later sees that, as he counts before he
 * looks.
 */
void
dlock_queue_unsettle(DlockSpace *space)
{
	DlockLockScan scan;
	DlockLock  *lock;

	if (pg_atomic_exchange_u32(&space->settled, 0) == 0)
		return;
	dlock_lock_scan_begin(&scan, true, &space->key, false);
	while ((lock = dlock_lock_scan_next(&scan)) != NULL)
	{
		if (!lock->settled)
			continue;
		lock->settled = false;
		if (dlock_lock_is_unused(lock))
			dlock_lock_scan_remove(&scan);
	}
	dlock_lock_scan_end(&scan);
}
