// All times are in milliseconds. Fences and tickets are numbers that JavaScript represents exactly.

import type { ClientBase, ClientConfig, Pool } from 'pg';

/** One server: a URL, or a configuration of node-postgres. It may name several hosts; the primary is used. */
export type Server = string | (Omit<ClientConfig, 'port'> & { port?: number | string });

/**
 * A source of connections to one server: a pool, or a function that is called for each new connection and returns it, or
 * a server. A connection stays out of its pool while it is needed.
 */
export type Source = Server | Pool | (() => Server | ClientBase | Promise<Server | ClientBase>);

/**
 * Executes SQL in a transaction of the program: a connection of node-postgres, a manager or query runner of TypeORM, a
 * transaction of Knex, Prisma or postgres.js; or a function that sends a statement with values, and returns the value,
 * the row, or the rows.
 */
export type Executes =
  | { query(text: string, values: any[]): Promise<unknown> }
  | { raw(text: string, values: any[]): PromiseLike<unknown> }
  | { $queryRawUnsafe(text: string, ...values: any[]): PromiseLike<unknown> }
  | { unsafe(text: string, values: any[]): PromiseLike<unknown> }
  | ((text: string, values: (string | null)[]) => unknown);

export interface Observation {
  /** An acquire (`waited`) or its failure (`failed`), a release (`held`) or a loss (`lost`); `ms` is the time before */
  what: 'waited' | 'failed' | 'held' | 'lost';
  name: string;
  scope: 'session' | 'transaction' | 'lease';
  ms: number;
  error?: unknown;
}

export interface Waiting {
  /** Ends the wait, on the server, too, with Cancelled, whose cause is the signal's reason. */
  signal?: AbortSignal;
}

export interface RequestOptions {
  shared?: boolean;
  slots?: number;
  permits?: number;
  /** For others to read */
  info?: string;
  /** In lease scope: a repeated request of one owner, such as a job's number, gets the same lock. */
  owner?: string;
}

export interface Rhythm {
  /** Between two renewals; by default a third of the ttl */
  interval?: number;
  /** The part of the ttl that is not used; by default a hundredth of it */
  margin?: number;
}

export interface LockOptions extends RequestOptions, Rhythm {
  scope?: 'session' | 'transaction' | 'lease';
  /** For a lock in lease scope, on its own lease */
  ttl?: number;
  /** How long to wait for the lock: undefined waits without limit, 0 tries once. */
  timeout?: number;
}

export interface LeaseOptions extends Rhythm {
  ttl: number;
  /** The lease is on the server to which this name belongs. */
  near?: string;
  /** How long the locks stay closed after the lease has expired */
  delay?: number;
  info?: string;
}

export class Locks {
  /** Called for each wait, hold and loss */
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
  /** Returns a function that holds a lock while it runs. The name may depend on its arguments. */
  locked<A extends unknown[], T>(name: string | ((...values: A) => string), work: (...values: A) => T | Promise<T>,
    options?: LockOptions): (...values: A) => Promise<T>;
  /** Sets the number of permits, which replaces the number in requests; null restores that number. */
  resize(name: string, slots: number | null): Promise<void>;
}

declare class Kept {
  /** An AbortSignal whose reason is a LockLost. Once aborted, it stays aborted. */
  readonly lost: AbortSignal;
  /** The time, by now(), until which work may continue without an answer from the server */
  readonly deadline: number;
  /** Throws LockLost after a loss, and WrongState if it is not held. Call it before each request to another system. */
  check(): void;
  /**
   * Renews the lease now. A ttl replaces the lease's ttl. If an answer to that is lost, the client counts at most this
   * ttl from then on. Not for a lock of a Lease.
   */
  renew(ttl?: number): Promise<void>;
  /** Changes the info, which others can read. */
  setInfo(info: string | null): Promise<void>;
  /** Calls the function once after a loss; at once if it is lost already. */
  onLost(callback: (lost: this) => unknown): void;
}

