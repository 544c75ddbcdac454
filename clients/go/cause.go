//go:build go1.20

package dlock

import "context"

// withCause makes a child of the context; context.Cause returns the reason of its end.
func withCause(parent context.Context) (context.Context, func(error)) {
	return context.WithCancelCause(parent)
}
