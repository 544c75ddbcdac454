/*-------------------------------------------------------------------------
 *
 * queue_slots.c
 *	  The numbers of slots that the table dlock_slots sets for locks.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "shared/queue.h"

/* Apply set_slots; if it is 0, the slots of the oldest holder or the head. */
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

/* Change set_slots, and grant tickets that fit now. */
static void
change_slots(DlockSpace *space, DlockLock *lock, int32 slots,
			 DlockWakeups *wakeups)
{
	lock->set_slots = slots;
	follow_slots(lock);
	dlock_queue_grant_waiters(space, lock, wakeups);
}

/*
 * Keep a concurrent load of dlock_slots from applying an older row.  Count the
 * entry, and then read slots_loaded again: see dlock_queue_unsettle().
 */
static void
settle_slots(DlockSpace *space, DlockLock *lock)
{
	if (pg_atomic_read_u32(&space->slots_loaded) != 0 || lock->settled)
		return;
	pg_atomic_fetch_add_u32(&space->settled, 1);
	lock->settled = pg_atomic_read_u32(&space->slots_loaded) == 0;
}

/*
 * A transaction may change a lock's row in dlock_slots: keep the lock's entry
 * until the transaction ends.  Raises 53200, with nothing changed.
 */
DlockLock *
dlock_queue_expect_slots(const DlockKey *key, Oid role)
{
	DlockLock  *lock = dlock_lock_find(key);

	/* an entry exists if slots are set, so unsetting them needs no memory */
	if (lock == NULL)
		lock = dlock_lock_insert(key, 0, role);
	/* no overflow: each backend counts once, and few change a row at once */
	Assert(lock->setters < PG_UINT16_MAX);
	lock->setters++;
	dlock_queue_let_go(lock);
	return lock;
}

/* The transaction has ended.  If "changed", its commit is visible (I27). */
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
		settle_slots(space, lock);
		change_slots(space, lock, slots, &wakeups);
	}
	dlock_queue_let_go_and_wake(lock, &wakeups);
}

/* Load a row, unless "settled" or slots_loaded is set.  Raises 53200. */
void
dlock_queue_load_slots(DlockSpace *space, const DlockKey *key, int32 slots,
					   Oid role)
{
	DlockWakeups wakeups = {0};
	DlockLock  *lock = dlock_lock_insert(key, 0, role);

	if (pg_atomic_read_u32(&space->slots_loaded) == 0 && !lock->settled)
		change_slots(space, lock, slots, &wakeups);
	dlock_queue_let_go_and_wake(lock, &wakeups);
}

/*
 * Clear "settled": slots_loaded is set, so no process loads a row any more.
 * A process that counts an entry after this does not set "settled".
 */
void
dlock_queue_unsettle(DlockSpace *space)
{
	DlockLockScan scan;
	DlockLock  *lock;

	if (pg_atomic_exchange_u32(&space->settled, 0) == 0)
		return;
	dlock_lock_scan_begin(&scan, &space->key, false);
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
