// Package dlock has the locks of dlock, the lock service inside PostgreSQL.
package dlock

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// Locks is the service: one server, or several, over which names are spread.
type Locks struct {
	// How long to wait for an unreachable server; by default 30 seconds
	Patience time.Duration
	// For metrics and logs; by default nil
	Hooks   *Hooks
	servers []*Server
}

// Each hook is called in its own goroutine, with the name of the lock or the lease.
type Hooks struct {
	Acquired func(what string, waited time.Duration)
	Failed   func(what string, waited time.Duration, err error) // of an acquire
	Released func(what string, held time.Duration)
	Lost     func(what string, err error)
}

// Open takes a DSN for each server. A DSN may name several hosts, of which the primary is used. With an empty DSN, the
// environment variables such as PGHOST count.
func Open(dsns ...string) (*Locks, error) {
	servers := make([]Server, len(dsns))
	for n, dsn := range dsns {
		source, err := FromDSN(dsn)
		if err != nil {
			return nil, err
		}
		servers[n] = Server{Source: source, Key: dsn, own: true}
	}
	return New(servers...)
}

// New takes servers over the program's own connections.
func New(servers ...Server) (*Locks, error) {
	locks := &Locks{Patience: 30 * time.Second}
	seen := map[string]bool{}
	for n := range servers {
		if len(servers) > 1 && (servers[n].Key == "" || seen[servers[n].Key]) {
			return nil, newError(BadArgument, "22023", "each server needs a key of its own", nil)
		}
		seen[servers[n].Key] = true
		locks.servers = append(locks.servers, &servers[n])
	}
	if len(servers) == 0 {
		return nil, newError(BadArgument, "22023", "no server", nil)
	}
	return locks, nil
}

// Key is the key of the server to which this name belongs.
func (locks *Locks) Key(name string) string { return locks.server(name).Key }

func (locks *Locks) server(name string) *Server {
	var best *Server
	var most []byte
	for _, server := range locks.servers {
		weight := sha256.Sum256([]byte(server.Key + "\x00" + name))
		if best == nil || bytes.Compare(weight[:], most) > 0 {
			best, most = server, append([]byte(nil), weight[:]...)
		}
	}
	return best
}

// key is the same for servers with the same Key.
func (server *Server) key() any {
	if server.Key != "" {
		return server.Key
	}
	return server
}

func (locks *Locks) line(server *Server) *line {
	return &line{server: server, patience: locks.Patience}
}

// connect takes at most this patience, which the hosts of a DSN share.
func (server *Server) connect(ctx context.Context, name string, patience time.Duration) (connection, func(), error) {
	if !server.own {
		patience = shorter(patience, hostTimeout(ctx, 1))
	}
	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, done, err := server.Source(bounded, name)
	return conn, done, ofOwn(err)
}

// An Option of a lock, a lease, or an election
type Option func(*options)

type options struct {
	limited                             bool
	timeout, ttl, interval, margin      time.Duration
	owner                               string
	near                                string
	request, lease                      []named
	hasTTL, hasInterval, hasMargin, bad bool
}

func with(key string, value any) Option {
	return func(o *options) { o.request = append(o.request, named{key, value}) }
}

// Timeout is how long to wait for the lock. Without it the wait is unlimited; 0 only tries.
func Timeout(d time.Duration) Option {
	return func(o *options) { o.limited, o.timeout = true, d }
}

// TTL is the ttl of a lease, and puts a lock of Locks into lease scope, with a heartbeat.
func TTL(d time.Duration) Option { return func(o *options) { o.ttl, o.hasTTL = d, true } }

// Interval is the time between two renewals; by default a third of the ttl.
func Interval(d time.Duration) Option {
	return func(o *options) { o.interval, o.hasInterval = d, true }
}

// Margin is the part of the ttl that is not used; by default a hundredth.
func Margin(d time.Duration) Option { return func(o *options) { o.margin, o.hasMargin = d, true } }

// Owner, such as a job's number, lets a repeated request in lease scope get the lock of the earlier request.
func Owner(owner string) Option { return func(o *options) { o.owner = owner } }

// Shared holders hold a lock together.
func Shared() Option { return with("shared", true) }

// Slots is the number of permits that the lock has.
func Slots(n int) Option { return with("slots", n) }

// Permits is the number of permits to take.
func Permits(n int) Option { return with("permits", n) }

