package main

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/lib/pq"
)

var libPQ = []test{
	{"lib/pq: a transaction that commits, or panics, frees the lock", pqTransaction},
	{"lib/pq: so does whoever holds it in a session, and panics", pqSession},
	{"lib/pq: a timeout is an error, try is NULL", pqTimeout},
	{"lib/pq: errors are told apart by their code", pqErrors},
	{"lib/pq: a Duration is nanoseconds, which nobody waits for unwarned", pqDuration},
	{"lib/pq: a lease, each step over another connection", pqLease},
	{"lib/pq: a place in the queue, and a Listener", pqTicket},
	{"lib/pq: a context that ends takes the waiter out of the queue, and the connection with it", pqContext},
	{"lib/pq: any connection of the pool may be another session", pqPool},
	{"lib/pq: a Validator releases what was forgotten", pqReset},
}

var background = context.Background()

func pqCode(err error) string {
	var failure *pq.Error
	if !errors.As(err, &failure) {
		panic(fmt.Sprintf("%T: %v", err, err))
	}
	return string(failure.Code)
}

func pqTransaction() {
	pool := open("user=app")
	defer pool.Close()

	expectTransactions(func(work func()) {
		tx, err := pool.Begin()
		must(err)
		defer tx.Rollback() // does nothing after a commit
		_, err = tx.Exec("SELECT dlock_xact_acquire($1)", "account/7")
		must(err)
		work()
		must(tx.Commit())
	})
}

