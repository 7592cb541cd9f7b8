// Why one request went where it went, and what came of it.

import { ask, state } from "./feed.js";
import { clock, count, engine, h, ms, share, swatch } from "./format.js";
import { inlined, path, stages, stays } from "./requests.js";
import { REASONS } from "./refusals.js";

export class Request {
  constructor(id) {
    this.id = id;
    this.body = h("", {}, h("p.empty", {}, "Looking it up…"));
    this.logs = h("section.panel.logs", { hidden: true });
    this.element = h("", {}, h(".lead", {}, h("h1", {}, "Why did it go there?"), h("p.mono", {}, id)), this.body, this.logs);
    this.look();
  }

  update(_, changed) {
    // What came of it is told as a change of its decision.
    const known = [...state.tables.decisions.values()].find((row) => row.request === this.id);
    const phase = known ? known.phase : "";
    if (changed.has("decisions") && phase !== this.phase) {
      if (this.phase !== undefined) this.look();
      this.phase = phase;
    }
  }

  async look() {
    const query = `request=${encodeURIComponent(this.id)}`;
    try {
      const found = await ask(`explain?${query}`);
      this.body.replaceChildren(...found.decisions.map((one, place) => this.attempt(one, place, found.decisions.length)));
    } catch (error) {
      this.body.replaceChildren(h("section.panel", {}, h("p.empty", {}, error.message)));
    }
    if (!state.head?.viewer.operator) return;
    try {
      this.drawLogs(await ask(`logs?${query}`));
    } catch (error) {
      this.logs.hidden = false;
      this.logs.replaceChildren(h("h2", {}, "Logs"), h("p.empty", {}, error.message));
    }
  }

  attempt(one, place, number) {
    const { decision } = one;
    const title = number > 1 ? `Attempt ${place + 1} of ${number}` : decision.reason ? "It was refused" : path(decision);
    const parts = [h("section.panel", {}, h(".title", {}, h("h2", {}, title), h("span.muted", {}, `decided at ${clock(decision.at)}`)),
      h("p.story", {}, story(one)), decision.reason ? facts(one) : h("", {}, this.comparison(one), facts(one)))];
    const block = state.head.block_tokens;
    const prefix = { name: "Prefix there", number: true, write: (row) => `${count(row.prefix_blocks * block)} tokens` };
    if (one.prefills.length) {
      parts.push(alternatives("Who could have computed the prompt", `${count(one.num_prefills)} could; the best are shown, by the time to the first token`, one.prefills, decision.prefill, [
        prefix,
        { name: "Wait", number: true, write: (row) => ms(row.queue_ms) },
        { name: "Fetch", number: true, write: (row) => ms(row.transfer_ms) },
        { name: "Compute", number: true, write: (row) => ms(row.prefill_ms) },
        { name: "First token", number: true, write: (row) => ms(row.ttft_ms) },
        { name: "How", write: (row) => howWord(row.note) },
      ]));
    }
    if (one.inlines.length) {
      parts.push(alternatives("Decode nodes that could have computed it themselves", "in one step, between those of others", one.inlines, inlined(decision) ? decision.decode : "", [
        prefix,
        { name: "Wait", number: true, write: (row) => ms(row.queue_ms) },
        { name: "Step", number: true, write: (row) => ms(row.prefill_ms) },
        { name: "First token", number: true, write: (row) => ms(row.ttft_ms) },
      ]));
    }
    if (one.decodes.length) {
      parts.push(alternatives("Who could have made the output", `${count(one.num_decodes)} could; the best are shown, by the time between tokens`, one.decodes, decision.decode, [
        { name: "Between tokens", number: true, write: (row) => ms(row.tbt_ms) },
        prefix,
        { name: "Batch and room", write: (row) => row.note },
      ]));
    }
    if (!one.prefills.length && !one.decodes.length) {
      parts.push(h("section.panel", {}, h("p.empty", {}, "What the other instances would have taken was not kept: under high load it is for a hundred requests a second.")));
    }
    return h(".attempt", {}, ...parts);
  }

  comparison({ decision }) {
    const { predicted, actual } = decision;
    const took = { queue_ms: actual.queue_ms, transfer_ms: actual.transfer_ms, prefill_ms: actual.prefill_ms };
    const told = took.queue_ms + took.transfer_ms + took.prefill_ms > 0;
    if (actual.ttft_ms && !told) took.prefill_ms = actual.ttft_ms;
    const whole = 1.02 * Math.max(predicted.ttft_ms, actual.ttft_ms, 1);
    const bars = [h("span.span"), h("span.span")];
    stages(bars[0], predicted, whole);
    if (actual.ttft_ms) stages(bars[1], took, whole);
    return h("", {},
      h(".compare", { role: "img", "aria-label": `First token predicted after ${ms(predicted.ttft_ms)}, ${actual.ttft_ms ? `came after ${ms(actual.ttft_ms)}` : "not out yet"}` },
        h("span.muted", {}, "predicted"), bars[0], h("span.number", {}, ms(predicted.ttft_ms)),
        h("span.muted", {}, "actual"), bars[1], h("span.number", {}, actual.ttft_ms ? ms(actual.ttft_ms) : "–")),
      h(".key", {}, swatch("wait", "wait"), swatch("fetch", "fetching of a prefix"), swatch("compute", "computing of the prompt")));
  }

