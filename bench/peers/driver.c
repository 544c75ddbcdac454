/*-------------------------------------------------------------------------
 *
 * driver.c
 *	  The clients of one peer, as threads of one process: PostgreSQL's and
 *	  Redis's.
 *
 *	  driver PEER CLIENTS
 *
 * Connects all clients, prints "ready", and then does what it is told, a line
 * each; Driver.java and driver.go are the same for the other peers.
 *
 *	  turns WHAT CLIENTS BEGIN LENGTH ROUNDS TURN KINDS
 *
 * So many clients take a lock and give it back, again and again, while it is
 * this peer's turn by the clock.  WHAT is "own" (each client has a lock of its
 * own), "hot" (all have the same) or "work" (each locks its own, changes a row
 * in PostgreSQL and unlocks).  The first round begins at BEGIN, in
 * milliseconds since 1970; in each, every one of KINDS peers has a turn of
 * LENGTH milliseconds, and this one is number TURN.  Every other round goes
 * from the last to the first, as one peer's turn may be felt in the next.
 *
 * What ends in the first tenth of a turn does not count.  In the last three
 * tenths nothing new begins, so that those who are in a queue are through it
 * when the next peer's turn comes; "late" says how many were not.  Prints
 *
 *	  round ROUND COUNT	   what was done, for each round
 *	  wait BUCKET COUNT	   how long for, where BUCKET is 50 times the natural
 *						   logarithm of the microseconds: of acquiring, or of
 *						   the work as a whole
 *	  client CLIENT COUNT  what was done, for each client
 *	  late COUNT
 *	  end
 *
 *	  quit
 *
 *	  hold, release
 *
 * The first client takes or releases the lock that is the same for all; prints
 * "held" or "released", with the microseconds since 1970.
 *
 *	  pass
 *
 * All clients take it and release it at once; prints "waiting" when all are
 * about to ask, "first" when the first one has it, and "last" when the last
 * one has released it, with the microseconds since 1970.
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

/* above what any wait can be: 50 * log(microseconds of an hour) is 1100 */
#define BUCKETS		1200

/* The locks, and the rows, have the numbers from here on. */
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

/* What all clients are told, set while none runs */
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

/* From half of it to one and a half, so that no two keep in step */
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

/* Once what the turns are for; returns how long that took, or the lock. */
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
		/* before the call: whoever is next may have it before it ends */
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