// Info is for others to read, of a lock or of a lease.
func Info(info string) Option { return with("info", info) }

// Near puts a lease or tickets on the server of this name.
func Near(name string) Option { return func(o *options) { o.near = name } }

// Delay is how long the locks of a lease stay closed after the lease has expired.
func Delay(d time.Duration) Option { return with("delay", d) }

func newOptions(given []Option) options {
	var o options
	for _, option := range given {
		option(&o)
	}
	if !o.hasInterval {
		o.interval = o.ttl / 3
	}
	if !o.hasMargin {
		o.margin = o.ttl / 100
	}
	o.bad = o.isBad()
	return o
}

func (o *options) isBad() bool {
	return o.hasTTL && (o.interval <= 0 || o.margin < 0 || o.interval+o.margin >= o.ttl)
}

func (o *options) check() error {
	if o.bad {
		return newError(BadArgument, "22023", "there is no such ttl, interval or margin", nil)
	}
	return nil
}

func newOwner() (string, error) {
	var id [16]byte
	_, err := rand.Read(id[:])
	return fmt.Sprintf("%x", id), err
}

// giveBack releases a hold of a heart, and returns LockLost if it was lost. It calls owe if the release failed, and
// tells whether the server may execute the release, or an earlier renewal, at any later time.
func (k *kept) giveBack(l *line, s statement, last bool, owe func(later bool)) error {
	held := !k.Lost()
	k.heart.leave(k, last)
	if !held && last && k.heart.isLimited() {
		owe(true)
	}
	if held {
		answer, err := l.askUntil(background, func() statement { return s }, k.Deadline(), grace)
		if err != nil {
			owe(!l.isRefusal(err) || k.heart.isLimited()) // before the program learns of a loss, and requests again
		}
		if isAway(err) && Now() >= k.Deadline() {
			k.lose("there is no connection: " + err.Error())
		} else if err != nil {
			return err
		} else if (answer.isNull(0) || answer.text(0) == "f") && !l.doubt {
			k.lose("the server has ended it")
		}
	}
	mu.Lock()
	defer mu.Unlock()
	return k.loss
}

// A Lease is one heartbeat for any number of locks, all of them on one server.
type Lease struct {
	kept
	locks  *Locks
	server *Server
	options
	id   atomic.Int64
	line chan *line // for all calls that need not wait, of one hold; empty while a call uses it
}

// NewLease needs a TTL.
func (locks *Locks) NewLease(given ...Option) *Lease {
	lease := &Lease{locks: locks, options: newOptions(given)}
	lease.server = locks.server(lease.near)
	lease.state, lease.hooks, lease.renewing = unheld, locks.Hooks, make(chan struct{}, 1)
	lease.what = func() string { return fmt.Sprint("lease ", lease.id.Load()) }
	return lease
}

// ID is the number of the lease.
func (lease *Lease) ID() int64 { return lease.id.Load() }

// Open returns a context that ends when the lease is lost or closed.
func (lease *Lease) Open(ctx context.Context) (context.Context, error) {
	if err := lease.options.check(); err != nil {
		return nil, err
	}
	if err := lease.turn(unheld, asked); err != nil {
		return nil, err
	}
	lease.begin(ctx)
	l := lease.locks.line(lease.server)
	// if the answer is lost, the lease has no locks, and expires
	answer, err := l.ask(ctx, call("dlock_lease_open", lease.request, lease.ttl))
	if err == nil && ctx.Err() != nil {
		ask(background, l.conn, call("dlock_lease_close", nil, answer.number(0)), after(undo))
		err = cancelled(ctx)
	}
	if err != nil {
		l.drop()
		lease.end(err)
		return nil, err
	}
	lease.id.Store(answer.number(0))
	newHeart(lease.server, &lease.kept, lease.ID(), l.sent, lease.ttl, lease.interval, lease.margin)
	mu.Lock()
	lease.line = make(chan *line, 1)
	lease.line <- l
	mu.Unlock()
	lease.hold()
	return lease.Context(), nil
}

// Close ends all locks of the lease. It waits for an Open that is not finished. If the lease is closed already, it does
// nothing.
func (lease *Lease) Close() error {
	mu.Lock()
	for lease.state == asked {
		opened.Wait()
	}
	closed := lease.state == unheld
	mu.Unlock()
	if closed {
		return nil
	}
	if err := lease.turn(isHeld, leaving); err != nil {
		return err
	}
	defer lease.end(nil)
	return lease.use(background, lease.Deadline(), func(l *line) error {
		return lease.giveBack(l, call("dlock_lease_close", nil, lease.ID()), true, func(bool) {})
	})
}

