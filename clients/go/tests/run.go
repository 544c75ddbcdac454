// The scenarios of clients/scenarios.md, for the Go client
//
// Each row has one function with its name. test/t/client_go.pl starts this program.
package main

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"net"
	"net/url"
	"os"
	"os/exec"
	"regexp"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	_ "unsafe" // for go:linkname

	"dlock.org/dlock"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
)

const long = time.Hour

var (
	ctx     = context.Background()
	timeout = time.Duration(atoi(os.Getenv("PG_TEST_TIMEOUT_DEFAULT"))) * time.Second
	short   = 2 * time.Second
	kept    = []dlock.Option{dlock.TTL(long), dlock.Interval(500 * time.Millisecond)}
	main_   = address("MAIN", "app", "")
	locks   = open(main_)
	admin   = &session{dsn: address("MAIN", "admin", "")}
	try     = dlock.Timeout(0)
)

//go:linkname round dlock.org/dlock.round
var round time.Duration

func atoi(text string) int {
	number, err := strconv.Atoi(text)
	must(err)
	return number
}

func address(server, user, rest string) string {
	return "postgres://" + user + "@" + os.Getenv("DLOCK_"+server) + "/postgres?sslmode=disable" + rest
}

func open(dsns ...string) *dlock.Locks {
	locks, err := dlock.Open(dsns...)
	must(err)
	locks.Patience = timeout
	return locks
}

func late() *dlock.Locks {
	return open(address("MAIN", "app", "&options="+url.QueryEscape("-c search_path=late,public")))
}

func hasty(patience time.Duration) *dlock.Locks {
	locks := open(main_)
	locks.Patience = patience
	return locks
}

//
// Support for the rows
//

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func check(ok bool, what ...any) {
	if !ok {
		panic("not so: " + fmt.Sprint(what...))
	}
}

var errBoom = errors.New("boom")

func boom(context.Context) error { return errBoom }

func nothing(context.Context) error { return nil }

func raises(kind error, code string, err error) *dlock.Error {
	if !errors.Is(err, kind) {
		panic(fmt.Sprintf("%v, not %v", err, kind))
	}
	var own *dlock.Error
	if code != "" {
		check(errors.As(err, &own) && own.Code == code, "code of ", err)
	}
	return own
}

func lost(err error) { raises(dlock.LockLost, "55L01", err) }

func busy(err error) { raises(dlock.LockTimeout, "55P03", err) }

func wrong(err error) { raises(dlock.WrongState, "55000", err) }

func acquire(lock *dlock.Lock) error {
	_, err := lock.Lock(ctx)
	return err
}

func opened(lease *dlock.Lease) error {
	_, err := lease.Open(ctx)
	return err
}

// do calls Do with work that panics if a check fails. Do must release the lock then, too.
func do(lock *dlock.Lock, work func(context.Context)) error {
	return lock.Do(ctx, func(ctx context.Context) error {
		work(ctx)
		return nil
	})
}

func async(work func() error) chan error {
	result := make(chan error, 1)
	go func() {
		defer func() {
			if failure := recover(); failure != nil {
				result <- fmt.Errorf("%v\n%s", failure, debug.Stack())
			}
		}()
		result <- work()
	}()
	return result
}

// What the package logs: a panic of a callback
type syncBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

var logged syncBuffer

var input = bufio.NewReader(os.Stdin)

// order asks the test that started this program for an action.
func order(format string, values ...any) {
	fmt.Printf("! "+format+"\n", values...)
	if answer, err := input.ReadString('\n'); err != nil || answer != "done\n" {
		os.Exit(2)
	}
}

func until(condition func() bool, what ...any) {
	for end := dlock.Now() + timeout; !condition(); time.Sleep(10 * time.Millisecond) {
		check(dlock.Now() < end, "waited for ", fmt.Sprint(what...))
	}
}

// Another session
type session struct {
	dsn  string
	conn *pgx.Conn
	mu   sync.Mutex
}

func connect(dsn string) *pgx.Conn {
	config, err := pgx.ParseConfig(dsn)
	must(err)
	conn, err := pgx.ConnectConfig(ctx, config)
	must(err)
	return conn
}

func query(conn *pgx.Conn, sql string, values ...any) ([]string, error) {
	var parameters [][]byte
	for _, value := range values {
		parameters = append(parameters, []byte(fmt.Sprint(value)))
	}
	result := conn.PgConn().ExecParams(ctx, sql, parameters, nil, nil, nil).Read()
	if result.Err != nil || len(result.Rows) == 0 {
		return nil, result.Err
	}
	var row []string
	for _, value := range result.Rows[0] {
		row = append(row, string(value))
	}
	return row, nil
}

// row returns the first row, as text. It asks again if the connection broke.
func (s *session) row(sql string, values ...any) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for end := dlock.Now() + timeout; ; time.Sleep(10 * time.Millisecond) {
		var err error
		if s.conn == nil {
			s.conn, err = pgx.Connect(ctx, s.dsn)
		}
		if err == nil {
			var row []string
			if row, err = query(s.conn, sql, values...); err == nil {
				return row
			}
			if !s.conn.IsClosed() {
				panic(err)
			}
		}
		check(dlock.Now() < end, err)
		s.conn = nil
	}
}

func (s *session) ask(sql string, values ...any) string {
	row := s.row(sql, values...)
	if len(row) == 0 {
		return ""
	}
	return row[0]
}

func (s *session) is(sql string, values ...any) bool { return s.ask(sql, values...) == "t" }

func (s *session) until(sql string, values ...any) {
	until(func() bool { return s.is(sql, values...) }, sql, values)
}

func (s *session) isFree(name string) bool {
	return s.is("SELECT dlock_try_xact_acquire($1) IS NOT NULL", name)
}

func (s *session) untilFree(name string) {
	s.until("SELECT dlock_try_xact_acquire($1) IS NOT NULL", name)
}

func (s *session) left(name string) int {
	return atoi(s.ask("SELECT count(*) FROM dlock_locks WHERE name = $1", name))
}

func (s *session) untilWaits(name string) {
	s.until("SELECT count(*) = 1 FROM dlock_locks WHERE name = $1 AND NOT granted", name)
}

func (s *session) untilCallWaits() {
	s.until("SELECT count(*) = 1 FROM pg_stat_activity WHERE usename = 'app' AND wait_event = 'advisory'")
}

func (s *session) force(ticket int64) {
	check(s.is("SELECT dlock_force_release($1)", ticket), "forced")
}

func (s *session) untilRenewed(lease int64, count int) {
	for ; count > 0; count-- {
		before := s.ask("SELECT renewed_at FROM dlock_leases WHERE lease = $1", lease)
		s.until("SELECT renewed_at > $1::timestamptz FROM dlock_leases WHERE lease = $2", before, lease)
	}
}

// heartbeat waits for the heartbeat's connection, and returns its process.
func (s *session) heartbeat() string {
	from := "FROM pg_stat_activity WHERE application_name = 'dlock heartbeat'"
	s.until("SELECT count(*) = 1 " + from)
	return s.ask("SELECT min(pid) " + from)
}

func (s *session) holds(name string, work func(ticket int64)) {
	with(s.dsn, func(conn *pgx.Conn) {
		row, err := query(conn, "SELECT dlock_acquire($1)", name)
		must(err)
		work(int64(atoi(row[0])))
		_, err = query(conn, "SELECT dlock_release_all()")
		must(err)
	})
}

// abandoned works while calls of this function in the schema late wait. work can let later calls return at once. At the
// end, the calls that have waited are executed, and their sessions end.
func abandoned(function string, work func(waitNoMore func())) {
	var pids string
	with(admin.dsn, func(other *pgx.Conn) {
		execute := func(sql string, values ...any) []string {
			row, err := query(other, sql, values...)
			must(err)
			return row
		}
		execute("SELECT pg_advisory_lock(18)")
		execute("INSERT INTO late.waits VALUES ($1)", function)
		work(func() {
			pids = execute("SELECT array_agg(pid) FROM pg_stat_activity" +
				" WHERE usename = 'app' AND wait_event = 'advisory'")[0]
			check(pids != "", "no call has waited")
			execute("DELETE FROM late.waits")
		})
	})
	admin.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = ANY ($1::integer[])", pids)
}

func with(dsn string, work func(conn *pgx.Conn)) {
	conn := connect(dsn)
	defer conn.Close(ctx)
	work(conn)
}

func transaction(conn *pgx.Conn, work func(tx pgx.Tx) error) error {
	tx, err := conn.Begin(ctx)
	must(err)
	defer tx.Rollback(ctx)
	if err = work(tx); err == nil {
		err = tx.Commit(ctx)
	}
	return dlock.Translate(err)
}

// told waits for the callback, and for the context.
func told(lock *dlock.Lock) {
	called := make(chan *dlock.Lock, 1)
	lock.OnLost(func(lock *dlock.Lock) { called <- lock })
	check(<-called == lock, "called with the lock")
	<-lock.Context().Done()
	check(lock.Lost(), "lost")
	lost(lock.Check())
}

// Does the server have at most so many connections of the client?
func connected(most int) bool {
	return admin.is("SELECT count(*) <= $1 FROM pg_stat_activity WHERE usename = 'app'", most)
}

func killSessions() {
	admin.ask("SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity WHERE usename = 'app'")
}

// The next event, within the patience of a test
func next(tickets *dlock.Tickets) dlock.Event { return within(timeout, tickets) }

// The next event, before the client asks by itself
func soon(tickets *dlock.Tickets) dlock.Event { return within(30*time.Second, tickets) }

func within(patience time.Duration, tickets *dlock.Tickets) dlock.Event {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	event, err := tickets.Next(ctx)
	must(err)
	return event
}

func none(tickets *dlock.Tickets) {
	// after the answer to this, all earlier notifications have come
	must(tickets.Unwatch(ctx, "none"))
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	event, err := tickets.Next(ctx)
	raises(dlock.Cancelled, "57014", err)
	check(event == dlock.Event{}, "no event")
}

func isEvent(event dlock.Event, what, lock string, ticket int64) {
	check(event.Event == what && event.Lock == lock && event.Ticket == ticket, event, " is not ", what, lock, ticket)
}

func enqueue(tickets *dlock.Tickets, name string) int64 {
	ticket, err := tickets.Enqueue(ctx, name)
	must(err)
	return ticket
}

// Locks over connections with another configuration
func over(change func(config *pgx.ConnConfig)) *dlock.Locks {
	config, err := pgx.ParseConfig(main_)
	must(err)
	change(config)
	locks, err := dlock.New(dlock.Server{Source: func(ctx context.Context, _ string) (*pgx.Conn, func(), error) {
		conn, err := pgx.ConnectConfig(ctx, config)
		return conn, func() { conn.Close(background()) }, err
	}})
	must(err)
	return locks
}

// isTicket tells an answer with a ticket from an answer to the heartbeat.
var isTicket = regexp.MustCompile("[0-9]{12}").Match

// impatient has little patience, over connections that break when they send while it is away.
func impatient(away *atomic.Bool) *dlock.Locks {
	locks := wired(func(sent bool, _ []byte) error {
		if sent && away.Load() {
			return errBoom
		}
		return nil
	})
	locks.Patience = 100 * time.Millisecond
	return locks
}

// Locks over connections that show what passes, and break if that returns an error
func wired(pass func(sent bool, text []byte) error) *dlock.Locks {
	return over(func(config *pgx.ConnConfig) { config.DialFunc = through(pass) })
}

func through(pass func(sent bool, text []byte) error) pgconn.DialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		return wire{conn, pass, new(bytes.Buffer)}, err
	}
}

type wire struct {
	net.Conn
	pass func(sent bool, text []byte) error
	rest *bytes.Buffer
}

func (w wire) Write(text []byte) (int, error) {
	if err := w.pass(true, text); err != nil {
		w.Close() // a driver may try again
		return 0, err
	}
	return w.Conn.Write(text)
}

// The server sends an answer as a whole.  The driver's buffer may have room for a part of it.
func (w wire) Read(text []byte) (int, error) {
	if w.rest.Len() == 0 {
		piece := make([]byte, 8192)
		n, err := w.Conn.Read(piece)
		if failure := w.pass(false, piece[:n]); failure != nil {
			w.Close()
			return 0, failure
		}
		if n == 0 {
			return 0, err
		}
		w.rest.Write(piece[:n])
	}
	return w.rest.Read(text)
}

// A context that tells when a call begins to wait
type waiter struct {
	context.Context
	once  sync.Once
	waits func()
}

func (w *waiter) Done() <-chan struct{} {
	w.once.Do(w.waits)
	return w.Context.Done()
}

type row struct {
	name string
	test func()
}

