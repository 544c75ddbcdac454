// Times are in milliseconds, each. Fences and tickets are numbers, which JavaScript holds exactly.

import type { ClientBase, ClientConfig } from 'pg';

/** One server: a URL, or what node-postgres takes. It may name several hosts, of which the primary is taken. */
export type Server = string | (Omit<ClientConfig, 'port'> & { port?: number | string });

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
  constructor(servers?: Server | Server[], options?: { keys?: string[]; patience?: number });
  readonly servers: Server[];
  server(name: string): Server;
  lock(name: string, options?: LockOptions): Lock;
  lease(options: LeaseOptions): Lease;
  election(name: string, options?: LockOptions): Election;
  tickets(options?: TicketsOptions): Tickets;
  watch(name: string, options?: Waiting): AsyncGenerator<WatchEvent, void, void>;
}

declare class Kept {
  /** Once aborted, it stays so; its reason is a LockLost. Looks at the clock when it is asked. */
  readonly lost: AbortSignal;
  /** Until when to work without hearing from the server, by now() */
  readonly deadline: number;
  /** Throws LockLost, or WrongState if it is not held; before anything is sent to anybody. */
  check(): void;
  /** Calls it once, at once where it is lost already. */
  onLost(callback: (lost: this) => unknown): void;
}

export class Lock extends Kept implements AsyncDisposable {
  constructor(source: Locks | Lease | ClientBase, name: string, options?: LockOptions);
  readonly name: string;
  readonly scope: 'session' | 'transaction' | 'lease';
  readonly fence: number;
  readonly held: boolean;
  acquire(options?: Waiting): Promise<this>;
  release(): Promise<void>;
  /** The transaction of this connection commits only while we hold. */
  guard(client: ClientBase): Promise<void>;
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
  run<T>(work: (lease: this) => T | Promise<T>): Promise<T>;
  [Symbol.asyncDispose](): Promise<void>;
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