// pqWithLock is the one of docs/go.md.
func pqWithLock(ctx context.Context, pool *sql.DB, name string, work func(fence int64) error) (err error) {
	conn, err := pool.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()

	var fence int64
	if err = conn.QueryRowContext(ctx, "SELECT dlock_acquire($1)", name).Scan(&fence); err != nil {
		return err
	}
	defer func() {
		var released bool
		// not with ctx, which may be what has ended the work
		failure := conn.QueryRowContext(context.Background(),
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

func pqSession() {
	pool := open("user=app")
	defer pool.Close()

	expectSession(func(work func(fence int64) error) error {
		return pqWithLock(background, pool, "report", work)
	})
}

func pqTimeout() {
	pool := open("user=app")
	defer pool.Close()
	release := hold("busy")
	defer release()

	limit := 10 * time.Millisecond
	_, err := pool.Exec("SELECT dlock_acquire($1, timeout => make_interval(secs => $2))",
		"busy", limit.Seconds())
	expect("code", pqCode(err), "55P03")

	var fence sql.NullInt64
	must(pool.QueryRow("SELECT dlock_try_acquire($1)", "busy").Scan(&fence))
	expect("acquired", fence.Valid, false)
	var fences []int64
	must(pool.QueryRow("SELECT dlock_try_acquire_all($1)", pq.Array([]string{"free", "busy"})).
		Scan(pq.Array(&fences)))
	expect("fences", len(fences), 0)
}

func pqErrors() {
	pool := open("user=app")
	defer pool.Close()
	fails := func(code, query string, arguments ...interface{}) {
		_, err := pool.Exec(query, arguments...)
		expect(query, pqCode(err), code)
	}

	fails("55L01", "SELECT dlock_guard('report', 1)")
	fails("42501", "SELECT dlock_acquire('reserved/1')")
	fails("40001", "SELECT dlock_version_bump('doc', 7)")

	tx, err := pool.BeginTx(background, &sql.TxOptions{ReadOnly: true})
	must(err)
	_, err = tx.Exec("SELECT dlock_version_bump('doc', 0)")
	expect("read only", pqCode(err), "25006")
	must(tx.Rollback())

	var txs [2]*sql.Tx
	for i, name := range []string{"a", "b"} {
		txs[i], err = pool.Begin()
		must(err)
		_, err = txs[i].Exec("SELECT dlock_xact_acquire($1)", name)
		must(err)
	}
	waiter := make(chan error)
	go func() {
		_, err := txs[1].Exec("SELECT dlock_xact_acquire('a')")
		waiter <- err
	}()
	waitForWaiter("a")
	// the youngest ticket is the victim
	_, err = txs[0].Exec("SELECT dlock_xact_acquire('b')")
	expect("deadlock", pqCode(err), "40P01")
	must(txs[0].Rollback())
	must(<-waiter)
	must(txs[1].Rollback())
}

func pqDuration() {
	connector, err := pq.NewConnector("user=app")
	must(err)
	var notices []string
	pool := sql.OpenDB(pq.ConnectorWithNoticeHandler(connector, func(notice *pq.Error) {
		notices = append(notices, fmt.Sprint(notice.Code, " ", notice.Message))
	}))
	defer pool.Close()

	// the trap
	limit := 30 * time.Second
	_, err = pool.Exec("SELECT dlock_xact_acquire($1, timeout => $2)", "report", limit)
	must(err)
	expect("notices", fmt.Sprint(notices), "[01000 timeout is 347222 days long "+
		"25P01 dlock_xact_acquire() has no effect outside a transaction block]")
	_, err = pool.Exec("SELECT dlock_ttl_acquire($1, $2)", "report", limit)
	expect("code", pqCode(err), "22023")

	// what is advised
	var length string
	for query, argument := range map[string]interface{}{
		"SELECT make_interval(secs => $1)": limit.Seconds(),
		"SELECT $1::interval":              fmt.Sprintf("%d ms", limit.Milliseconds()),
	} {
		must(pool.QueryRow(query, argument).Scan(&length))
		expect(query, length, "00:00:30")
	}
	expect("notices", len(notices), 2)
}

func pqLease() {
	pool := open("user=app")
	defer pool.Close()
	conns := make([]*sql.Conn, 4)
	for i := range conns {
		var err error
		conns[i], err = pool.Conn(background)
		must(err)
		defer conns[i].Close()
	}

	var fence, again, kept int64
	acquire := "SELECT dlock_ttl_acquire($1, '1h', owner => $2)"
	must(conns[0].QueryRowContext(background, acquire, "report", "job/17").Scan(&fence))
	must(conns[1].QueryRowContext(background, acquire, "report", "job/17").Scan(&again))
	expect("asked again", again, fence)
	must(conns[2].QueryRowContext(background, "SELECT dlock_renew($1)", fence).Scan(&kept))
	expect("kept", kept, int64(1))

	tx, err := conns[3].BeginTx(background, nil)
	must(err)
	_, err = tx.Exec("SELECT dlock_guard($1, $2)", "report", fence)
	must(err)
	must(tx.Commit())

	var released bool
	must(pool.QueryRow("SELECT dlock_release_ticket($1)", fence).Scan(&released))
	expect("released", released, true)
	var gone sql.NullInt64
	must(pool.QueryRow("SELECT dlock_renew($1)", fence).Scan(&gone))
	expect("renewed", gone.Valid, false)
}

// The connections of a pool throw away what is announced, so what is enqueued is
// a lease's, and announced to the listener.
func pqTicket() {
	pool := open("user=app")
	defer pool.Close()
	listener := pq.NewListener("user=app", time.Second, time.Minute, nil)
	defer listener.Close()
	must(listener.Listen("jobs"))
	release := hold("report")

	var ticket int64
	must(pool.QueryRow("SELECT dlock_ttl_enqueue($1, '1h', channel => 'jobs', owner => $2)",
		"report", "job/17").Scan(&ticket))
	granted := func() (result bool) {
		must(pool.QueryRow("SELECT dlock_wait($1, '0')", ticket).Scan(&result))
		return
	}
	expect("granted", granted(), false)
	release()
	for !granted() {
		<-listener.Notify // nil after a reconnect
	}
	_, err := pool.Exec("SELECT dlock_release_ticket($1)", ticket)
	must(err)
}

func pqContext() {
	pool := open("user=app")
	defer pool.Close()
	release := hold("busy")
	defer release()

	conn, err := pool.Conn(background)
	must(err)
	defer conn.Close()
	_, err = conn.ExecContext(background, "SELECT dlock_acquire('mine')")
	must(err)

	ctx, cancel := context.WithCancel(background)
	done := make(chan error)
	go func() {
		_, err := conn.ExecContext(ctx, "SELECT dlock_acquire('busy')")
		done <- err
	}()
	waitForWaiter("busy")
	cancel()
	expect("code", pqCode(<-done), "57014")
	waitUntil("SELECT count(*) = 0 FROM dlock_locks WHERE NOT granted")

	// the trap: whatever else this session held is lost
	_, err = conn.ExecContext(background, "SELECT dlock_release('mine')")
	expect("error", err, driver.ErrBadConn)
	waitUntil("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'mine'")

	// what is advised keeps the connection
	other, err := pool.Conn(background)
	must(err)
	defer other.Close()
	_, err = other.ExecContext(background, "SELECT dlock_acquire('mine')")
	must(err)
	_, err = other.ExecContext(background, "SELECT dlock_acquire('busy', timeout => '10 ms')")
	expect("code", pqCode(err), "55P03")
	_, err = other.ExecContext(background, "SELECT dlock_release('mine')")
	must(err)
}

func pqPool() {
	pool := open("user=app")
	defer pool.Close()

	_, err := pool.Exec("SELECT dlock_acquire('report')")
	must(err)
	stranger, err := pool.Conn(background) // the one that has just gone back
	must(err)

	var released bool
	must(pool.QueryRow("SELECT dlock_release('report')").Scan(&released))
	expect("released by another session", released, false)
	must(stranger.QueryRowContext(background, "SELECT dlock_is_held('report')").Scan(&released))
	expect("held by a stranger", released, true)
	must(stranger.Close())
	expect("is free", isFree("report"), false)
	must(pool.Close())
	waitUntil("SELECT count(*) = 0 FROM dlock_locks")
}

// What a connection of lib/pq can do, and database/sql asks for
type pqConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.Pinger
	driver.QueryerContext
}

// A cleanConn holds nothing when it goes back to the pool, which asks then
// whether it is valid.
type cleanConn struct{ pqConn }

func (conn cleanConn) IsValid() bool {
	_, err := conn.ExecContext(context.Background(), "SELECT dlock_release_all()", nil)
	return err == nil
}

type cleanConnector struct{ driver.Connector }

func (connector cleanConnector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := connector.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return cleanConn{conn.(pqConn)}, nil
}

func pqReset() {
	connector, err := pq.NewConnector("user=app")
	must(err)
	pool := sql.OpenDB(cleanConnector{connector})
	defer pool.Close()
	pool.SetMaxOpenConns(1)

	var pid, same int
	must(pool.QueryRow("SELECT pg_backend_pid()").Scan(&pid))
	_, err = pool.Exec("SELECT dlock_acquire($1)", "report")
	must(err)
	expect("is free", isFree("report"), true)

	// also after an error, and a transaction that nobody has ended
	tx, err := pool.Begin()
	must(err)
	_, err = tx.Exec("SELECT dlock_acquire('report')")
	must(err)
	_, err = tx.Exec("SELECT 1 / 0")
	expect("code", pqCode(err), "22012")
	must(tx.Rollback())
	expect("is free", isFree("report"), true)
	must(pool.QueryRow("SELECT pg_backend_pid()").Scan(&same))
	expect("session", same, pid)
}
