// One of the holders of ../clients.pl: holder PROXY SERVER END
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"dlock.org/dlock"
	"github.com/jackc/pgx/v5"
)

var ctx = context.Background()

func dsn(address string) string {
	return "postgres://app@" + address + "/postgres?sslmode=disable"
}

func write(scope string, fence int64) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn(os.Args[2]))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	if scope != "session" {
		if _, err = tx.Exec(ctx, "SELECT dlock_guard('mixed', $1)", fence); err != nil {
			return err
		}
	}
	done, err := tx.Exec(ctx, "UPDATE proof SET fence = $1 WHERE fence < $1", fence)
	if err != nil {
		return err
	}
	if err = tx.Commit(ctx); err == nil {
		fmt.Println("wrote", scope, fence, done.RowsAffected())
	}
	return err
}

func work(scope string, lock *dlock.Lock) error {
	for turn := 0; turn < 3; turn++ {
		now := time.Now()
		if err := lock.Check(); err != nil {
			return err
		}
		fmt.Println("held", scope, lock.Fence(), now.UnixNano()/1000)
		if turn == 1 {
			if err := write(scope, lock.Fence()); err != nil {
				fmt.Printf("failed write: %T\n", err)
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}

func hold(locks *dlock.Locks, scope int) error {
	ttl, timeout := dlock.TTL(3*time.Second), dlock.Timeout(10*time.Second)

	switch scope {
	case 0:
		lock := locks.NewLock("mixed", timeout)
		return lock.Do(ctx, func(context.Context) error { return work("session", lock) })
	case 1:
		lock := locks.NewLock("mixed", ttl, timeout)
		return lock.Do(ctx, func(context.Context) error { return work("ttl", lock) })
	}
	lease := locks.NewLease(ttl)
	return lease.Do(ctx, func(context.Context) error {
		lock := lease.NewLock("mixed", timeout)
		return lock.Do(ctx, func(context.Context) error { return work("lease", lock) })
	})
}

func main() {
	locks, err := dlock.Open(dsn(os.Args[1]))
	if err != nil {
		panic(err)
	}
	locks.Patience = 5 * time.Second
	end, err := strconv.ParseInt(os.Args[3], 10, 64)
	if err != nil {
		panic(err)
	}
	for turn := 0; time.Now().Unix() < end; turn++ {
		var own *dlock.Error
		if err := hold(locks, turn%3); err == nil {
			fmt.Println("done")
		} else if errors.As(err, &own) {
			fmt.Println("failed", own.Code)
		} else {
			panic(err)
		}
	}
}
