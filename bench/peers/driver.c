/*-------------------------------------------------------------------------
 *
 * driver.c
 *	  The clients of one peer, as threads of one process: PostgreSQL's and
 *	  Redis's.
 *
 *	  driver PEER CLIENTS
 *
 * Connects all clients, prints "ready", and executes one command per line.
 * Driver.java and driver.go do the same for other peers.
 *
 *	  turns WHAT CLIENTS BEGIN LENGTH ROUNDS TURN KINDS
 *
 * CLIENTS clients repeatedly acquire and release a lock while it is this peer's
 * turn by the clock.  WHAT is "own" (a lock for each client), "hot" (one lock
 * for all) or "work" (each client locks its own, changes a row in PostgreSQL
 * and unlocks).  The first round begins at BEGIN, in milliseconds since 1970.
 * In each round, each of KINDS peers has a turn of LENGTH milliseconds, and
 * this peer is number TURN.  Every second round goes backwards, because a turn
 * may affect the next one.
 *
 * Operations that end in the first tenth of a turn do not count.  No operation
 * begins in the last three tenths, so that the queue is empty before the next
 * peer's turn; "late" is the number of operations that ended too late.  Prints
 *
 *	  round ROUND COUNT	   operations of each round
 *	  wait BUCKET COUNT	   a histogram of the times to acquire, or of the whole
 *						   work: BUCKET is 50 times the natural logarithm of
 *						   the microseconds
 *	  client CLIENT COUNT  operations of each client
 *	  late COUNT
 *	  end
 *
 *	  quit
 *
 *	  hold, release
 *
 * The first client acquires or releases the common lock.  Prints "held" or
 * "released", with the microseconds since 1970.
 *
 *	  pass
 *
 * Each client acquires the common lock, and releases it at once.  Prints
 * "waiting" before the requests, "first" at the first grant and "last" after
 * the last release, with the microseconds since 1970.
 *
 *-------------------------------------------------------------------------
 */
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "driver.h"

/* more than any wait: 50 * log(microseconds of an hour) is 1100 */
#define BUCKETS		1200

/* the first number of locks and rows */
#define FIRST_LOCK	1000000000000LL

typedef struct Client
{
	pthread_t	thread;
	void	   *session;
	char		own[32];
	char		row[16];
	long		done;
	long		late;
	long		waits[BUCKETS];
	long	   *rounds;
} Client;

/* The command for all clients, set while none runs */
static struct
{
	char		what[10];
	long long	begin;
	long long	length;
	int			rounds;
	int			turn;
	int			kinds;
}			turns;

static const Peer *peer;
static Client *clients;
static int	connected;
static char hot[32];
static long poll_us;

/* protected by the mutex */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static long long first_got;

void
die(const char *what, const char *message)
{
	fprintf(stderr, "driver: %s: %s\n", what, message);
	exit(1);
}

static void
say(const char *format,...)
{
	va_list		arguments;

	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	putchar('\n');
	fflush(stdout);
}

/* Microseconds since 1970, the clock that all drivers share */
static long long
now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_REALTIME, &time);
	return time.tv_sec * 1000000LL + time.tv_nsec / 1000;
}

static void
sleep_until(long long us)
{
	struct timespec time = {us / 1000000, us % 1000000 * 1000};

	while (clock_nanosleep(CLOCK_REALTIME, TIMER_ABSTIME, &time, NULL) != 0)
		 /* a signal */ ;
}

/* 0.5 to 1.5 times the interval, so that clients do not stay in step */
void
pause_before_retry(void)
{
	static __thread unsigned seed;

	if (seed == 0)
		seed = (unsigned) now();
	sleep_until(now() + poll_us / 2 + rand_r(&seed) % (poll_us + 1));
}

static int
bucket(long long us)
{
	int			result = us <= 1 ? 0 : (int) (50 * log((double) us));

	return result < BUCKETS ? result : BUCKETS - 1;
}

/* One operation; returns the time of the whole, or of the acquire. */
static long long
take_once(Client *client)
{
	long long	began = now();
	long long	got;

	if (strcmp(turns.what, "work") == 0)
	{
		peer->work(client->session, client->own, client->row);
		got = now();
	}
	else
	{
		const char *lock = strcmp(turns.what, "hot") == 0 ? hot : client->own;

		peer->acquire(client->session, lock);
		got = now();
		peer->release(client->session, lock);
	}
	return got - began;
}

static void *
take_turns(void *argument)
{
	Client	   *client = argument;

	for (int round = 0; round < turns.rounds; round++)
	{
		int			place = round % 2 == 0 ? turns.turn :
			turns.kinds - 1 - turns.turn;
		long long	length = turns.length * 1000;
		long long	begin = turns.begin * 1000 +
			(round * turns.kinds + place) * length;
		long long	counts = begin + length / 10;
		long long	stop = begin + length * 7 / 10;
		long long	began;

		sleep_until(begin);
		while ((began = now()) < stop)
		{
			long long	waited = take_once(client);
			long long	ended = now();

			if (began >= counts)
				client->waits[bucket(waited)]++;
			if (ended >= begin + length)
				client->late++;
			if (ended >= counts && ended < stop)
			{
				client->rounds[round]++;
				client->done++;
			}
		}
	}
	return NULL;
}

