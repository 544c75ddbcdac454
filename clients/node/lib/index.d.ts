// Times are in milliseconds, each. Fences and tickets are numbers, which JavaScript holds exactly.

import type { ClientBase, ClientConfig, Pool } from 'pg';

/** One server: a URL, or what node-postgres takes. It may name several hosts, of which the primary is taken. */
export type Server = string | (Omit<ClientConfig, 'port'> & { port?: number | string });

/**
 * What gives connections to one server: a pool, or a function that returns a connection, or what names a server, and is
 * asked for each new connection. A connection of a pool is kept out of it as long as it is needed.
 */
export type Source = Server | Pool | (() => Server | ClientBase | Promise<Server | ClientBase>);

/**
 * What executes SQL in a transaction of the program's: a connection of node-postgres, a manager or query runner of
 * TypeORM, a transaction of Knex, Prisma or postgres.js; or a function that sends a statement with values, and returns
 * the value, the row, or the rows.
 */
export type Executes =
  | { query(text: string, values: any[]): Promise<unknown> }
  | { raw(text: string, values: any[]): PromiseLike<unknown> }
  | { $queryRawUnsafe(text: string, ...values: any[]): PromiseLike<unknown> }
  | { unsafe(text: string, values: any[]): PromiseLike<unknown> }
  | ((text: string, values: (string | null)[]) => unknown);

export interface Observation {
  /** `waited` for a lock that was acquired, or `failed` to acquire; `held` until the release, or until it was `lost` */
  what: 'waited' | 'failed' | 'held' | 'lost';
  name: string;
  scope: 'session' | 'transaction' | 'lease';
  ms: number;
  error?: unknown;
}

export interface Waiting {
  /** Ends the waiting, in the server, too: Cancelled, whose cause is the signal's reason. */
  signal?: AbortSignal;
}

export interface RequestOptions {
  shared?: boolean;
  slots?: number;
  permits?: number;
  /** For others to read */
  info?: string;
  /** In lease scope: makes a request the same as an earlier one, a job's number for instance. */
  owner?: string;
}

export interface Rhythm {
  /** Between two renewals; by default a third of the ttl */
  interval?: number;
  /** What is not used of the ttl; by default a hundredth of it */
  margin?: number;
}

export interface LockOptions extends RequestOptions, Rhythm {
  scope?: 'session' | 'transaction' | 'lease';
  /** Lease scope: on a lease of its own */
  ttl?: number;
  /** How long to wait for the lock; undefined is for ever, 0 a try. */
  timeout?: number;
}

export interface LeaseOptions extends Rhythm {
  ttl: number;
  /** The lease is on the server that has this name. */
  near?: string;
  /** How long its locks stay closed when it has run out */
  delay?: number;
  info?: string;
}

export class Locks {
  /** The observer is told of each wait, hold and loss. */
  constructor(servers?: Source | Source[], options?: {
    keys?: string[];
    patience?: number;
    observer?: (observation: Observation) => void;
  });
  readonly servers: Source[];
  server(name: string): Source;
  lock(name: string, options?: LockOptions): Lock;
  lease(options: LeaseOptions): Lease;
  election(name: string, options?: LockOptions): Election;
  tickets(options?: TicketsOptions): Tickets;
  watch(name: string, options?: Waiting): AsyncGenerator<WatchEvent, void, void>;
  /** A function that works while it holds a lock, one for each call; the name may come from the arguments. */
  locked<A extends unknown[], T>(name: string | ((...values: A) => string), work: (...values: A) => T | Promise<T>,
    options?: LockOptions): (...values: A) => Promise<T>;
  /** How many permits the lock has, whatever requests say; null if they say it again */
  resize(name: string, slots: number | null): Promise<void>;
}

declare class Kept {
  /** Once aborted, it stays so; its reason is a LockLost. Looks at the clock when it is asked. */
  readonly lost: AbortSignal;
  /** Until when to work without hearing from the server, by now() */
  readonly deadline: number;
  /** Throws LockLost, or WrongState if it is not held; before anything is sent to anybody. */
  check(): void;
  /** Renews the lease now; with a ttl, it has that one from now on. Not of a lock of a Lease. */
  renew(ttl?: number): Promise<void>;
  /** For others to read, from now on */
  setInfo(info: string | null): Promise<void>;
  /** Calls it once, at once where it is lost already. */
  onLost(callback: (lost: this) => unknown): void;
}

