package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgconn"
	"github.com/jackc/pgx/v4"
	"github.com/jackc/pgx/v4/pgxpool"
)

var pgxTests = []test{
	{"pgx: a transaction that commits, or panics, frees the lock", pgxTransaction},
	{"pgx: so does whoever holds it in a session, and panics", pgxSession},
	{"pgx: a timeout is an error, try is NULL", pgxTimeout},
	{"pgx: errors are told apart by their code", pgxErrors},
	{"pgx: a Duration is an interval, but nanoseconds where a number is wanted", pgxDuration},
	{"pgx: a lease, each step over another connection", pgxLease},
	{"pgx: a place in the queue, and what is announced", pgxTicket},
	{"pgx: a context that ends takes the waiter out of the queue, and the connection with it", pgxContext},
	{"pgx: what was forgotten stays in a pool", pgxPool},
	{"pgx: AfterRelease releases what was forgotten", pgxReset},
}

func pgxCode(err error) string {
	var failure *pgconn.PgError
	if !errors.As(err, &failure) {
		panic(fmt.Sprintf("%T: %v", err, err))
	}
	return failure.Code
}

func newPgxPool(size int32, change func(*pgxpool.Config)) *pgxpool.Pool {
	config, err := pgxpool.ParseConfig("user=app")
	must(err)
	config.MaxConns = size
	if change != nil {
		change(config)
	}
	pool, err := pgxpool.ConnectConfig(background, config)
	must(err)
	return pool
}

func pgxConnect() *pgx.Conn {
	conn, err := pgx.Connect(background, "user=app")
	must(err)
	return conn
}

func pgxTransaction() {
	pool := newPgxPool(2, nil)
	defer pool.Close()

	expectTransactions(func(work func()) {
		must(pool.BeginFunc(background, func(tx pgx.Tx) error {
			if _, err := tx.Exec(background, "SELECT dlock_xact_acquire($1)", "account/7"); err != nil {
				return err
			}
			work()
			return nil
		}))
	})
}

// pgxWithLock is pqWithLock, as docs/go.md says.
func pgxWithLock(ctx context.Context, pool *pgxpool.Pool, name string, work func(fence int64) error) (err error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()

	var fence int64
	if err = conn.QueryRow(ctx, "SELECT dlock_acquire($1)", name).Scan(&fence); err != nil {
		return err
	}
	defer func() {
		var released bool
		failure := conn.QueryRow(context.Background(),
			"SELECT dlock_release_ticket($1)", fence).Scan(&released)
		if failure == nil && !released {
			failure = fmt.Errorf("lock %s was lost", name)
		}
		if err == nil {
			err = failure
		}
	}()
	return work(fence)
}

func pgxSession() {
	pool := newPgxPool(2, nil)
	defer pool.Close()

	expectSession(func(work func(fence int64) error) error {
		return pgxWithLock(background, pool, "report", work)
	})
}

func pgxTimeout() {
	conn := pgxConnect()
	defer conn.Close(background)
	release := hold("busy")
	defer release()

	_, err := conn.Exec(background, "SELECT dlock_acquire($1, timeout => $2)",
		"busy", 10*time.Millisecond)
	expect("code", pgxCode(err), "55P03")

	var fence *int64
	must(conn.QueryRow(background, "SELECT dlock_try_acquire($1)", "busy").Scan(&fence))
	expect("acquired", fence != nil, false)
	var fences []int64
	must(conn.QueryRow(background, "SELECT dlock_try_acquire_all($1)",
		[]string{"free", "busy"}).Scan(&fences))
	expect("fences", len(fences), 0)
}

func pgxErrors() {
	conn, other := pgxConnect(), pgxConnect()
	defer conn.Close(background)
	defer other.Close(background)
	fails := func(code, query string, arguments ...interface{}) {
		_, err := conn.Exec(background, query, arguments...)
		expect(query, pgxCode(err), code)
	}

	fails("55L01", "SELECT dlock_guard('report', 1)")
	fails("42501", "SELECT dlock_acquire('reserved/1')")
	fails("40001", "SELECT dlock_version_bump('doc', 7)")

	tx, err := conn.BeginTx(background, pgx.TxOptions{AccessMode: pgx.ReadOnly})
	must(err)
	fails("25006", "SELECT dlock_version_bump('doc', 0)")
	must(tx.Rollback(background))

	_, err = other.Exec(background, "BEGIN; SELECT dlock_xact_acquire('b')")
	must(err)
	_, err = conn.Exec(background, "BEGIN; SELECT dlock_xact_acquire('a')")
	must(err)
	waiter := make(chan error)
	go func() {
		_, err := other.Exec(background, "SELECT dlock_xact_acquire('a')")
		waiter <- err
	}()
	waitForWaiter("a")
	// the youngest ticket is the victim
	fails("40P01", "SELECT dlock_xact_acquire('b')")
	_, err = conn.Exec(background, "ROLLBACK")
	must(err)
	must(<-waiter)
}

