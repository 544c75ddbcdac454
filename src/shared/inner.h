/*-------------------------------------------------------------------------
 *
 * inner.h
 *	  Functions that only the files of src/shared call, grouped by file.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_SHARED_INNER_H
#define DLOCK_SHARED_INNER_H

#include "storage/dsm.h"

#include "shared/shared.h"

/* The lock that protects a list also protects the links of its members. */

static inline void
dlock_list_init(DlockList *list)
{
	list->head = list->tail = InvalidDsaPointer;
	list->length = 0;
}

static inline void
dlock_list_append(DlockList *list, DlockLink *link)
{
	dsa_pointer self = dlock_pointer(link);

	link->prev = list->tail;
	link->next = InvalidDsaPointer;
	if (DsaPointerIsValid(list->tail))
		dlock_link_at(list->tail)->next = self;
	else
		list->head = self;
	list->tail = self;
	list->length++;
}

static inline void
dlock_list_prepend(DlockList *list, DlockLink *link)
{
	dsa_pointer self = dlock_pointer(link);

	link->prev = InvalidDsaPointer;
	link->next = list->head;
	if (DsaPointerIsValid(list->head))
		dlock_link_at(list->head)->prev = self;
	else
		list->tail = self;
	list->head = self;
	list->length++;
}

static inline void
dlock_list_remove(DlockList *list, DlockLink *link)
{
	if (DsaPointerIsValid(link->prev))
		dlock_link_at(link->prev)->next = link->next;
	else
		list->head = link->next;
	if (DsaPointerIsValid(link->next))
		dlock_link_at(link->next)->prev = link->prev;
	else
		list->tail = link->prev;
	link->prev = link->next = InvalidDsaPointer;
	list->length--;
}

static inline void
dlock_exchange(dsa_pointer *a, dsa_pointer *b)
{
	dsa_pointer before = *a;

	*a = *b;
	*b = before;
}

/* memory.c */
#define DLOCK_HINT_FULL \
	"Release locks that are not needed, or increase dlock.max_memory and restart the server."

extern Size dlock_area_size(void);
extern dsm_segment *dlock_segment_create(Size size);
extern void dlock_log_small_area(void);
extern const char *dlock_memory_directory(void);
extern void *dlock_table_insert(dshash_table *table, const void *key,
								bool *found);
extern dsa_pointer dlock_allocate_uncounted(Size size);

/* account.c */
extern bool dlock_memory_suffices(Oid role);
extern void dlock_check_memory(Oid role);
extern bool dlock_memory_to_spare(bool has_some);
extern void *dlock_allocate(Oid role, Size size);
extern dsa_pointer dlock_allocate_if_free(Oid role, Size size);
extern void dlock_release_memory(Oid role, void *object, Size size);
extern void dlock_pass_memory(Oid from, Oid to, Size size);
extern void dlock_close_accounts(void);

/* lock_table.c */
static inline DlockPartition *
dlock_lock_partition(const DlockKey *key)
{
	/* the low bits select the bucket */
	return &dlock_control->locks[key->hash >> (32 - DLOCK_PARTITION_BITS)];
}

/* Entries that a walk prefetches; a power of 2 */
#define DLOCK_SCAN_AHEAD	32

/* A walk through a space's locks; only lock_table.c uses these fields */
typedef struct DlockLockScan
{
	bool		locked;			/* the partition's lock is held */
	int			partition;
	int			end;			/* the walk ends before this partition */
	uint32		bucket;			/* the next bucket */
	uint32		num_buckets;
	DlockLock  *current;
	const DlockSpaceKey *space;
	bool		queued;			/* only entries with a queue */

	/* a ring: the next entries */
	uint32		head;
	uint32		count;
	DlockLock  *ahead[DLOCK_SCAN_AHEAD];
} DlockLockScan;

extern bool dlock_lock_is_spare(const DlockKey *key, Oid role);
extern void dlock_lock_free_spare(void);
extern void dlock_lock_table_init(int tranche);
extern DlockLock *dlock_lock_find(const DlockKey *key);
extern DlockLock *dlock_lock_insert(const DlockKey *key, int32 slots,
									Oid role);
extern void dlock_lock_enter(const DlockKey *key);
extern void dlock_lock_leave(const DlockKey *key);
extern void dlock_lock_release(DlockLock *lock);
extern void dlock_lock_remove(DlockLock *lock);
extern void dlock_lock_scan_begin(DlockLockScan *scan,
								  const DlockSpaceKey *space, bool queued);
extern void dlock_lock_scan_begin_in(DlockLockScan *scan, int partition,
									 const DlockSpaceKey *space, bool queued);
extern DlockLock *dlock_lock_scan_next(DlockLockScan *scan);
extern void dlock_lock_scan_remove(DlockLockScan *scan);
extern void dlock_lock_scan_end(DlockLockScan *scan);

/* shmem.c */
extern void dlock_leave_slot(void);

/* counter.c */
extern void dlock_count_for(DlockSpace *space);

/* Add to a counter of a ticket's space.  The amount can be negative. */
static inline void
dlock_count_ticket(const DlockTicket *ticket, DlockCounter counter,
				   int64 amount)
{
	if (likely(pg_atomic_read_u64(&dlock_my_backend->space) == ticket->space))
		dlock_count(counter, (uint64) amount);
	else
		pg_atomic_fetch_add_u64(&dlock_space_at(ticket->space)->counters[counter],
								amount);
}


/* contention.c */
extern void dlock_contention_reset(DlockSpace *space);
extern void dlock_contention_free(DlockSpace *space);
extern void dlock_contention_expiration(DlockSpace *space, const DlockKey *key,
										bool is_waited_for);

/* catalog.c */
extern void dlock_check_committed(DlockSpace *space);
extern char *dlock_role_setting(Oid role, const char *name);

