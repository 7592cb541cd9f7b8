// What runs, and what ended lately: predicted beside actual.

import { count, engine, h, lasting, many, ms, shortId, swatch, text } from "./format.js";
import { lines, linked, Table } from "./table.js";

/** Whether it is decoded by the engine that computes its prompt. */
export function stays(row) {
  return engine(row.prefill) === row.decode;
}

/** Whether it was given to a decode node alone, between whose steps its prompt is computed. */
export function inlined(row) {
  return row.prefill === row.decode;
}

export function path(row) {
  return stays(row) ? `${row.decode} alone` : `${engine(row.prefill)} → ${row.decode}`;
}

export function link(row, id) {
  return `#/request/${encodeURIComponent(row.request || id)}`;
}

const KINDS = ["wait", "fetch", "compute", "late", "emit", "mark"];

/** Sets the pieces of a bar, each to a share of it from and to; those that are not named are not seen. */
function pieces(bar, wanted) {
  if (!bar.firstChild) bar.append(...KINDS.map((kind) => h(`span.${kind}`)));
  KINDS.forEach((kind, place) => {
    const piece = bar.children[place];
    const [from, to] = wanted[kind] || [0, 0];
    piece.style.left = `${(100 * from).toFixed(2)}%`;
    if (kind === "mark") piece.hidden = !wanted.mark;
    else piece.style.width = `${(100 * Math.max(0, to - from)).toFixed(2)}%`;
  });
}

/** Wait, transfer and compute, in the scale of `whole` ms, and what comes beside them. */
export function stages(bar, times, whole, beside = {}) {
  const wait = times.queue_ms;
  const fetched = wait + times.transfer_ms;
  pieces(bar, { wait: [0, wait / whole], fetch: [wait / whole, fetched / whole], compute: [fetched / whole, (fetched + times.prefill_ms) / whole], ...beside });
}

function progress(cell, row, now) {
  if (!cell.firstChild) cell.append(h("span.span"), h(".span-text"));
  const [bar, said] = cell.children;
  const predicted = row.predicted;
  let late = 0;
  if (!predicted) {
    pieces(bar, {});
    text(said, row.phase === "prefill" ? "before the first token; another Conductor placed it" : "answering; another Conductor placed it");
  } else if (row.phase === "prefill") {
    const gone = Math.max(0, 1000 * (now - row.at));
    const whole = 1.1 * Math.max(predicted.ttft_ms, gone, 1);
    late = gone - predicted.ttft_ms;
    stages(bar, predicted, whole, { late: late > 0 ? [predicted.ttft_ms / whole, gone / whole] : null, mark: [gone / whole] });
    text(said, late > 50 ? `first token ${ms(late)} late` : late > -50 ? "first token due now" : `first token due in ${ms(-late)}`);
  } else {
    const whole = Math.max(1, predicted.output_tokens * predicted.tbt_ms);
    const gone = row.first ? Math.max(0, 1000 * (now - row.first)) : 0;
    pieces(bar, { emit: [0, Math.min(1, gone / whole)] });
    text(said, `answering for ${lasting(gone / 1000)} of ${lasting(whole / 1000)} predicted`);
  }
  said.classList.toggle("bad-text", late > 1000);
}

function pair(cell, predicted, actual, write) {
  const off = predicted && actual ? actual / predicted : 1;
  lines(cell, actual ? write(actual) : "–", predicted ? `${write(predicted)} predicted` : "");
  cell.children[0].className = off > 2 ? "warn-text" : "";
}

