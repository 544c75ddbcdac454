// Where connections come from: a server's configuration, or the program's own source of them

import pg from 'pg';
import { BadArgument, ConnectionLost, NotPrimary, cancelled, translate } from './errors.js';
import { FOREVER, ask, close, cut, hostsOf, now } from './wire.js';

const isPool = (source) => typeof source?.connect === 'function' && 'idleCount' in source;

export const isSource = (source) =>
  typeof source === 'string' || typeof source === 'function' || isPool(source)
  || typeof source === 'object' && source !== null && typeof source.query !== 'function';

// Notes the connection's end, so that the next request fails. Returns a function that removes the listeners.
function listen(client) {
  const ignore = () => {};
  const end = () => { client.ended = true; };
  client.ended = false;
  client.on('error', ignore);
  client.once('end', end);
  return () => client.off('error', ignore).off('end', end);
}

// Connects to the primary among the hosts, which share the time.
async function connect(config, name, { until, signal }) {
  const hosts = hostsOf(config);
  let failure;
  for (const [n, host] of hosts.entries()) {
    if (signal?.aborted) throw cancelled(signal);
    const left = Math.max((until - now()) / (hosts.length - n), 1);
    const client = new pg.Client({
      keepAlive: true, keepAliveInitialDelayMillis: 30000, fallback_application_name: name, ...host,
      connectionTimeoutMillis: Math.min(host.connectionTimeoutMillis || 10000, left),
    });
    const stop = () => cut(client);
    listen(client);
    signal?.addEventListener('abort', stop);
    try {
      await client.connect();
      if (hosts.length > 1 && (await ask(client, ['SHOW transaction_read_only'], { until, limit: 10000 })) === 'on')
        throw new NotPrimary('the server is a standby', '25006');
      return client;
    } catch (error) {
      failure = translate(error);
      await close(client);
    } finally {
      signal?.removeEventListener('abort', stop);
    }
  }
  throw failure;
}

/** Waits for a connection. Discards one that comes too late. */
export async function inTime(making, discard, { until, signal }) {
  let timer, stop;
  const late = new Promise((_, reject) => {
    stop = () => reject(cancelled(signal));
    timer = setTimeout(() => reject(new ConnectionLost('there is no connection in time')),
      Math.min(Math.max(until - now(), 0), FOREVER));
    signal?.addEventListener('abort', stop);
  });
  try {
    return await Promise.race([making, late]);
  } catch (error) {
    making.then(discard).catch(() => {});
    throw translate(error);
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener('abort', stop);
  }
}

const isClient = (made) => typeof made?.query === 'function' && typeof made.end === 'function';

/**
 * Returns a connection, and a function that returns it, either clean or in an unknown state. A pool's connection
 * stays out of the pool until then. A source that is a function returns a connection, or a server's configuration.
 */
export async function lend(source, name, { until, signal }) {
  if (signal?.aborted) throw cancelled(signal);
  if (isPool(source)) {
    const client = await inTime(source.connect(), (late) => late.release(), { until, signal });
    const forget = listen(client);
    return {
      client,
      pooled: true,
      end: (good) => {
        forget();
        client.release(!good);
      },
    };
  }
  let client = source;
  if (typeof source === 'function') {
    client = await inTime(Promise.resolve().then(source), (late) => isClient(late) && late.end(), { until, signal });
    if (isClient(client)) {
      if (isPool(client) || !client.processID) throw new BadArgument('a connection has to be connected', '22023');
      listen(client);
      return { client, pooled: false, end: () => close(client) };
    }
    if (!isSource(client) || typeof client === 'function')
      throw new BadArgument(`no connection, but ${typeof client}`, '22023');
  }
  client = await connect(client, name, { until, signal });
  return { client, pooled: false, end: () => close(client) };
}
