package dlock

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// The time between queries that make up for lost notifications, and notice a connection that has become silent
var round = time.Minute // a variable for the tests

// An Event is a change of a ticket: granted, wanted (a request waits for the lock), released (by force), expired, lost;
// or of a watched lock: held, free.
type Event struct {
	Event  string `json:"event"`
	Lock   string `json:"lock"`
	Ticket int64  `json:"ticket"`
	Mode   string `json:"mode"`
	Scope  string `json:"scope"`
	Info   string `json:"info"`
}

type place struct {
	request
	s       statement
	heart   *heart // of the lease at the enqueue; otherwise nil
	granted bool
}

// Tickets are places in many queues of one server, over one connection. Without a lease they end with the connection.
// Next and the other methods may be called at the same time.
type Tickets struct {
	locks  *Locks
	lease  *Lease
	line   *line
	next   chan struct{} // one goroutine at a time is in Next
	alone  chan struct{} // protects the connection, and what follows
	last   connection
	events []Event
	places map[int64]*place
	order  []int64
	watch  map[string]bool
	round  time.Duration

	closed atomic.Bool

	turn    sync.Mutex // protects what follows
	wanting int        // the number of others that want the connection
	stop    func()     // ends the wait of Next
}

// NewTickets are tickets of a session. The only option is Near.
func (locks *Locks) NewTickets(given ...Option) *Tickets {
	o := newOptions(given)
	return &Tickets{locks: locks, line: locks.line(locks.server(o.near)), places: map[int64]*place{},
		watch: map[string]bool{}, round: after(round), next: make(chan struct{}, 1), alone: make(chan struct{}, 1)}
}

// NewTickets are tickets of the lease, which keep their places when the connection breaks.
func (lease *Lease) NewTickets() *Tickets {
	tickets := lease.locks.NewTickets(Near(lease.near))
	tickets.lease = lease
	return tickets
}

// Watch reports the holder of a lock, now and at each change, with the events held and free.
func (locks *Locks) Watch(ctx context.Context, name string) (*Tickets, error) {
	tickets := locks.NewTickets(Near(name))
	if err := tickets.Watch(ctx, name); err != nil {
		tickets.Close()
		return nil, err
	}
	return tickets, nil
}

// Enqueue returns the ticket, which is the fence once it is granted. The options are Shared, Slots, Permits, Info and,
// with a lease, Owner.
func (t *Tickets) Enqueue(ctx context.Context, name string, given ...Option) (ticket int64, err error) {
	o := newOptions(given)
	p := &place{request: request{name, o.owner}, s: call("dlock_enqueue", o.request, name)}
	if t.lease != nil {
		if p.heart, err = t.lease.beats(); err != nil {
			return 0, err
		}
		if p.owner == "" {
			if p.owner, err = newOwner(); err != nil {
				return 0, err
			}
		}
		p.s = call("dlock_lease_enqueue", append(o.request, named{"owner", p.owner}), name, p.heart.id)
	}
	err = t.use(ctx, name, func() error {
		if p.heart != nil && p.heart.owes(p.request) {
			return newError(WrongState, "55000", fmt.Sprintf("%q is being taken back from this owner", name), nil)
		}
		answer, err := t.ask(ctx, p.s)
		if err != nil {
			if p.heart != nil && !t.line.isRefusal(err) && !t.has(p) {
				p.heart.owe(p.request)
			}
			return err
		}
		ticket = answer.number(0)
		if t.places[ticket] == nil {
			t.order = append(t.order, ticket)
		}
		t.places[ticket] = p
		return t.confirm(ticket)
	})
	return ticket, err
}

// has is true if an earlier enqueue of the request got the ticket.
func (t *Tickets) has(p *place) bool {
	for _, earlier := range t.places {
		if earlier.request == p.request && earlier.heart == p.heart {
			return true
		}
	}
	return false
}

