/*-------------------------------------------------------------------------
 *
 * account.c
 *	  Memory counted for each role, the role's limit, and errors at the limit.
 *
 * A role has one account for all databases.  Each object names the role that
 * it counts for, so any process can free it, even after the role was dropped.
 *
 * A backend adds its counts to the shared account in steps of
 * REPORT_MEMORY_EVERY bytes, because otherwise all backends would contend for
 * one cache line.  So an account can be wrong by one step for each backend.
 *
 * An account is removed if its memory is 0 and no backend has it open (I30).
 * Memory is counted before other processes can free it, and subtracted after
 * it is freed.  So after an error the count can be too high, never too low.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/guc.h"

#include "shared/inner.h"

#define REPORT_MEMORY_EVERY 4096

/* Maximum number of accounts that a backend has open at one time */
#define MAX_OPEN	8

/* A role or session user with less than 1/LITTLE of the limit "has little". */
#define LITTLE		64

/* Memory that counts for no role can take at most 1/NOBODYS of the limit. */
#define NOBODYS		16

/* GUC, in percent of dlock_memory_limit() */
int			dlock_max_memory_per_role;

dshash_table *dlock_accounts = NULL;

typedef struct Account
{
	DlockAccount *shared;		/* NULL: this place is free */
	int64		unreported;		/* bytes not added to "shared" yet */
	Oid			role;
	int			percent;		/* the role's setting; 0: use this session's;
								 * -1: not read yet */
} Account;

static Account open_accounts[MAX_OPEN];

static Account *latest = &open_accounts[0];

static void
report_account(Account *account)
{
	pg_atomic_fetch_add_u64(&account->shared->used, account->unreported);
	pg_atomic_fetch_add_u64(&dlock_control->memory_used, account->unreported);
	account->unreported = 0;
}

/* Raises nothing. */
static void
close_account(Account *account)
{
	DlockAccount *shared = dshash_find(dlock_accounts, &account->role, true);

	Assert(shared == account->shared && shared->users > 0);
	report_account(account);
	account->shared = NULL;
	if (--shared->users == 0 && pg_atomic_read_u64(&shared->used) == 0)
		dshash_delete_entry(dlock_accounts, shared);
	else
		dshash_release_lock(dlock_accounts, shared);
}

/* Return a free place; if there is none, close an account. */
static Account *
find_closed_account(void)
{
	static uint32 next = 0;
	Account    *account;

	for (int i = 0; i < MAX_OPEN; i++)
	{
		if (open_accounts[i].shared == NULL)
			return &open_accounts[i];
	}
	account = &open_accounts[next++ % MAX_OPEN];
	close_account(account);
	return account;
}

/* If "make" is set, a missing account is made, which can raise 53200. */
static Account *
open_account(Oid role, bool make)
{
	Account    *account;
	DlockAccount *shared;
	bool		found = true;

	if (likely(latest->role == role && latest->shared != NULL))
		return latest;
	for (int i = 0; i < MAX_OPEN; i++)
	{
		if (open_accounts[i].role == role && open_accounts[i].shared != NULL)
			return latest = &open_accounts[i];
	}

	account = find_closed_account();
	shared = make ? dlock_table_insert(dlock_accounts, &role, &found) :
		dshash_find(dlock_accounts, &role, true);
	Assert(shared != NULL);
	if (!found)
	{
		shared->users = 0;
		pg_atomic_init_u32(&shared->sponsor, InvalidOid);
		pg_atomic_init_u64(&shared->used, 0);
	}
	shared->users++;
	dshash_release_lock(dlock_accounts, shared);
	*account = (Account)
	{
		.shared = shared,
		.role = role,
		.percent = -1
	};
	return latest = account;
}

static inline void
count_memory(Account *account, int64 change)
{
	account->unreported += change;
	if (unlikely(account->unreported > REPORT_MEMORY_EVERY ||
				 account->unreported < -REPORT_MEMORY_EVERY))
		report_account(account);
}

/*
 * Move the count of some memory to another role.  Raises 53200, but only if the
 * role has no account yet.
 */