/* purge.c */
extern void dlock_remove_useless_space(const DlockSpaceKey *key);

/* ticket.c */
/*
 * Change a ticket's state.  The caller changes the ticket and its links first,
 * because processes read the state without the lock, and a session may free a
 * GONE ticket.
 */
static inline void
dlock_ticket_set_state(DlockTicket *ticket, DlockState state)
{
	if (state == DLOCK_ENDING && dlock_state_of(ticket) == DLOCK_GRANTED)
		dlock_count_ticket(ticket, DLOCK_COUNT_HELD, -1);
	pg_write_barrier();
	pg_atomic_write_u32(&ticket->state, state);
}

/*
 * Store the start of a ticket's wait, which was "waited" microseconds ago.
 * Until the grant, granted_at is -(start + 2^61), on the monotonic clock.  So
 * it is below 0 even if the wait began before the machine was booted.
 */
static inline void
dlock_ticket_begin_wait(DlockTicket *ticket, int64 waited)
{
	ticket->granted_at = waited - (int64) dlock_monotonic_now() -
		(INT64CONST(1) << 61);
}

/* Microseconds that a ticket has waited; 0 if granted_at is a time */
static inline int64
dlock_ticket_waited(const DlockTicket *ticket, uint64 now)
{
	if (ticket->granted_at >= 0)
		return 0;
	return Max((int64) now + (INT64CONST(1) << 61) + ticket->granted_at, 0);
}

extern uint64 dlock_first_unreserved(Oid database);
extern void dlock_ticket_joined(DlockTicket *ticket);
extern void dlock_ticket_fill(DlockSpace *space, const DlockRequest *request,
							  DlockTicket *ticket);
extern void dlock_ticket_release_texts(DlockTicket *ticket);

/* report.c */
extern void dlock_expiry_fill(DlockExpiry *expiry, DlockLease *lease);
extern void dlock_lease_name_fill(DlockLeaseName *name,
								  const DlockLeaseTicket *ticket);

/* queue.c */
extern bool dlock_queue_restore(DlockLeaseTicket *ticket, DlockState state);
extern void dlock_queue_withdraw(DlockLeaseTicket *ticket);
extern void dlock_queue_finish(DlockLeaseTicket *ticket);
extern void dlock_queue_purge(const DlockSpaceKey *space);

/* record.c */
extern void dlock_record_init(DlockRecord *record, bool is_lease,
							  bool is_single);
extern void dlock_record_use(DlockRecord *record);
extern void dlock_record_use_found(DlockRecord *record);

/* id_table.c */
extern void dlock_ids_reserve(uint64 more);
extern void dlock_id_table_init(DlockIdPartition *partitions, int tranche);

/* lease.c */

/*
 * Take the lease lock, to change leases and their tickets (I9).  In builds
 * with assertions, an error before dlock_lease_end_change() is a PANIC.
 */
static inline void
dlock_lease_begin_change(DlockSpace *space)
{
	LWLockAcquire(&space->lease_lock, LW_EXCLUSIVE);
	COMPAT_NO_ERROR_BEGIN();
}

#ifdef COMPAT_CHECKS
extern void dlock_check_lease(const DlockLease *lease);
#else
#define dlock_check_lease(lease)	((void) 0)
#endif

static inline void
dlock_lease_end_change(DlockSpace *space, DlockLease *lease)
{
	dlock_check_lease(lease);
	COMPAT_NO_ERROR_END();
	LWLockRelease(&space->lease_lock);
}

extern void dlock_lease_start(DlockSpace *space, DlockLease *lease, bool heir);
extern void dlock_lease_be_over(DlockLease *lease, bool always);

/* lease_ticket.c */
extern bool dlock_lease_ticket_is_delayed(const DlockLeaseTicket *ticket);
extern DlockLeaseTicket *dlock_lease_ticket_find_same(const DlockLeaseTicket *wanted);
extern bool dlock_lease_ticket_adopt(DlockLeaseTicket *ticket,
									 DlockState state, bool heir);
extern void dlock_lease_ticket_granted(DlockLeaseTicket *ticket,
									   TimestampTz now);
extern bool dlock_lease_ticket_ended(DlockLeaseTicket *ticket,
									 DlockState state);
extern void dlock_lease_ticket_exchange_info(DlockLeaseTicket *ticket,
											 dsa_pointer *info);
extern bool dlock_lease_ticket_lower(DlockLeaseTicket *ticket);
extern bool dlock_lease_ticket_undelay(DlockLeaseTicket *ticket);
extern void dlock_lease_ticket_redirect(DlockLeaseTicket *ticket,
										dsa_pointer announcement);
extern void dlock_lease_ticket_row(DlockLeaseTicket *ticket, DlockRow *row);

/* journal.c */
extern void dlock_journal_mark(DlockSpace *space, DlockRecord *record);
extern void dlock_journal_flush(XLogRecPtr removed);

/* quorum.c */
extern uint64 dlock_quorum_confirmed(DlockSpace *space, int durability);

/* announcement.c */
extern void dlock_announcement_release(DlockSpace *space,
									   DlockAnnouncement *announcement);
extern void dlock_announcement_count(DlockTicket *ticket);
extern void dlock_announcement_orphan(DlockTicket *ticket);
extern void dlock_announcement_purge(DlockSpace *space);
extern void dlock_announcement_restored(DlockTicket *ticket, bool granted);

/* watch.c */
extern void dlock_watch_count_change(const DlockKey *key,
									 DlockSpace **to_wake);
extern void dlock_watch_purge(DlockSpace *space);

/* launcher.c */
extern bool dlock_worker_comes(DlockSpace *space);

#endif							/* DLOCK_SHARED_INNER_H */