// use works with exclusive use of the lease's connection. If it is not free soon, use works over another one, in the
// rest of the time. After the lease's end, each user closes the connection.
func (lease *Lease) use(ctx context.Context, until time.Duration, work func(*line) error) error {
	mu.Lock()
	line := lease.line
	mu.Unlock()
	// never zero, because Close of a lost lease must take a free connection, to close it
	timer := time.NewTimer(shorter(grace, longer(obey, (until-Now())/2)))
	defer timer.Stop()
	select {
	case l := <-line:
		defer func() {
			mu.Lock()
			ended := lease.state != isHeld || lease.line != line
			mu.Unlock()
			if ended {
				l.close()
			}
			line <- l
		}()
		return work(l)
	case <-ctx.Done():
		return cancelled(ctx)
	case <-timer.C:
		other := lease.locks.line(lease.server)
		defer other.close()
		return work(other)
	}
}

// OnLost calls the function once with the lease; at once, if the lease is lost already.
func (lease *Lease) OnLost(call func(*Lease)) { lease.onLost(func() { call(lease) }) }

// NewLock is a lock that the lease keeps.
func (lease *Lease) NewLock(name string, given ...Option) *Lock {
	lock := newLock(name, leaseScope, given)
	lock.lease, lock.hooks = lease, lease.locks.Hooks
	lock.line = lease.locks.line(lease.server)
	return lock
}

// Do opens the lease, works, and closes it.
func (lease *Lease) Do(ctx context.Context, work func(context.Context) error) error {
	held, err := lease.Open(ctx)
	if err != nil {
		return err
	}
	return within(held, work, lease.Close)
}

// within works, and then leaves, after a panic, too. An error of the work takes precedence over a loss.
func within(ctx context.Context, work func(context.Context) error, leave func() error) (err error) {
	panicked := true
	defer func() {
		if failure := leave(); err == nil && !panicked {
			err = failure
		}
	}()
	err = work(ctx)
	panicked = false
	return err
}

type scope int

const (
	sessionScope scope = iota
	transactionScope
	leaseScope
)

// A Lock is for one goroutine at a time. It can be acquired again after its release.
type Lock struct {
	kept
	options
	name    string
	scope   scope
	lease   *Lease
	tx      Querier
	line    *line
	until   time.Duration
	owner   string // the owner of the current request
	keeper  *heart // the heart of the Lease that it was requested for
	fence   atomic.Int64
	doubt   bool
	unwatch func()
}

func newLock(name string, scope scope, given []Option) *Lock {
	lock := &Lock{name: name, scope: scope, options: newOptions(given)}
	lock.state, lock.renewing = unheld, make(chan struct{}, 1)
	lock.what = func() string { return fmt.Sprintf("lock %q", name) }
	// only Locks give a lock a lease of its own
	lock.bad = lock.bad || lock.hasTTL
	return lock
}

// NewLock is a lock in session scope on a connection of its own, or with a TTL a lock in lease scope.
func (locks *Locks) NewLock(name string, given ...Option) *Lock {
	lock := newLock(name, sessionScope, given)
	lock.bad = lock.options.isBad()
	if lock.hasTTL {
		lock.scope = leaseScope
	}
	lock.hooks = locks.Hooks
	lock.line = locks.line(locks.server(name))
	return lock
}

// InTx is a lock in transaction scope: it ends with the transaction. If the context ends during the wait, the driver
// closes the connection.
func InTx(tx Querier, name string, given ...Option) *Lock {
	lock := newLock(name, transactionScope, given)
	lock.tx = tx
	return lock
}

// Name is the lock's name.
func (lock *Lock) Name() string { return lock.name }

// Fence is the lock's number, greater than that of each earlier holder.
func (lock *Lock) Fence() int64 { return lock.fence.Load() }

// OnLost calls the function once with the lock; at once, if the lock is lost already.
func (lock *Lock) OnLost(call func(*Lock)) { lock.onLost(func() { call(lock) }) }