static void *
pass_once(void *argument)
{
	Client	   *client = argument;

	peer->acquire(client->session, hot);
	pthread_mutex_lock(&mutex);
	if (first_got == 0)
		first_got = now();
	pthread_mutex_unlock(&mutex);
	peer->release(client->session, hot);
	return NULL;
}

static void *
connect_client(void *argument)
{
	Client	   *client = argument;

	client->session = peer->connect(peer->name);
	return NULL;
}

static void
start_clients(int count, void *(*function) (void *))
{
	pthread_attr_t attributes;

	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 256 * 1024);
	for (int i = 0; i < count; i++)
		if (pthread_create(&clients[i].thread, &attributes, function,
						   &clients[i]) != 0)
			die("threads", "could not start one");
}

static void
join_clients(int count)
{
	for (int i = 0; i < count; i++)
		pthread_join(clients[i].thread, NULL);
}

static void
print_turns(int count)
{
	long		waits[BUCKETS] = {0};
	long		late = 0;

	for (int round = 0; round < turns.rounds; round++)
	{
		long		done = 0;

		for (int i = 0; i < count; i++)
			done += clients[i].rounds[round];
		printf("round %d %ld\n", round, done);
	}
	for (int i = 0; i < count; i++)
	{
		printf("client %d %ld\n", i, clients[i].done);
		late += clients[i].late;
		for (int b = 0; b < BUCKETS; b++)
			waits[b] += clients[i].waits[b];
	}
	for (int b = 0; b < BUCKETS; b++)
		if (waits[b] > 0)
			printf("wait %d %ld\n", b, waits[b]);
	say("late %ld\nend", late);
}

static void
run_turns(const char *line)
{
	int			count;

	if (sscanf(line, "turns %9s %d %lld %lld %d %d %d", turns.what, &count,
			   &turns.begin, &turns.length, &turns.rounds, &turns.turn,
			   &turns.kinds) != 7 || count > connected)
		die("not understood", line);
	for (int i = 0; i < count; i++)
	{
		clients[i].done = clients[i].late = 0;
		memset(clients[i].waits, 0, sizeof(clients[i].waits));
		clients[i].rounds = calloc(turns.rounds, sizeof(long));
		if (clients[i].rounds == NULL)
			die("memory", "there is no more");
	}
	start_clients(count, take_turns);
	join_clients(count);
	print_turns(count);
	for (int i = 0; i < count; i++)
		free(clients[i].rounds);
}

static void
run_command(const char *line)
{
	if (strcmp(line, "quit\n") == 0)
		exit(0);
	else if (strncmp(line, "turns ", 6) == 0)
		run_turns(line);
	else if (strcmp(line, "hold\n") == 0)
	{
		peer->acquire(clients[0].session, hot);
		say("held %lld", now());
	}
	else if (strcmp(line, "release\n") == 0)
	{
		/* before the call, because the next holder may get it earlier */
		say("released %lld", now());
		peer->release(clients[0].session, hot);
	}
	else if (strcmp(line, "pass\n") == 0)
	{
		first_got = 0;
		start_clients(connected, pass_once);
		say("waiting");
		join_clients(connected);
		say("first %lld\nlast %lld", first_got, now());
	}
	else
		die("not understood", line);
}

static const Peer *
find_peer(const Peer *peers, const char *name)
{
	while (peers->name && strcmp(peers->name, name) != 0)
		peers++;
	return peers->name ? peers : NULL;
}

int
main(int argc, char **argv)
{
	char		line[200];

	connected = argc == 3 ? atoi(argv[2]) : 0;
	if (connected > 0)
		peer = find_peer(postgres_peers, argv[1]);
#ifdef WITH_REDIS
	if (connected > 0 && peer == NULL)
		peer = find_peer(redis_peers, argv[1]);
#endif
	if (peer == NULL)
		die("usage", "driver PEER CLIENTS");
	poll_us = getenv("POLL_US") ? atol(getenv("POLL_US")) : 1000;
	snprintf(hot, sizeof(hot), "%lld", FIRST_LOCK - 1);
	clients = calloc(connected, sizeof(Client));
	if (clients == NULL)
		die("memory", "there is no more");
	for (int i = 0; i < connected; i++)
	{
		snprintf(clients[i].own, sizeof(clients[i].own), "%lld",
				 FIRST_LOCK + i);
		snprintf(clients[i].row, sizeof(clients[i].row), "%d", i);
	}
	start_clients(connected, connect_client);
	join_clients(connected);
	say("ready");
	while (fgets(line, sizeof(line), stdin))
		run_command(line);
	return 0;
}