  drawLogs({ lines, found, directory }) {
    this.logs.hidden = false;
    const where = "other machines’ logs have the same id";
    this.logs.replaceChildren(
      h(".title", {}, h("h2", {}, "Logs"), h("span.muted", {}, `of the processes on this gateway’s machine; ${where}`)),
      lines.length
        ? h(".log", { tabindex: "0", role: "region", "aria-label": "Lines of the logs" }, ...lines.map((line) => h("", {}, h("span.muted", {}, line.time), h("span", {}, line.process),
            h("span", { class: line.level === "warning" ? "warn-text" : line.level === "error" ? "bad-text" : "" }, line.text))))
        : h("p.empty", {}, found ? `No line of ${directory} names it.` : "This gateway’s machine keeps no logs in files; look where its output goes."),
    );
  }
}

function howWord(note) {
  return { "cache-aware": "uses what is there", recompute: "computes the rest", fetch: "fetches the rest", await: "waits for another prompt to compute it" }[note] || note;
}

function story({ decision, prefills, num_prefills, ttft_slo_ms, tbt_slo_ms }) {
  const block = state.head.block_tokens;
  if (decision.reason) {
    const [, why] = REASONS[decision.reason] || ["", decision.reason];
    const back = decision.retry_after_s ? ` It was told to come back after ${decision.retry_after_s} s.` : "";
    return `It was turned away: ${why}. In the Conductor’s words: “${decision.message}”.${back}`;
  }
  const { predicted, actual } = decision;
  const parts = [];
  if (inlined(decision)) {
    parts.push(`${decision.decode} computes the prompt itself: it lacked so little of it that the first token comes sooner so than over a prefill group.`);
  } else {
    const best = Math.min(...prefills.map((row) => row.ttft_ms));
    const chosen = prefills.find((row) => row.instance_id === decision.prefill);
    const equal = prefills.filter((row) => row.ttft_ms <= best * 1.001).length;
    const prefill = engine(decision.prefill);
    if (num_prefills === 1) parts.push(`${prefill} is the only one that could compute the prompt.`);
    else if (chosen && chosen.ttft_ms <= best * 1.001) {
      parts.push(equal > 1
        ? `${prefill} was predicted to have the first token as soon as any of the ${num_prefills} that could compute the prompt.`
        : `${prefill} was predicted to have the first token sooner than any other of the ${num_prefills} that could compute the prompt.`);
    } else parts.push(`${prefill} computes the prompt.`);
    parts.push(decision.local_blocks ? `Its store had the first ${count(decision.local_blocks * block)} of ${count(decision.tokens)} tokens.` : "Its store had nothing of the prompt.");
    if (decision.source) parts.push(`${count((decision.source_blocks - decision.local_blocks) * block)} more came from ${decision.source}.`);
    parts.push(stays(decision) ? `${prefill} makes the output, too: nothing is handed over.` : `${decision.decode} makes the output.`);
    if (decision.waits) parts.push("Nobody had room for the output, so it was to wait for some first.");
  }
  parts.push(`Objectives: first token within ${ms(ttft_slo_ms)}, then a token every ${ms(tbt_slo_ms)}.`);
  if (actual.ttft_ms) {
    const off = actual.ttft_ms / Math.max(1, predicted.ttft_ms);
    parts.push(off > 1.25 ? `It took ${off.toFixed(1)} times as long as predicted.` : off < 0.8 ? `It took ${share(off)} of what was predicted.` : "It took about as long as predicted.");
  }
  return parts.join(" ");
}

function facts({ decision, policy, admission }) {
  const { predicted, actual } = decision;
  const rows = [["Tenant", decision.tenant || "none"], ["Gateway", decision.gateway], ["Prompt", `${count(decision.tokens)} tokens${actual.cached_tokens ? `, ${count(actual.cached_tokens)} of them reused` : ""}`]];
  if (predicted) {
    rows.push(["Between tokens", `${ms(predicted.tbt_ms)} predicted${actual.tbt_ms ? `, ${ms(actual.tbt_ms)} actual` : ""}`]);
    rows.push(["Output", `${count(predicted.output_tokens)} tokens predicted${actual.output_tokens ? `, ${count(actual.output_tokens)} actual` : ""}`]);
    rows.push(["State", { prefill: "before the first token", decode: "answering", finished: "finished", failed: "failed: it is tried anew elsewhere where that helps", moved: "moved: the output goes on elsewhere" }[decision.phase]]);
  }
  rows.push(["Rules", `${policy} placement, ${admission} admission`]);
  const list = h("dl.facts", {}, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  list.style.marginTop = "12px";
  return list;
}

function alternatives(title, note, rows, chosen, columns) {
  return h("section.panel", {}, h(".title", {}, h("h2", {}, title), h("span.muted", {}, note)),
    h(".scroll", { tabindex: "0", role: "region", "aria-label": title }, h("table.plain", {},
      h("thead", {}, h("tr", {}, h("th", {}, "Instance"), ...columns.map(({ name, number }) => h(number ? "th.number" : "th", {}, name)))),
      h("tbody", {}, ...rows.map((row) => h(row.instance_id === chosen ? "tr.chosen" : "tr", {},
        h("td", {}, engine(row.instance_id) + (row.instance_id === chosen ? " (chosen)" : "")),
        ...columns.map(({ number, write }) => h(number ? "td.number" : "td", {}, write(row)))))))));
}