// A lock in session scope, and one in lease scope
func both(name string, options ...dlock.Option) []*dlock.Lock {
	return []*dlock.Lock{locks.NewLock(name, options...),
		locks.NewLock(name, append([]dlock.Option{dlock.TTL(long)}, options...)...)}
}

var rows = []row{

	//
	// Plain use
	//

	{"session_acquire_release", func() {
		lock := locks.NewLock("plain", dlock.Info("me"))
		must(acquire(lock))
		fence := lock.Fence()
		check(!admin.isFree("plain"), "free")
		seen := admin.row("SELECT ticket, info, scope FROM dlock_locks WHERE name = 'plain'")
		check(fmt.Sprint(seen) == fmt.Sprintf("[%d me session]", fence), seen)
		must(lock.Check())
		must(lock.Context().Err())
		must(lock.Unlock())
		check(admin.left("plain") == 0, "left")
		check(lock.Context().Err() != nil && !lock.Lost(), "the context ends with the lock")
		must(do(lock, func(context.Context) { check(lock.Fence() > fence, "a greater fence") }))
		check(admin.left("plain") == 0, "left")
	}},

	{"session_exception", func() {
		check(locks.NewLock("plain").Do(ctx, boom) == errBoom, "the work's error")
		check(admin.left("plain") == 0, "left")
		func() {
			defer func() { check(recover() == errBoom, "the panic") }()
			do(locks.NewLock("plain"), func(context.Context) { panic(errBoom) })
		}()
		check(admin.left("plain") == 0, "left")
	}},

	{"session_on_connection", func() {
		with(main_, func(conn *pgx.Conn) {
			outer, inner := dlock.OnConn(conn, "plain"), dlock.OnConn(conn, "plain")
			must(do(outer, func(context.Context) {
				must(do(inner, func(context.Context) {
					check(inner.Fence() == outer.Fence(), "one fence")
					_, err := conn.Exec(ctx, "SELECT 1")
					must(err)
				}))
				check(!admin.isFree("plain"), "free")
			}))
			check(admin.isFree("plain"), "free")
			_, err := conn.Exec(ctx, "SELECT 1")
			must(err)
			raises(dlock.BadArgument, "22023", acquire(dlock.OnConn(conn, "plain", dlock.TTL(long))))
		})
	}},

	{"lock_used_twice", func() {
		for _, lock := range both("twice") {
			var first, second chan error
			admin.holds("twice", func(int64) {
				first, second = async(func() error { return acquire(lock) }), async(func() error { return acquire(lock) })
				select {
				case err := <-first:
					first = second
					wrong(err)
				case err := <-second:
					wrong(err)
				}
				admin.untilWaits("twice")
			})
			must(<-first)
			fence := lock.Fence()
			wrong(acquire(lock))
			must(lock.Check())
			must(lock.Unlock())
			wrong(lock.Unlock())
			check(admin.left("twice") == 0, "left")
			must(do(lock, func(context.Context) { check(lock.Fence() > fence, "fence") }))
		}
	}},

	{"check_unheld", func() {
		with(main_, func(conn *pgx.Conn) {
			must(transaction(conn, func(tx pgx.Tx) error {
				for _, lock := range append(both("plain"), dlock.InTx(tx, "plain")) {
					wrong(lock.Check())
					must(do(lock, func(context.Context) { must(lock.Check()) }))
					wrong(lock.Check())
				}
				return nil
			}))
		})
		lease := locks.NewLease(dlock.TTL(long))
		wrong(lease.Check())
		must(lease.Do(ctx, func(context.Context) error { return lease.Check() }))
		wrong(lease.Check())
	}},

	{"try_busy", func() { allBusy(try) }},
	{"timeout", func() { allBusy(dlock.Timeout(50 * time.Millisecond)) }},

	{"shared", func() {
		first, second := locks.NewLock("shared", dlock.Shared()), locks.NewLock("shared", dlock.Shared())
		third := locks.NewLock("shared", try)
		must(acquire(first))
		must(acquire(second))
		check(first.Fence() != second.Fence(), "fences")
		busy(acquire(third))
		check(admin.ask("SELECT count(*) FROM dlock_locks WHERE name = 'shared' AND granted") == "2", "two hold")
		must(first.Unlock())
		must(second.Unlock())
		must(third.Do(ctx, nothing))
	}},

	{"slots", func() {
		big := locks.NewLock("slots", dlock.Slots(3), dlock.Permits(2))
		third := locks.NewLock("slots", dlock.Slots(3), try)
		must(acquire(big))
		must(do(locks.NewLock("slots", dlock.Slots(3)), func(context.Context) {
			busy(acquire(third))
			wrong(acquire(locks.NewLock("slots", dlock.Slots(4))))
			must(big.Unlock())
			must(third.Do(ctx, nothing))
		}))
	}},

	{"resize", func() {
		slots := func() string { return admin.ask("SELECT slots FROM dlock_slots WHERE name = 'pool'") }
		raises(dlock.NotAllowed, "42501", locks.Resize(ctx, "pool", 1))
		must(open(admin.dsn).Resize(ctx, "pool", 1))
		check(slots() == "1", "slots")
		must(open(admin.dsn).Resize(ctx, "pool", 0))
		check(slots() == "", "slots")
	}},

	{"transaction_commit", func() {
		with(main_, func(conn *pgx.Conn) {
			must(transaction(conn, func(tx pgx.Tx) error {
				lock := dlock.InTx(tx, "plain")
				must(do(lock, func(context.Context) {
					check(fmt.Sprint(lock.Fence()) == admin.ask("SELECT ticket FROM dlock_locks WHERE name = 'plain'"), "fence")
				}))
				check(!admin.isFree("plain"), "free")
				return nil
			}))
			check(admin.isFree("plain"), "free")
		})

		// over database/sql, with a guard
		db, err := sql.Open("pgx", main_)
		must(err)
		defer db.Close()
		tx, err := db.Begin()
		must(err)
		lock := dlock.InTx(dlock.SQL(tx), "plain")
		must(acquire(lock))
		check(!admin.isFree("plain"), "free")
		must(lock.Guard(ctx, dlock.SQL(tx)))
		must(tx.Commit())
		check(admin.isFree("plain"), "free")
		raises(dlock.WrongState, "55000", lock.Guard(ctx, dlock.SQL(db)))
	}},

	{"transaction_rollback", func() {
		with(main_, func(conn *pgx.Conn) {
			check(transaction(conn, func(tx pgx.Tx) error {
				return dlock.InTx(tx, "plain").Do(ctx, boom)
			}) == errBoom, "the work's error")
			check(admin.isFree("plain"), "free")
		})
	}},

	{"transaction_none", func() {
		pool, err := pgxpool.NewWithConfig(ctx, poolConfig(2))
		must(err)
		defer pool.Close()
		with(main_, func(conn *pgx.Conn) {
			lease := locks.NewLock("lease", kept...)
			must(do(lease, func(context.Context) {
				for _, tx := range []dlock.Querier{conn, pool} {
					raises(dlock.WrongState, "55000", acquire(dlock.InTx(tx, "plain")))
					_, err := dlock.InTxAll(ctx, tx, []string{"plain"})
					raises(dlock.WrongState, "55000", err)
					raises(dlock.WrongState, "55000", lease.Guard(ctx, tx))
				}
			}))
			check(admin.left("plain") == 0, "left")
			must(conn.Ping(ctx))
		})
	}},

	{"lease_acquire_release", func() {
		lock := locks.NewLock("lease", dlock.TTL(long), dlock.Owner("job/1"), dlock.Info("me"))
		must(do(lock, func(ctx context.Context) {
			seen := admin.row("SELECT ticket, scope, pid IS NULL, owner, info FROM dlock_locks WHERE name = 'lease'")
			check(fmt.Sprint(seen) == fmt.Sprintf("[%d lease t job/1 me]", lock.Fence()), seen)
			check(!lock.Lost() && ctx.Err() == nil, "lost")
			check(lock.Deadline() > dlock.Now(), "deadline")
			must(lock.Check())
		}))
		check(!lock.Lost(), "lost")
		check(admin.left("lease") == 0, "left")
	}},

	{"lease_renews", func() {
		lock := locks.NewLock("lease", kept...)
		must(do(lock, func(context.Context) {
			deadline := lock.Deadline()
			admin.untilRenewed(lock.Fence(), 2)
			check(!admin.isFree("lease") && !lock.Lost(), "held")
			until(func() bool { return lock.Deadline() > deadline }, "the deadline")
		}))
	}},

	{"lease_deadline", func() {
		lock := late().NewLock("lease", dlock.TTL(long))
		var waiting chan error
		var latest time.Duration
		with(admin.dsn, func(other *pgx.Conn) {
			_, err := other.Exec(ctx, "SELECT pg_advisory_lock(17)")
			must(err)
			admin.holds("lease", func(int64) {
				waiting = async(func() error { return acquire(lock) })
				admin.untilWaits("lease")
			})
			admin.untilCallWaits()
			check(len(waiting) == 0, "still waiting")
			latest = dlock.Now() + long*99/100
		})
		must(<-waiting)
		check(latest-long < lock.Deadline() && lock.Deadline() <= latest, "deadline")
		must(lock.Unlock())
	}},

	{"lease_many", func() {
		lease := locks.NewLease(dlock.TTL(long), dlock.Info("many"))
		held := func(count int) bool {
			return admin.is("SELECT count(*) = 1 AND min(held) = $1 FROM dlock_leases WHERE lease = $2", count, lease.ID())
		}
		must(lease.Do(ctx, func(context.Context) error {
			var many []*dlock.Lock
			for _, name := range []string{"a", "b", "c"} {
				lock := lease.NewLock(name)
				must(acquire(lock))
				many = append(many, lock)
			}
			check(held(3), "3")
			must(many[0].Unlock())
			check(held(2) && admin.isFree("a") && !admin.isFree("b"), "2")
			busy(acquire(lease.NewLock("b", try)))
			return nil
		}))
		check(admin.ask("SELECT count(*) FROM dlock_leases") == "0", "leases")
		check(admin.isFree("b") && admin.isFree("c"), "free")
		must(lease.Do(ctx, func(ctx context.Context) error {
			return lease.NewLock("a").Do(ctx, func(context.Context) error {
				check(held(1), "1")
				return nil
			})
		}))
	}},

	{"acquire_all", func() {
		lease, names := locks.NewLease(dlock.TTL(long)), []string{`a"\,`, "b"}
		must(opened(lease))
		all := func(ctx context.Context, options ...dlock.Option) error {
			held, err := lease.LockAll(ctx, names, options...)
			check((err == nil) == (len(held) == 2), held)
			return err
		}
		left := func(count string) { check(admin.ask("SELECT count(*) FROM dlock_locks") == count, "left") }
		admin.holds("b", func(int64) {
			busy(all(ctx, try))
			left("1")
			ctx, cancel := context.WithCancel(ctx)
			waiting := async(func() error { return all(ctx) })
			admin.untilWaits("b")
			cancel()
			raises(dlock.Cancelled, "57014", <-waiting)
			left("1")
		})
		must(all(ctx))
		check(!admin.isFree(names[0]) && !admin.isFree("b"), "free")
		must(lease.Close())
		left("0")
	}},

	{"renew_ttl", func() {
		lock, lease := locks.NewLock("lease", dlock.TTL(long)), locks.NewLease(dlock.TTL(long))
		must(acquire(lock))
		must(opened(lease))
		renews := func(id int64, renew func(context.Context, time.Duration) error, deadline func() time.Duration) {
			is := func(ttl string) bool { return admin.ask("SELECT ttl FROM dlock_leases WHERE lease = $1", id) == ttl }
			must(renew(ctx, 2*long))
			check(is("02:00:00") && deadline() > dlock.Now()+long, "longer")
			must(renew(ctx, long/2))
			shorter := deadline()
			check(is("00:30:00") && shorter < dlock.Now()+long/2, "shorter")
			for _, refused := range []time.Duration{-long, 48 * long} {
				raises(dlock.BadArgument, "22023", renew(ctx, refused))
				check(is("00:30:00") && deadline() == shorter, "changed")
			}
			must(renew(ctx, 0))
			check(is("00:30:00"), "changed")
		}
		renews(lock.Fence(), lock.Renew, lock.Deadline)
		renews(lease.ID(), lease.Renew, lease.Deadline)
		plain := locks.NewLock("plain")
		must(do(plain, func(context.Context) { wrong(plain.Renew(ctx, long)) }))
		admin.force(lock.Fence())
		lost(lock.Renew(ctx, 0))
		lost(lock.Unlock())
		must(lease.Close())
		wrong(lease.Renew(ctx, 0))
	}},

	{"change_held", func() {
		lease := locks.NewLease(dlock.TTL(long))
		must(opened(lease))
		with(main_, func(conn *pgx.Conn) {
			transaction(conn, func(tx pgx.Tx) error {
				for _, lock := range append(both("held"), lease.NewLock("held"), dlock.InTx(tx, "held")) {
					is := func(expected bool) {
						held, err := lock.IsHeld(ctx)
						must(err)
						check(held == expected, "held: ", held)
					}
					is(false)
					must(acquire(lock))
					fence := lock.Fence()
					is(true)
					must(lock.SetInfo(ctx, "changed"))
					must(lock.Downgrade(ctx))
					seen := admin.row("SELECT ticket, info, mode FROM dlock_locks WHERE name = 'held'")
					check(fmt.Sprint(seen) == fmt.Sprintf("[%d changed shared]", fence) && lock.Fence() == fence, seen)
					must(lock.Check())
					is(true)
					admin.force(fence)
					is(false)
					lost(lock.Downgrade(ctx))
					lock.Unlock()
				}
				return errBoom
			})
		})
		must(lease.SetInfo(ctx, "changed"))
		check(admin.ask("SELECT info FROM dlock_leases WHERE lease = $1", lease.ID()) == "changed", "info")
		must(lease.Close())
	}},

	{"lease_closed_under_lock", func() {
		lease := locks.NewLease(dlock.TTL(long))
		must(opened(lease))
		lock := lease.NewLock("closed")
		must(acquire(lock))
		must(lease.Close())
		check(admin.left("closed") == 0, "left")
		told(lock)
		lost(lock.Unlock())
		must(lease.Close())
		check(!lease.Lost(), "lost")
	}},

	{"lease_opened_twice", func() {
		lease := locks.NewLease(dlock.TTL(long))
		seen := func(count string) { check(admin.ask("SELECT count(*) FROM dlock_leases") == count, count) }
		results := []error{}
		for _, opening := range []chan error{async(func() error { return opened(lease) }),
			async(func() error { return opened(lease) })} {
			if err := <-opening; err != nil {
				results = append(results, err)
			}
		}
		check(len(results) == 1, results)
		wrong(results[0])
		wrong(opened(lease))
		seen("1")
		must(lease.Close())
		seen("0")
	}},

	{"lease_closed_while_opening", func() {
		lease := locks.NewLease(dlock.TTL(long))
		open := func() error { return opened(lease) }
		order("freeze")
		opening, refused := async(open), async(open)
		var err error
		select {
		case err = <-refused:
		case err = <-opening:
			opening = refused
		}
		wrong(err)
		closing := async(lease.Close)
		order("thaw")
		must(<-closing)
		must(<-opening)
		check(admin.ask("SELECT count(*) FROM dlock_leases") == "0", "leases")
		must(lease.Do(ctx, nothing))
	}},

	{"connections", func() {
		few := func() { check(connected(4), "connections") }
		lease := locks.NewLease(dlock.TTL(long))
		must(lease.Do(ctx, func(context.Context) error {
			var many []*dlock.Lock
			for n := 0; n < 1000; n++ {
				many = append(many, lease.NewLock(fmt.Sprint("many/", n)))
			}
			for n := 0; n < 10; n++ {
				many = append(many, locks.NewLock(fmt.Sprint("own/", n), dlock.TTL(long)))
			}
			for n, lock := range many {
				must(acquire(lock))
				if n%100 == 0 || n >= 1000 {
					few()
				}
			}
			for _, lock := range many {
				must(lock.Unlock())
			}
			few()
			return nil
		}))
	}},

	{"connections_waiting", func() {
		lease := locks.NewLease(dlock.TTL(long))
		must(lease.Do(ctx, func(context.Context) error {
			many, waiting := []*dlock.Lock{}, []chan error{}
			with(admin.dsn, func(holder *pgx.Conn) {
				_, err := query(holder, "SELECT count(dlock_acquire('many/' || n)) FROM generate_series(0, 19) AS n")
				must(err)
				for n := 0; n < 20; n += 2 {
					many = append(many, lease.NewLock(fmt.Sprint("many/", n)),
						locks.NewLock(fmt.Sprint("many/", n+1), dlock.TTL(long)))
				}
				for _, lock := range many {
					lock := lock
					waiting = append(waiting, async(func() error { return acquire(lock) }))
				}
				admin.until("SELECT count(*) = 20 FROM dlock_locks WHERE NOT granted")
				check(connected(22), "connections")
			})
			for _, result := range waiting {
				must(<-result)
			}
			until(func() bool { return connected(4) }, "few connections")
			for _, lock := range many {
				must(lock.Unlock())
			}
			return nil
		}))
	}},

	{"lease_same_owner", func() {
		var fence int64
		with(main_, func(conn *pgx.Conn) {
			must(conn.QueryRow(ctx, "SELECT dlock_ttl_acquire('lease', '1 h', owner => 'job/1')").Scan(&fence))
		})
		lock := locks.NewLock("lease", dlock.TTL(2*long), dlock.Owner("job/1"), try)
		must(do(lock, func(context.Context) {
			check(lock.Fence() == fence, "fence")
			check(lock.Deadline() < dlock.Now()+long, "deadline")
			busy(acquire(locks.NewLock("lease", dlock.TTL(long), dlock.Owner("job/2"), try)))
		}))
		check(admin.left("lease") == 0, "left")
	}},

	{"guard_commits", func() {
		lock := locks.NewLock("lease", dlock.TTL(long))
		must(do(lock, func(context.Context) {
			with(main_, func(conn *pgx.Conn) {
				must(transaction(conn, func(tx pgx.Tx) error {
					must(lock.Guard(ctx, tx))
					_, err := tx.Exec(ctx, "INSERT INTO data VALUES (1)")
					return err
				}))
			})
		}))
		check(admin.ask("SELECT count(*) FROM data WHERE n = 1") == "1", "written")
	}},

	{"guard_refuses", func() {
		lock := locks.NewLock("lease", dlock.TTL(long))
		lost(do(lock, func(context.Context) {
			admin.force(lock.Fence())
			with(main_, func(conn *pgx.Conn) {
				lost(transaction(conn, func(tx pgx.Tx) error {
					if err := lock.Guard(ctx, tx); err != nil {
						return err
					}
					_, err := tx.Exec(ctx, "INSERT INTO data VALUES (2)")
					return err
				}))
			})
		}))
		check(admin.ask("SELECT count(*) FROM data WHERE n = 2") == "0", "written")
	}},

	{"enqueue_free", func() {
		tickets := locks.NewTickets()
		coming := make(chan dlock.Event, 1)
		done := async(func() error {
			coming <- next(tickets)
			return nil
		})
		ticket := enqueue(tickets, "queue")
		must(<-done)
		isEvent(<-coming, "granted", "queue", ticket)
		another := enqueue(tickets, "next")
		isEvent(next(tickets), "granted", "next", another)
		none(tickets)
		must(tickets.Release(ctx, ticket))
		check(admin.isFree("queue") && !admin.isFree("next"), "free")
		must(tickets.Close())
	}},

	{"enqueue_waits", func() {
		tickets := locks.NewTickets()
		var ticket int64
		admin.holds("queue", func(int64) {
			ticket = enqueue(tickets, "queue")
			none(tickets)
		})
		isEvent(next(tickets), "granted", "queue", ticket)
		must(tickets.Close())
	}},

	{"enqueue_thousands", func() {
		with(admin.dsn, func(holder *pgx.Conn) {
			tickets, waiting := locks.NewTickets(), map[int64]bool{}
			_, err := query(holder, "SELECT count(dlock_acquire('job/' || n)) FROM generate_series(1, 2000) AS n")
			must(err)
			for n := 1; n <= 2000; n++ {
				waiting[enqueue(tickets, fmt.Sprint("job/", n))] = true
			}
			check(len(waiting) == 2000, "tickets")
			check(admin.ask("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'dlock'") == "1", "one connection")
			_, err = query(holder, "SELECT dlock_release_all()")
			must(err)
			for len(waiting) > 0 {
				event := next(tickets)
				check(event.Event == "granted" && waiting[event.Ticket], event)
				delete(waiting, event.Ticket)
			}
			none(tickets)
			must(tickets.Close())
		})
	}},

	{"enqueue_connection_killed", func() {
		lease := locks.NewLease(dlock.TTL(long))
		must(opened(lease))
		ours, unread, released, kept := locks.NewTickets(), locks.NewTickets(), locks.NewTickets(), lease.NewTickets()
		var held, waits int64
		admin.holds("busy", func(int64) {
			enqueue(unread, "unread")
			gone := enqueue(released, "released")
			enqueue(ours, "free")
			check(next(ours).Event == "granted", "granted")
			held, waits = enqueue(kept, "kept"), enqueue(kept, "busy")
			isEvent(next(kept), "granted", "kept", held)
			killSessions()
			_, err := ours.Next(ctx)
			lost(err)
			ticket := enqueue(ours, "free")
			isEvent(next(ours), "granted", "free", ticket)
			_, err = unread.Enqueue(ctx, "other")
			lost(err)
			ticket = enqueue(unread, "other")
			isEvent(next(unread), "granted", "other", ticket)
			lost(released.Release(ctx, gone))
			ticket = enqueue(released, "released")
			isEvent(next(released), "granted", "released", ticket)
			must(unread.Close())
			must(released.Close())
			none(kept)
			seen := admin.ask("SELECT string_agg(ticket::text, ' ' ORDER BY ticket) FROM dlock_locks WHERE lease = $1", lease.ID())
			check(seen == fmt.Sprint(held, " ", waits), seen)
		})
		isEvent(next(kept), "granted", "busy", waits)
		none(kept)
		must(kept.Release(ctx, waits))
		must(kept.Release(ctx, held))
		must(kept.Close())
		must(ours.Close())
		must(lease.Close())
	}},

	{"enqueue_released", func() {
		tickets := locks.NewTickets()
		ticket := enqueue(tickets, "queue")
		check(next(tickets).Event == "granted", "granted")
		admin.force(ticket)
		isEvent(next(tickets), "released", "queue", ticket)
		lost(tickets.Release(ctx, ticket))
		waiting := async(func() error {
			_, err := tickets.Next(ctx)
			return err
		})
		must(tickets.Close())
		wrong(<-waiting)
	}},

	{"election_hand_over", func() {
		var fences [2]int64
		leads, leave := [2]chan bool{make(chan bool), make(chan bool)}, [2]chan bool{make(chan bool), make(chan bool)}
		campaign := func(n int) chan error {
			election := locks.NewElection("leader", dlock.TTL(long), dlock.Info(fmt.Sprint("node-", n)))
			return async(func() error {
				return election.Run(ctx, func(_ context.Context, lock *dlock.Lock) error {
					fences[n] = lock.Fence()
					leads[n] <- true
					<-leave[n]
					return nil
				})
			})
		}
		first := campaign(0)
		<-leads[0]
		second := campaign(1)
		admin.untilWaits("leader")
		check(admin.ask("SELECT info FROM dlock_locks WHERE name = 'leader' AND granted") == "node-0", "info")
		close(leave[0])
		must(<-first)
		<-leads[1]
		close(leave[1])
		must(<-second)
		check(fences[0] < fences[1], fences)

		admin.holds("leader", func(int64) {
			ctx, stop := context.WithCancel(ctx)
			running := async(func() error {
				return locks.NewElection("leader").Run(ctx, func(context.Context, *dlock.Lock) error { return nil })
			})
			admin.untilWaits("leader")
			stop()
			raises(dlock.Cancelled, "57014", <-running)
			check(admin.left("leader") == 1, "left")
		})
	}},

	{"election_lost", func() {
		// the work returns at the loss, or with the error of its context
		for _, result := range []func(context.Context) error{func(context.Context) error { return nil },
			func(ctx context.Context) error { return fmt.Errorf("broken off: %w", ctx.Err()) }} {
			var fences []int64
			must(locks.NewElection("leader", kept...).Run(ctx, func(ctx context.Context, lock *dlock.Lock) error {
				fences = append(fences, lock.Fence())
				if len(fences) == 2 {
					return nil
				}
				admin.force(lock.Fence())
				<-ctx.Done()
				return result(ctx)
			}))
			check(fences[0] < fences[1], fences)
		}
		check(locks.NewElection("leader", kept...).Run(ctx,
			func(context.Context, *dlock.Lock) error { return errBoom }) == errBoom, "the work's error")
	}},

	{"election_restart", func() {
		lease := locks.NewLease(kept...)
		must(opened(lease))
		must(acquire(lease.NewLock("leader")))
		led := make(chan bool, 1)
		running := async(func() error {
			return hasty(0).NewElection("leader", dlock.TTL(long)).Run(ctx, func(context.Context, *dlock.Lock) error {
				led <- true
				return nil
			})
		})
		admin.untilWaits("leader")
		order("restart")
		admin.untilRenewed(lease.ID(), 1)
		check(len(led) == 0, "leads")
		must(lease.Close())
		must(<-running)
		check(len(led) == 1, "leads")
	}},

	{"election_outage", func() {
		var fences []int64
		told := make(chan bool, 1)
		running := async(func() error {
			return hasty(0).NewElection("leader", dlock.TTL(short)).Run(ctx, func(ctx context.Context, lock *dlock.Lock) error {
				fences = append(fences, lock.Fence())
				if len(fences) == 1 {
					admin.heartbeat()
					order("freeze")
					<-ctx.Done()
					told <- lock.Lost()
				}
				return nil
			})
		})
		check(<-told, "lost")
		order("thaw")
		must(<-running)
		check(len(fences) == 2 && fences[0] < fences[1], fences)
	}},

	{"watch", func() {
		watch, err := locks.Watch(ctx, "leader")
		must(err)
		isEvent(next(watch), "free", "leader", 0)
		with(admin.dsn, func(conn *pgx.Conn) {
			row, err := query(conn, "SELECT dlock_acquire('leader', info => 'node-1')")
			must(err)
			ticket := int64(atoi(row[0]))
			event := next(watch)
			isEvent(event, "held", "leader", ticket)
			check(event.Info == "node-1", event)
			killSessions()
			// over a new connection, the first event is the current holder
			isEvent(next(watch), "held", "leader", ticket)
			_, err = query(conn, "SELECT dlock_release_all()")
			must(err)
		})
		isEvent(next(watch), "free", "leader", 0)
		must(watch.Close())
	}},

	{"observer", func() {
		told, watched := make(chan string, 9), open(main_)
		tell := func(event, what string) {
			told <- event + " " + what
			panic("observed")
		}
		watched.Hooks = &dlock.Hooks{
			Acquired: func(what string, _ time.Duration) { tell("acquired", what) },
			Failed: func(what string, _ time.Duration, err error) {
				busy(err)
				tell("failed", what)
			},
			Released: func(what string, _ time.Duration) { tell("released", what) },
			Lost:     func(what string, _ error) { tell("lost", what) },
		}
		is := func(expected string) {
			seen := <-told
			check(seen == expected, seen, ", not ", expected)
		}
		must(do(watched.NewLock("plain"), func(context.Context) { is(`acquired lock "plain"`) }))
		is(`released lock "plain"`)
		admin.holds("busy", func(int64) { busy(acquire(watched.NewLock("busy", try))) })
		is(`failed lock "busy"`)
		lock := watched.NewLock("lease", kept...)
		lost(do(lock, func(context.Context) {
			is(`acquired lock "lease"`)
			admin.force(lock.Fence())
			is(`lost lock "lease"`)
		}))
		is(`released lock "lease"`)
		until(func() bool { return strings.Count(logged.String(), "observed") >= 6 }, "the log")
		check(len(told) == 0, "more")
	}},

	{"errors", errorRow},
	{"sharding", sharding},

	//
	// Faults
	//

	{"session_connection_killed", func() {
		lock := locks.NewLock("killed")
		lost(do(lock, func(ctx context.Context) {
			killSessions()
			admin.holds("killed", func(fence int64) { check(fence > lock.Fence(), "fence") })
			<-ctx.Done() // a lock in session scope is notified, too
		}))
	}},

	{"session_restart", func() {
		lock := locks.NewLock("restart")
		lost(do(lock, func(context.Context) { order("restart") }))
		fence := lock.Fence()
		must(do(lock, func(context.Context) { check(lock.Fence() > fence, "fence") }))
	}},

	{"lease_connection_killed", func() {
		lock := locks.NewLock("lease", kept...)
		must(do(lock, func(context.Context) {
			for n := 0; n < 2; n++ {
				admin.heartbeat()
				killSessions()
				admin.untilRenewed(lock.Fence(), 1)
			}
			check(!lock.Lost() && admin.is("SELECT dlock_check('lease', $1)", lock.Fence()), "held")
		}))
	}},

	{"lease_acquire_killed", func() {
		lock := locks.NewLock("lease", dlock.TTL(long), dlock.Owner("job/1"))
		var waiting chan error
		admin.holds("lease", func(int64) {
			waiting = async(func() error { return acquire(lock) })
			admin.untilWaits("lease")
			check(admin.is("SELECT pg_terminate_backend(pid, 60000) FROM dlock_locks WHERE NOT granted"), "terminated")
			admin.untilWaits("lease")
		})
		must(<-waiting)
		seen := admin.row("SELECT string_agg(ticket::text, ' '), min(owner) FROM dlock_locks WHERE name = 'lease'")
		check(fmt.Sprint(seen) == fmt.Sprintf("[%d job/1]", lock.Fence()), seen)
		must(lock.Unlock())
	}},

	{"lease_backend_stopped", func() {
		lock := locks.NewLock("lease", kept...)
		must(do(lock, func(context.Context) {
			pid := admin.heartbeat()
			order("stop %s", pid)
			admin.untilRenewed(lock.Fence(), 2)
			check(!lock.Lost(), "lost")
			order("continue %s", pid)
			check(!admin.isFree("lease"), "free")
		}))
		check(admin.left("lease") == 0, "left")
	}},

	{"lease_server_stopped", func() {
		lock := locks.NewLock("lease", dlock.TTL(short))
		lost(do(lock, func(context.Context) {
			admin.heartbeat()
			order("freeze")
			told(lock)
			order("thaw")
			check(admin.is("SELECT true") && lock.Lost(), "lost")
		}))
		admin.untilFree("lease")
	}},

	{"lease_client_stopped", func() {
		lock := locks.NewLock("lease", dlock.TTL(short))
		lost(do(lock, func(ctx context.Context) {
			called := make(chan bool, 1)
			lock.OnLost(func(*dlock.Lock) { called <- true })
			order("suspend %d SELECT dlock_try_xact_acquire('lease') IS NOT NULL", os.Getpid())
			check(ctx.Err() != nil, "the context has ended")
			check(lock.Lost(), "lost")
			<-called
			check(admin.is("SELECT true") && lock.Lost(), "lost")
			admin.holds("lease", func(fence int64) { check(fence > lock.Fence(), "fence") })
		}))
	}},

	{"lease_restart", func() {
		lock := locks.NewLock("lease", kept...)
		must(do(lock, func(context.Context) {
			order("restart")
			admin.untilRenewed(lock.Fence(), 2)
			check(!lock.Lost() && admin.is("SELECT dlock_check('lease', $1)", lock.Fence()), "held")
		}))
		check(admin.left("lease") == 0, "left")
	}},

	{"lease_worker_killed", func() {
		lock, successor := locks.NewLock("lease", kept...), locks.NewLock("lease", dlock.TTL(long))
		var waiting chan error
		must(do(lock, func(context.Context) {
			waiting = async(func() error { return acquire(successor) })
			admin.untilWaits("lease")
			check(admin.is("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"+
				" WHERE backend_type = 'dlock worker'"), "terminated")
			admin.untilRenewed(lock.Fence(), 2)
			check(!lock.Lost(), "lost")
		}))
		must(<-waiting)
		must(successor.Unlock())
	}},

	{"lease_forced_release", func() {
		lock := locks.NewLock("lease", kept...)
		lost(do(lock, func(ctx context.Context) {
			admin.force(lock.Fence())
			told(lock)
			check(ctx.Err() == context.Canceled && lock.Lost(), "stays lost")
		}))
	}},

	{"lease_forced_one_of_many", func() {
		lease := locks.NewLease(kept...)
		must(lease.Do(ctx, func(context.Context) error {
			still, forced := lease.NewLock("kept"), lease.NewLock("forced")
			must(acquire(still))
			lost(do(forced, func(context.Context) {
				admin.force(forced.Fence())
				told(forced)
				check(!still.Lost() && !lease.Lost(), "lost")
			}))
			must(still.Unlock())
			return nil
		}))
		check(admin.left("kept") == 0, "left")
	}},

	{"lease_quorum_late", func() {
		lock := late().NewLock("lease", kept...)
		must(do(lock, func(context.Context) {
			admin.heartbeat()
			admin.untilRenewed(lock.Fence(), 1)
			admin.ask("UPDATE late.quorum SET late = true")
			called := admin.ask("SELECT last_value FROM late.calls")
			// the first call may have been sent before the update
			admin.until("SELECT last_value > $1::bigint + 1 FROM late.calls", called)
			deadline := lock.Deadline()
			admin.until("SELECT last_value > $1::bigint + 3 FROM late.calls", called)
			check(lock.Deadline() == deadline && !lock.Lost(), "deadline")
			admin.ask("UPDATE late.quorum SET late = false")
			until(func() bool { return lock.Deadline() > deadline }, "the deadline")
			check(!lock.Lost(), "lost")
		}))
	}},

	{"lease_opened_late", func() {
		lease := late().NewLease(dlock.TTL(time.Second))
		lost(lease.Do(ctx, func(context.Context) error { return lease.Check() }))
		admin.until("SELECT count(*) = 0 FROM dlock_leases")
		admin.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = 'app'")
	}},

	{"lease_callback", func() {
		lock, called := locks.NewLock("lease", kept...), make(chan string, 9)
		callback := func(name string) func(*dlock.Lock) {
			return func(of *dlock.Lock) {
				check(of == lock, "called with the lock")
				called <- name
				if name == "bad" {
					panic(errBoom)
				}
			}
		}
		lost(do(lock, func(context.Context) {
			lock.OnLost(callback("bad"))
			lock.OnLost(callback("good"))
			admin.force(lock.Fence())
			told(lock)
			lock.OnLost(callback("late"))
		}))
		until(func() bool { return strings.Contains(logged.String(), "boom") }, "the log")
		seen := map[string]int{<-called: 1}
		seen[<-called]++
		seen[<-called]++
		check(seen["bad"] == 1 && seen["good"] == 1 && seen["late"] == 1 && len(called) == 0, seen)
	}},

	{"lease_callback_hangs", func() {
		lease := locks.NewLease(dlock.TTL(short), dlock.Interval(200*time.Millisecond))
		lost(lease.Do(ctx, func(context.Context) error {
			lock, called, never := lease.NewLock("lease"), make(chan bool), make(chan bool)
			must(acquire(lock))
			lock.OnLost(func(*dlock.Lock) {
				called <- true
				<-never
			})
			admin.force(lock.Fence())
			<-called
			order("freeze")
			until(lease.Lost, "the loss of the lease")
			order("thaw")
			close(never)
			return nil
		}))
	}},

	{"acquire_client_timeout", func() {
		for _, lock := range both("busy") {
			admin.holds("busy", func(int64) {
				ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
				defer cancel()
				_, err := lock.Lock(ctx)
				raises(dlock.Cancelled, "57014", err)
				check(errors.Is(err, context.DeadlineExceeded), err)
				check(admin.left("busy") == 1, "left")
			})
			admin.untilFree("busy")
		}
	}},

	{"acquire_cancelled", func() {
		for _, lock := range both("busy") {
			admin.holds("busy", func(int64) {
				ctx, cancel := context.WithCancel(ctx)
				waiting := async(func() error {
					_, err := lock.Lock(ctx)
					return err
				})
				admin.untilWaits("busy")
				cancel()
				err := <-waiting
				raises(dlock.Cancelled, "57014", err)
				check(errors.Is(err, context.Canceled), err)
				check(admin.left("busy") == 1, "left")
			})
			admin.untilFree("busy")

			// cancelled after the grant, before its answer has arrived
			ctx, cancel := context.WithCancel(ctx)
			waiting := async(func() error {
				_, err := lock.Lock(ctx)
				return err
			})
			until(func() bool { return admin.left("busy") > 0 }, "the grant")
			cancel()
			if err := <-waiting; err == nil {
				must(lock.Unlock())
			} else {
				raises(dlock.Cancelled, "57014", err)
			}
			admin.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'busy'")
		}
	}},

	{"acquire_broken_off", func() {
		lease := locks.NewLease(dlock.TTL(long))
		must(lease.Do(ctx, func(context.Context) error {
			still := lease.NewLock("kept")
			must(acquire(still))
			with(main_, func(conn *pgx.Conn) {
				for _, lock := range append(both("busy"), lease.NewLock("busy"), dlock.OnConn(conn, "busy")) {
					admin.holds("busy", func(int64) {
						ctx, cancel := context.WithCancel(ctx)
						waiting := async(func() error {
							_, err := lock.Lock(ctx)
							return err
						})
						admin.untilWaits("busy")
						cancel()
						cancel()
						raises(dlock.Cancelled, "57014", <-waiting)
						check(admin.left("busy") == 1, "left")
						_, err := conn.Exec(background(), "SELECT 1")
						must(err)
					})
					admin.untilFree("busy")
				}
			})
			// canceled at each moment of the connect
			admin.holds("busy", func(int64) {
				for ms := 0; ms < 10; ms++ {
					ctx, cancel := context.WithTimeout(ctx, time.Duration(ms)*time.Millisecond)
					_, err := locks.NewLock("busy").Lock(ctx)
					cancel()
					raises(dlock.Cancelled, "57014", err)
				}
				admin.until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy'")
			})
			return still.Check()
		}))
	}},

	{"waiter_killed", func() {
		admin.holds("busy", func(int64) {
			waiter := exec.Command(os.Args[0], "wait")
			waiter.Stderr = os.Stderr
			must(waiter.Start())
			admin.untilWaits("busy")
			must(waiter.Process.Kill())
			admin.until("SELECT count(*) = 1 FROM dlock_locks WHERE name = 'busy'")
			waiter.Wait()
		})
	}},

	{"server_silent", func() {
		hasty, mine := hasty(time.Second), locks.NewLock("mine")
		must(acquire(mine))
		admin.holds("busy", func(int64) {
			stopping, stop := context.WithCancel(ctx)
			waiting := async(func() error {
				_, err := locks.NewLock("busy", dlock.TTL(long)).Lock(stopping)
				return err
			})
			admin.untilWaits("busy")
			order("freeze")
			stop()
			brief := dlock.Timeout(50 * time.Millisecond)
			silent := []chan error{
				async(func() error { return opened(hasty.NewLease(dlock.TTL(long))) }),
				async(func() error { return acquire(hasty.NewLock("x", brief)) }),
				async(func() error { return acquire(hasty.NewLock("x", brief, dlock.TTL(long))) })}
			released := async(mine.Unlock)
			raises(dlock.Cancelled, "57014", <-waiting)
			lost(<-released)
			for _, result := range silent {
				raises(dlock.ConnectionLost, "", <-result)
			}
			order("thaw")
		})
		admin.until("SELECT count(*) = 0 FROM dlock_locks")
	}},

	{"release_silent", func() {
		lease := locks.NewLease(kept...)
		must(lease.Do(ctx, func(context.Context) error {
			held := []*dlock.Lock{lease.NewLock("silent"), locks.NewLock("own", kept...)}
			for _, lock := range held {
				must(acquire(lock))
			}
			pids := strings.Fields(admin.ask("SELECT string_agg(pid::text, ' ') FROM pg_stat_activity" +
				" WHERE application_name = 'dlock'"))
			for _, pid := range pids {
				order("stop %s", pid)
			}
			for _, lock := range held {
				must(lock.Unlock())
				check(admin.left(lock.Name()) == 0, "left")
			}
			check(!lease.Lost(), "lost")
			for _, pid := range pids {
				order("continue %s", pid)
			}
			return nil
		}))
	}},

	{"release_owed", func() {
		lease := hasty(100 * time.Millisecond).NewLease(kept...)
		must(lease.Do(ctx, func(context.Context) error {
			lock := lease.NewLock("owed")
			must(acquire(lock))
			killSessions()
			order("freeze")
			raises(dlock.ConnectionLost, "", lock.Unlock())
			order("thaw")
			admin.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'owed'")
			check(!lease.Lost(), "lost")
			return lease.NewLock("owed", try).Do(ctx, nothing)
		}))
	}},

	{"acquire_owed", func() {
		// neither a cancel nor a check ends the request
		var away atomic.Bool
		lease := impatient(&away).NewLease(kept...)
		must(lease.Do(ctx, func(context.Context) error {
			admin.holds("owed", func(int64) {
				ctx, cancel := context.WithCancel(ctx)
				waiting := []chan error{
					async(func() error {
						_, err := lease.NewLock("owed").Lock(ctx)
						return err
					}),
					async(func() error {
						_, err := lease.LockAll(ctx, []string{"owed"})
						return err
					})}
				admin.until("SELECT count(*) = 2 FROM dlock_locks WHERE name = 'owed' AND NOT granted")
				order("freeze")
				away.Store(true)
				cancel()
				for _, result := range waiting {
					raises(dlock.Cancelled, "57014", <-result)
				}
				away.Store(false)
				order("thaw")
			})
			admin.until("SELECT count(*) = 0 FROM dlock_locks WHERE name = 'owed'")
			admin.untilRenewed(lease.ID(), 1)
			check(!lease.Lost(), "lost")
			return lease.NewLock("owed", try).Do(ctx, nothing)
		}))
	}},

	{"release_late", func() {
		first, second := lateJobs()
		must(acquire(first))
		abandoned("dlock_release_ticket", func(waitNoMore func()) {
			raises(dlock.ConnectionLost, "", first.Unlock())
			waitNoMore()
			must(acquire(second))
			check(second.Fence() > first.Fence(), "a greater fence")
		})
		check(admin.is("SELECT dlock_check('late', $1)", second.Fence()), "held")
		must(second.Unlock())
	}},

	{"release_repeated", func() {
		lease := late().NewLease(dlock.TTL(long))
		must(lease.Do(ctx, func(context.Context) error {
			tickets := lease.NewTickets()
			ticket := enqueue(tickets, "queue")
			abandoned("dlock_release_ticket", func(waitNoMore func()) {
				releasing := async(func() error { return tickets.Release(ctx, ticket) })
				admin.untilCallWaits()
				admin.ask("SELECT dlock_release_ticket($1)", ticket)
				waitNoMore()
				must(<-releasing)
			})
			return tickets.Close()
		}))
	}},

	{"release_refused", func() {
		with(main_, func(conn *pgx.Conn) {
			lock := dlock.OnConn(conn, "plain")
			refused := func(code string) {
				err := lock.Unlock()
				var own *dlock.Error
				check(errors.As(err, &own) && own.Code == code && own.Kind != dlock.LockLost, err)
				must(lock.Check())
				check(!admin.isFree("plain"), "free")
			}
			held, err := lock.Lock(ctx)
			must(err)
			fence := lock.Fence()
			conn.Exec(ctx, "BEGIN")
			conn.Exec(ctx, "SELECT 1 / 0")
			refused("25P02")
			conn.Exec(ctx, "ROLLBACK")
			// the program reads rows
			rows, err := conn.Query(ctx, "SELECT 1")
			must(err)
			refused("55000")
			rows.Close()
			must(held.Err())
			check(lock.Fence() == fence, "another fence")
			must(lock.Unlock())
			check(admin.isFree("plain"), "free")
			wrong(lock.Unlock())
		})
	}},

	{"undo_late", func() {
		first, second := lateJobs()
		abandoned("dlock_locks", func(waitNoMore func()) {
			admin.holds("late", func(int64) {
				ctx, cancel := context.WithCancel(ctx)
				waiting := async(func() error {
					_, err := first.Lock(ctx)
					return err
				})
				admin.untilWaits("late")
				cancel()
				raises(dlock.Cancelled, "57014", <-waiting)
				waitNoMore()
			})
			must(acquire(second))
		})
		check(admin.is("SELECT dlock_check('late', $1)", second.Fence()), "held")
		must(second.Unlock())
	}},

	{"renew_late", func() {
		lock, _ := lateJobs()
		must(do(lock, func(context.Context) {
			abandoned("dlock_renew", func(waitNoMore func()) {
				raises(dlock.ConnectionLost, "", lock.Renew(ctx, long/2))
				waitNoMore()
				must(lock.Renew(ctx, long))
				check(lock.Deadline() <= dlock.Now()+long/2, "deadline")
			})
			must(lock.Check())
		}))
	}},

	{"renew_lost", func() {
		for _, after := range []bool{true, false} {
			first, second := lateJobs()
			must(acquire(first))
			abandoned("dlock_renew", func(waitNoMore func()) {
				raises(dlock.ConnectionLost, "", first.Renew(ctx, short))
				order("freeze")
				if after {
					told(first)
				}
				err := first.Unlock()
				check(errors.Is(err, dlock.LockLost) || errors.Is(err, dlock.ConnectionLost), err)
				order("thaw")
				waitNoMore()
				must(acquire(second))
				check(second.Fence() > first.Fence(), "a greater fence")
			})
			check(admin.is("SELECT dlock_check('late', $1)", second.Fence()), "held")
			must(second.Unlock())
		}
	}},

	{"pool_returned", poolReturned},

	{"clock_stepped", func() {
		const day = 86400
		lock := locks.NewLock("lease", kept...)
		must(do(lock, func(context.Context) {
			before, deadline := time.Now().Unix(), lock.Deadline()
			for _, seconds := range []int64{day, -day} {
				order("clock %d", seconds)
				until(func() bool {
					off := time.Now().Unix() - before - seconds
					return -day/2 < off && off < day/2
				}, "the clock")
				check(!lock.Lost() && lock.Deadline() < deadline+long, "deadline")
				admin.untilRenewed(lock.Fence(), 1)
			}
			until(func() bool { return lock.Deadline() > deadline }, "the deadline")
			check(lock.Deadline() < dlock.Now()+long, "deadline")
		}))
		lock = locks.NewLock("lease", dlock.TTL(short))
		lost(do(lock, func(context.Context) {
			admin.heartbeat()
			order("freeze")
			told(lock)
			order("thaw")
		}))
		order("clock 0")
	}},

	{"lease_promotion", func() {
		// the standby is tried first, and skipped
		pair := open("postgres://app@" + os.Getenv("DLOCK_STANDBY") + "," + os.Getenv("DLOCK_OTHER") + "/postgres?sslmode=disable")
		promoted := &session{dsn: address("STANDBY", "admin", "")}
		lock := pair.NewLock("lease", kept...)
		must(do(lock, func(context.Context) {
			order("promote")
			promoted.until("SELECT count(*) = 1 FROM dlock_leases WHERE lease = $1", lock.Fence())
			promoted.untilRenewed(lock.Fence(), 2)
			check(!lock.Lost() && promoted.is("SELECT dlock_check('lease', $1)", lock.Fence()), "held")
		}))
		check(promoted.left("lease") == 0, "left")
		fence := lock.Fence()
		must(do(lock, func(context.Context) { check(lock.Fence() > fence, "fence") }))
	}},
}

