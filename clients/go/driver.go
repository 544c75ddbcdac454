package dlock

// This file has all uses of the driver. It also works with the imports of pgx v4.

import (
	"context"
	"database/sql"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

type connection = *pgx.Conn

// A Source returns a connection for the package; the name tells its purpose. The connection stays out of its pool until
// the package calls done. If the connection's state is unknown, the package closes it before.
type Source func(ctx context.Context, name string) (conn *pgx.Conn, done func(), err error)

// A Querier executes SQL in a transaction: a pgx.Tx, or what SQL returns.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// checkTransaction is for what lasts until the end of the transaction.
func checkTransaction(tx Querier) error {
	open := true
	switch tx := tx.(type) {
	case *pgx.Conn:
		open = tx.IsClosed() || tx.PgConn().TxStatus() != 'I'
	case *pgxpool.Conn:
		return checkTransaction(tx.Conn())
	case *pgxpool.Pool:
		open = false
	case querier:
		_, several := tx.tx.(*sql.DB)
		open = !several
	}
	if !open {
		return newError(WrongState, "55000", "there is no open transaction", nil)
	}
	return nil
}

// FromPool takes connections from a pool. Each held lock in session scope needs one, and so does each open Lease. The
// heartbeat needs one while a lease is open. The pool must not be behind a pooler in transaction mode, except for
// leases.
func FromPool(pool *pgxpool.Pool) Source {
	return func(ctx context.Context, _ string) (*pgx.Conn, func(), error) {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return nil, nil, err
		}
		return conn.Conn(), conn.Release, nil
	}
}

// FromDSN connects to the first host of the DSN that is the primary.
func FromDSN(dsn string) (Source, error) {
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, newError(BadArgument, "22023", err.Error(), err)
	}
	return func(ctx context.Context, name string) (*pgx.Conn, func(), error) {
		several := false
		for _, host := range config.Fallbacks {
			several = several || host.Host != config.Host || host.Port != config.Port
		}
		hosts := append([]*pgconn.FallbackConfig{{
			Host: config.Host, Port: config.Port, TLSConfig: config.TLSConfig}}, config.Fallbacks...)
		var failure error
		for n, host := range hosts {
			one := config.Copy()
			one.Host, one.Port, one.TLSConfig, one.Fallbacks = host.Host, host.Port, host.TLSConfig, nil
			one.DialFunc = (&net.Dialer{KeepAlive: 30 * time.Second}).DialContext
			if one.RuntimeParams["application_name"] == "" {
				one.RuntimeParams["application_name"] = name
			}
			left := 1
			if several {
				one.ValidateConnect, left = isPrimary, len(hosts)-n
			}
			bounded, cancel := context.WithTimeout(ctx, hostTimeout(ctx, left))
			conn, err := pgx.ConnectConfig(bounded, one)
			cancel()
			if err == nil {
				return conn, func() { closeConn(conn) }, nil
			}
			failure = err
			if ctx.Err() != nil {
				break
			}
		}
		return nil, nil, failure
	}, nil
}

// isPrimary is called by the driver, for each new connection.
func isPrimary(ctx context.Context, conn *pgconn.PgConn) error {
	answer := conn.ExecParams(ctx, "SHOW transaction_read_only", nil, nil, nil, nil).Read()
	if answer.Err == nil && row(answer.Rows[0]).text(0) == "on" {
		return &pgconn.PgError{Code: "25006", Message: "the server is a standby"}
	}
	return answer.Err
}

func closeConn(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	conn.Close(ctx)
}

// cut ends a running statement by closing its connection.
func cut(conn *pgx.Conn) {
	conn.PgConn().Conn().Close()
}

// cancelRunning asks the server to cancel, and waits until the server has read the request. If false, it may read it
// later.
func cancelRunning(conn *pgx.Conn) bool {
	ctx, cancel := context.WithTimeout(context.Background(), obey)
	defer cancel()
	return conn.PgConn().CancelRequest(ctx) == nil && ctx.Err() == nil
}

// exec sends one statement, and returns its first row. Nothing but cut ends it.
func exec(conn *pgx.Conn, s statement) (row, error) {
	if conn.PgConn().IsBusy() { // the driver would break the query whose rows the program reads
		return nil, newError(WrongState, "55000", "the connection is busy", nil)
	}
	result := conn.PgConn().ExecParams(context.Background(), s.sql, s.values, nil, nil, nil).Read()
	if result.Err != nil || len(result.Rows) == 0 {
		return nil, result.Err
	}
	return result.Rows[0], nil
}

// detailOf reads the fields that only the driver's error has.
func detailOf(err *pgconn.PgError) (message, detail, hint string) {
	return err.Message, err.Detail, err.Hint
}

type serverError = *pgconn.PgError

// A Server is one server, with all its hosts. With several servers, each needs a key that stays the same when the
// server moves.
type Server struct {
	Source Source
	Key    string
	own    bool // this package makes the connections, and may change settings
}

// OnConn is a lock in session scope on a connection of the program.
func OnConn(conn *pgx.Conn, name string, options ...Option) *Lock {
	lock := newLock(name, sessionScope, options)
	lock.line = &line{conn: conn, given: true}
	return lock
}

// hear waits for a notification, and returns its payload.
func hear(ctx context.Context, conn *pgx.Conn) (payload string, err error) {
	heard, err := conn.WaitForNotification(ctx)
	if heard == nil {
		return "", err
	}
	return heard.Payload, nil
}

// Reset is for a pool to call when a connection is returned, as in
// config.AfterRelease = func(conn *pgx.Conn) bool { return dlock.Reset(conn) == nil }.
func Reset(conn *pgx.Conn) error {
	for _, sql := range []string{"ROLLBACK", "SELECT dlock_release_all()"} {
		if _, err := exec(conn, statement{sql: sql}); err != nil {
			return Translate(err)
		}
	}
	return nil
}

func isEnded(conn *pgx.Conn) bool {
	return conn.IsClosed()
}

func quoted(items []string) string {
	var text strings.Builder
	for i, item := range items {
		if i > 0 {
			text.WriteByte(',')
		}
		text.WriteByte('"')
		text.WriteString(strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(item))
		text.WriteByte('"')
	}
	return "{" + text.String() + "}"
}

// SQL makes a Querier of a *sql.Tx, or of a *sql.Conn in a transaction, with any driver.
func SQL(tx interface {
	QueryRowContext(ctx context.Context, sql string, args ...any) *sql.Row
}) Querier {
	return querier{tx}
}

type querier struct {
	tx interface {
		QueryRowContext(ctx context.Context, sql string, args ...any) *sql.Row
	}
}

func (q querier) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return q.tx.QueryRowContext(ctx, sql, args...)
}
