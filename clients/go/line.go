package dlock

import (
	"context"
	"math"
	"math/rand"
	"strconv"
	"strings"
	"time"
)

const (
	forever = time.Duration(math.MaxInt64)

	// How late an answer may be. Then the client drops the connection.
	grace = 5 * time.Second

	// How long the server may take to obey a cancel, and the client then to undo the request
	obey = time.Second
	undo = 2 * time.Second
)

func after(d time.Duration) time.Duration { return later(Now(), d) }

func later(at, d time.Duration) time.Duration {
	if d > forever-at {
		return forever
	}
	return at + d
}

func shorter(a, b time.Duration) time.Duration {
	if a < b {
		return a
	}
	return b
}

func longer(a, b time.Duration) time.Duration {
	if a < b {
		return b
	}
	return a
}

// pauses before retries without a server: they grow, and are varied at random
type pauses struct{ next, most time.Duration }

func newPauses(most time.Duration) *pauses { return &pauses{100 * time.Millisecond, most} }

func (p *pauses) take() time.Duration {
	pause := p.next
	p.next = shorter(2*pause, p.most)
	return time.Duration(float64(pause) * (0.5 + rand.Float64()))
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// enter waits until no other call is inside. To leave, receive from the door.
func enter(ctx context.Context, door chan struct{}) error {
	select {
	case door <- struct{}{}: // even if the context has ended
		return nil
	default:
	}
	select {
	case door <- struct{}{}:
		return nil
	case <-ctx.Done():
		return cancelled(ctx)
	}
}

type statement struct {
	sql    string
	values [][]byte
}

// A row has its values in text format.
type row [][]byte

func (r row) isNull(n int) bool { return len(r) <= n || r[n] == nil }

func (r row) text(n int) string {
	if r.isNull(n) {
		return ""
	}
	return string(r[n])
}

func (r row) number(n int) int64 {
	number, _ := strconv.ParseInt(r.text(n), 10, 64)
	return number
}

type named struct {
	key   string
	value any
}

func encode(value any) []byte {
	switch value := value.(type) {
	case nil:
		return nil
	case string:
		return []byte(value)
	case bool:
		return strconv.AppendBool(nil, value)
	case int:
		return strconv.AppendInt(nil, int64(value), 10)
	case int64:
		return strconv.AppendInt(nil, value, 10)
	case time.Duration:
		return append(strconv.AppendInt(nil, value.Microseconds(), 10), " us"...)
	}
	panic("dlock: no such parameter")
}

func plain(sql string, values ...any) statement {
	s := statement{sql: sql}
	for _, value := range values {
		s.values = append(s.values, encode(value))
	}
	return s
}

// call is SELECT name(...). The server chooses options that are not given.
func call(name string, options []named, values ...any) statement {
	places := make([]string, 0, len(values)+len(options))
	for n := range values {
		places = append(places, "$"+strconv.Itoa(n+1))
	}
	for _, option := range options {
		values = append(values[:len(values):len(values)], option.value)
		places = append(places, option.key+" => $"+strconv.Itoa(len(values)))
	}
	return plain("SELECT "+name+"("+strings.Join(places, ", ")+")", values...)
}

// hostTimeout is the time that a host has to answer. All hosts that are left share the time until the context's end.
func hostTimeout(ctx context.Context, left int) time.Duration {
	timeout := 10 * time.Second
	if end, ok := ctx.Deadline(); ok {
		timeout = shorter(timeout, time.Until(end)/time.Duration(left))
	}
	return timeout
}

// ask returns the first row. At the given time it cuts the connection. If the context ends, it cancels the statement on
// the server, too, and returns the server's answer.
func ask(ctx context.Context, conn connection, s statement, until time.Duration) (row, error) {
	if ctx.Err() != nil {
		return nil, cancelled(ctx)
	}
	done, returned := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(returned)
		enforce(ctx, conn, until, done)
	}()
	answer, err := exec(conn, s)
	close(done)
	<-returned // otherwise the cancel could hit the next statement
	return answer, ofOwn(err)
}