export class Lock extends Kept implements AsyncDisposable {
  constructor(source: Locks | Lease | ClientBase, name: string, options?: LockOptions);
  constructor(db: Executes, name: string, options: RequestOptions & { scope: 'transaction'; timeout?: number });
  readonly name: string;
  readonly scope: 'session' | 'transaction' | 'lease';
  readonly fence: number;
  /** False after a loss, too */
  readonly held: boolean;
  acquire(options?: Waiting): Promise<this>;
  /** If the program's own connection refuses it, as in a failed transaction, the lock stays held. */
  release(): Promise<void>;
  /** The transaction can commit only while the lock is held. */
  guard(db: Executes): Promise<void>;
  /** Asks the server. The answer can be outdated on arrival; to be sure, guard. */
  isHeld(): Promise<boolean>;
  /** Makes an exclusive hold shared, without releasing it. */
  downgrade(): Promise<void>;
  run<T>(work: (lock: this) => T | Promise<T>, options?: Waiting): Promise<T>;
  [Symbol.asyncDispose](): Promise<void>;
}

export class Lease extends Kept implements AsyncDisposable {
  constructor(locks: Locks, options: LeaseOptions);
  readonly id: number;
  readonly ttl: number;
  open(options?: Waiting): Promise<this>;
  /** Ends all of its locks. Waits for an open in progress. Does nothing if closed already. */
  close(): Promise<void>;
  lock(name: string, options?: Omit<LockOptions, 'ttl' | 'scope'>): Lock;
  /** Acquires all or none, in an order that prevents deadlocks. Release each of them, or close the lease. */
  acquireAll(names: string[], options?: Waiting & AllOptions): Promise<Lock[]>;
  run<T>(work: (lease: this) => T | Promise<T>): Promise<T>;
  [Symbol.asyncDispose](): Promise<void>;
}

export interface AllOptions {
  timeout?: number;
  shared?: boolean;
  info?: string;
}

/** Each method calls the function of its name, prefixed with dlock_, in the program's transaction. */
export class Calls {
  constructor(db: Executes);
  xactAcquire(name: string, options?: Omit<RequestOptions, 'owner'> & { timeout?: number }): Promise<number>;
  xactAcquireAll(names: string[], options?: AllOptions): Promise<number[]>;
  /** Acquires in session scope, on a connection that the program keeps. */
  acquireAll(names: string[], options?: AllOptions): Promise<number[]>;
  releaseTicket(ticket: number): Promise<void>;
  releaseAtCommit(ticket: number): Promise<void>;
  /** The transaction can commit only while the lock is held. */
  guard(lock: Lock): Promise<void>;
  guard(name: string, fence: number): Promise<void>;
  isHeld(name: string, lease?: number): Promise<boolean>;
  /** Returns the number of the lease's tickets; undefined if the lease has ended */
  renew(id: number, ttl?: number): Promise<number | undefined>;
  downgrade(ticket: number): Promise<boolean>;
  setInfo(id: number, info: string | null): Promise<boolean>;
  resize(name: string, slots: number | null): Promise<void>;
}

export class Election {
  constructor(locks: Locks, name: string, options?: LockOptions);
  /** Returns the result of work that was completed while this process led. Work must check `lock.lost`. */
  run<T>(work: (lock: Lock) => T | Promise<T>, options?: Waiting): Promise<T>;
}

export interface TicketsOptions {
  /** Tickets of a lease keep their places when the connection breaks. */
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
  /** Returns the next event; undefined if no event has come within the timeout. Ends at most 5 seconds after it. */
  next(options?: Waiting & { timeout?: number }): Promise<TicketEvent | WatchEvent | undefined>;
  close(): Promise<void>;
  [Symbol.asyncDispose](): Promise<void>;
}

export function watch(locks: Locks, name: string, options?: Waiting): AsyncGenerator<WatchEvent, void, void>;

/** A pool calls this when a connection is returned. */
export function reset(client: ClientBase): Promise<void>;

/** Milliseconds of a clock that is never stepped */
export function now(): number;

/** Returns the error of this package for a driver's, which an ORM may have wrapped. Returns others as they are. */
export function translate(error: unknown): unknown;

/** An error of the server */
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
