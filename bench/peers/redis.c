/*-------------------------------------------------------------------------
 *
 * redis.c
 *	  The lock of Redis's manual for one server: SET with NX and PX, and a
 *	  script that deletes the key if it still has this client's token.
 *
 * REDIS_SOCKET is the server's socket, and TTL_MS the lifetime of a lock,
 * which is not renewed.  A client that finds the lock busy retries, because
 * Redis does not announce a release.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <hiredis/hiredis.h>

#include "driver.h"

typedef struct Session
{
	redisContext *context;
	/* a connection to PostgreSQL for the work, opened when it is needed */
	void	   *postgres;
	char		token[64];
	char		script[64];
	const char *ttl_ms;
} Session;

static const char *const compare_and_delete =
"if redis.call('get', KEYS[1]) == ARGV[1] then "
"return redis.call('del', KEYS[1]) else return 0 end";

static redisReply *
check(Session *session, redisReply *reply)
{
	if (reply == NULL)
		die("redis", session->context->errstr);
	if (reply->type == REDIS_REPLY_ERROR)
		die("redis", reply->str);
	return reply;
}

static void *
connect_session(const char *kind)
{
	Session    *session = calloc(1, sizeof(Session));
	const char *socket = getenv("REDIS_SOCKET");
	redisReply *reply;

	(void) kind;
	session->context = redisConnectUnix(socket ? socket : "");
	if (session->context == NULL || session->context->err)
		die("redis", "could not connect");
	session->ttl_ms = getenv("TTL_MS") ? getenv("TTL_MS") : "5000";
	snprintf(session->token, sizeof(session->token), "%d-%p", (int) getpid(),
			 (void *) session);
	reply = check(session, redisCommand(session->context, "SCRIPT LOAD %s",
										compare_and_delete));
	snprintf(session->script, sizeof(session->script), "%s", reply->str);
	freeReplyObject(reply);
	return session;
}

static void
acquire(void *opaque, const char *lock)
{
	Session    *session = opaque;

	for (;;)
	{
		redisReply *reply = redisCommand(session->context,
										 "SET %s %s NX PX %s", lock,
										 session->token, session->ttl_ms);
		int			got = check(session, reply)->type == REDIS_REPLY_STATUS;

		freeReplyObject(reply);
		if (got)
			return;
		pause_before_retry();
	}
}

static void
release(void *opaque, const char *lock)
{
	Session    *session = opaque;

	redisReply *reply = redisCommand(session->context, "EVALSHA %s 1 %s %s",
									 session->script, lock, session->token);

	freeReplyObject(check(session, reply));
}

static void
work(void *opaque, const char *lock, const char *row)
{
	Session    *session = opaque;

	if (session->postgres == NULL)
		session->postgres = postgres_peers[0].connect("plain");
	acquire(session, lock);
	postgres_peers[0].work(session->postgres, lock, row);
	release(session, lock);
}

const Peer	redis_peers[] = {
	{"redis", connect_session, acquire, release, work},
	{0}
};