export class Requests {
  constructor() {
    this.note = h("p");
    const own = (cell, [id, row]) => linked(cell, link(row, id), this.named(row.request), row.tenant || "no tenant");
    this.live = new Table("Requests in flight", [
      { name: "Request", width: "minmax(126px, 1.2fr)", narrow: "minmax(0, 1.2fr)", draw: own },
      { name: "Path", width: "minmax(120px, 1.1fr)", wide: true, draw: (cell, [, row]) => lines(cell, path(row), `over ${row.gateway}`) },
      { name: "Prompt", width: "84px", number: true, wide: true, draw: (cell, [, row]) => lines(cell, count(row.tokens), "tokens") },
      { name: "For", width: "58px", narrow: "44px", number: true, draw: (cell, [, row]) => text(cell, lasting(this.now - row.at)) },
      { name: "Progress", width: "minmax(140px, 2fr)", narrow: "minmax(0, 1.5fr)", draw: (cell, [, row]) => progress(cell, row, this.now) },
    ], { rowHeight: 50, empty: "Nothing is in flight just now." });
    this.ended = new Table("Requests that ended lately", [
      { name: "Request", width: "minmax(126px, 1.3fr)", narrow: "minmax(0, 1.1fr)", draw: own },
      { name: "Path", width: "minmax(120px, 1.2fr)", wide: true, draw: (cell, [, row]) => lines(cell, path(row), ["failed", "moved"].includes(row.phase) ? row.phase : row.branch ? branchWord(row) : "") },
      { name: "Prompt", width: "92px", number: true, wide: true, draw: (cell, [, row]) => lines(cell, count(row.tokens), `${count(row.actual.cached_tokens)} reused`) },
      { name: "First token", width: "minmax(96px, 1fr)", narrow: "minmax(0, 1fr)", number: true, draw: (cell, [, row]) => pair(cell, row.predicted?.ttft_ms, row.actual.ttft_ms, ms) },
      { name: "Between tokens", width: "minmax(104px, 1fr)", number: true, wide: true, draw: (cell, [, row]) => pair(cell, row.predicted?.tbt_ms, row.actual.tbt_ms, ms) },
      { name: "Output", width: "minmax(92px, 1fr)", number: true, wide: true, draw: (cell, [, row]) => pair(cell, row.predicted?.output_tokens, row.actual.output_tokens, count) },
    ], { rowHeight: 50, empty: "No request has ended yet since this Conductor began to lead." });
    const field = h("input", { type: "search", placeholder: "chatcmpl-…", "aria-label": "Id of a request" });
    const find = h("form.tools", { onsubmit: (event) => { event.preventDefault(); if (field.value.trim()) location.hash = `#/request/${encodeURIComponent(field.value.trim())}`; } },
      field, h("button", { type: "submit" }, "Why did it go there?"));
    this.count = h("span.muted");
    this.element = h(
      "", {},
      h(".lead", {}, h("h1", {}, "Requests"), this.note),
      find,
      h("section.panel", {},
        h(".title", {}, h("h2", {}, "In flight"), this.count), this.live.element,
        h(".key", {}, swatch("wait", "predicted wait"), swatch("fetch", "fetching of a prefix"), swatch("compute", "computing of the prompt"), swatch("bad", "beyond the prediction"), swatch("emit", "answer, of its predicted time"))),
      h("section.panel", {}, h(".title", {}, h("h2", {}, "Ended lately"), h("span.muted", {}, "the newest first")), this.ended.element),
    );
  }

  /** On phones without what all ids begin with. */
  named(id) {
    return this.live.narrow.matches ? shortId(id).replace(/^[a-z]+-/, "") : shortId(id);
  }

  update({ head, tables }, changed) {
    this.now = head.taken_at;
    const all = [...tables.attempts].sort(([, one], [, other]) => other.at - one.at);
    this.live.set(all);
    const viewer = head.viewer;
    text(this.note, viewer.operator ? "Of every tenant and every gateway. Of each, one instance computes the prompt and one makes the output; it may be the same." : `Those of ${viewer.tenant}.`);
    text(this.count, viewer.operator ? (all.length < head.attempts ? `${all.length} of ${count(head.attempts)}, the newest of each tenant` : many(all.length, "request")) : many(all.length, "request"));
    if (changed.has("decisions") || !this.drawn) {
      this.drawn = true;
      this.ended.set([...tables.decisions].filter(([, row]) => row.ended).sort(([, one], [, other]) => other.ended - one.ended));
    }
  }
}

export function branchWord(row) {
  if (inlined(row)) return "computed by the decode node";
  if (row.branch === "cache-aware") return row.local_blocks ? "where its prefix was" : "computed whole";
  return { fetch: "prefix fetched", recompute: "rest computed, not fetched", await: "prefix awaited" }[row.branch] || row.branch;
}
