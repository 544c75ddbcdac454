/*-------------------------------------------------------------------------
 *
 * inner.h
 *	  Functions that only the files of this room call, by file.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_SHARED_INNER_H
#define DLOCK_SHARED_INNER_H

#include "storage/dsm.h"

#include "shared/shared.h"

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
extern bool dlock_memory_to_spare(bool has_some);
extern dsa_pointer dlock_allocate(Oid role, Size size);
extern dsa_pointer dlock_allocate_if_free(Oid role, Size size);
extern void dlock_release_memory(Oid role, dsa_pointer pointer, Size size);
extern void dlock_pass_memory(Oid from, Oid to, Size size);
extern void dlock_close_accounts(void);

/* lock_table.c */
/* Entries that a walk prefetches; a power of 2 */
#define DLOCK_SCAN_AHEAD	32

/* A walk through a space's locks; its fields are lock_table.c's alone */
typedef struct DlockLockScan
{
	bool		locked;			/* the partition's lock is held */
	int			partition;
	int			end;			/* the first partition left out */
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

extern void dlock_lock_table_init(DlockPartition *partitions, int tranche);
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

/* counter.c */
extern void dlock_count_for(DlockSpace *space);

/* contention.c */
extern void dlock_contention_free(DlockSpace *space);
extern void dlock_contention_expiration(DlockSpace *space, const DlockKey *key,
										bool is_waited_for);

/* catalog.c */
extern void dlock_check_committed(DlockSpace *space);
extern char *dlock_role_setting(Oid role, const char *name);

/* ticket.c */
extern uint64 dlock_first_unreserved(Oid database);

/* purge.c */
extern void dlock_remove_useless_space(const DlockSpaceKey *key);

/* ticket.c */
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
extern DlockIdPartition *dlock_ids;
extern DlockIdPartition *dlock_requests;

extern void dlock_id_table_init(DlockIdPartition *partitions, int tranche);

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
extern void dlock_sender_wake(DlockSpace *space);

#endif							/* DLOCK_SHARED_INNER_H */