func pgxDuration() {
	conn := pgxConnect()
	defer conn.Close(background)

	limit := 30 * time.Second
	for _, simple := range []bool{false, true} {
		expectLength := func(query string, argument interface{}, wanted string) {
			var length string
			must(conn.QueryRow(background, query, pgx.QuerySimpleProtocol(simple), argument).
				Scan(&length))
			expect(query, length, wanted)
		}
		expectLength("SELECT $1::interval::text", limit, "00:00:30")
		expectLength("SELECT make_interval(secs => $1)::text", limit.Seconds(), "00:00:30")
	}

	// the trap: where the server wants a number, it gets nanoseconds
	var length string
	must(conn.QueryRow(background, "SELECT make_interval(secs => $1)::text", limit).Scan(&length))
	expect("length", length, "8333333:20:00")
}

func pgxLease() {
	conns := make([]*pgx.Conn, 5)
	for i := range conns {
		conns[i] = pgxConnect()
		defer conns[i].Close(background)
	}

	var fence, again, kept int64
	acquire := "SELECT dlock_ttl_acquire($1, $2, owner => $3)"
	must(conns[0].QueryRow(background, acquire, "report", time.Hour, "job/17").Scan(&fence))
	must(conns[1].QueryRow(background, acquire, "report", time.Hour, "job/17").Scan(&again))
	expect("asked again", again, fence)
	must(conns[2].QueryRow(background, "SELECT dlock_renew($1)", fence).Scan(&kept))
	expect("kept", kept, int64(1))
	must(conns[3].BeginFunc(background, func(tx pgx.Tx) error {
		_, err := tx.Exec(background, "SELECT dlock_guard($1, $2)", "report", fence)
		return err
	}))

	var released bool
	must(conns[4].QueryRow(background, "SELECT dlock_release_ticket($1)", fence).Scan(&released))
	expect("released", released, true)
	var gone *int64
	must(conns[0].QueryRow(background, "SELECT dlock_renew($1)", fence).Scan(&gone))
	expect("renewed", gone != nil, false)
}

// The connection keeps what is announced until it is asked for, whatever else it
// does before: a grant that comes along with the answer to the enqueue is there.
func pgxTicket() {
	conn := pgxConnect()
	defer conn.Close(background)
	release := hold("busy")

	var tickets [2]int64
	for i, name := range []string{"free", "busy"} {
		must(conn.QueryRow(background, "SELECT dlock_enqueue($1)", name).Scan(&tickets[i]))
	}
	granted := func(ticket int64) (result bool) {
		must(conn.QueryRow(background, "SELECT dlock_wait($1, '0')", ticket).Scan(&result))
		return
	}
	expect("granted", granted(tickets[0]), true)
	expect("granted", granted(tickets[1]), false)
	release()
	for !granted(tickets[1]) {
		_, err := conn.WaitForNotification(background)
		must(err)
	}
	for _, ticket := range tickets {
		_, err := conn.Exec(background, "SELECT dlock_release_ticket($1)", ticket)
		must(err)
	}
}

func pgxContext() {
	conn := pgxConnect()
	defer conn.Close(background)
	release := hold("busy")
	defer release()

	_, err := conn.Exec(background, "SELECT dlock_acquire('mine')")
	must(err)
	ctx, cancel := context.WithCancel(background)
	done := make(chan error)
	go func() {
		_, err := conn.Exec(ctx, "SELECT dlock_acquire('busy')")
		done <- err
	}()
	waitForWaiter("busy")
	cancel()
	err = <-done
	expect("canceled", errors.Is(err, context.Canceled), true)

	// the trap: it is closed, at once and for the server a moment later, and
	// whatever else this session held is lost
	expect("is closed", conn.IsClosed(), true)
	waitUntil("SELECT count(*) = 0 FROM dlock_locks WHERE NOT granted OR name = 'mine'")

	// what is advised keeps the connection
	other := pgxConnect()
	defer other.Close(background)
	_, err = other.Exec(background, "SELECT dlock_acquire('mine')")
	must(err)
	_, err = other.Exec(background, "SELECT dlock_acquire('busy', timeout => '10 ms')")
	expect("code", pgxCode(err), "55P03")
	_, err = other.Exec(background, "SELECT dlock_release('mine')")
	must(err)
}

func pgxPool() {
	pool := newPgxPool(1, nil)
	_, err := pool.Exec(background, "SELECT dlock_acquire('report')")
	must(err)
	expect("is free", isFree("report"), false)
	var held bool
	must(pool.QueryRow(background, "SELECT dlock_is_held('report')").Scan(&held))
	expect("held by whoever comes next", held, true)
	pool.Close()
	waitUntil("SELECT count(*) = 0 FROM dlock_locks")
}

func pgxReset() {
	pool := newPgxPool(1, func(config *pgxpool.Config) {
		config.AfterRelease = func(conn *pgx.Conn) bool {
			_, err := conn.Exec(context.Background(), "SELECT dlock_release_all()")
			return err == nil // false: it is closed
		}
	})
	defer pool.Close()

	var pid, same int
	must(pool.QueryRow(background, "SELECT pg_backend_pid()").Scan(&pid))
	_, err := pool.Exec(background, "SELECT dlock_acquire('report')")
	must(err)
	// the pool does it beside the program, but before anyone gets the connection
	var held bool
	must(pool.QueryRow(background, "SELECT dlock_is_held('report')").Scan(&held))
	expect("held by whoever comes next", held, false)
	expect("is free", isFree("report"), true)
	must(pool.QueryRow(background, "SELECT pg_backend_pid()").Scan(&same))
	expect("session", same, pid)
}