// Release returns LockLost if the ticket was lost. After another error, the heartbeat of a lease repeats the release. A
// ticket of the session can be released again.
func (t *Tickets) Release(ctx context.Context, ticket int64) error {
	entered := false
	release := func() error {
		entered = true
		p := t.places[ticket]
		if p == nil {
			return newError(LockLost, "55L01", fmt.Sprintf("ticket %d is not ours", ticket), nil)
		}
		if p.heart != nil {
			delete(t.places, ticket) // a new connection must not request it again
		}
		answer, err := t.ask(ctx, call("dlock_release_ticket", nil, ticket))
		if err != nil {
			if p.heart != nil {
				p.heart.owe(p.request)
			}
			return err
		}
		delete(t.places, ticket)
		if answer.text(0) != "t" && !t.line.doubt {
			return newError(LockLost, "55L01", fmt.Sprintf("ticket %d was lost", ticket), nil)
		}
		return nil
	}
	err := t.use(ctx, "", release)
	if !entered && t.lease != nil {
		go t.use(background, "", release) // sends nothing any more, but lets the heartbeat repeat it
	}
	return err
}

// Watch adds a lock whose holder is reported, now and at each change.
func (t *Tickets) Watch(ctx context.Context, name string) error {
	return t.use(ctx, name, func() error {
		_, err := t.ask(ctx, call("dlock_watch", nil, name))
		if err == nil {
			t.watch[name] = true
		}
		return err
	})
}

// Unwatch ends a watch.
func (t *Tickets) Unwatch(ctx context.Context, name string) error {
	return t.use(ctx, name, func() error {
		delete(t.watch, name)
		_, err := t.ask(ctx, call("dlock_unwatch", nil, name))
		return err
	})
}

// Next waits for the next event. When the context ends it returns Cancelled.
func (t *Tickets) Next(ctx context.Context) (Event, error) {
	if err := enter(ctx, t.next); err != nil {
		return Event{}, err
	}
	defer func() { <-t.next }()
	for {
		event, err := t.listen(ctx)
		if event != nil || err != nil {
			return *or(event, &Event{}), err
		}
		if ctx.Err() != nil {
			return Event{}, cancelled(ctx)
		}
	}
}

func or[T any](value, other *T) *T {
	if value != nil {
		return value
	}
	return other
}

// Close ends the session's tickets. A lease keeps its own.
func (t *Tickets) Close() error {
	t.closed.Store(true) // ends the retries of another call
	return t.use(background, "", func() error {
		t.line.drop()
		return nil
	})
}

// use works with exclusive use of the connection, after it has ended the wait of Next.
func (t *Tickets) use(ctx context.Context, name string, work func() error) error {
	if name != "" && t.locks.server(name) != t.line.server {
		return newError(BadArgument, "22023", fmt.Sprintf("%q is on another server", name), nil)
	}
	t.turn.Lock()
	t.wanting++
	if t.stop != nil {
		t.stop()
	}
	t.turn.Unlock()
	err := enter(ctx, t.alone)
	t.turn.Lock()
	t.wanting--
	t.turn.Unlock()
	if err != nil {
		return err
	}
	defer func() { <-t.alone }()
	return work()
}

// listen waits once, and returns an event, or nil if none has come.
func (t *Tickets) listen(ctx context.Context) (*Event, error) {
	if err := enter(ctx, t.alone); err != nil {
		return nil, err
	}
	defer func() { <-t.alone }()
	conn, err := t.session(ctx)
	if err != nil {
		return nil, err
	}
	if Now() >= t.round {
		t.round = after(round)
		_, err = ask(background, conn, statement{sql: "SELECT 1"}, after(grace))
		if err != nil && !isA(err, ConnectionLost) { // which is noticed below
			return nil, err
		}
		for _, ticket := range t.tickets() {
			if err := t.confirm(ticket); err != nil {
				return nil, err
			}
		}
	}
	if err = t.hear(ended, conn, true); err == nil && len(t.events) == 0 {
		wait, stop := context.WithTimeout(ctx, t.round-Now())
		defer stop()
		t.turn.Lock()
		if t.wanting > 0 {
			stop()
		}
		t.stop = stop
		t.turn.Unlock()
		err = t.hear(wait, conn, false)
		t.turn.Lock()
		t.stop = nil
		t.turn.Unlock()
	}
	if err != nil {
		return nil, err
	}
	if len(t.events) == 0 {
		return nil, nil
	}
	event := t.events[0]
	t.events = t.events[1:]
	return &event, nil
}

// A context that has ended, to take the events that have come, without a wait
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(background)
	cancel()
	return ctx
}()

func (t *Tickets) hear(ctx context.Context, conn connection, all bool) error {
	for {
		payload, err := hear(ctx, conn)
		if payload == "" {
			if ctx.Err() != nil || isEnded(conn) {
				return nil
			}
			return Translate(err)
		}
		if err = t.take(payload); err != nil || !all {
			return err
		}
	}
}