// Lock waits until the lock is granted. It returns a context that ends when the lock is lost or released.
func (lock *Lock) Lock(ctx context.Context) (context.Context, error) {
	if err := lock.options.check(); err != nil {
		return nil, err
	}
	if err := lock.turn(unheld, asked); err != nil {
		return nil, err
	}
	lock.begin(ctx)
	lock.fence.Store(0)
	lock.doubt, lock.owner, lock.until = false, "", forever
	if lock.limited {
		lock.until = after(lock.timeout)
	}
	err := lock.acquire(ctx)
	if err == nil && ctx.Err() != nil {
		err = cancelled(ctx)
	}
	if err != nil {
		lock.takeBack(err)
		lock.end(err)
		return nil, err
	}
	lock.hold()
	return lock.Context(), nil
}

func (lock *Lock) acquire(ctx context.Context) (err error) {
	if lock.line != nil {
		lock.line.checks, lock.line.doubt = !(lock.limited && lock.timeout == 0), false
	}
	switch {
	case lock.scope == transactionScope:
		if err = checkTransaction(lock.tx); err != nil {
			return err
		}
		s := lock.statement("dlock_xact_acquire", lock.until)
		answer, _, err := scan(ctx, lock.tx, s)
		lock.fence.Store(answer.number(0))
		return err
	case lock.scope == sessionScope:
		if err = lock.ask(ctx, "dlock_acquire"); err == nil && !lock.line.given {
			lock.watch()
		}
		return err
	}
	if err = lock.pay(ctx); err != nil {
		return err
	}
	if lock.owner = lock.options.owner; lock.owner == "" {
		if lock.owner, err = newOwner(); err != nil {
			return err
		}
	}
	if lock.lease != nil {
		err = lock.acquireOfLease(ctx)
	} else {
		err = lock.acquireWithTTL(ctx)
	}
	if err == nil {
		lock.line.close() // a held lock needs no connection
	}
	return err
}

// statement is the lock's request. A repeated request gets the remaining time.
func (lock *Lock) statement(function string, until time.Duration, values ...any) statement {
	all := lock.request[:len(lock.request):len(lock.request)]
	if lock.scope == leaseScope {
		all = append(all, named{"owner", lock.owner})
	}
	if until < forever {
		all = append(all, named{"timeout", longer(0, until-Now())})
	}
	return call(function, all, append([]any{lock.name}, values...)...)
}

func (lock *Lock) ask(ctx context.Context, function string, values ...any) error {
	answer, err := lock.line.askUntil(ctx, func() statement { return lock.statement(function, lock.until, values...) },
		later(lock.until, grace), forever)
	if err == nil {
		lock.fence.Store(answer.number(0))
	}
	return err
}

// watch reports a loss when the connection ends.
func (lock *Lock) watch() {
	conn, ended := lock.line.conn, make(chan struct{})
	ctx, stop := context.WithCancel(background)
	lock.unwatch = func() {
		stop()
		<-ended
	}
	go func() {
		defer close(ended)
		for {
			if _, err := hear(ctx, conn); ctx.Err() != nil {
				return
			} else if err != nil {
				lock.lose("its connection is gone: " + err.Error())
				return
			}
		}
	}()
}

func (lock *Lock) acquireOfLease(ctx context.Context) error {
	lease := lock.lease
	if lease.locks.server(lock.name) != lease.server {
		return newError(BadArgument, "22023", lock.what()+" is not on the server of "+lease.what(), nil)
	}
	h, err := lease.beats() // the lease may be closed and opened again meanwhile
	if err != nil {
		return err
	}
	if h.owes(request{lock.name, lock.owner}) {
		return newError(WrongState, "55000", lock.what()+" is being taken back from this owner", nil)
	}
	lock.keeper = h
	// over the lease's connection, if the lock need not wait
	until := later(lock.until, grace)
	err = lease.use(ctx, until, func(l *line) error {
		answer, err := l.askUntil(ctx, func() statement {
			return lock.statement("dlock_lease_acquire", 0, h.id)
		}, until, grace)
		lock.fence.Store(answer.number(0))
		lock.doubt = l.doubt
		return err
	})
	if isA(err, LockTimeout) && !(lock.limited && lock.timeout == 0) {
		err = lock.ask(ctx, "dlock_lease_acquire", h.id)
	}
	if err != nil {
		return err
	}
	h.join(&lock.kept, lock.name, lock.Fence())
	return lock.lost()
}

