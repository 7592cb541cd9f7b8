// Work that is spread over frames, so that none takes long.

const MOST_MS = 4;

/** What there is to do, by whose it is. */
const waiting = new Map();
let asked = false;

/** Does it in one of the next frames, in turn, unless there is newer work of the same owner by then. */
export function soon(owner, work) {
  waiting.set(owner, work);
  if (asked) return;
  asked = true;
  requestAnimationFrame(some);
}

function some() {
  const until = performance.now() + MOST_MS;
  for (const [owner, work] of waiting) {
    waiting.delete(owner);
    work();
    if (performance.now() > until) break;
  }
  asked = waiting.size > 0;
  if (asked) requestAnimationFrame(some);
}
