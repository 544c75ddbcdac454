package dlock

import (
	"syscall"
	"time"
	"unsafe"
)

const clockBoottime = 7

// Now is the time of a clock that is never stepped, and that runs while the machine sleeps.
func Now() time.Duration {
	var now syscall.Timespec
	syscall.Syscall(syscall.SYS_CLOCK_GETTIME, clockBoottime, uintptr(unsafe.Pointer(&now)), 0)
	return time.Duration(now.Nano())
}
