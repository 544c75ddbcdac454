package dlock

import (
	"context"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"strings"
)

// A Kind is a class of errors that programs distinguish: errors.Is(err, dlock.LockTimeout).
type Kind string

func (kind Kind) Error() string { return string(kind) }

// The kinds of errors. All other errors of the server are of the kind Other.
const (
	LockTimeout    = Kind("lock timeout")
	Deadlock       = Kind("deadlock")
	LockLost       = Kind("lock lost")
	NotAllowed     = Kind("not allowed")
	NotPrimary     = Kind("not the primary")
	StaleVersion   = Kind("stale version")
	BadArgument    = Kind("bad argument")
	WrongState     = Kind("wrong state")
	NoRoom         = Kind("no room")
	Cancelled      = Kind("cancelled")
	QuorumLate     = Kind("quorum late")
	ConnectionLost = Kind("connection lost")
	Other          = Kind("error")
)

var kinds = map[string]Kind{
	"55P03": LockTimeout,
	"40P01": Deadlock,
	"55L01": LockLost,
	"42501": NotAllowed,
	"25006": NotPrimary,
	"40001": StaleVersion,
	"22023": BadArgument,
	"22004": BadArgument,
	"55000": WrongState,
	"53200": NoRoom,
	"53400": NoRoom,
	"57014": Cancelled,
	"58030": QuorumLate,
	"57P01": ConnectionLost,
	"57P02": ConnectionLost,
	"57P03": ConnectionLost,
}

// An Error has the SQLSTATE, and its text. A lost connection may have no code.
type Error struct {
	Kind                        Kind
	Code, Message, Detail, Hint string
	Cause                       error
}

func (e *Error) Error() string {
	if e.Code == "" {
		return "dlock: " + e.Message
	}
	return "dlock: " + e.Message + " (" + e.Code + ")"
}

// Is compares the kind.
func (e *Error) Is(target error) bool { return target == error(e.Kind) }

// Unwrap returns the driver's error, or that of the context.
func (e *Error) Unwrap() error { return e.Cause }

func newError(kind Kind, code, message string, cause error) *Error {
	return &Error{Kind: kind, Code: code, Message: message, Cause: cause}
}

func cancelled(ctx context.Context) error {
	return newError(Cancelled, "57014", "cancelled by the program", ctx.Err())
}

func isA(err error, kinds ...Kind) bool {
	for _, kind := range kinds {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}

func isAway(err error) bool { return isA(err, ConnectionLost, NotPrimary) }

// Translate returns the error of this package for a driver's, which other errors may wrap. It returns errors as they
// are if they come neither from the server nor from the connection.
func Translate(err error) error {
	var own *Error
	var refusal interface {
		error
		SQLState() string
	}
	var network net.Error
	switch {
	case err == nil || errors.As(err, &own):
		return err
	case errors.As(err, &refusal):
		return ofServer(err, refusal.SQLState())
	case errors.As(err, &network), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF),
		errors.Is(err, net.ErrClosed), errors.Is(err, driver.ErrBadConn):
		return lostConnection(err)
	}
	return err
}

func ofServer(err error, code string) error {
	var details serverError
	kind := kinds[code]
	if kind == "" {
		kind = Other
	}
	if strings.HasPrefix(code, "08") {
		kind = ConnectionLost
	}
	result := newError(kind, code, err.Error(), err)
	if errors.As(err, &details) {
		result.Message, result.Detail, result.Hint = detailOf(details)
	}
	return result
}

func lostConnection(err error) error {
	return newError(ConnectionLost, "", err.Error(), err)
}

// ofOwn translates errors of this package's statements. An error that is not the server's comes from the connection.
func ofOwn(err error) error {
	var own *Error
	if err = Translate(err); err == nil || errors.As(err, &own) {
		return err
	}
	return lostConnection(err)
}