func enforce(ctx context.Context, conn connection, until time.Duration, done <-chan struct{}) {
	last := time.NewTimer(longer(0, until-Now()))
	defer last.Stop()
	select {
	case <-done:
		return
	case <-last.C:
		cut(conn)
		return
	case <-ctx.Done():
	}
	if !cancelRunning(conn) {
		cut(conn) // the cancel could hit a later statement
		<-done
		closeConn(conn)
		return
	}
	obeyed := time.NewTimer(obey)
	defer obeyed.Stop()
	select {
	case <-done:
	case <-obeyed.C:
		cut(conn)
	}
}

var background = context.Background()

// A line is a connection that is made when it is needed, and again after a failure.
type line struct {
	server   *Server
	patience time.Duration
	given    bool // it is the program's connection, and never replaced
	conn     connection
	done     func()
	checks   bool // the server checks whether a waiting client is alive
	trial         // of the last call
}

type trial struct {
	sent  time.Duration // when the statement was about to be sent
	doubt bool          // an earlier attempt may have been executed, too
}

// another is for one call, because several calls for a held lock may be on their way.
func (l *line) another() *line { return &line{server: l.server, patience: l.patience} }

var checked = statement{sql: "SELECT set_config('client_connection_check_interval', '500ms', false)" +
	" WHERE current_setting('client_connection_check_interval') = '0'"}

func (l *line) ask(ctx context.Context, s statement) (row, error) {
	return l.askUntil(ctx, func() statement { return s }, forever, grace)
}

// askUntil executes a call. If the connection breaks or does not answer within the limit, it retries over a new one,
// until the given time, or until the patience with an unreachable server ends. Without a limit, it uses a connection
// until that breaks.
func (l *line) askUntil(ctx context.Context, s func() statement, until, limit time.Duration) (row, error) {
	end := shorter(until, after(l.patience))
	l.trial = trial{}
	for waits := newPauses(2 * time.Second); ; {
		answer, err := l.once(ctx, s, until, end, limit)
		if err == nil {
			return answer, nil
		}
		if ctx.Err() != nil {
			return nil, cancelled(ctx)
		}
		late, away := isA(err, QuorumLate), isAway(err)
		if l.given || !away && !(late && until < forever) {
			return nil, err
		}
		l.doubt = l.doubt || l.conn != nil
		if away {
			if l.conn != nil && limit == forever {
				end = shorter(until, after(l.patience))
			}
			l.close()
		}
		if !late && Now() >= end {
			return nil, err
		}
		if sleep(ctx, shorter(waits.take(), until-Now())); Now() >= until {
			return nil, err
		}
	}
}

func (l *line) once(ctx context.Context, s func() statement, until, end, limit time.Duration) (row, error) {
	if ctx.Err() != nil {
		return nil, cancelled(ctx)
	}
	if l.conn == nil {
		if err := l.open(ctx, shorter(until, longer(after(grace), end))); err != nil {
			return nil, err
		}
	}
	what := s()
	l.sent = Now()
	until = shorter(until, later(l.sent, limit))
	if l.given {
		until = forever
	}
	return ask(ctx, l.conn, what, until)
}

func (l *line) open(ctx context.Context, end time.Duration) error {
	conn, done, err := l.server.connect(ctx, "dlock", end-Now())
	if err != nil {
		return err
	}
	l.conn, l.done = conn, done
	if l.checks && l.server.own {
		_, err = ask(ctx, conn, checked, shorter(end, after(grace)))
		if !isA(err, ConnectionLost) {
			err = nil // not every platform can check
		}
	}
	return err
}

// close returns the connection to its pool, or closes it.
func (l *line) close() {
	if l.conn != nil && !l.given {
		l.done()
		l.conn, l.done = nil, nil
	}
}

// drop closes a connection in an unknown state, so that no pool keeps it.
func (l *line) drop() {
	if l.conn != nil && !l.given {
		closeConn(l.conn)
		l.close()
	}
}