// Two locks of one owner in the schema late, with little patience. The driver sends a cancel when a connection breaks.
// The cancel does not reach a call that waits in the schema late.
func lateJobs() (first, second *dlock.Lock) {
	locks := over(func(config *pgx.ConnConfig) {
		config.RuntimeParams["search_path"] = "late, public"
		config.DialFunc = through(func(sent bool, text []byte) error {
			const cancel = 80877102 // the code of the request in PostgreSQL's protocol; the process follows
			if sent && len(text) >= 16 && binary.BigEndian.Uint32(text[4:]) == cancel && admin.is(
				"SELECT wait_event = 'advisory' FROM pg_stat_activity WHERE pid = $1", binary.BigEndian.Uint32(text[8:])) {
				return errBoom
			}
			return nil
		})
	})
	locks.Patience = 100 * time.Millisecond
	job := func() *dlock.Lock { return locks.NewLock("late", dlock.TTL(long), dlock.Owner("job/1")) }
	return job(), job()
}

func background() context.Context { return context.Background() }

// Each scope requests a lock that another session holds.
func allBusy(timeout dlock.Option) {
	admin.holds("busy", func(int64) {
		with(main_, func(conn *pgx.Conn) {
			for _, lock := range append(both("busy", timeout), dlock.OnConn(conn, "busy", timeout)) {
				busy(acquire(lock))
				check(admin.left("busy") == 1, "left")
			}
			busy(transaction(conn, func(tx pgx.Tx) error { return acquire(dlock.InTx(tx, "busy", timeout)) }))
			check(admin.left("busy") == 1, "left")
		})
	})
}

