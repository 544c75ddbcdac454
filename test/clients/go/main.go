// Locks of dlock in Go programs: with lib/pq, over database/sql, and with pgx.
//
// Each test does what a program would, with the means of the driver, as
// docs/go.md advises; and each trap that the page warns of is sprung
// once, so that the advice can go if the trap does.
//
// What would break it: a result, an error or an argument that a driver takes for
// something else; a lock that stays after an error or a panic, or in a pool; a
// waiter that stays in the queue although its context has ended.
//
// libpq's environment variables say where the server is;
// test/t/client_stacks.pl sets them, and reads what is printed here.
package main

import (
	"database/sql"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"time"

	_ "github.com/lib/pq"
)

// The one with which the tests look at the others
var admin = open("")

func open(config string) *sql.DB {
	db, err := sql.Open("postgres", config)
	must(err)
	return db
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func expect(what string, got, wanted interface{}) {
	if got != wanted {
		panic(fmt.Sprintf("%s: got %v, wanted %v", what, got, wanted))
	}
}

// ask is what the administrator sees; "" stands for NULL.
func ask(query string, arguments ...interface{}) string {
	var result sql.NullString
	must(admin.QueryRow(query, arguments...).Scan(&result))
	return result.String
}

// isFree tells whether anybody else can have the lock, at once.
func isFree(name string) bool {
	return ask("SELECT dlock_try_xact_acquire($1) IS NOT NULL", name) == "true"
}

// patience is how long a test may take.
func patience() time.Duration {
	seconds, err := strconv.Atoi(os.Getenv("PG_TEST_TIMEOUT_DEFAULT"))
	if err != nil {
		seconds = 180
	}
	return time.Duration(seconds) * time.Second
}

func waitUntil(query string, arguments ...interface{}) {
	end := time.Now().Add(patience())
	for ask(query, arguments...) != "true" {
		if time.Now().After(end) {
			panic(fmt.Sprint("waited for: ", query, arguments))
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func waitForWaiter(name string) {
	waitUntil("SELECT count(*) > 0 FROM dlock_locks WHERE name = $1 AND NOT granted", name)
}

// hold has somebody else hold the lock, until the function that it returns is
// called.
func hold(name string) (release func()) {
	tx, err := admin.Begin()
	must(err)
	_, err = tx.Exec("SELECT dlock_xact_acquire($1)", name)
	must(err)
	return func() { must(tx.Rollback()) }
}

// paniced tells whether the function does.
func paniced(work func()) (result bool) {
	defer func() { result = recover() != nil }()
	work()
	return
}

// expectTransactions: pay locks an account in a transaction, and works in there.
func expectTransactions(pay func(work func())) {
	pay(func() { expect("is free", isFree("account/7"), false) })
	expect("is free", isFree("account/7"), true)
	expect("paniced", paniced(func() { pay(func() { panic("no money") }) }), true)
	expect("is free", isFree("account/7"), true)
}

// expectSession: withLock holds the lock "report" in a session while it works.
func expectSession(withLock func(work func(fence int64) error) error) {
	noPaper := errors.New("no paper")
	err := withLock(func(fence int64) error {
		expect("fence", ask("SELECT dlock_fence('report')"), fmt.Sprint(fence))
		return noPaper
	})
	expect("error", err, noPaper)
	expect("is free", isFree("report"), true)

	expect("paniced", paniced(func() {
		withLock(func(int64) error { panic("no printer") })
	}), true)
	expect("is free", isFree("report"), true)

	err = withLock(func(fence int64) error {
		ask("SELECT dlock_force_release($1)", fence)
		return nil
	})
	expect("error", fmt.Sprint(err), "lock report was lost")
}

// A test ends with its first error, by a panic.
type test struct {
	name string
	run  func()
}

func (t test) passes() (passed bool) {
	defer func() {
		if problem := recover(); problem != nil {
			fmt.Printf("%v\n%s\n", problem, debug.Stack())
			passed = false
		}
	}()
	overdue := time.AfterFunc(patience(), func() { panic("overdue: " + t.name) })
	defer overdue.Stop()
	t.run()
	waitUntil("SELECT count(*) = 0 FROM dlock_locks")
	return true
}

func main() {
	failed := false

	for _, t := range append(libPQ, pgxTests...) {
		if t.passes() {
			fmt.Printf("ok %s\n", t.name)
			continue
		}
		failed = true
		fmt.Printf("not ok %s\n", t.name)
		// not in the way of the next one
		ask("SELECT count(dlock_force_release(ticket)) FROM dlock_locks")
	}
	if failed {
		os.Exit(1)
	}
}
