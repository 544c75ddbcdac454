// The clients of a peer with a client in Go, as goroutines of one process.
// driver.c describes its commands and its output.
package main

import (
	"bufio"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// One client, used by one goroutine
type session interface {
	acquire(lock string)
	release(lock string)
	// changes the row with that id in PostgreSQL
	update(row int)
}

const (
	buckets   = 1200
	firstLock = 1000000000000
)

var hot = strconv.Itoa(firstLock - 1)

// The operations of one client in its turns
type result struct {
	rounds []int
	waits  [buckets]int
	done   int
	late   int
}

// The command for all clients
type turns struct {
	what                                        string
	clients, begin, length, rounds, turn, kinds int
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "driver:", err)
		os.Exit(1)
	}
}

// Microseconds since 1970, the clock that all drivers share
func now() int {
	return int(time.Now().UnixMicro())
}

func bucket(us int) int {
	if us <= 1 {
		return 0
	}
	b := int(50 * math.Log(float64(us)))
	if b >= buckets {
		b = buckets - 1
	}
	return b
}

// One operation; returns the time of the whole, or of the acquire
func takeOnce(s session, client int, what string) int {
	lock := hot
	if what != "hot" {
		lock = strconv.Itoa(firstLock + client)
	}
	began := now()
	s.acquire(lock)
	got := now()
	if what == "work" {
		s.update(client)
	}
	s.release(lock)
	if what == "work" {
		got = now()
	}
	return got - began
}

func takeTurns(s session, client int, t turns) *result {
	r := &result{rounds: make([]int, t.rounds)}
	length := t.length * 1000
	for round := range r.rounds {
		place := t.turn
		if round%2 == 1 {
			place = t.kinds - 1 - t.turn
		}
		begin := t.begin*1000 + (round*t.kinds+place)*length
		time.Sleep(time.Duration(begin-now()) * time.Microsecond)
		for began := now(); began < begin+length*7/10; began = now() {
			waited := takeOnce(s, client, t.what)
			ended := now()
			if began >= begin+length/10 {
				r.waits[bucket(waited)]++
			}
			if ended >= begin+length {
				r.late++
			}
			if ended >= begin+length/10 && ended < begin+length*7/10 {
				r.rounds[round]++
				r.done++
			}
		}
	}
	return r
}

// do calls the function for the first count sessions at once.
func do(sessions []session, function func(int, session)) *sync.WaitGroup {
	var group sync.WaitGroup
	for i, s := range sessions {
		group.Add(1)
		go func(i int, s session) {
			function(i, s)
			group.Done()
		}(i, s)
	}
	return &group
}

func runTurns(sessions []session, line string) {
	var t turns
	_, err := fmt.Sscanf(line, "turns %s %d %d %d %d %d %d", &t.what,
		&t.clients, &t.begin, &t.length, &t.rounds, &t.turn, &t.kinds)
	check(err)
	results := make([]*result, t.clients)
	do(sessions[:t.clients], func(i int, s session) {
		results[i] = takeTurns(s, i, t)
	}).Wait()
	printTurns(results, t.rounds)
}

func printTurns(results []*result, rounds int) {
	late := 0
	for round := 0; round < rounds; round++ {
		done := 0
		for _, r := range results {
			done += r.rounds[round]
		}
		fmt.Println("round", round, done)
	}
	for i, r := range results {
		fmt.Println("client", i, r.done)
		late += r.late
	}
	for b := 0; b < buckets; b++ {
		count := 0
		for _, r := range results {
			count += r.waits[b]
		}
		if count > 0 {
			fmt.Println("wait", b, count)
		}
	}
	fmt.Println("late", late)
	fmt.Println("end")
}

func pass(sessions []session) {
	var first int64
	group := do(sessions, func(_ int, s session) {
		s.acquire(hot)
		atomic.CompareAndSwapInt64(&first, 0, int64(now()))
		s.release(hot)
	})
	fmt.Println("waiting")
	group.Wait()
	last := now()
	fmt.Println("first", first)
	fmt.Println("last", last)
}

// serve executes the commands.
func serve(sessions []session) {
	fmt.Println("ready")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		switch line := in.Text(); strings.Fields(line)[0] {
		case "turns":
			runTurns(sessions, line)
		case "quit":
			os.Exit(0)
		case "hold":
			sessions[0].acquire(hot)
			fmt.Println("held", now())
		case "release":
			fmt.Println("released", now())
			sessions[0].release(hot)
		case "pass":
			pass(sessions)
		default:
			check(fmt.Errorf("not understood: %s", line))
		}
	}
}