func errorRow() {
	fails := func(kind dlock.Kind, code, sql string, values ...any) *dlock.Error {
		var err error
		with(main_, func(conn *pgx.Conn) { _, err = query(conn, sql, values...) })
		return raises(kind, code, dlock.Translate(err))
	}
	admin.holds("busy", func(int64) {
		busy(acquire(locks.NewLock("busy", try)))
		waiting := async(func() error { return acquire(locks.NewLock("busy")) })
		admin.untilWaits("busy")
		check(admin.is("SELECT pg_cancel_backend(pid) FROM dlock_locks WHERE NOT granted"), "cancelled")
		raises(dlock.Cancelled, "57014", <-waiting)
	})
	with(main_, func(one *pgx.Conn) {
		with(main_, func(two *pgx.Conn) {
			crosswise := func(conn *pgx.Conn, first, second string, met *sync.WaitGroup) chan error {
				return async(func() error {
					held := dlock.OnConn(conn, first)
					must(acquire(held))
					met.Done()
					met.Wait()
					err := dlock.OnConn(conn, second).Do(ctx, nothing)
					must(held.Unlock())
					return err
				})
			}
			met := &sync.WaitGroup{}
			met.Add(2)
			first, second := crosswise(one, "a", "b", met), crosswise(two, "b", "a", met)
			failure := <-first
			if other := <-second; other != nil {
				check(failure == nil, "one fails")
				failure = other
			}
			check(raises(dlock.Deadlock, "40P01", failure).Detail != "", "detail")
		})
	})
	fails(dlock.LockLost, "55L01", "SELECT dlock_guard('gone', 1)")
	raises(dlock.NotAllowed, "42501", acquire(locks.NewLock("reserved/1")))
	standby := open(address("STANDBY", "app", ""))
	standby.Patience = 0
	raises(dlock.NotPrimary, "25006", acquire(standby.NewLock("standby")))
	fails(dlock.StaleVersion, "40001", "SELECT dlock_version_bump('doc', 7)")
	raises(dlock.BadArgument, "22023", acquire(locks.NewLock("slots", dlock.Slots(0))))
	fails(dlock.BadArgument, "22004", "SELECT dlock_acquire(NULL)")
	must(do(locks.NewLock("slots", dlock.Slots(2)), func(context.Context) {
		wrong(acquire(locks.NewLock("slots", dlock.Slots(3))))
	}))
	for code, kind := range map[string]dlock.Kind{"53200": dlock.NoRoom, "53400": dlock.NoRoom,
		"58030": dlock.QuorumLate, "22012": dlock.Other} {
		check(fails(kind, code, "SELECT raise($1, $2)", code, "do this").Hint == "do this", "hint")
	}
	nowhere := open("postgres://127.0.0.1:1/postgres")
	nowhere.Patience = 0
	raises(dlock.ConnectionLost, "", acquire(nowhere.NewLock("x")))
	check(dlock.Translate(errBoom) == errBoom, "the program's own")
	raises(dlock.BadArgument, "22023", acquire(locks.NewLock("x", dlock.TTL(long), dlock.Interval(long))))
}