func (lock *Lock) acquireWithTTL(ctx context.Context) error {
	if err := lock.ask(ctx, "dlock_ttl_acquire", lock.ttl); err != nil {
		return err
	}
	// After a long wait, only a renewal makes the deadline known. A repeated request keeps its earlier ttl.
	s := plain("SELECT dlock_renew($1), $2::bigint", lock.Fence(), lock.ttl.Microseconds())
	if lock.options.owner != "" {
		s = plain("SELECT dlock_renew(lease), (extract(epoch FROM ttl) * 1000000)::bigint"+
			" FROM dlock_leases WHERE lease = $1", lock.Fence())
	}
	until := shorter(after(lock.ttl), later(lock.until, grace))
	answer, err := lock.line.askUntil(ctx, func() statement { return s }, until, lock.interval)
	if err != nil {
		return err
	}
	if answer.isNull(0) {
		lock.lose("the server has ended its lease at once")
		return lock.Check()
	}
	ttl := shorter(lock.ttl, time.Duration(answer.number(1))*time.Microsecond)
	part := float64(ttl) / float64(lock.ttl)
	newHeart(lock.line.server, &lock.kept, lock.Fence(), lock.line.sent, ttl,
		time.Duration(float64(lock.interval)*part), time.Duration(float64(lock.margin)*part))
	return nil
}

// takeBack undoes an interrupted request.
func (lock *Lock) takeBack(err error) {
	l := lock.line
	if lock.heart != nil {
		lock.heart.leave(&lock.kept, lock.lease == nil)
	}
	if lock.unwatch != nil {
		lock.unwatch()
		lock.unwatch = nil
	}
	switch lock.scope {
	case transactionScope:
		return
	case sessionScope:
		if l.given && lock.Fence() != 0 {
			undoHere(l.conn, lock.Fence())
		}
		l.drop()
		return
	}
	if l.isRefusal(err) && lock.Fence() == 0 && !lock.doubt || lock.owner == "" {
		l.drop()
		return
	}
	if len(l.takeBack(lock.keeper, request{lock.name, lock.owner})) > 0 {
		lock.owe(true)
	}
}

// undoHere releases locks on the program's connection. If it may still hold one of them, it closes the connection.
func undoHere(conn connection, fences ...int64) {
	for _, fence := range fences {
		if _, err := ask(background, conn, call("dlock_release_ticket", nil, fence), after(undo)); err != nil {
			closeConn(conn)
			return
		}
	}
}

// owe leaves an undo or a release to the heartbeat of the Lease, or to the owner's next request, if the server may
// execute the abandoned one later. A lock with a ttl of its own expires.
func (lock *Lock) owe(later bool) {
	switch {
	case lock.keeper != nil:
		lock.keeper.owe(request{lock.name, lock.owner})
	case lock.options.owner != "" && later:
		lock.debtor().owe(lock.Fence())
	}
}

func (lock *Lock) debtor() debtor {
	return debtor{lock.line.server.key(), request{lock.name, lock.options.owner}}
}

// pay releases what the owner must not get again.
func (lock *Lock) pay(ctx context.Context) (err error) {
	if lock.lease != nil || lock.options.owner == "" {
		return nil
	}
	owed := lock.debtor().owed()
	if owed == nil {
		return nil
	}
	d, until := owed.Value.(debt), later(lock.until, grace)
	if d.ticket != 0 {
		release := call("dlock_release_ticket", nil, d.ticket)
		_, err = lock.line.askUntil(ctx, func() statement { return release }, until, grace)
	} else {
		err = lock.line.undo(ctx, nil, d.request, until)
	}
	if err == nil {
		mu.Lock()
		defer mu.Unlock()
		settle(owed)
	}
	return err
}

// isRefusal is false if the server may have executed the request.
func (t trial) isRefusal(err error) bool {
	var own *Error
	return errors.As(err, &own) && !isA(err, QuorumLate, Cancelled) && !t.doubt
}

// takeBack undoes requests that the server may have executed, and returns those that it could not undo.
func (l *line) takeBack(h *heart, requests ...request) []request {
	l.drop()
	until := after(undo)
	l.checks = false
	for len(requests) > 0 && l.undo(background, h, requests[0], until) == nil {
		requests = requests[1:]
	}
	l.drop()
	return requests
}

