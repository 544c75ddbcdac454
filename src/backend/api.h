/*-------------------------------------------------------------------------
 *
 * api.h
 *	  Shared by arguments.c and the files of SQL-callable functions, api*.c.
 *
 *-------------------------------------------------------------------------
 */
#ifndef DLOCK_API_H
#define DLOCK_API_H

#include "backend/inner.h"

/* Define an SQL-callable function that returns the expression "call" */
#define DLOCK_FUNCTION(name, call) \
	PG_FUNCTION_INFO_V1(name); \
	Datum \
	name(PG_FUNCTION_ARGS) \
	{ \
		return call; \
	} \
	extern int	no_such_variable

/* Begin a call, and return this database's space */
extern DlockSpace *dlock_begin_call(void);
extern DlockSpace *dlock_begin_named_call(FunctionCallInfo fcinfo,
										  DlockKey *key);
extern void dlock_check_unrestricted(void);
extern DlockSpace *dlock_begin_change(void);
extern DlockSpace *dlock_begin_lease_change(void);
extern DlockSpace *dlock_begin_protected_change(FunctionCallInfo fcinfo,
												DlockKey *key);

/* Arguments */
extern void dlock_raise_null(const char *name);
extern void dlock_make_key(DlockKey *key, const DlockSpace *space, text *name);
extern DlockTimeout dlock_get_timeout(FunctionCallInfo fcinfo, int argument);
extern int64 dlock_get_duration(FunctionCallInfo fcinfo, int argument,
								const char *name);
extern const char *dlock_get_info(FunctionCallInfo fcinfo, int argument);
extern void dlock_get_request(FunctionCallInfo fcinfo, int shared,
							  DlockRequest *request);
extern const char *dlock_get_channel(FunctionCallInfo fcinfo, int argument,
									 DlockScope scope);
extern DlockLease *dlock_get_lease(FunctionCallInfo fcinfo, DlockSpace *space);
extern void dlock_raise_timeout(DlockSpace *space, const DlockRequest *request,
								DlockTimeout timeout, DlockOutcome outcome);

static inline void
dlock_need(FunctionCallInfo fcinfo, int argument, const char *name)
{
	if (unlikely(PG_ARGISNULL(argument)))
		dlock_raise_null(name);
}

static inline int64
dlock_get_int64(FunctionCallInfo fcinfo, int argument, const char *name)
{
	dlock_need(fcinfo, argument, name);
	return PG_GETARG_INT64(argument);
}

/* Returns a text argument, which usually needs no detoasting. */
static inline text *
dlock_get_varlena(FunctionCallInfo fcinfo, int argument)
{
	struct varlena *value = (struct varlena *)
		DatumGetPointer(PG_GETARG_DATUM(argument));

	if (likely(!VARATT_IS_COMPRESSED(value) && !VARATT_IS_EXTERNAL(value)))
		return (text *) value;
	return PG_GETARG_TEXT_PP(argument);
}

/* Uses of a session that do not work behind a transaction pooler */
typedef enum DlockSessionUse
{
	DLOCK_USE_LOCK,
	DLOCK_USE_ATTACHED_LEASE,
	DLOCK_USE_CHANNEL,
	DLOCK_USE_WATCH
} DlockSessionUse;

extern void dlock_advise_against_use(DlockSessionUse use);

static inline void
dlock_check_session_use(DlockSessionUse use)
{
	if (unlikely(dlock_session_locks != DLOCK_SESSION_LOCKS_ALLOW))
		dlock_advise_against_use(use);
}

#endif							/* DLOCK_API_H */