func sharding() {
	nowhere := "postgres://127.0.0.1:1/postgres"
	other := &session{dsn: address("OTHER", "admin", "")}
	server := func(key, dsn string) dlock.Server {
		source, err := dlock.FromDSN(dsn)
		must(err)
		return dlock.Server{Key: key, Source: source}
	}
	spread := func(servers ...dlock.Server) *dlock.Locks {
		locks, err := dlock.New(servers...)
		must(err)
		return locks
	}
	first, second, none := server("main", main_), server("other", address("OTHER", "app", "")), server("third", nowhere)
	both, turned, third := spread(first, second), spread(second, first), spread(first, second, none)
	var held []*dlock.Lock
	here, moved := 0, 0
	for n := 0; n < 20; n++ {
		name := fmt.Sprint("shard/", n)
		lock := both.NewLock(name)
		must(acquire(lock))
		held = append(held, lock)
		check(admin.left(name)+other.left(name) == 1, "on one server")
		here += admin.left(name)
		check((both.Key(name) == "main") == (admin.left(name) == 1), "the key")
		busy(acquire(turned.NewLock(name, try)))
		if third.Key(name) == "third" {
			moved++
		} else {
			check(third.Key(name) == both.Key(name), "only that server's names have moved")
		}
	}
	check(0 < here && here < 20 && moved > 0, here, moved)
	for _, lock := range held {
		must(lock.Unlock())
	}
	_, err := dlock.New(first, first)
	raises(dlock.BadArgument, "22023", err)
}