void
dlock_pass_memory(Oid from, Oid to, Size size)
{
	count_memory(open_account(to, true), size);
	count_memory(open_account(from, false), -(int64) size);
}

/*
 * The limit of an account, in percent: the role's setting by ALTER ROLE.  If
 * the role has none, or if this session has logged in as the role, the limit
 * is the session's setting.  Reads the catalog once, unless "again" is set.
 */
static int
limit_percent(Account *account, bool again)
{
	if (account->percent < 0 || again)
	{
		int			percent = 0;
		char	   *value = NULL;

		if (account->role != GetAuthenticatedUserId())
			value = dlock_role_setting(account->role,
									   "dlock.max_memory_per_role");
		if (value && (!parse_int(value, &percent, 0, NULL) ||
					  percent < 1 || percent > 100))
			percent = 0;
		account->percent = percent;
	}
	return account->percent != 0 ? account->percent : dlock_max_memory_per_role;
}

static int64
memory_of(Account *account)
{
	return (int64) pg_atomic_read_u64(&account->shared->used) +
		account->unreported;
}

static bool
exceeds_limit(Account *account, int64 limit, bool again)
{
	return memory_of(account) * 100 >= limit * limit_percent(account, again);
}

/*
 * Is there plenty of memory for one more lock of the role?  If not, the caller
 * must call dlock_check_memory().  Raises 53200 if no account can be made.
 */
bool
dlock_memory_suffices(Oid role)
{
	Account    *account = open_account(role, true);
	int64		limit = dlock_memory_limit();

	return likely((int64) pg_atomic_read_u64(&dlock_control->memory_used) <
				  limit - limit / 4 &&
				  !exceeds_limit(account, limit, false));
}

/*
 * Is there memory for a sketch (contention.c)?  Sketches count for no role and
 * outlive the sessions that need them, so all sketches together get a small
 * share.  Half of it is kept for sketches that have no memory for names yet.
 * Sketches never use the last eighth of the memory.  Raises 53200.
 */
bool
dlock_memory_to_spare(bool has_some)
{
	int64		limit = dlock_memory_limit();
	int64		share = limit / NOBODYS;

	return (int64) pg_atomic_read_u64(&dlock_control->memory_used) <
		limit - limit / 8 &&
		memory_of(open_account(InvalidOid, true)) <
		(has_some ? share / 2 : share);
}

static void
raise_out_of_memory(bool by_all)
{
	bool		by_setting = !dlock_control->area_is_small;

	ereport(ERROR,
			(errcode(ERRCODE_OUT_OF_MEMORY),
			 errmsg("out of memory for locks"),
			 !by_all ?
			 errdetail("The locks and tickets of all sessions have taken three quarters of what they may. The rest is kept for superusers, and for roles that have little if their session user has little, too.") :
			 by_setting ?
			 errdetail("The locks and tickets of all sessions have reached their part of dlock.max_memory.") :
			 errdetail("The locks and tickets of all sessions have reached their part of the file system of \"%s\", which is less than dlock.max_memory.",
					   dlock_memory_directory()),
			 by_setting ?
			 errhint(DLOCK_HINT_FULL) :
			 errhint("Release locks that are not needed; or give the file system more room, and restart the server.")));
}

static void
raise_role_limit(Account *account, int64 limit)
{
	const char *name = GetUserNameFromId(account->role, true);

	ereport(ERROR,
			(errcode(ERRCODE_OUT_OF_MEMORY),
			 errmsg("out of memory for locks"),
			 errdetail("The locks, leases and tickets of role \"%s\", in all databases, have reached dlock.max_memory_per_role, which is %d percent of %lld kB.",
					   name ? name : psprintf("%u", account->role),
					   limit_percent(account, false), (long long) (limit / 1024)),
			 errhint("Release locks that this role does not need, in any database, or have a superuser increase dlock.max_memory_per_role for it.")));
}

/*
 * The memory that the session user takes, under all roles that it assumes: its
 * own account, those that it sponsors (has_little()), and the given account.
 */
