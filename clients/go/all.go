package dlock

import (
	"context"
	"strconv"
	"time"
)

// Several locks at once: all, or none. Calls of these functions do not deadlock with each other. Their options are
// Timeout, Shared and Info.

// InTxAll acquires locks in transaction scope, and returns their fences.
func InTxAll(ctx context.Context, tx Querier, names []string, given ...Option) ([]int64, error) {
	if err := checkTransaction(tx); err != nil {
		return nil, err
	}
	o, until := limits(given)
	answer, _, err := scan(ctx, tx, allOf("dlock_xact_acquire_all", o, until, names))
	return fences(answer), err
}

// LockAll acquires locks in session scope, which must all be on one connection of the program.
func LockAll(ctx context.Context, locks []*Lock, given ...Option) error {
	o, until := limits(given)
	names, seen := make([]string, len(locks)), map[string]bool{}
	for n, lock := range locks {
		if lock.line == nil || !lock.line.given || lock.line.conn != locks[0].line.conn {
			return newError(BadArgument, "22023", "not all locks are on one connection", nil)
		}
		if names[n] = lock.name; seen[lock.name] {
			return newError(BadArgument, "22023", strconv.Quote(lock.name)+" is given twice", nil)
		}
		seen[lock.name] = true
	}
	if len(locks) == 0 {
		return nil
	}
	for n, lock := range locks {
		if err := lock.turn(unheld, asked); err != nil {
			notAsked(locks[:n])
			return err
		}
	}
	conn := locks[0].line.conn
	answer, err := ask(ctx, conn, allOf("dlock_acquire_all", o, until, names), forever)
	got := fences(answer)
	if err == nil && ctx.Err() != nil {
		undoHere(conn, got...)
		err = cancelled(ctx)
	}
	if err != nil {
		notAsked(locks)
		return err
	}
	for n, lock := range locks {
		lock.got(ctx, got[n], nil)
	}
	return nil
}

func notAsked(locks []*Lock) {
	for _, lock := range locks {
		lock.turn(asked, unheld)
	}
}

// LockAll acquires locks that the lease keeps. Unlock each of them, or close the lease.
func (lease *Lease) LockAll(ctx context.Context, names []string, given ...Option) ([]*Lock, error) {
	var locks []*Lock
	var requests []request
	for _, name := range names {
		if lease.locks.server(name) != lease.server {
			return nil, newError(BadArgument, "22023", name+" is not on the server of "+lease.what(), nil)
		}
		locks = append(locks, lease.NewLock(name))
		requests = append(requests, request{name, ""})
	}
	heart, err := lease.claim(names)
	if err != nil {
		return nil, err
	}
	o, until := limits(given)
	l := lease.locks.line(lease.server)
	l.checks = !(o.limited && o.timeout == 0)
	answer, err := l.askUntil(ctx, func() statement {
		return allOf("dlock_lease_acquire_all", o, until, names, heart.id)
	}, later(until, grace), forever)
	if err == nil && ctx.Err() != nil {
		err = cancelled(ctx)
	}
	if err == nil {
		err = lease.Check()
	}
	if err == nil {
		l.close()
		for n, fence := range fences(answer) {
			locks[n].got(ctx, fence, heart)
		}
		return locks, nil
	}
	if answer == nil && l.isRefusal(err) {
		l.drop()
	} else {
		heart.owe(l.takeBack(heart, requests...)...)
	}
	heart.release(names...)
	return nil, err
}

// claim refuses names that the lease holds or still undoes, because a repeated request would get the earlier lock. It
// returns the heart for the request, because the lease may be closed and opened again meanwhile.
func (lease *Lease) claim(names []string) (*heart, error) {
	mu.Lock()
	defer mu.Unlock()
	heart, err := lease.held()
	if err != nil {
		return nil, err
	}
	for n, name := range names {
		if heart.together[name] || heart.owed[request{name, ""}] {
			for _, before := range names[:n] {
				delete(heart.together, before)
			}
			return nil, newError(WrongState, "55000", lease.what()+" has "+strconv.Quote(name)+" already", nil)
		}
		heart.together[name] = true
	}
	return heart, nil
}

// release forgets names that claim has noted.
func (h *heart) release(names ...string) {
	mu.Lock()
	defer mu.Unlock()
	for _, name := range names {
		delete(h.together, name)
	}
}

func (lock *Lock) got(ctx context.Context, fence int64, h *heart) {
	lock.begin(ctx)
	lock.owner, lock.keeper = "", h
	lock.fence.Store(fence)
	if h != nil {
		h.join(&lock.kept, lock.name, fence)
	}
	lock.hold()
}

func limits(given []Option) (o options, until time.Duration) {
	o, until = newOptions(given), forever
	if o.limited {
		until = after(o.timeout)
	}
	return o, until
}

// allOf is a request for all names. A repeated request gets the remaining time.
func allOf(function string, o options, until time.Duration, names []string, values ...any) statement {
	all := o.request[:len(o.request):len(o.request)]
	if until < forever {
		all = append(all, named{"timeout", longer(0, until-Now())})
	}
	return call(function, all, append([]any{quoted(names)}, values...)...)
}

func fences(answer row) (all []int64) {
	for _, item := range items(answer.text(0)) {
		if fence, err := strconv.ParseInt(item, 10, 64); err == nil {
			all = append(all, fence)
		}
	}
	return all
}
