/*-------------------------------------------------------------------------
 *
 * inner.h
 *	  Functions that only the files of this directory call, by file.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_BACKEND_INNER_H
#define DLOCK_BACKEND_INNER_H

#include "backend/backend.h"

struct ReturnSetInfo;
struct TriggerData;
struct TupleDescData;

/* arguments.c */
extern void dlock_get_key(FunctionCallInfo fcinfo, const DlockSpace *space,
						  DlockKey *key);

/* session.c */
extern bool dlock_session_attached;
extern void dlock_session_check_parallel(void);
extern void dlock_session_attach(void);
extern int64 dlock_session_acquire(DlockSpace *space,
								   const DlockRequest *request,
								   DlockOutcome *outcome);
extern bool dlock_session_acquire_all(DlockSpace *space,
									  DlockRequest *request,
									  DlockKey *const *keys, int count,
									  int64 *fences, int *failed,
									  DlockOutcome *outcome);
extern int64 dlock_session_enqueue(DlockSpace *space,
								   const DlockRequest *request);
extern bool dlock_session_wait(DlockSpace *space, int64 number,
							   DlockTimeout timeout);
extern bool dlock_session_release_latest(const DlockSpace *space,
										 const char *name, Size length,
										 bool *released);
extern bool dlock_session_release(const DlockKey *key);
extern bool dlock_session_release_ticket(DlockSpace *space, int64 number);
extern bool dlock_session_holds(const DlockKey *key);
extern bool dlock_session_check(DlockSpace *space, const DlockKey *key,
								int64 number);

/* request.c */
extern bool dlock_request_wait_for_load(DlockSpace *space,
										DlockRequest *request,
										DlockOutcome *outcome);

/* lessee.c */
extern DlockLeaseTicket *dlock_lessee_acquire(DlockSpace *space,
											  DlockRequest *request,
											  DlockOutcome *outcome);
extern void dlock_lessee_make_durable(DlockSpace *space,
									  DlockLeaseTicket *ticket, bool granted);
extern int64 dlock_lessee_enqueue(DlockSpace *space,
								  const DlockRequest *request,
								  const FmgrInfo *function);
extern bool dlock_lessee_wait(DlockSpace *space, DlockLeaseTicket *ticket,
							  DlockTimeout timeout);

/* lease_open.c */
extern int64 dlock_lease_begin(DlockSpace *space, int64 ttl, int64 delay,
							  bool attach, const char *info);
extern void dlock_lease_forget_ended(void);

/* change.c */
extern bool dlock_change_info(DlockSpace *space, int64 number,
							  const char *info);
extern bool dlock_change_mode(DlockSpace *space, int64 number);
extern int	dlock_change_ttl(int64 number, int64 ttl);

/* durable.c */
extern void dlock_durable_wait(DlockSpace *space, DlockRecord *record);
extern void dlock_durable_wait_only(DlockSpace *space, DlockRecord *record,
									const char *outcome);
extern void dlock_durable_wait_at(DlockSpace *space, DlockRecord *record,
								  int level, const char *outcome);

/* wait.c */
extern DlockOutcome dlock_wait_for_grant(const DlockRequest *request,
										 DlockTicket *ticket);
extern void dlock_wait_check_space(const DlockSpace *space,
								   const DlockKey *key);

/* deadlock.c */
extern void dlock_describe_ticket(StringInfo buffer, DlockMode mode,
								  int32 permits, const DlockKey *key);
extern bool dlock_deadlock_check(DlockSpace *space, bool thorough, bool told);
extern void dlock_deadlock_log(DlockSpace *space, const DlockRequest *request,
							   int64 waited, bool granted);

/* xact.c */
extern void dlock_xact_release_at_commit(DlockSpace *space, int64 number);
extern void dlock_xact_guard(DlockSpace *space, const DlockKey *key,
							 int64 fence);
extern bool dlock_xact_has_guarded(const DlockKey *key);
extern void dlock_xact_keep_result(const FmgrInfo *function, int count);

/* watches.c */
extern void dlock_session_watch(DlockSpace *space, const DlockKey *key,
								const char *channel);
extern bool dlock_session_unwatch(const DlockKey *key);
extern void dlock_session_unwatch_all(void);

/* cancel.c */
extern volatile bool dlock_cancel_explained;
extern void dlock_cancel_prepare(void);
extern void dlock_cancel_watch(const DlockKey *key, DlockTicket *ticket,
							   DlockLease *lease);
extern void dlock_cancel_unwatch(bool all);

/* lone_call.c */
extern void dlock_lone_call_note(const FmgrInfo *function);
extern void dlock_lone_call_end(bool is_commit);

/* channel.c */
extern const char *dlock_notify_listen(void);
extern bool dlock_notify_is_mine(DlockTicket *ticket);

/* errors.c */
extern void dlock_raise_lease_gone(int64 number);

/* force.c */
extern char *dlock_describe_caller(void);
extern bool dlock_lease_is_other(DlockSpace *space, int64 number,
								 NameData *role);
extern void dlock_log_forced_release(DlockSpace *space, int64 number,
									 const DlockForced *forced);
extern void dlock_log_forced_close(int64 number, const char *role,
								   int64 tickets);

/* result.c */
extern struct ReturnSetInfo *dlock_begin_rows(FunctionCallInfo fcinfo,
											  const Oid *types,
											  int num_columns);
extern struct TupleDescData *dlock_begin_row(FunctionCallInfo fcinfo,
											 const Oid *types,
											 int num_columns);

/* reserve.c */
extern void dlock_reserve_check(DlockSpace *space, const DlockKey *key);
extern bool dlock_reserve_lets_in(DlockSpace *space, const DlockKey *key);
extern void dlock_reserve_add(DlockSpace *space, text *prefix, Oid owner);
extern bool dlock_reserve_remove(DlockSpace *space, text *prefix);

/* version.c */
extern int64 dlock_version_read(DlockSpace *space, const DlockKey *key);
extern int64 dlock_version_increment(DlockSpace *space, const DlockKey *key,
									 int64 expected);
extern bool dlock_version_remove(DlockSpace *space, const DlockKey *key);

/* slots.c */
extern void dlock_slots_check_right(DlockSpace *space, const DlockKey *key,
									Oid function);
extern void dlock_slots_set(DlockSpace *space, const DlockKey *key,
							int32 slots);
extern void dlock_slots_note(DlockSpace *space, const DlockKey *key);

/* views.c */
extern DlockSpace *dlock_space_to_show(void);

/* triggers.c */
extern struct TriggerData *dlock_trigger(FunctionCallInfo fcinfo,
										 const char *function);
extern struct TriggerData *dlock_own_trigger(FunctionCallInfo fcinfo,
											 const char *function);

#endif							/* DLOCK_BACKEND_INNER_H */
