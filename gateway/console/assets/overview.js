// Is it well? Rates and latencies of the last minute, and over the last hour.

import { Chart } from "./charts.js";
import { count, h, many, ms, rate, share, short, text } from "./format.js";

// Places in a bucket of the history.
export const B = {
  at: 0, placed: 1, refused: 2, finished: 3, failed: 4, prompt: 5, cached: 6, output: 7, first: 8, inTime: 9,
  ttft50: 10, ttft90: 11, ttft99: 12, tbt50: 13, tbt90: 14, tbt99: 15, prefillLoad: 16, decodeLoad: 17, attempts: 18,
};
const BUCKET_S = 10;
const MINUTE = 6;

/** The buckets that are over, by time; where nothing was noted, one of nothing. */
export function buckets(history) {
  const numbers = [...history.keys()].map(Number).sort((one, other) => one - other);
  numbers.pop();
  const found = [];
  for (const number of numbers) {
    const last = found.length ? found[found.length - 1][0] : null;
    const bucket = history.get(String(number));
    for (let at = last === null ? bucket[0] : last + BUCKET_S; at < bucket[0] - 1; at += BUCKET_S) {
      found.push([at, ...new Array(9).fill(0), ...new Array(6).fill(NaN), NaN, NaN, NaN]);
    }
    found.push(bucket);
  }
  return found.slice(-360);
}

/** The middle of a quantile over some buckets, each counting as its first tokens. */
function typical(some, place, weight) {
  const total = some.reduce((sum, bucket) => sum + bucket[weight], 0);
  return total ? some.reduce((sum, bucket) => sum + bucket[place] * bucket[weight], 0) / total : null;
}

function known(bucket, place, weight) {
  return bucket[weight] ? bucket[place] : NaN;
}

export class Overview {
  constructor() {
    this.headline = h("h1");
    this.below = h("p");
    this.tiles = {};
    const tile = (name, title) => {
      this.tiles[name] = { figure: h(".figure"), below: h(".below") };
      return h("section.tile", {}, h("h2", {}, title), this.tiles[name].figure, this.tiles[name].below);
    };
    const loads = [
      { name: "prefill", color: "prefill", value: (bucket) => bucket[B.prefillLoad] },
      { name: "decode", color: "decode", value: (bucket) => bucket[B.decodeLoad] },
    ];
    this.charts = {
      rate: new Chart("Requests per second", [
        { name: "placed", color: "accent", value: (bucket) => bucket[B.placed] / BUCKET_S },
        { name: "refused", color: "bad", value: (bucket) => bucket[B.refused] / BUCKET_S },
      ], rate),
      ttft: new Chart("Time to first token", quantiles("ttft", B.first), ms),
      tbt: new Chart("Time between tokens", quantiles("tbt", B.finished), ms),
      load: new Chart("Load", loads, share, { note: "100% is as much as the objectives allow" }),
      reuse: new Chart("Prompt tokens found in the pool", [
        { name: "of all prompt tokens", color: "decode", value: (bucket) => (bucket[B.prompt] ? bucket[B.cached] / bucket[B.prompt] : NaN) },
      ], share),
      output: new Chart("Output tokens per second", [
        { name: "of requests that ended", color: "accent", value: (bucket) => bucket[B.output] / BUCKET_S },
      ], short),
    };
    this.predictions = h("section.panel");
    this.predictions.style.marginTop = "16px";
    this.element = h(
      "",
      {},
      h(".lead", {}, this.headline, this.below),
      h(
        ".grid.tiles",
        {},
        tile("rate", "Requests"),
        tile("ttft", "Time to first token"),
        tile("tbt", "Time between tokens"),
        tile("output", "Output"),
        tile("reuse", "Prompt reused"),
        tile("refused", "Refused"),
      ),
      h(".grid.charts", {}, ...Object.values(this.charts).map((chart) => chart.element)),
      this.predictions,
    );
  }

  update({ head, tables }, changed) {
    if (!head.pools) return;
    const { both, prefill, decode, away } = head.engines;
    const split = `${prefill} prefill and ${decode} decode instances`;
    const all = both ? many(both, "instance") + (prefill + decode ? ` of both roles, ${split}` : "") : split;
    text(
      this.headline,
      !head.ready
        ? "It takes no requests: " + (head.pools.prefill.ready ? "no decode node is ready." : "no prefill group is ready.")
        : away
          ? `It serves, with ${away} of ${many(both + prefill + decode, "instance")} away.`
          : `All is there: ${all}.`,
    );
    const waiting = head.attempts_in_prefill;
    text(this.below, `${many(head.attempts, "request")} in flight, ${count(waiting)} of them before the first token.`);
    if (changed.has("history")) {
      const over = buckets(tables.history);
      const newest = over.length ? over[over.length - 1][0] : 0;
      if (newest !== this.newest) {
        this.newest = newest;
        this.drawHistory(head, over);
      }
    }
    this.drawPredictions(head.predictions);
  }

