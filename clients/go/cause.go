//go:build go1.20

package dlock

import "context"

// context.Cause tells why.
func withCause(parent context.Context) (context.Context, func(error)) {
	return context.WithCancelCause(parent)
}