func poolReturned() {
	config := poolConfig(1)
	config.AfterRelease = func(conn *pgx.Conn) bool { return dlock.Reset(conn) == nil }
	pool, err := pgxpool.NewWithConfig(ctx, config)
	must(err)
	defer pool.Close()
	taken := func(work func(conn *pgx.Conn)) (pid uint32) {
		conn, err := pool.Acquire(ctx)
		must(err)
		defer conn.Release()
		work(conn.Conn())
		return conn.Conn().PgConn().PID()
	}
	unheld := func(conn *pgx.Conn) {
		row, err := query(conn, "SELECT dlock_is_held('pool')")
		must(err)
		check(row[0] == "f", "held")
	}
	pid := taken(func(conn *pgx.Conn) {
		must(acquire(dlock.OnConn(conn, "pool")))
		conn.Exec(ctx, "BEGIN")
		conn.Exec(ctx, "SELECT 1 / 0")
	})
	// a connection in a failed transaction does not stay in the pool
	taken(unheld)
	check(admin.isFree("pool"), "free")
	pid = taken(func(conn *pgx.Conn) { must(acquire(dlock.OnConn(conn, "pool"))) })
	check(taken(unheld) == pid, "the same connection")
	check(admin.isFree("pool"), "free")

	// Locks over the pool's connections: out of the pool while the lock is held, and clean afterwards
	over, err := dlock.New(dlock.Server{Source: dlock.FromPool(pool)})
	must(err)
	must(do(over.NewLock("pool"), func(context.Context) {
		check(!admin.isFree("pool"), "free")
		check(pool.Stat().IdleConns() == 0, "out of the pool")
	}))
	check(taken(unheld) == pid, "the same connection")
	lost(do(over.NewLock("pool"), func(context.Context) { killSessions() }))
	check(taken(unheld) != pid, "another connection")
}