// undo undoes a request, and waits until its session has ended.
func (l *line) undo(ctx context.Context, h *heart, r request, until time.Duration) error {
	for waits := newPauses(2 * time.Second); ; {
		done, err := r.takeBack(h, func(s statement) (row, error) {
			return l.askUntil(ctx, func() statement { return s }, until, grace)
		})
		if err != nil || done {
			return err
		}
		if Now() >= until {
			return newError(ConnectionLost, "", "the session of the request goes on waiting", nil)
		}
		sleep(ctx, waits.take())
	}
}

// Unlock returns LockLost if the lock was lost. A lock in transaction scope ends with its transaction. A connection of
// the program that refuses the release, as in a failed transaction, keeps the lock. Then call Unlock again.
func (lock *Lock) Unlock() error {
	if err := lock.turn(isHeld, leaving); err != nil {
		return err
	}
	release := call("dlock_release_ticket", nil, lock.Fence())
	if lock.scope == sessionScope {
		return lock.unlockHere(release)
	}
	defer lock.end(nil)
	switch {
	case lock.scope == transactionScope:
		return nil
	case lock.lease == nil:
		l := lock.line.another()
		defer l.close()
		return lock.giveBack(l, release, true, lock.owe)
	}
	if lock.owner == "" {
		defer lock.keeper.release(lock.name)
	}
	// over the lease's connection; if that fails, the lease's heartbeat repeats the release
	return lock.lease.use(background, lock.Deadline(), func(l *line) error {
		return lock.giveBack(l, release, false, lock.owe)
	})
}

func (lock *Lock) unlockHere(release statement) error {
	l, until := lock.line, after(grace)
	if l.given {
		until = forever
	}
	if lock.unwatch != nil {
		lock.unwatch()
		lock.unwatch = nil
	}
	var answer row
	var err error
	lost := lock.Lost()
	if !lost {
		answer, err = ask(background, l.conn, release, until)
	}
	if err != nil && l.given && !isEnded(l.conn) {
		lock.turn(leaving, isHeld)
		return err
	}
	defer lock.end(nil)
	switch {
	case lost:
	case err != nil && isEnded(l.conn):
		lock.lose("its connection is gone: " + err.Error())
	case err != nil:
		l.drop()
		return err
	case answer.text(0) != "t":
		lock.lose("the server has ended its ticket")
	}
	if lock.Lost() {
		l.drop()
	} else {
		l.close()
	}
	return lock.lost()
}

// Guard lets the transaction commit only while the lock is held.
func (lock *Lock) Guard(ctx context.Context, tx Querier) error {
	if err := checkTransaction(tx); err != nil {
		return err
	}
	var nothing any
	return Translate(tx.QueryRow(ctx, "SELECT dlock_guard($1, $2)::text", lock.name, lock.Fence()).Scan(&nothing))
}

// Do acquires the lock, works, and releases it. The context of the work ends at the loss.
func (lock *Lock) Do(ctx context.Context, work func(context.Context) error) error {
	held, err := lock.Lock(ctx)
	if err != nil {
		return err
	}
	return within(held, work, lock.Unlock)
}

// An Election runs work while this process leads, and campaigns again after a loss.
type Election struct{ lock *Lock }

// NewElection has a ttl of 15 seconds by default.
func (locks *Locks) NewElection(name string, given ...Option) *Election {
	return &Election{locks.NewLock(name, append([]Option{TTL(15 * time.Second)}, given...)...)}
}

// Run returns what the work returns if it ends while this process leads. The context of the work ends at the loss, and
// then the work must return. Run waits for an unreachable server without limit.
func (e *Election) Run(ctx context.Context, work func(context.Context, *Lock) error) error {
	waits := newPauses(15 * time.Second)
	for {
		held, err := e.lock.Lock(ctx)
		if err != nil {
			if isAway(err) {
				sleep(ctx, waits.take())
			} else if !isA(err, LockLost) {
				return err
			}
			continue
		}
		waits = newPauses(15 * time.Second)
		done := false
		err = within(held, func(ctx context.Context) error {
			failure := work(ctx, e.lock)
			done = failure == nil
			return failure
		}, e.lock.Unlock)
		if done && (err == nil || isAway(err)) {
			return nil // the work ended while this process led; the lock expires
		}
		// an error of the work because of the loss, or a loss after the work's end
		if !e.lock.Lost() || !(isA(err, LockLost) || errors.Is(err, context.Canceled)) || ctx.Err() != nil {
			return err
		}
	}
}