export class Lock extends Kept implements AsyncDisposable {
  constructor(source: Locks | Lease | ClientBase, name: string, options?: LockOptions);
  constructor(db: Executes, name: string, options: RequestOptions & { scope: 'transaction'; timeout?: number });
  readonly name: string;
  readonly scope: 'session' | 'transaction' | 'lease';
  readonly fence: number;
  readonly held: boolean;
  acquire(options?: Waiting): Promise<this>;
  release(): Promise<void>;
  /** The transaction commits only while we hold. */
  guard(db: Executes): Promise<void>;
  /** Asks the server, for a moment that is over; to be sure, guard. */
  isHeld(): Promise<boolean>;
  /** From an exclusive hold to a shared one, with nobody in between */
  downgrade(): Promise<void>;
  run<T>(work: (lock: this) => T | Promise<T>, options?: Waiting): Promise<T>;
  [Symbol.asyncDispose](): Promise<void>;
}

export class Lease extends Kept implements AsyncDisposable {
  constructor(locks: Locks, options: LeaseOptions);
  readonly id: number;
  readonly ttl: number;
  open(options?: Waiting): Promise<this>;
  close(): Promise<void>;
  lock(name: string, options?: Omit<LockOptions, 'ttl' | 'scope'>): Lock;
  /** All of them, or none, in an order of which no deadlock comes. Each one is to be released, or the lease closed. */
  acquireAll(names: string[], options?: Waiting & AllOptions): Promise<Lock[]>;
  run<T>(work: (lease: this) => T | Promise<T>): Promise<T>;
  [Symbol.asyncDispose](): Promise<void>;
}

export interface AllOptions {
  timeout?: number;
  shared?: boolean;
  info?: string;
}

/** Each is the function of that name, with dlock_ before it, over the program's connection and in its transaction. */
export class Calls {
  constructor(db: Executes);
  xactAcquire(name: string, options?: Omit<RequestOptions, 'owner'> & { timeout?: number }): Promise<number>;
  xactAcquireAll(names: string[], options?: AllOptions): Promise<number[]>;
  /** In session scope, on a connection that the program keeps */
  acquireAll(names: string[], options?: AllOptions): Promise<number[]>;
  releaseTicket(ticket: number): Promise<void>;
  releaseAtCommit(ticket: number): Promise<void>;
  /** The transaction commits only while the lock is held. */
  guard(lock: Lock): Promise<void>;
  guard(name: string, fence: number): Promise<void>;
  isHeld(name: string, lease?: number): Promise<boolean>;
  /** How many tickets the lease keeps; undefined where it is gone */
  renew(id: number, ttl?: number): Promise<number | undefined>;
  downgrade(ticket: number): Promise<boolean>;
  setInfo(id: number, info: string | null): Promise<boolean>;
  resize(name: string, slots: number | null): Promise<void>;
}

export class Election {
  constructor(locks: Locks, name: string, options?: LockOptions);
  /** What work returns that was done to its end while we lead; it heeds `lock.lost`. */
  run<T>(work: (lock: Lock) => T | Promise<T>, options?: Waiting): Promise<T>;
}

export interface TicketsOptions {
  /** Keeps their places when the connection breaks */
  lease?: Lease;
  near?: string;
}

export interface TicketEvent {
  event: 'granted' | 'wanted' | 'released' | 'expired' | 'lost';
  lock: string;
  ticket: number;
}

export type WatchEvent = { event: 'free'; lock: string } | {
  event: 'held';
  lock: string;
  ticket: number;
  mode: string;
  scope: string;
  info?: string | null;
};

export class Tickets implements AsyncDisposable {
  constructor(locks: Locks, options?: TicketsOptions);
  enqueue(name: string, options?: RequestOptions): Promise<number>;
  release(ticket: number): Promise<void>;
  watch(name: string): Promise<void>;
  unwatch(name: string): Promise<void>;
  /** Undefined where nothing has come within the timeout */
  next(options?: Waiting & { timeout?: number }): Promise<TicketEvent | WatchEvent | undefined>;
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

export function watch(locks: Locks, name: string, options?: Waiting): AsyncGenerator<WatchEvent, void, void>;

/** What a pool calls when a connection comes back */
export function reset(client: ClientBase): Promise<void>;

/** By a clock that nobody steps */
export function now(): number;

/** The error of this package for a driver's, or an ORM's around it; what it does not know is returned as it is. */
export function translate(error: unknown): unknown;

/** What the server refused */
export class DlockError extends Error {
  constructor(message: string, code?: string, details?: { detail?: string; hint?: string; cause?: unknown });
  readonly code?: string;
  readonly detail?: string;
  readonly hint?: string;
}

export class LockTimeout extends DlockError {}
export class Deadlock extends DlockError {}
export class LockLost extends DlockError {}
export class NotAllowed extends DlockError {}
export class NotPrimary extends DlockError {}
export class StaleVersion extends DlockError {}
export class BadArgument extends DlockError {}
export class WrongState extends DlockError {}
export class NoRoom extends DlockError {}
export class Cancelled extends DlockError {}
export class QuorumLate extends DlockError {}
export class ConnectionLost extends DlockError {}

export {};