// Features of Go
var own = []row{

	// The lock is granted, and its first renewal waits.
	{"cancelled_after_grant", func() {
		lock := late().NewLock("lease", dlock.TTL(long))
		with(admin.dsn, func(other *pgx.Conn) {
			_, err := other.Exec(ctx, "SELECT pg_advisory_lock(17)")
			must(err)
			ctx, cancel := context.WithCancel(ctx)
			waiting := async(func() error {
				_, err := lock.Lock(ctx)
				return err
			})
			admin.untilCallWaits()
			check(admin.left("lease") == 1, "granted")
			cancel()
			raises(dlock.Cancelled, "57014", <-waiting)
			check(admin.left("lease") == 0, "left")
		})
	}},

	// The server may read a cancel later, so a connection of the program is closed, although the answer has come.
	{"cancel_unread", func() {
		silent, err := net.Listen("tcp", "127.0.0.1:0")
		must(err)
		defer silent.Close()
		config, err := pgx.ParseConfig(main_)
		must(err)
		dial := config.DialFunc
		config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			return dial(ctx, network, address)
		}
		conn, err := pgx.ConnectConfig(ctx, config)
		must(err)
		ctx, cancel := context.WithCancel(ctx)
		var waiting <-chan error
		admin.holds("busy", func(int64) {
			waiting = async(func() error {
				_, err := dlock.OnConn(conn, "busy").Lock(ctx)
				return err
			})
			admin.untilWaits("busy")
			dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", silent.Addr().String())
			}
			cancel()
			_, err := silent.Accept()
			must(err)
		})
		raises(dlock.Cancelled, "57014", <-waiting)
		check(conn.IsClosed(), "closed")
		admin.untilFree("busy")
	}},

	// If the connection has become silent, the next round finds that.
	{"round_silent", func() {
		defer func(before time.Duration) { round = before }(round)
		round = 0
		var silent atomic.Bool
		tickets := wired(func(sent bool, _ []byte) error {
			if sent && silent.Load() {
				return errors.New("no answer")
			}
			return nil
		}).NewTickets()
		enqueue(tickets, "silent")
		ended, end := context.WithCancel(ctx)
		end()
		event, err := tickets.Next(ended)
		must(err)
		check(event.Event == "granted", "granted")
		silent.Store(true)
		_, err = tickets.Next(ctx)
		lost(err)
		must(tickets.Close())
	}},

	// The undo of a request releases no ticket that another lease holds with the same owner.
	{"cancelled_same_owner", func() {
		owner := dlock.Owner("job/1")
		first, second := locks.NewLease(kept...), locks.NewLease(kept...)
		must(opened(first))
		must(opened(second))
		own := func() *dlock.Lock { return locks.NewLock("busy", append(kept, owner)...) }
		for _, pair := range [][2]*dlock.Lock{{first.NewLock("busy", owner), second.NewLock("busy", owner)},
			{first.NewLock("busy", owner), own()}, {own(), second.NewLock("busy", owner)}} {
			holder, waiter := pair[0], pair[1]
			must(do(holder, func(context.Context) {
				ctx, cancel := context.WithCancel(ctx)
				waiting := async(func() error {
					_, err := waiter.Lock(ctx)
					return err
				})
				admin.untilWaits("busy")
				check(admin.is("SELECT bool_and((lease = ticket) = (lease NOT IN ($1, $2))) FROM dlock_locks('busy')",
					first.ID(), second.ID()), "the lease of a lock with a ttl is its ticket")
				cancel()
				raises(dlock.Cancelled, "57014", <-waiting)
				check(admin.left("busy") == 1 && !admin.isFree("busy"), "left")
				must(holder.Check())
			}))
			check(admin.left("busy") == 0, "left")
		}
		must(first.Close())
		must(second.Close())
	}},

	// The context ends after the server's answer, before the client reads it.
	{"cancelled_after_open", func() {
		ctx, cancel := context.WithCancel(ctx)
		var opens atomic.Bool
		over := wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_lease_open")) {
				opens.Store(true)
			} else if !sent && opens.Load() {
				cancel()
			}
			return nil
		})
		raises(dlock.Cancelled, "57014", over.NewLease(dlock.TTL(long)).Do(ctx, nothing))
		check(admin.ask("SELECT count(*) FROM dlock_leases") == "0", "leases")
	}},

	// A request with the context of an earlier hold
	{"context_of_lost_lock", func() {
		lock := locks.NewLock("lost")
		must(acquire(lock))
		ended := lock.Context()
		must(lock.Unlock())
		_, err := lock.Lock(ended)
		raises(dlock.Cancelled, "57014", err)
		lost(do(lock, func(ctx context.Context) {
			killSessions()
			<-ctx.Done()
			_, err := locks.NewLock("other").Lock(ctx)
			raises(dlock.Cancelled, "57014", err)
		}))
	}},

	{"in_tx_all", func() {
		with(main_, func(conn *pgx.Conn) {
			must(transaction(conn, func(tx pgx.Tx) error {
				fences, err := dlock.InTxAll(ctx, tx, []string{"b", `a"\,`})
				must(err)
				check(len(fences) == 2 && !admin.isFree("b") && !admin.isFree(`a"\,`), fences)
				return nil
			}))
			admin.holds("b", func(int64) {
				busy(transaction(conn, func(tx pgx.Tx) error {
					_, err := dlock.InTxAll(ctx, tx, []string{"a", "b"}, try)
					return err
				}))
			})
		})
	}},

	{"lock_all", func() {
		names := []string{`a"\,`, "b"}
		lease := locks.NewLease(kept...)
		all, err := lease.LockAll(ctx, names)
		wrong(err)
		must(lease.Do(ctx, func(context.Context) error {
			all, err = lease.LockAll(ctx, names)
			must(err)
			check(all[1].Name() == "b" && all[1].Check() == nil, all)
			_, err = lease.LockAll(ctx, []string{"c", "b"})
			wrong(err)
			must(all[1].Unlock())
			check(admin.isFree("b") && admin.isFree("c") && !admin.isFree(names[0]), "free")
			admin.force(all[0].Fence())
			lost(all[0].Unlock())
			all, err = lease.LockAll(ctx, names)
			return err
		}))
		must(lease.Do(ctx, func(context.Context) error {
			_, err := lease.LockAll(ctx, names)
			must(err)
			raises(dlock.LockLost, "", all[0].Unlock()) // of the opening before
			_, err = lease.LockAll(ctx, names)
			wrong(err)
			return nil
		}))
		with(main_, func(conn *pgx.Conn) {
			both := []*dlock.Lock{dlock.OnConn(conn, names[0]), dlock.OnConn(conn, "b")}
			admin.holds("b", func(int64) {
				busy(dlock.LockAll(ctx, both, try))
				check(admin.isFree(names[0]), "not all, but one")
			})
			must(dlock.LockAll(ctx, both))
			wrong(dlock.LockAll(ctx, both))
			must(both[1].Unlock())
			check(admin.isFree("b") && !admin.isFree(names[0]), "free")
			must(both[0].Unlock())
			for _, other := range []*dlock.Lock{locks.NewLock("c"), dlock.OnConn(conn, "b")} {
				raises(dlock.BadArgument, "22023", dlock.LockAll(ctx, append(both, other)))
			}
		})
	}},

	// The lease is closed and opened again before the request is repeated.
	{"lock_all_reopened", func() {
		var lease *dlock.Lease
		var once sync.Once
		lease = wired(func(sent bool, text []byte) (err error) {
			if sent && bytes.Contains(text, []byte("dlock_lease_acquire_all")) {
				once.Do(func() {
					must(lease.Close())
					must(opened(lease))
					err = errBoom
				})
			}
			return err
		}).NewLease(kept...)
		must(lease.Do(ctx, func(context.Context) error {
			_, err := lease.LockAll(ctx, []string{"a"})
			lost(err)
			check(admin.isFree("a"), "not free")
			return lease.Check()
		}))
	}},

	// Calls for a lock with a ttl do not disturb each other.
	{"calls_at_once", func() {
		first, second := make(chan bool), make(chan bool)
		lock := wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_set_info")) {
				close(first)
				<-second
			}
			return nil
		}).NewLock("lease", kept...)
		must(acquire(lock))
		changing := async(func() error { return lock.SetInfo(ctx, "changed") })
		<-first
		must(lock.Renew(ctx, long/2))
		must(lock.Unlock())
		close(second)
		wrong(<-changing)
	}},

	// The lock is released and acquired again before the answer to a change arrives.
	{"change_reopened", func() {
		var again func()
		lock := wired(func(sent bool, text []byte) error {
			if sent && regexp.MustCompile(`dlock_(set_info|downgrade|renew)\(\$1`).Match(text) && again != nil {
				reopen := again
				again = nil
				reopen()
			}
			return nil
		}).NewLock("lease", dlock.TTL(long))
		must(acquire(lock))
		change := func(call func() error) {
			again = func() {
				must(lock.Unlock())
				must(acquire(lock))
			}
			wrong(call())
			check(again == nil, "sent")
			must(lock.Check())
			check(lock.Deadline() > dlock.Now()+long/2, "deadline")
		}
		change(func() error { return lock.SetInfo(ctx, "one") })
		change(func() error { return lock.Downgrade(ctx) })
		change(func() error { return lock.Renew(ctx, long/2) })
		must(lock.Unlock())
	}},

	// The server executes a renewal after the release, before the answer to the release arrives. That is no loss.
	{"renew_released", func() {
		var releases atomic.Int64
		sends, goOn := make(chan bool), make(chan bool)
		var renewing chan error
		lock := wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_renew($1, ttl")) {
				close(sends)
				<-goOn
			} else if sent && bytes.Contains(text, []byte("dlock_release_ticket")) {
				releases.Add(1)
			} else if !sent && releases.CompareAndSwap(1, 2) {
				close(goOn)
				wrong(<-renewing)
			}
			return nil
		}).NewLock("lease", dlock.TTL(long))
		must(acquire(lock))
		renewing = async(func() error { return lock.Renew(ctx, long) })
		<-sends
		must(lock.Unlock())
		check(!lock.Lost(), "lost")
	}},

	// The lease is closed and opened again before the answer to a request arrives.
	{"lease_reopened", func() {
		var lease *dlock.Lease
		var asks atomic.Int64
		lease = wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_lease_acquire")) {
				asks.Add(1)
			} else if !sent && asks.CompareAndSwap(1, 2) {
				must(lease.Close())
				must(opened(lease))
			}
			return nil
		}).NewLease(kept...)
		must(lease.Do(ctx, func(context.Context) error {
			lock := lease.NewLock("a")
			lost(acquire(lock))
			check(admin.isFree("a"), "not free")
			return lock.Do(ctx, nothing)
		}))
	}},

	// A renewal waits for an earlier one, whose refusal would restore a deadline that the server does not honour.
	{"renew_twice", func() {
		var renewals atomic.Int64
		first, second := make(chan bool), make(chan bool)
		lease := wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_renew($1, ttl")) && renewals.Add(1) == 1 {
				close(first)
				<-second
			}
			return nil
		}).NewLease(dlock.TTL(long))
		must(lease.Do(ctx, func(context.Context) error {
			raises(dlock.BadArgument, "22023", lease.Renew(ctx, 99*time.Millisecond))
			check(renewals.Load() == 0, "the client refuses it")
			refused := async(func() error { return lease.Renew(ctx, 48*long) })
			<-first
			must(lease.Renew(&waiter{Context: ctx, waits: func() { close(second) }}, long/2))
			raises(dlock.BadArgument, "22023", <-refused)
			check(lease.Deadline() <= dlock.Now()+long/2, "deadline")
			return nil
		}))
	}},

	// A renewal whose answer is lost may have changed the ttl, although the server refuses the repetition.
	{"renew_in_doubt", func() {
		var renewals atomic.Int64
		lease := wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_renew($1, ttl")) && renewals.Add(1) == 1 {
				admin.ask("ALTER ROLE app SET dlock.max_ttl = '1min'")
				return errBoom
			}
			return nil
		}).NewLease(dlock.TTL(long))
		defer admin.ask("ALTER ROLE app RESET dlock.max_ttl")
		must(lease.Do(ctx, func(context.Context) error {
			raises(dlock.BadArgument, "22023", lease.Renew(ctx, long/2))
			check(renewals.Load() == 2, "one attempt was lost")
			check(lease.Deadline() <= dlock.Now()+long/2, "deadline")
			return nil
		}))
	}},

	// The same if the server refuses the next connection.
	{"renew_reconnect_refused", func() {
		lease := wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_renew($1, ttl")) {
				admin.ask("REVOKE CONNECT ON DATABASE postgres FROM PUBLIC")
				return errBoom
			}
			return nil
		}).NewLease(dlock.TTL(long))
		must(lease.Do(ctx, func(context.Context) error {
			defer admin.ask("GRANT CONNECT ON DATABASE postgres TO PUBLIC")
			raises(dlock.NotAllowed, "42501", lease.Renew(ctx, long/2))
			check(lease.Deadline() <= dlock.Now()+long/2, "deadline")
			return nil
		}))
	}},

	// The lost attempt is executed after a later renewal, and makes the ttl shorter.
	{"renew_executed_late", func() {
		var renewals atomic.Int64
		lease := wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_renew($1, ttl")) && renewals.Add(1) == 1 {
				return errBoom
			}
			return nil
		}).NewLease(dlock.TTL(long))
		must(lease.Do(ctx, func(context.Context) error {
			must(lease.Renew(ctx, long/2))
			must(lease.Renew(ctx, 2*long))
			admin.ask("SELECT dlock_renew($1, '30 min')", lease.ID())
			must(lease.Renew(ctx, 0))
			check(lease.Deadline() <= dlock.Now()+long/2, "deadline")
			return nil
		}))
	}},

	// Enqueue learns of its grant without a notification.
	{"enqueue_deaf", func() {
		tickets := over(func(config *pgx.ConnConfig) {
			config.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) {}
		}).NewTickets()
		ticket := enqueue(tickets, "queue")
		isEvent(soon(tickets), "granted", "queue", ticket)
		must(tickets.Close())
	}},

	// A notification arrives while Next waits, or with the reply to another statement.
	{"enqueue_told", func() {
		var told atomic.Bool
		tickets := wired(func(sent bool, text []byte) error {
			if !sent && bytes.Contains(text, []byte("granted")) {
				told.Store(true)
			}
			return nil
		}).NewTickets()
		for _, waits := range []bool{false, true} {
			var ticket int64
			admin.holds("queue", func(int64) {
				ticket = enqueue(tickets, "queue")
				none(tickets)
			})
			if !waits {
				until(func() bool {
					must(tickets.Unwatch(ctx, "none"))
					return told.Load()
				}, "the notification")
			}
			isEvent(soon(tickets), "granted", "queue", ticket)
			must(tickets.Release(ctx, ticket))
		}
		must(tickets.Close())
	}},

	// The heartbeat gives back a ticket whose enqueue or release was interrupted.
	{"enqueue_owed", func() {
		var cancel context.CancelFunc
		var asks atomic.Bool
		lease := wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_lease_enqueue")) {
				asks.Store(true)
			} else if !sent && isTicket(text) && asks.Swap(false) && cancel != nil {
				cancel()
				return errBoom
			}
			return nil
		}).NewLease(dlock.TTL(long))
		must(lease.Do(ctx, func(context.Context) error {
			tickets, owner := lease.NewTickets(), dlock.Owner("job/1")
			ticket, err := tickets.Enqueue(ctx, "queue", owner)
			must(err)
			isEvent(next(tickets), "granted", "queue", ticket)
			var stopped context.Context
			stopped, cancel = context.WithCancel(ctx)
			for _, name := range []string{"other", "queue"} {
				_, err = tickets.Enqueue(stopped, name, owner)
				raises(dlock.Cancelled, "57014", err)
			}
			admin.untilFree("other")
			check(!admin.isFree("queue"), "its earlier request has the place")
			raises(dlock.Cancelled, "57014", tickets.Release(stopped, ticket))
			admin.untilFree("queue")
			return tickets.Close()
		}))
		tickets := locks.NewTickets()
		ticket := enqueue(tickets, "queue")
		stopped, stop := context.WithCancel(ctx)
		stop()
		raises(dlock.Cancelled, "57014", tickets.Release(stopped, ticket))
		must(tickets.Release(ctx, ticket))
		check(admin.isFree("queue"), "free")
		must(tickets.Close())
	}},

	// An enqueue without an answer is repeated until the patience ends, or until the tickets are closed.
	{"enqueue_unanswered", func() {
		var asks atomic.Int64
		var asked atomic.Bool
		over := wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_lease_enqueue")) {
				asks.Add(1)
				asked.Store(true)
			} else if !sent && isTicket(text) && asked.Swap(false) {
				return errBoom
			}
			return nil
		})
		over.Patience = 0
		lease := over.NewLease(dlock.TTL(long))
		must(lease.Do(ctx, func(context.Context) error {
			tickets := lease.NewTickets()
			_, err := tickets.Enqueue(ctx, "queue")
			raises(dlock.ConnectionLost, "", err)
			must(tickets.Close())
			admin.untilFree("queue") // the heartbeat gives it back

			over.Patience = timeout
			tickets = lease.NewTickets()
			before := asks.Load()
			enqueuing := async(func() error {
				_, err := tickets.Enqueue(ctx, "queue")
				return err
			})
			until(func() bool { return asks.Load() >= before+2 }, "a repetition")
			must(tickets.Close())
			wrong(<-enqueuing)
			admin.untilFree("queue")
			return nil
		}))
	}},

	// The server refuses to give one of the places again over the next connection. The other places stay.
	{"enqueue_refused_again", func() {
		lease := locks.NewLease(dlock.TTL(long))
		must(lease.Do(ctx, func(context.Context) error {
			tickets := lease.NewTickets()
			refused, other := enqueue(tickets, "queue"), enqueue(tickets, "other")
			isEvent(next(tickets), "granted", "queue", refused)
			isEvent(next(tickets), "granted", "other", other)
			killSessions()
			admin.force(refused)
			must(do(locks.NewLock("queue", dlock.Slots(2)), func(context.Context) {
				isEvent(next(tickets), "lost", "queue", refused)
				must(tickets.Release(ctx, other))
			}))
			return tickets.Close()
		}))
	}},

	// The heartbeat repeats a release until it succeeds.
	{"release_owed_again", func() {
		var cutting atomic.Bool
		var cuts atomic.Int64
		over := wired(func(sent bool, text []byte) error {
			if sent && cutting.Load() && bytes.Contains(text, []byte("dlock_release_ticket")) {
				cuts.Add(1)
				return errBoom
			}
			return nil
		})
		over.Patience = 100 * time.Millisecond
		lease := over.NewLease(kept...)
		must(lease.Do(ctx, func(context.Context) error {
			lock := lease.NewLock("owed", dlock.Owner("job/1"))
			must(acquire(lock))
			cutting.Store(true)
			raises(dlock.ConnectionLost, "", lock.Unlock())
			released := cuts.Load()
			until(func() bool { return cuts.Load() >= released+3 }, "the heartbeat")
			check(!lease.Lost() && !admin.isFree("owed"), "released")
			cutting.Store(false)
			admin.untilFree("owed")
			until(func() bool {
				err := acquire(lock)
				check(err == nil || errors.Is(err, dlock.WrongState), err) // the request is still being undone
				return err == nil
			}, "the same owner")
			return lock.Unlock()
		}))
	}},

	// The owner's next request fails until it has released what a release without an answer may still release.
	{"debt_stays", func() {
		var cutting atomic.Bool
		over := wired(func(sent bool, text []byte) error {
			if sent && cutting.Load() && bytes.Contains(text, []byte("dlock_release_ticket")) {
				return errBoom
			}
			return nil
		})
		over.Patience = 100 * time.Millisecond
		lock := over.NewLock("owed", dlock.TTL(long), dlock.Owner("job/1"))
		must(acquire(lock))
		fence := lock.Fence()
		cutting.Store(true)
		raises(dlock.ConnectionLost, "", lock.Unlock())
		raises(dlock.ConnectionLost, "", acquire(lock))
		check(admin.is("SELECT dlock_check('owed', $1)", fence), "held")
		cutting.Store(false)
		must(do(lock, func(context.Context) { check(lock.Fence() > fence, "a greater fence") }))

		// the same if the deadline passes without an answer
		over.Patience = timeout
		lock = over.NewLock("owed", dlock.TTL(long), dlock.Owner("job/1"), dlock.Interval(100*time.Millisecond),
			dlock.Margin(long-3*time.Second))
		must(acquire(lock))
		fence = lock.Fence()
		cutting.Store(true)
		lost(lock.Unlock())
		check(admin.is("SELECT dlock_check('owed', $1)", fence), "held")
		cutting.Store(false)
		must(do(lock, func(context.Context) { check(lock.Fence() > fence, "a greater fence") }))
	}},

	// A request that could not be undone is granted later. The owner's next request releases its ticket.
	{"debt_unknown", func() {
		var away atomic.Bool
		lock := impatient(&away).NewLock("owed", dlock.TTL(long), dlock.Owner("job/1"))
		admin.holds("owed", func(int64) {
			ctx, cancel := context.WithCancel(ctx)
			waiting := async(func() error {
				_, err := lock.Lock(ctx)
				return err
			})
			admin.untilWaits("owed")
			away.Store(true)
			cancel()
			raises(dlock.Cancelled, "57014", <-waiting)
			away.Store(false)
		})
		admin.until("SELECT count(*) = 1 AND bool_and(granted) FROM dlock_locks WHERE name = 'owed'")
		ticket := int64(atoi(admin.ask("SELECT ticket FROM dlock_locks WHERE name = 'owed'")))
		must(do(lock, func(context.Context) { check(lock.Fence() > ticket, "a greater fence") }))
	}},

	{"reset", func() {
		with(main_, func(conn *pgx.Conn) {
			must(acquire(dlock.OnConn(conn, "pool")))
			conn.Exec(ctx, "BEGIN")
			conn.Exec(ctx, "SELECT 1 / 0")
			check(conn.PgConn().TxStatus() == 'E', "the transaction has not failed")
			must(dlock.Reset(conn))
			check(conn.PgConn().TxStatus() == 'I' && admin.isFree("pool"), "not reset")
		})
	}},

	// The source makes each new connection, for example with a new token.
	{"source", func() {
		asked := map[string]int{}
		var mu sync.Mutex
		over, err := dlock.New(dlock.Server{Source: func(ctx context.Context, name string) (*pgx.Conn, func(), error) {
			mu.Lock()
			defer mu.Unlock()
			asked[name]++
			conn, err := pgx.Connect(ctx, main_)
			return conn, func() { conn.Close(background()) }, err
		}})
		must(err)
		lock := over.NewLock("lease", kept...)
		must(do(lock, func(context.Context) {
			admin.untilRenewed(lock.Fence(), 1)
			killSessions()
			admin.untilRenewed(lock.Fence(), 1)
		}))
		check(asked["dlock heartbeat"] >= 2 && asked["dlock"] >= 2, asked)
		failing, err := dlock.New(dlock.Server{Source: func(context.Context, string) (*pgx.Conn, func(), error) {
			return nil, nil, errBoom
		}})
		must(err)
		failing.Patience = 0
		raises(errBoom, "", acquire(failing.NewLock("plain")))
	}},

	// A silent host leaves time for the next one, within the bound of the call.
	{"host_silent", func() {
		silent, err := net.Listen("tcp", "127.0.0.1:0")
		must(err)
		defer silent.Close()
		over := open(strings.Replace(main_, "@", "@"+silent.Addr().String()+",", 1))
		must(do(over.NewLock("x", try), func(context.Context) { check(!admin.isFree("x"), "free") }))
	}},

	// Silent hosts leave time for the next one before the deadline of a lease. They refuse the acquire, and do not answer
	// the heartbeat.
	{"hosts_silent", func() {
		silent, err := net.Listen("tcp", "127.0.0.1:0")
		must(err)
		host := silent.Addr().String()
		must(silent.Close())
		over := open(strings.Replace(main_, "@", "@"+strings.Repeat(host+",", 2), 1))
		lock := over.NewLock("lease", dlock.TTL(4*short))
		must(do(lock, func(context.Context) {
			silent, err = net.Listen("tcp", host)
			must(err)
			defer silent.Close()
			before := lock.Deadline()
			until(func() bool { return lock.Lost() || lock.Deadline() > before }, "a renewal")
		}))
	}},

	// A lock of a lease is not requested beyond its timeout, and not released beyond the deadline.
	{"attempts_bounded", func() {
		var attempt func(ctx context.Context) error
		over, err := dlock.New(dlock.Server{Source: func(ctx context.Context, name string) (*pgx.Conn, func(), error) {
			if name == "dlock" && attempt != nil {
				if err := attempt(ctx); err != nil {
					return nil, nil, err
				}
			}
			conn, err := pgx.Connect(ctx, main_)
			return conn, func() { conn.Close(background()) }, err
		}})
		must(err)
		lease := over.NewLease(dlock.TTL(long))
		must(opened(lease))
		killSessions()
		var left time.Duration
		attempt = func(ctx context.Context) error {
			if left == 0 {
				end, _ := ctx.Deadline()
				left = time.Until(end)
			}
			return nil
		}
		must(lease.NewLock("a", try).Do(ctx, nothing))
		check(left <= 5*time.Second, left)
		must(lease.Close())

		lock, attempts := over.NewLock("b", dlock.TTL(2*time.Second)), 0
		must(acquire(lock))
		attempt = func(context.Context) error {
			// the pause after the fourth is at least 0.4 seconds long
			if attempts++; attempts == 4 {
				until(func() bool { return dlock.Now() > lock.Deadline()-100*time.Millisecond }, "the deadline")
			}
			return &net.OpError{Op: "dial", Err: errBoom}
		}
		lost(lock.Unlock())
		check(attempts <= 4, attempts)
		attempt = nil
	}},

	// A call waits for other calls of the same tickets only until its context ends.
	{"tickets_busy", func() {
		var blocked atomic.Bool
		sends, goOn := make(chan bool), make(chan bool)
		lease := wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_watch")) && !blocked.Swap(true) {
				close(sends)
				<-goOn
			}
			return nil
		}).NewLease(dlock.TTL(long))
		must(lease.Do(ctx, func(context.Context) error {
			tickets := lease.NewTickets()
			ticket := enqueue(tickets, "queue")
			isEvent(next(tickets), "granted", "queue", ticket)
			stopped, stop := context.WithCancel(ctx)
			waits := make(chan bool)
			waiting := async(func() error {
				_, err := tickets.Next(&waiter{Context: stopped, waits: func() { close(waits) }})
				return err
			})
			<-waits
			ended, end := context.WithCancel(ctx)
			end()
			_, err := tickets.Next(ended)
			raises(dlock.Cancelled, "57014", err)
			stop()
			raises(dlock.Cancelled, "57014", <-waiting)

			watching := async(func() error { return tickets.Watch(ctx, "watched") })
			<-sends
			_, err = tickets.Enqueue(ended, "other")
			raises(dlock.Cancelled, "57014", err)
			raises(dlock.Cancelled, "57014", tickets.Release(ended, ticket))
			close(goOn)
			must(<-watching)
			admin.untilFree("queue") // the heartbeat repeats the release
			return tickets.Close()
		}))
	}},

	// A lost lock that the program does not release is no part of the heartbeat any more.
	{"lost_forgotten", func() {
		var asked atomic.Int64
		lease := wired(func(sent bool, text []byte) error {
			if sent && bytes.Contains(text, []byte("dlock_check")) && bytes.Contains(text, []byte("forgotten")) {
				asked.Add(1)
			}
			return nil
		}).NewLease(dlock.TTL(long), dlock.Interval(100*time.Millisecond))
		must(lease.Do(ctx, func(context.Context) error {
			lock := lease.NewLock("forgotten")
			must(acquire(lock))
			admin.force(lock.Fence())
			told(lock)
			check(asked.Load() > 0, "asked")
			before := asked.Load()
			admin.untilRenewed(lease.ID(), 2)
			check(asked.Load() == before, "asked again")
			return nil
		}))
	}},

	// Tickets return no connection that listens to the pool.
	{"pooled_tickets", func() {
		var listens atomic.Bool
		config := poolConfig(3)
		config.AfterRelease = func(conn *pgx.Conn) bool {
			row, err := query(conn, "SELECT count(*) > 0 FROM pg_listening_channels()")
			listens.Store(listens.Load() || err == nil && row[0] == "t")
			return true
		}
		pool, err := pgxpool.NewWithConfig(ctx, config)
		must(err)
		over, err := dlock.New(dlock.Server{Source: dlock.FromPool(pool)})
		must(err)
		lease := over.NewLease(dlock.TTL(long))
		must(opened(lease))
		tickets := lease.NewTickets()
		must(tickets.Watch(ctx, "watched"))
		enqueue(tickets, "queue")
		next(tickets) // the lock is free, or the grant
		next(tickets)
		killSessions()
		admin.ask("REVOKE EXECUTE ON FUNCTION dlock_lease_enqueue FROM PUBLIC")
		defer admin.ask("GRANT EXECUTE ON FUNCTION dlock_lease_enqueue TO PUBLIC")
		for n := 0; n < 2; n++ {
			_, err = tickets.Next(ctx)
			raises(dlock.NotAllowed, "42501", err) // the place is not given again
		}
		must(tickets.Close())
		must(lease.Close())
		pool.Close()
		check(!listens.Load(), "listens")
	}},

	// While a lease is open, the heartbeat has one connection of the pool.
	{"pooled_lease", func() {
		pool, err := pgxpool.NewWithConfig(ctx, poolConfig(2))
		must(err)
		defer pool.Close()
		over, err := dlock.New(dlock.Server{Source: dlock.FromPool(pool)})
		must(err)
		lock := over.NewLock("lease", kept...)
		must(do(lock, func(context.Context) {
			admin.untilRenewed(lock.Fence(), 1)
			check(pool.Stat().AcquiredConns() == 1, pool.Stat().AcquiredConns())
		}))
		until(func() bool { return pool.Stat().AcquiredConns() == 0 }, "all are back")
	}},
}

