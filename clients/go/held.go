package dlock

import (
	"context"
	"time"
)

// Calls for a lock or a lease that is held

// The server's least ttl
const leastTTL = 100 * time.Millisecond

// send executes a call over the connection of the lock or of its lease, or over one for this call.
func (lock *Lock) send(ctx context.Context, s statement) (row, trial, error) {
	switch {
	case lock.lease != nil:
		return lock.lease.send(ctx, s)
	case lock.scope == transactionScope:
		return scan(ctx, lock.tx, s)
	case lock.scope == sessionScope:
		until := after(grace)
		if lock.line.given {
			until = forever
		}
		if lock.unwatch != nil {
			lock.unwatch()
			defer lock.watch()
		}
		answer, err := ask(ctx, lock.line.conn, s, until)
		return answer, trial{}, err
	}
	l := lock.line.another()
	defer l.close()
	answer, err := l.askUntil(ctx, func() statement { return s }, lock.Deadline(), grace)
	return answer, l.trial, err
}

func (lease *Lease) send(ctx context.Context, s statement) (answer row, how trial, err error) {
	err = lease.use(ctx, lease.Deadline(), func(l *line) error {
		answer, err = l.askUntil(ctx, func() statement { return s }, lease.Deadline(), grace)
		how = l.trial
		return err
	})
	return answer, how, err
}

// scan returns one value, in text format.
func scan(ctx context.Context, tx Querier, s statement) (row, trial, error) {
	var text *string
	values := make([]any, len(s.values))
	for n := range values {
		values[n] = string(s.values[n])
	}
	err := Translate(tx.QueryRow(ctx, s.sql+"::text", values...).Scan(&text))
	if err != nil || text == nil {
		return nil, trial{}, err
	}
	if *text == "true" || *text == "false" {
		*text = (*text)[:1]
	}
	return row{[]byte(*text)}, trial{}, nil
}

// sendHeld executes a call that returns false after a loss, or after a release meanwhile: LockLost or WrongState.
func (k *kept) sendHeld(send func() (row, trial, error)) error {
	mu.Lock()
	_, err := k.held()
	since := k.since // a later hold has another
	mu.Unlock()
	if err != nil {
		return err
	}
	answer, _, err := send()
	if err != nil || answer.text(0) == "t" {
		return err
	}
	mu.Lock()
	defer mu.Unlock()
	return k.ended(since)
}

// ended is called after an answer that the server has ended the hold. Caller holds mu.
func (k *kept) ended(since time.Duration) error {
	if k.state != isHeld || k.since != since {
		return newError(WrongState, "55000", k.what()+" was released", nil)
	}
	k.setLost("the server has ended it")
	return k.loss
}

// SetInfo changes the info, which others can read.
func (lock *Lock) SetInfo(ctx context.Context, info string) error {
	return lock.sendHeld(func() (row, trial, error) {
		return lock.send(ctx, call("dlock_set_info", nil, lock.Fence(), info))
	})
}

// SetInfo changes the info, which others can read.
func (lease *Lease) SetInfo(ctx context.Context, info string) error {
	return lease.sendHeld(func() (row, trial, error) {
		return lease.send(ctx, call("dlock_set_info", nil, lease.ID(), info))
	})
}

// Downgrade makes an exclusive hold shared, without releasing it.
func (lock *Lock) Downgrade(ctx context.Context) error {
	return lock.sendHeld(func() (row, trial, error) {
		return lock.send(ctx, call("dlock_downgrade", nil, lock.Fence()))
	})
}

// IsHeld asks the server. The answer can be outdated on arrival; to be sure, use Guard.
func (lock *Lock) IsHeld(ctx context.Context) (bool, error) {
	h, err := lock.beats()
	if err != nil {
		return false, nil
	}
	var options []named
	if h != nil {
		options = []named{{"lease", h.id}}
	}
	answer, _, err := lock.send(ctx, call("dlock_is_held", options, lock.name))
	return answer.text(0) == "t", err
}

