#!/usr/bin/env python3
"""Objects in a store that compares ETags, under a lock

Shows: fencing for a service without locks.  The fence is in the object, and
each write names the ETag that it replaces.

    python3 store.py serve 8080                         # a store to try it with
    python3 store.py append http://127.0.0.1:8080/log   # adds lines of input

An instance holds the lock while it has input.  First it claims the object by
writing its fence into it.  Then the writes of all earlier holders fail,
because the ETag has changed.  An earlier holder that reads the object again
finds the greater fence.

PGHOST and so on name the server with dlock.  Any store with conditional writes
can replace this one: S3, Google Cloud Storage, Azure Blob Storage.
"""

import hashlib
import json
import os
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.error import HTTPError

import dlock

TTL = float(os.environ.get('TTL', '30'))


def append(url, lines):
    with dlock.Locks('').lock(url, ttl=TTL) as lock:
        etag, content = claim(url, lock)
        print('claimed', flush=True)
        for line in lines:
            content['lines'].append(line.strip())
            etag = write(url, content, etag, lock)
            if etag is None:
                raise dlock.LockLost(f'{url} was claimed by another holder')
            print('stored', line.strip(), flush=True)


def claim(url, lock):
    """Puts the fence into the object, and returns its ETag and content."""
    while True:
        etag, content = read(url)
        if content['fence'] > lock.fence:
            raise dlock.LockLost(f'{url} has fence {content["fence"]}')
        content['fence'] = lock.fence
        new = write(url, content, etag, lock)
        if new is not None:
            return new, content
        # an earlier holder has written since the read: read again


def read(url):
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.headers['ETag'], json.load(answer)
    except HTTPError as error:
        if error.code != 404:
            raise
        return None, {'fence': 0, 'lines': []}


def write(url, content, etag, lock):
    """Returns the new ETag, or None if the object's ETag is not the given one."""
    condition = {'If-Match': etag} if etag else {'If-None-Match': '*'}
    lock.check()        # only saves requests; the ETag protects the object
    try:
        with urllib.request.urlopen(urllib.request.Request(
                url, json.dumps(content).encode(), condition,
                method='PUT')) as answer:
            return answer.headers['ETag']
    except HTTPError as error:
        if error.code != 412:
            raise
        return None


class Store(BaseHTTPRequestHandler):
    """An object store: GET, and conditional PUT as in RFC 9110"""
    objects: dict = {}
    mutex = Lock()

    def do_GET(self):
        self.answer(200 if self.path in self.objects else 404)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers['Content-Length']))
        expected = self.headers['If-Match']
        with self.mutex:
            there = self.path in self.objects
            if expected is None and self.headers['If-None-Match'] != '*':
                self.answer(428)
            elif there if expected is None else (
                    not there or self.etag() != expected):
                self.answer(412)
            else:
                self.objects[self.path] = body
                self.answer(200)

    def etag(self):
        return f'"{hashlib.sha256(self.objects[self.path]).hexdigest()}"'

    def answer(self, status):
        body = self.objects[self.path] if status == 200 else b''
        self.send_response(status)
        if status == 200:
            self.send_header('ETag', self.etag())
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == '__main__':
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if sys.argv[1] == 'serve':
        server = ThreadingHTTPServer(('127.0.0.1', int(sys.argv[2])), Store)
        print('serving', server.server_port, flush=True)
        server.serve_forever()
    try:
        append(sys.argv[2], sys.stdin)
    except dlock.LockLost as error:
        sys.exit(f'lost: {error}')
