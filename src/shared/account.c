/*-------------------------------------------------------------------------
 *
 * account.c
 *	  Whose memory is it: what each role has taken of the area, its limit, and
 *	  the errors where it gets no more.
 *
 * All that requests take is counted to a role, in one account for all
 * databases: a ticket, a lock's entry and an announcement to who has asked,
 * and what a lease has to who has opened it.  What is counted carries its role,
 * and whoever frees it, be it the worker or another session, gives it back to
 * that one.
 *
 * A backend counts for itself at first, and reports in steps: where each lock
 * and each release would report, all backends would fight for that one cache
 * line.  So what an account says is off by a step for each backend that counts
 * in it; all of them together can be off by a few megabytes.
 *
 * A backend has a few accounts open at a time.  An account is in the table for
 * as long as somebody has it open, or something is counted in it.  What was
 * reported and what was not are together what its role has; so one that nobody
 * has open, and that is at 0, has nothing anywhere, and goes (I30).
 *
 * An error can leave too much counted, and never too little: memory is counted
 * before anybody else can free it, and given back once it is freed.  So whoever
 * frees finds the account, though the role has been dropped.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/guc.h"

#include "shared/inner.h"

#define REPORT_MEMORY_EVERY 4096

/* Accounts that a backend has open at a time, at the most */
#define MAX_OPEN	8

/* A role, or a session user, that has less than this part of the limit has little */
#define LITTLE		64

/* What is counted to no role has no more than this part of the limit */
#define NOBODYS		16

/* The setting, in percent of dlock_memory_limit() */
int			dlock_max_memory_per_role;

/* What is valid only once dlock_attach() has returned */
dshash_table *dlock_accounts = NULL;

/* An account that this backend has open */
typedef struct Account
{
	DlockAccount *shared;		/* stays where it is while we are a user; NULL:
								 * no account is open here */
	Oid			role;
	int64		unreported;		/* taken here and not yet reported, or given
								 * back */
	bool		percent_known;
	int			percent;		/* its limit; 0: as this session's setting says */
} Account;

static Account open_accounts[MAX_OPEN];

/* The one that was used last */
static Account *latest = &open_accounts[0];

static void
report(Account *account)
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
	report(account);
	account->shared = NULL;
	if (--shared->users == 0 && pg_atomic_read_u64(&shared->used) == 0)
		dshash_delete_entry(dlock_accounts, shared);
	else
		dshash_release_lock(dlock_accounts, shared);
}

/* A place for one more; where there is none, another one is closed. */
static Account *
find_place(void)
{
	static int	next = 0;
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

/*
 * Open the account of a role.  One to whom something is counted has an account;
 * so with "make" alone this can raise 53200.
 */
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

	account = find_place();
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
		.role = role
	};
	return latest = account;
}

static inline void
count_memory(Account *account, int64 change)
{
	account->unreported += change;
	if (unlikely(account->unreported > REPORT_MEMORY_EVERY ||
				 account->unreported < -REPORT_MEMORY_EVERY))
		report(account);
}

/* Note that memory which was counted to a role is free.  Raises nothing. */
static void
return_memory(Oid role, Size size)
{
	count_memory(open_account(role, false), -(int64) size);
}

/* What was counted to one role is another one's now.  Raises 53200. */
void
dlock_pass_memory(Oid from, Oid to, Size size)
{
	count_memory(open_account(to, true), size);
	count_memory(open_account(from, false), -(int64) size);
}

/*
 * The limit of a role whose account is open, in percent: what ALTER ROLE ...
 * SET says of that role, as this session's setting does if it is the one that
 * has logged in.  As with any setting, a session goes by what was said when it
 * began to use it; but who has reached a limit looks again.
 */
static int
limit_percent(Account *account, bool again)
{
	char	   *value;

	if (!account->percent_known || again)
	{
		account->percent_known = true;
		account->percent = 0;
		if (account->role != GetAuthenticatedUserId() &&
			(value = dlock_role_setting(account->role,
										"dlock.max_memory_per_role")) != NULL &&
			(!parse_int(value, &account->percent, 0, NULL) ||
			 account->percent < 1 || account->percent > 100))
			account->percent = 0;
	}
	return account->percent != 0 ? account->percent : dlock_max_memory_per_role;
}

/* What a role has, as far as this backend knows */
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
 * Is there memory for one more lock of a role's?  A look at two counts that
 * change rarely, while there is plenty; otherwise dlock_check_memory() is to be
 * asked, which also knows who is exempt.  Raises 53200, where not even an
 * account can be made.
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
 * Is there memory for what can be done without, and is counted to no role?  It
 * stays when those are gone who have brought it about, so all of it together has
 * a small share, of which half is kept for those who have none of it yet; and where
 * there is hardly any for locks, none.  Raises 53200, as above.
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
	bool		by_setting = dlock_control->area_size >=
		(Size) dlock_max_memory * 1024;

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
			 errhint("Release what this role does not need, in any database, or have a superuser increase dlock.max_memory_per_role for it.")));
}

/*
 * What the session user has, through whatever role: its own account, those that
 * it sponsors, and the one that it is about to use.  Roles are found one by one,
 * which only those do who come when memory is scarce.
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
 * Has a role little, and the session user, too?  One session user can take on
 * many roles, and must not take for each of them what is kept for all.
 *
 * What is taken is counted to the role, and can be given back by anybody; so the
 * role's account notes the session user as its sponsor, to whom all counts that
 * it has, as long as it has something.  A sponsor takes the place of another one
 * only by this, that is, if the two have little together.
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
 * Is there memory for one more lock of a role's?  Raises 53200 where there is
 * not.
 *
 * An eighth is kept for superusers, so that one who is to clear up can still
 * lock; and another one for roles that have little, so that several who have
 * much do not stop all others, wherever these are.  The area's own limit stands
 * behind this one; it is reached first only where the area has become very
 * fragmented.
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

/* Memory that a role takes.  Raises 53200. */
dsa_pointer
dlock_allocate(Oid role, Size size)
{
	Account    *account = open_account(role, true);
	dsa_pointer pointer = dlock_allocate_uncounted(size);

	count_memory(account, size);
	return pointer;
}

/* The same, or an invalid pointer if no piece is free */
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

void
dlock_release_memory(Oid role, dsa_pointer pointer, Size size)
{
	dsa_free(dlock_area, pointer);
	return_memory(role, size);
}

/* A text in shared memory, or none for NULL.  Raises 53200. */
dsa_pointer
dlock_text_copy(Oid role, const char *text)
{
	dsa_pointer copy;

	if (text == NULL)
		return InvalidDsaPointer;
	copy = dlock_allocate(role, strlen(text) + 1);
	strcpy(dlock_address(copy), text);
	return copy;
}

void
dlock_text_free(Oid role, dsa_pointer text)
{
	if (DsaPointerIsValid(text))
		dlock_release_memory(role, text,
							 strlen(dlock_address(text)) + 1);
}

/* Report all that was not.  Raises nothing. */
void
dlock_report_memory(void)
{
	for (int i = 0; i < MAX_OPEN; i++)
	{
		if (open_accounts[i].shared != NULL)
			report(&open_accounts[i]);
	}
}

/* The backend exits, and counts nothing any more. */
void
dlock_close_accounts(void)
{
	for (int i = 0; i < MAX_OPEN; i++)
	{
		if (open_accounts[i].shared != NULL)
			close_account(&open_accounts[i]);
	}
}