static int64
memory_of_session_user(Account *account)
{
	Oid			session_user = GetSessionUserId();
	int64		sum = memory_of(account);
	dshash_seq_status status;
	DlockAccount *other;

	dshash_seq_init(&status, dlock_accounts, false);
	while ((other = dshash_seq_next(&status)) != NULL)
	{
		if (other->role != account->role &&
			(other->role == session_user ||
			 pg_atomic_read_u32(&other->sponsor) == session_user))
			sum += (int64) pg_atomic_read_u64(&other->used);
	}
	dshash_seq_term(&status);
	return sum;
}

/*
 * Does the role have little, and the session user, too, if not a superuser?  A
 * session user can assume many roles, but must not take the memory kept for
 * such roles once per role.  So it becomes the account's sponsor.  The account
 * counts for role and sponsor, until another session user becomes the sponsor.
 */
static bool
has_little(Account *account, int64 limit)
{
	Oid			session_user = GetSessionUserId();

	if (memory_of(account) >= limit / LITTLE)
		return false;
	if (superuser_arg(session_user))
		return true;
	if (memory_of_session_user(account) >= limit / LITTLE)
		return false;
	if (session_user != account->role)
		pg_atomic_write_u32(&account->shared->sponsor, session_user);
	return true;
}

/*
 * Raise 53200 unless there is memory for one more lock of the role.  An eighth
 * of the memory is kept for superusers, who must lock in order to clean up.
 * Another eighth is kept for roles that have little, so that a few large users
 * do not stop all others.
 */
void
dlock_check_memory(Oid role)
{
	Account    *account = open_account(role, true);
	int64		limit = dlock_memory_limit();
	int64		used = (int64) pg_atomic_read_u64(&dlock_control->memory_used);

	if (used >= limit)
		raise_out_of_memory(true);
	if (superuser() || superuser_arg(role))
		return;
	if (used >= limit - limit / 8)
		raise_out_of_memory(true);
	if (exceeds_limit(account, limit, false) &&
		exceeds_limit(account, limit, true))
		raise_role_limit(account, limit);
	if (used >= limit - limit / 4 && !has_little(account, limit))
		raise_out_of_memory(false);
}

/* Raises 53200. */
void *
dlock_allocate(Oid role, Size size)
{
	Account    *account = open_account(role, true);
	dsa_pointer pointer = dlock_allocate_uncounted(size);

	count_memory(account, size);
	return dlock_address(pointer);
}

/* Like dlock_allocate(), but returns an invalid pointer if the area is full */
dsa_pointer
dlock_allocate_if_free(Oid role, Size size)
{
	Account    *account = open_account(role, true);
	dsa_pointer pointer = dsa_allocate_extended(dlock_area, size,
												DSA_ALLOC_NO_OOM);

	if (DsaPointerIsValid(pointer))
		count_memory(account, size);
	return pointer;
}

/* Raises nothing. */
void
dlock_release_memory(Oid role, void *object, Size size)
{
	dsa_free(dlock_area, dlock_pointer(object));
	count_memory(open_account(role, false), -(int64) size);
}

/* Copy a text; returns an invalid pointer for NULL.  Raises 53200. */
dsa_pointer
dlock_text_copy(Oid role, const char *text)
{
	char	   *copy;

	if (text == NULL)
		return InvalidDsaPointer;
	copy = dlock_allocate(role, strlen(text) + 1);
	strcpy(copy, text);
	return dlock_pointer(copy);
}

void
dlock_text_free(Oid role, dsa_pointer text)
{
	if (DsaPointerIsValid(text))
		dlock_release_memory(role, dlock_address(text),
							 strlen(dlock_address(text)) + 1);
}

/* Raises nothing. */
void
dlock_report_memory(void)
{
	for (int i = 0; i < MAX_OPEN; i++)
	{
		if (open_accounts[i].shared != NULL)
			report_account(&open_accounts[i]);
	}
}

void
dlock_close_accounts(void)
{
	for (int i = 0; i < MAX_OPEN; i++)
	{
		if (open_accounts[i].shared != NULL)
			close_account(&open_accounts[i]);
	}
}