func (t *Tickets) take(payload string) error {
	var event Event
	if json.Unmarshal([]byte(payload), &event) != nil {
		return nil
	}
	switch event.Event {
	case "granted":
		return t.confirm(event.Ticket)
	case "released", "expired":
		t.forget(event.Ticket, event.Event)
	case "wanted":
		if t.places[event.Ticket] != nil {
			t.events = append(t.events, event)
		}
	case "held", "free":
		if t.watch[event.Lock] {
			t.events = append(t.events, event)
		}
	}
	return nil
}

func (t *Tickets) tickets() (all []int64) {
	for _, ticket := range t.order {
		if t.places[ticket] != nil {
			all = append(all, ticket)
		}
	}
	t.order = all
	return all[:len(all):len(all)]
}

// session returns the connection, or a new one if it broke. Tickets of a lease stay; tickets of the session are lost.
func (t *Tickets) session(ctx context.Context) (connection, error) {
	if t.closed.Load() {
		return nil, newError(WrongState, "55000", "the tickets are closed", nil)
	}
	if t.last != nil && !isEnded(t.last) {
		return t.last, nil
	}
	if t.lease == nil && len(t.places) > 0 {
		var events []Event
		for _, event := range t.events {
			if event.Event == "held" || event.Event == "free" || t.places[event.Ticket] == nil {
				events = append(events, event)
			}
		}
		t.events, t.places, t.order = events, map[int64]*place{}, nil
		return nil, newError(LockLost, "55L01", "the tickets are gone with their connection", nil)
	}
	t.line.drop() // it may listen, and have watches
	if _, err := t.line.ask(ctx, statement{sql: "SELECT 1"}); err != nil {
		return nil, err
	}
	conn := t.line.conn
	for name := range t.watch {
		if _, err := ask(background, conn, call("dlock_watch", nil, name), after(grace)); err != nil {
			return nil, err
		}
	}
	for _, ticket := range t.tickets() {
		answer, err := ask(background, conn, t.places[ticket].s, after(grace))
		again := answer.number(0)
		switch {
		case isA(err, LockLost, WrongState): // the lease has ended, or another client holds the lock with other slots
			t.forget(ticket, "lost")
		case err != nil:
			return nil, err
		case again != ticket:
			if _, err = ask(background, conn, call("dlock_release_ticket", nil, again), after(grace)); err != nil {
				return nil, err
			}
			t.forget(ticket, "lost")
		}
	}
	t.last = conn
	for _, ticket := range t.tickets() {
		if err := t.confirm(ticket); err != nil {
			return nil, err
		}
	}
	return conn, nil
}

// ask executes a call, again over another connection if one breaks, until the patience ends. Then an earlier attempt is
// in doubt.
func (t *Tickets) ask(ctx context.Context, s statement) (row, error) {
	end, waits := after(t.line.patience), newPauses(2*time.Second)
	for doubt := false; ; doubt = true {
		conn, err := t.session(ctx)
		t.line.doubt = doubt
		if err != nil {
			return nil, err
		}
		answer, err := ask(ctx, conn, s, after(grace))
		if !isA(err, ConnectionLost) {
			return answer, err
		}
		t.line.drop()
		t.last, t.line.doubt = nil, true
		if ctx.Err() != nil {
			return nil, cancelled(ctx)
		}
		if Now() >= end {
			return nil, err
		}
		sleep(ctx, waits.take())
	}
}

// confirm asks for the grant, because a notification is only a hint. Each grant is reported once.
func (t *Tickets) confirm(ticket int64) error {
	p := t.places[ticket]
	if p == nil || p.granted {
		return nil
	}
	answer, err := ask(background, t.last, call("dlock_wait", nil, ticket, "0"), after(grace))
	switch {
	case isA(err, LockLost):
		t.forget(ticket, "lost")
	case isA(err, ConnectionLost): // ask over the next connection
	case err != nil:
		return err
	case answer.text(0) == "t":
		p.granted = true
		t.events = append(t.events, Event{Event: "granted", Lock: p.name, Ticket: ticket})
	}
	return nil
}

func (t *Tickets) forget(ticket int64, event string) {
	if p := t.places[ticket]; p != nil {
		delete(t.places, ticket)
		t.events = append(t.events, Event{Event: event, Lock: p.name, Ticket: ticket})
	}
}