  drawHistory(head, over) {
    const minute = over.slice(-MINUTE);
    const sum = (place) => minute.reduce((total, bucket) => total + bucket[place], 0);
    const seconds = Math.max(1, minute.length) * BUCKET_S;
    const goal = { ttft: head.ttft_slo_ms, tbt: head.tbt_slo_ms };
    this.tile("rate", rate(sum(B.placed) / seconds), "per s", "placed, in the last minute");
    const first = sum(B.first);
    this.latency("ttft", typical(minute, B.ttft50, B.first), Math.max(...minute.map((bucket) => bucket[B.ttft99])),
      first ? `${share(sum(B.inTime) / first)} within ${ms(goal.ttft)}` : "no first token in the last minute");
    this.latency("tbt", typical(minute, B.tbt50, B.finished), Math.max(...minute.map((bucket) => bucket[B.tbt99])), `objective ${ms(goal.tbt)}`);
    this.tile("output", short(sum(B.output) / seconds), "tokens per s", `${short(sum(B.prompt) / seconds)} prompt tokens per s`);
    this.tile("reuse", sum(B.prompt) ? share(sum(B.cached) / sum(B.prompt)) : "–", "", "of prompt tokens,\nfrom the pool");
    const asked = sum(B.placed) + sum(B.refused);
    this.tile("refused", asked ? share(sum(B.refused) / asked) : "–", "", `${count(sum(B.refused))} in the last minute`);
    this.tiles.refused.figure.classList.toggle("bad-text", sum(B.refused) > 0.05 * asked);
    const goals = {
      ttft: { value: goal.ttft, name: `objective ${ms(goal.ttft)}` },
      tbt: { value: goal.tbt, name: `objective ${ms(goal.tbt)}` },
      load: { value: 1, name: "all that the objectives allow" },
    };
    for (const [name, chart] of Object.entries(this.charts)) chart.set(over, goals[name]);
  }

  latency(name, median, worst, below) {
    this.tile(name, median === null ? "–" : ms(median), median === null ? "" : "median", `99th percentile ${worst > 0 ? ms(worst) : "–"}\n${below}`);
  }

  tile(name, figure, unit, below) {
    const tile = this.tiles[name];
    tile.figure.replaceChildren(figure, ...(unit ? [h("small", {}, unit)] : []));
    text(tile.below, below);
  }

  drawPredictions(rows) {
    const said = JSON.stringify(rows);
    if (said === this.predicted) return;
    this.predicted = said;
    const names = {
      ttft: "time to first token", queue: "wait in the queue", transfer: "fetching of a prefix", prefill: "computing of a prompt",
      tbt: "time between tokens", output_tokens: "length of the output",
    };
    this.predictions.replaceChildren(
      h(".title", {}, h("h2", {}, "How good the predictions are"), h("span.muted", {}, "of the latest thousand requests; every placement rests on these")),
      rows.length
        ? h(".scroll", { tabindex: "0", role: "region", "aria-label": "Errors of predictions" }, h(
            "table.plain", {},
            h("thead", {}, h("tr", {}, h("th", {}, "Predicted"), ...["Half within", "90% within", "On the whole"].map((name) => h("th.number", {}, name)))),
            h("tbody", {}, ...rows.map(([quantity, , median, p90, bias]) =>
              h("tr", {}, h("td", {}, names[quantity] || quantity), h("td.number", {}, share(median)), h("td.number", {}, share(p90)),
                h("td.number", {}, Math.abs(bias) < 0.005 ? "even" : `${share(Math.abs(bias))} too ${bias > 0 ? "high" : "low"}`)))),
          ))
        : h("p.empty", {}, "No request has ended yet since this Conductor began to lead."),
    );
  }
}

function quantiles(kind, weight) {
  return [
    { name: "median", color: "accent", value: (bucket) => known(bucket, B[`${kind}50`], weight) },
    { name: "90th percentile", color: "decode", value: (bucket) => known(bucket, B[`${kind}90`], weight) },
    { name: "99th", color: "fetch", value: (bucket) => known(bucket, B[`${kind}99`], weight) },
  ];
}
