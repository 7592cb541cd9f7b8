// What the gateway tells: the whole state first, then each second what has changed.

const KEY = "springtide-key";

export const state = { head: null, tables: {}, heardAt: 0 };

let reached = { onState: () => {}, onTrouble: () => {}, onKeyWanted: () => {} };
let running = null;

export function key() {
  return sessionStorage.getItem(KEY) || "";
}

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

export function headers() {
  return key() ? { authorization: `Bearer ${key()}` } : {};
}

/** What is at a path beneath /console, as JSON. Throws an Error with the server's own words. */
export async function ask(path) {
  const answer = await fetch(`/console/${path}`, { headers: headers() });
  if (!answer.ok) throw await errorOf(answer);
  return answer.json();
}

async function errorOf(answer) {
  const body = await answer.json().catch(() => ({}));
  return new Error(body.error?.message || `the gateway answers ${answer.status}`);
}

/** Follows the stream for as long as the page is seen. */
export function follow(handlers) {
  reached = handlers;
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  if (!document.hidden) start();
}

export function again() {
  stop();
  start();
}

function stop() {
  running?.abort();
  running = null;
}

async function start() {
  if (running) return;
  const own = (running = new AbortController());
  let pause = 500;
  while (!own.signal.aborted) {
    try {
      const answer = await fetch("/console/events", { headers: headers(), signal: own.signal });
      if (answer.status === 401) {
        stop();
        reached.onKeyWanted(Boolean(key()));
        return;
      }
      if (!answer.ok) throw await errorOf(answer);
      pause = 500;
      await read(answer.body.getReader());
      throw new Error("the gateway has ended the connection");
    } catch (error) {
      if (own.signal.aborted) return;
      reached.onTrouble(error instanceof TypeError ? "the gateway cannot be reached" : error.message);
    }
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(2 * pause, 10000);
  }
}

async function read(reader) {
  const decoder = new TextDecoder();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += decoder.decode(value, { stream: true });
    let end;
    while ((end = waiting.indexOf("\n\n")) >= 0) {
      take(waiting.slice(0, end));
      waiting = waiting.slice(end + 2);
    }
  }
}

function take(event) {
  const lines = event.split("\n");
  const name = lines.find((line) => line.startsWith("event: "))?.slice(7);
  const data = lines.find((line) => line.startsWith("data: "));
  if (!data) return;
  const { tables, ...head } = JSON.parse(data.slice(6));
  const changed = new Set(["head"]);
  if (name === "state") {
    state.tables = Object.fromEntries(Object.entries(tables).map(([table, rows]) => [table, new Map(Object.entries(rows))]));
    Object.keys(tables).forEach((table) => changed.add(table));
  } else {
    for (const [table, change] of Object.entries(tables)) {
      const rows = state.tables[table];
      change.gone.forEach((gone) => rows.delete(gone));
      for (const [row, value] of Object.entries(change.set)) rows.set(row, value);
      changed.add(table);
    }
  }
  state.head = head;
  state.heardAt = Date.now();
  reached.onState(changed);
}
