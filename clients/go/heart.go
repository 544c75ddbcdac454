package dlock

// Each lease has a heart, whose timer watches the deadline and waits for nothing else. A pulse renews all leases on one
// server, over one connection.

import (
	"container/list"
	"context"
	"fmt"
	"log"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Timers stop while the machine sleeps, so check the clock at least each second.
const glance = time.Second

const renew = "SELECT array(SELECT dlock_renew(id) FROM unnest($1::bigint[]) AS leases (id))::text," +
	" array(SELECT fence FROM unnest($2::text[], $3::bigint[]) AS held (name, fence)" +
	" WHERE NOT dlock_check(name, fence))::text"

// find finds the tickets that a request may have left. Without a lease, it was a request with a ttl, whose lease is the
// ticket.
const find = "SELECT array(SELECT ticket FROM dlock_locks($1)" +
	" WHERE owner IS NOT DISTINCT FROM $2 AND lease = coalesce($3, ticket) AND scope = 'lease' AND role = current_user)"

const takeBack = "SELECT bool_and(dlock_release_ticket(ticket)) FROM unnest($1::bigint[]) AS found (ticket)"

// The number of debts that are kept, the newest
const mostDebts = 10000

// mu protects everything in this file. No input or output happens while it is held.
var (
	mu     sync.Mutex
	opened = sync.NewCond(&mu) // an acquire or an open has ended
	pulses = map[any]*pulse{}
	debts  = map[debtor]*list.Element{}
	ages   = list.New() // the debts, the newest last
)

// The states of a lock and of a lease
const (
	unheld  = "not held"
	asked   = "asked for"
	isHeld  = "held"
	leaving = "being released"
)

// kept is a lock or a lease, which may be lost.
type kept struct {
	what      func() string
	state     string
	ctx       context.Context
	cancel    func(error)
	heart     *heart
	loss      error
	callbacks []func()
	hooks     *Hooks
	since     time.Duration
	renewing  chan struct{} // for one call of Renew at a time
}

// lossContext ends at the loss. It checks the clock, because a stopped process may ask before a timer has run.
type lossContext struct {
	context.Context
	look func()
}

func (c lossContext) Err() error {
	c.look()
	return c.Context.Err()
}

func (k *kept) turn(before, after string) error {
	mu.Lock()
	defer mu.Unlock()
	if k.state != before {
		return newError(WrongState, "55000", k.what()+" is "+k.state, nil)
	}
	k.state = after
	return nil
}

// begin makes a child of the program's context.
func (k *kept) begin(parent context.Context) {
	inner, cancel := withCause(parent) // without mu: the parent may be the context of another lock
	mu.Lock()
	defer mu.Unlock()
	k.ctx, k.cancel = lossContext{inner, k.look}, cancel
	k.heart, k.loss, k.callbacks = nil, nil, nil
	k.since = Now()
}

func (k *kept) hold() {
	mu.Lock()
	defer mu.Unlock()
	k.state = isHeld
	if k.hooks != nil && k.hooks.Acquired != nil {
		what, waited := k.what(), Now()-k.since
		go guarded(what, func() { k.hooks.Acquired(what, waited) })
	}
	k.since = Now()
	opened.Broadcast()
}

// end is called after a release, or with the error of an acquire.
func (k *kept) end(err error) {
	mu.Lock()
	defer mu.Unlock()
	what, took := k.what(), Now()-k.since
	if err != nil && k.hooks != nil && k.hooks.Failed != nil {
		go guarded(what, func() { k.hooks.Failed(what, took, err) })
	} else if err == nil && k.hooks != nil && k.hooks.Released != nil {
		go guarded(what, func() { k.hooks.Released(what, took) })
	}
	k.state = unheld
	k.cancel(nil)
	opened.Broadcast()
}

// Context ends when the lock is lost or released. If it was lost, context.Cause of it is LockLost.
func (k *kept) Context() context.Context {
	mu.Lock()
	defer mu.Unlock()
	return k.ctx
}

// Lost checks the clock, too. Once true, it stays true.
func (k *kept) Lost() bool { return k.lost() != nil }

func (k *kept) lost() error {
	k.look()
	mu.Lock()
	defer mu.Unlock()
	return k.loss
}

// Check returns LockLost after a loss, and WrongState if it is not held. It sends nothing.
func (k *kept) Check() error {
	_, err := k.beats()
	return err
}

// beats is Check, and returns the heart. A later hold has another.
func (k *kept) beats() (*heart, error) {
	mu.Lock()
	defer mu.Unlock()
	return k.held()
}

// Caller holds mu.
func (k *kept) held() (*heart, error) {
	if k.heart != nil {
		k.heart.look()
	}
	if k.loss != nil {
		return nil, k.loss
	}
	if k.state != isHeld {
		return nil, newError(WrongState, "55000", k.what()+" is "+k.state, nil)
	}
	return k.heart, nil
}

// Deadline is the time, by Now, until which the program may work without an answer from the server.
func (k *kept) Deadline() time.Duration {
	mu.Lock()
	defer mu.Unlock()
	if k.heart == nil {
		return forever
	}
	return k.heart.deadline
}

func (k *kept) onLost(call func()) {
	mu.Lock()
	defer mu.Unlock()
	if k.loss != nil {
		go guarded(k.what(), call)
		return
	}
	k.callbacks = append(k.callbacks, call)
}

// guarded makes a callback, whose panic does not end the program.
func guarded(what string, call func()) {
	defer func() {
		if failure := recover(); failure != nil {
			log.Printf("dlock: callback of %s: panic: %v\n%s", what, failure, debug.Stack())
		}
	}()
	call()
}

func (k *kept) look() {
	mu.Lock()
	defer mu.Unlock()
	if k.heart != nil {
		k.heart.look()
	}
}

func (k *kept) lose(why string) {
	mu.Lock()
	defer mu.Unlock()
	k.setLost(why)
}

// Caller holds mu, also for each of the following unexported functions that does not lock it.
func (k *kept) setLost(why string) {
	if k.loss != nil {
		return
	}
	what := k.what()
	k.loss = newError(LockLost, "55L01", what+" was lost: "+why, nil)
	k.cancel(k.loss)
	for _, call := range k.callbacks {
		go guarded(what, call)
	}
	k.callbacks = nil
	if k.hooks != nil && k.hooks.Lost != nil {
		loss := k.loss
		go guarded(what, func() { k.hooks.Lost(what, loss) })
	}
}

// request is for a lease, or has a ttl. One for several locks has no owner.
type request struct{ name, owner string }

// takeBack undoes the request. False if its session still waits, because it has not noticed yet that the client is
// gone. The server may execute an abandoned statement late, so the statement that releases names the tickets: it cannot
// release what the owner acquires later.
func (r request) takeBack(h *heart, ask func(statement) (row, error)) (bool, error) {
	var owner, lease any
	if r.owner != "" {
		owner = r.owner
	}
	if h != nil {
		lease = h.id
	}
	found, err := ask(plain(find, r.name, owner, lease))
	if err != nil || found.text(0) == "{}" {
		return true, err
	}
	answer, err := ask(plain(takeBack, found.text(0)))
	return answer.text(0) != "f", err
}

// A debtor is an owner that the program gives to a lock with a ttl of its own.
type debtor struct {
	server any
	request
}

// A debt is a release, an undo or a renewal without an answer. The server may execute it at any later time, and then
// ends what the owner has. The owner's next request must not get the same ticket, so it first releases that ticket.
type debt struct {
	debtor
	ticket int64 // 0 if it may be any ticket of the owner
}

func (d debtor) owe(ticket int64) {
	mu.Lock()
	defer mu.Unlock()
	if e := debts[d]; e != nil {
		if e.Value.(debt).ticket == ticket {
			return
		}
		settle(e)
		ticket = 0
	}
	debts[d] = ages.PushBack(debt{d, ticket})
	if ages.Len() > mostDebts {
		settle(ages.Front())
	}
}

func (d debtor) owed() *list.Element {
	mu.Lock()
	defer mu.Unlock()
	return debts[d]
}

// settle forgets this debt, but no later debt of the same debtor.
func settle(e *list.Element) {
	if d := e.Value.(debt).debtor; debts[d] == e {
		delete(debts, d)
		ages.Remove(e)
	}
}

type hold struct {
	name  string
	fence int64
}

// The heart of a lease
type heart struct {
	id             int64
	interval, life time.Duration
	deadline, due  time.Duration
	over           bool
	mostLife       time.Duration // because of a renewal whose outcome is not known
	mostInterval   time.Duration
	members        map[*kept]*hold // the objects to notify: the lease (nil) and locks
	owed           map[request]bool
	together       map[string]bool // the names of LockAll
	timer          *time.Timer
	pulse          *pulse
}

func newHeart(server *Server, k *kept, id int64, sent, ttl, interval, margin time.Duration) {
	mu.Lock()
	defer mu.Unlock()
	h := &heart{id: id, interval: interval, life: ttl - margin, deadline: later(sent, ttl-margin), due: after(interval),
		mostLife: forever, mostInterval: forever, members: map[*kept]*hold{k: nil}, owed: map[request]bool{},
		together: map[string]bool{}}
	k.heart = h
	key := server.key()
	if h.pulse = pulses[key]; h.pulse == nil {
		h.pulse = newPulse(key, server)
	}
	h.pulse.hearts[h] = true
	h.pulse.wake()
	h.watch()
}

func (h *heart) watch() {
	h.look()
	if !h.over {
		h.timer = time.AfterFunc(shorter(h.deadline-Now(), glance), func() {
			mu.Lock()
			defer mu.Unlock()
			h.watch()
		})
	}
}

func (h *heart) look() {
	if !h.over && Now() >= h.deadline {
		h.lose("its deadline has passed")
	}
}

func (h *heart) lose(why string) {
	h.over = true
	if h.timer != nil {
		h.timer.Stop()
	}
	h.pulse.remove(h)
	for k := range h.members {
		k.setLost(why)
	}
}

func (h *heart) join(k *kept, name string, fence int64) {
	mu.Lock()
	defer mu.Unlock()
	k.heart = h
	h.members[k] = &hold{name, fence}
	if h.over {
		k.setLost("its lease is over")
	}
}

// leave stops notifying the object. With last, it ends the lease, and with it all of its remaining locks.
func (h *heart) leave(k *kept, last bool) {
	mu.Lock()
	defer mu.Unlock()
	delete(h.members, k)
	if last && !h.over {
		h.lose("its lease is closed")
	}
}

// isLimited is true if a renewal with a ttl has no answer.
func (h *heart) isLimited() bool {
	mu.Lock()
	defer mu.Unlock()
	return h.mostLife < forever
}

// owe lets the heartbeat undo requests that the server may have executed.
func (h *heart) owe(requests ...request) {
	mu.Lock()
	defer mu.Unlock()
	for _, r := range requests {
		h.owed[r] = true
	}
	h.pulse.wake()
}

func (h *heart) owes(r request) bool {
	mu.Lock()
	defer mu.Unlock()
	return h.owed[r]
}

func (h *heart) renewed(sent time.Duration, kept bool, gone map[string]bool, held map[*kept]*hold) {
	if h.over {
		return
	}
	if !kept {
		h.lose("the server has ended its lease")
		return
	}
	h.deadline = longer(h.deadline, later(sent, h.life))
	for k, hold := range held {
		if gone[fmt.Sprint(hold.fence)] && h.members[k] == hold {
			k.setLost("the server has ended its ticket")
			delete(h.members, k)
		}
	}
}

// A pulse renews all leases on one server.
type pulse struct {
	key      any
	server   *Server
	hearts   map[*heart]bool
	ctx      context.Context
	end      context.CancelFunc
	woken    chan struct{}
	conn     connection
	done     func()
	asked    time.Duration // the time of a request without an answer, or 0
	silent   connection    // the connection of that request
	patience *time.Timer
}

func newPulse(key any, server *Server) *pulse {
	p := &pulse{key: key, server: server, hearts: map[*heart]bool{}, woken: make(chan struct{}, 1)}
	p.ctx, p.end = context.WithCancel(background)
	pulses[key] = p
	go p.beat()
	return p
}

func (p *pulse) remove(h *heart) {
	delete(p.hearts, h)
	if len(p.hearts) == 0 && pulses[p.key] == p {
		delete(pulses, p.key)
		p.end()
	}
	p.wake()
}

// wake ends a rest, and sets the timer for a connection's answer again, because the shortest interval may have changed.
func (p *pulse) wake() {
	select {
	case p.woken <- struct{}{}:
	default:
	}
	if p.patience != nil {
		p.patience.Stop()
		p.patience = nil
	}
	if p.asked != 0 {
		conn := p.silent
		p.patience = time.AfterFunc(longer(0, later(p.asked, p.shortest())-Now()), func() { cut(conn) })
	}
}

func (p *pulse) shortest() time.Duration {
	if len(p.hearts) == 0 {
		return 0
	}
	shortest := forever
	for h := range p.hearts {
		shortest = shorter(shortest, h.interval)
	}
	return shortest
}

func (p *pulse) beat() {
	waits, pause := newPauses(2*time.Second), time.Duration(0)
	for {
		due := p.rest(pause)
		if due == nil {
			break
		}
		pause = 0
		settled, err := p.serve(due)
		switch {
		case err != nil: // does not prove a loss: retry
			pause = waits.take()
			p.close()
		case settled:
			waits = newPauses(2 * time.Second)
		default:
			pause = waits.take()
		}
	}
	p.close()
}

func (p *pulse) close() {
	if p.conn != nil {
		p.done()
		p.conn = nil
	}
}

// rest waits, and returns the leases that are due now or soon; nil if no lease is left.
func (p *pulse) rest(pause time.Duration) []*heart {
	mu.Lock()
	defer mu.Unlock()
	earliest := after(shorter(pause, p.shortest()/2))
	for len(p.hearts) > 0 {
		now, next := Now(), forever
		var due []*heart
		for h := range p.hearts {
			at := h.due
			if len(h.owed) > 0 {
				at = now
			}
			next = shorter(next, at)
			if at <= now+h.interval/4 {
				due = append(due, h)
			}
		}
		if next = longer(next, earliest); next <= now {
			return due
		}
		timer := time.NewTimer(shorter(next-now, glance))
		mu.Unlock()
		select {
		case <-timer.C:
		case <-p.woken:
		}
		timer.Stop()
		mu.Lock()
	}
	return nil
}

// serve renews the leases, and undoes owed requests. False if a request is still owed.
func (p *pulse) serve(due []*heart) (bool, error) {
	if p.conn == nil {
		mu.Lock()
		patience := longer(time.Second, p.shortest())
		mu.Unlock()
		conn, done, err := p.server.connect(p.ctx, "dlock heartbeat", patience)
		if err != nil {
			return false, err
		}
		p.conn, p.done = conn, done
	}
	if err := p.renew(due); err != nil {
		return false, err
	}
	settled := true
	for _, h := range due {
		for _, r := range p.owedOf(h) {
			done, err := r.takeBack(h, p.ask)
			if err != nil {
				return false, err
			}
			if !done {
				settled = false
				continue
			}
			mu.Lock()
			delete(h.owed, r)
			mu.Unlock()
		}
	}
	return settled, nil
}

func (p *pulse) owedOf(h *heart) (all []request) {
	mu.Lock()
	defer mu.Unlock()
	for r := range h.owed {
		all = append(all, r)
	}
	return all
}

func (p *pulse) ask(s statement) (row, error) {
	mu.Lock()
	p.asked, p.silent = Now(), p.conn
	p.wake()
	mu.Unlock()
	answer, err := ask(background, p.conn, s, forever)
	mu.Lock()
	p.asked = 0
	p.wake()
	mu.Unlock()
	return answer, err
}

func (p *pulse) renew(due []*heart) error {
	var ids, fences, names []string
	held := make([]map[*kept]*hold, len(due))
	mu.Lock()
	for n, h := range due {
		ids = append(ids, fmt.Sprint(h.id))
		held[n] = map[*kept]*hold{}
		for k, hold := range h.members {
			if hold != nil {
				held[n][k] = hold
				names = append(names, hold.name)
				fences = append(fences, strconv.FormatInt(hold.fence, 10))
			}
		}
	}
	mu.Unlock()
	sent := Now()
	answer, err := p.ask(plain(renew, quoted(ids), quoted(names), quoted(fences)))
	if err != nil {
		return err
	}
	gone := map[string]bool{}
	for _, fence := range items(answer.text(1)) {
		gone[fence] = true
	}
	mu.Lock()
	defer mu.Unlock()
	for n, tickets := range items(answer.text(0)) {
		due[n].due = sent + due[n].interval
		due[n].renewed(sent, tickets != "NULL", gone, held[n])
	}
	return nil
}

// items splits an array of numbers.
func items(array string) []string {
	return strings.Split(strings.Trim(array, "{}"), ",")
}