func poolConfig(most int32) *pgxpool.Config {
	config, err := pgxpool.ParseConfig(main_)
	must(err)
	config.MaxConns = most
	return config
}

func run(test func()) (failure any) {
	done := make(chan any, 1)
	go func() {
		defer func() {
			if failure := recover(); failure != nil {
				done <- fmt.Sprintf("%v\n%s", failure, debug.Stack())
			}
		}()
		test()
		admin.until("SELECT count(*) = 0 FROM dlock_locks")
		// no connection is left
		admin.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = 'app'")
		done <- nil
	}()
	select {
	case failure = <-done:
	case <-time.After(timeout * 3 / 2):
		debug.SetTraceback("all")
		failure = "it hangs"
	}
	return failure
}

func main() {
	if len(os.Args) == 2 && os.Args[1] == "wait" {
		must(acquire(locks.NewLock("busy", dlock.TTL(long))))
		return
	}
	log.SetOutput(&logged)
	short *= time.Duration((timeout + 179*time.Second) / (180 * time.Second))
	chosen, failed, quiet := map[string]bool{}, 0, false
	if len(os.Args) == 2 && os.Args[1] == "own" {
		rows, quiet = own, true
	} else {
		for _, name := range os.Args[1:] {
			chosen[name] = true
		}
	}
	for _, row := range rows {
		if len(chosen) > 0 && !chosen[row.name] {
			continue
		}
		began := dlock.Now()
		if failure := run(row.test); failure != nil {
			failed = 1
			fmt.Println("# " + strings.ReplaceAll(fmt.Sprint(failure), "\n", "\n# "))
			fmt.Println("not ok " + row.name)
			order("thaw")
			order("clock 0")
			admin.ask("SELECT count(dlock_force_release(ticket)) FROM dlock_locks")
		} else {
			fmt.Println("ok " + row.name)
		}
		if !quiet {
			fmt.Printf("# %s: %.1f s\n", row.name, (dlock.Now() - began).Seconds())
		}
	}
	os.Exit(failed)
}
