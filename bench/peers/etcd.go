package main

// etcd's clients: the mutex of its concurrency package.
//
// All clients of a process share one connection, as an application's threads
// do. Each has its own session, because a lock belongs to a session. ETCD is
// the server's address, and POSTGRES that of PostgreSQL.

import (
	"context"
	"database/sql"
	"os"
	"strconv"

	_ "github.com/lib/pq"
	"go.etcd.io/etcd/clientv3"
	"go.etcd.io/etcd/clientv3/concurrency"
)

const ttlSeconds = 5

type etcdSession struct {
	session *concurrency.Session
	locks   map[string]*concurrency.Mutex
	change  *sql.Stmt
}

func (s *etcdSession) acquire(lock string) {
	mutex := s.locks[lock]
	if mutex == nil {
		mutex = concurrency.NewMutex(s.session, "/locks/"+lock)
		s.locks[lock] = mutex
	}
	check(mutex.Lock(context.Background()))
}

func (s *etcdSession) release(lock string) {
	check(s.locks[lock].Unlock(context.Background()))
}

func (s *etcdSession) update(row int) {
	if s.change == nil {
		db, err := sql.Open("postgres", os.Getenv("POSTGRES"))
		check(err)
		s.change, err = db.Prepare("UPDATE guarded SET value = value + 1 WHERE id = $1")
		check(err)
	}
	_, err := s.change.Exec(row)
	check(err)
}

func main() {
	count, err := strconv.Atoi(os.Args[1])
	check(err)
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{os.Getenv("ETCD")}})
	check(err)
	sessions := make([]session, count)
	for i := range sessions {
		s, err := concurrency.NewSession(client, concurrency.WithTTL(ttlSeconds))
		check(err)
		sessions[i] = &etcdSession{session: s, locks: map[string]*concurrency.Mutex{}}
	}
	serve(sessions)
}