// Renew renews the lease of a lock with a ttl now. A ttl other than 0 replaces the ttl of the lease.
func (lock *Lock) Renew(ctx context.Context, ttl time.Duration) error {
	h, err := lock.beats()
	if err != nil {
		return err
	}
	if lock.scope != leaseScope || lock.lease != nil {
		return newError(WrongState, "55000", lock.what()+" has no lease of its own", nil)
	}
	err = lock.renew(ctx, ttl, &lock.options, lock.send)
	if lock.options.owner != "" && h.isLimited() {
		lock.debtor().owe(h.id)
	}
	return err
}

// Renew renews the lease now. A ttl other than 0 replaces the ttl of the lease.
func (lease *Lease) Renew(ctx context.Context, ttl time.Duration) error {
	return lease.renew(ctx, ttl, &lease.options, lease.send)
}

// renew requests another ttl if it is not 0. Until the server has answered, the shorter ttl counts. A refusal restores
// the earlier limits, so another renewal waits.
func (k *kept) renew(ctx context.Context, ttl time.Duration, o *options,
	send func(context.Context, statement) (row, trial, error)) error {
	if err := enter(ctx, k.renewing); err != nil {
		return err
	}
	defer func() { <-k.renewing }()
	mu.Lock()
	h, err := k.held()
	if err != nil {
		mu.Unlock()
		return err
	}
	since, next, life, interval, deadline := k.since, *o, h.life, h.interval, h.deadline
	mostLife, mostInterval := h.mostLife, h.mostInterval
	var sends []named
	if ttl != 0 {
		part := float64(ttl) / float64(o.ttl)
		next.ttl, next.interval = ttl, time.Duration(float64(o.interval)*part)
		next.margin = time.Duration(float64(o.margin) * part)
		if next.bad = next.isBad() || ttl < leastTTL; next.bad {
			mu.Unlock()
			return next.check()
		}
		sends = []named{{"ttl", ttl}}
		least := shorter(life, ttl-next.margin)
		// the server may execute a request that is abandoned at any later time, so these limits stay without an answer
		h.mostLife, h.mostInterval = shorter(mostLife, ttl-next.margin), shorter(mostInterval, next.interval)
		h.change(least, shorter(interval, next.interval), shorter(deadline, after(least)))
	}
	mu.Unlock()
	answer, how, err := send(ctx, call("dlock_renew", sends, h.id))
	mu.Lock()
	defer mu.Unlock()
	if !how.doubt && (how.sent == 0 || err == nil || how.isRefusal(err)) {
		h.mostLife, h.mostInterval = mostLife, mostInterval
		if isA(err, BadArgument, NotAllowed) {
			h.change(life, interval, longer(h.deadline, deadline))
		}
	}
	if err != nil {
		return err
	}
	if answer.isNull(0) {
		return k.ended(since)
	}
	if ttl != 0 {
		life, interval = ttl-next.margin, next.interval
		if k.heart == h { // otherwise it has been released, and acquired again
			o.ttl, o.interval, o.margin = next.ttl, next.interval, next.margin
		}
	}
	h.change(life, interval, longer(h.deadline, later(how.sent, shorter(life, h.mostLife))))
	return nil
}

// change sets new limits. The next renewal is at most the new interval away.
func (h *heart) change(life, interval, deadline time.Duration) {
	if !h.over {
		h.life, h.interval, h.deadline = shorter(life, h.mostLife), shorter(interval, h.mostInterval), deadline
		h.due = shorter(h.due, after(h.interval))
		h.timer.Stop()
		h.watch()
		h.pulse.wake()
	}
}

// Resize sets the number of permits of a lock, which replaces the number in requests. 0 restores that number.
func (locks *Locks) Resize(ctx context.Context, name string, slots int) error {
	l := locks.line(locks.server(name))
	defer l.close()
	s := call("dlock_set_slots", nil, name, slots)
	if slots == 0 {
		s.values[1] = nil
	}
	_, err := l.ask(ctx, s)
	return err
}
