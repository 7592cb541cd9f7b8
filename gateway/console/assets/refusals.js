// The latest requests that were turned away, and why.

import { clock, count, h, lasting, many, shortId, text } from "./format.js";
import { link } from "./requests.js";
import { lines, linked, Table } from "./table.js";

export const REASONS = {
  ttft: ["First token too late", "its first token would have come after the objective"],
  tbt: ["Tokens too slow", "with it, tokens would have come slower than the objective"],
  no_prefill: ["No prefill group", "none was ready"],
  no_decode: ["No decode node", "none was ready"],
  too_large: ["Too large", "no instance has the memory for it, whatever the load"],
  deadline: ["Deadline", "it could not have been answered by its own deadline"],
  priority: ["Priority", "what was left under load is for requests of higher priority"],
  tenant_share: ["Tenant’s share", "what was left under load is for tenants that have had less than their share"],
  size: ["Size", "what was left under load serves several smaller requests in its place"],
  not_idle: ["Not idle", "it asks for idle capacity, of which there was none"],
};

export class Refusals {
  constructor() {
    this.sums = h("section.panel");
    this.table = new Table("Latest refusals", [
      { name: "When", width: "68px", narrow: "62px", draw: (cell, [, row]) => text(cell, clock(row.at)) },
      { name: "Why", width: "minmax(130px, 2.4fr)", narrow: "minmax(0, 1.2fr)", draw: (cell, [, row]) => { lines(cell, REASONS[row.reason]?.[0] || row.reason, row.message); cell.title = row.message; } },
      { name: "Request", width: "minmax(116px, 1fr)", narrow: "minmax(0, 1fr)", draw: (cell, [id, row]) => linked(cell, link(row, id), shortId(row.request), row.tenant || "no tenant") },
      { name: "Prompt", width: "84px", number: true, wide: true, draw: (cell, [, row]) => lines(cell, count(row.tokens), "tokens") },
      { name: "Come back", width: "104px", number: true, wide: true, draw: (cell, [, row]) => text(cell, row.retry_after_s ? `after ${lasting(row.retry_after_s)}` : "does not help") },
    ], { rowHeight: 50 });
    this.element = h(
      "", {},
      h(".lead", {}, h("h1", {}, "Refusals"),
        h("p", {}, "Requests that the Conductor turned away on arrival, for they would have missed their objectives or made others miss theirs. Clients are answered 429 and told when to come back.")),
      this.sums,
      h("section.panel", {}, h(".title", {}, h("h2", {}, "The latest")), this.table.element),
    );
  }

  update({ head, tables }, changed) {
    if (!head.pools) return;
    const said = JSON.stringify(head.refused_by_reason);
    if (said !== this.said) {
      this.said = said;
      const reasons = Object.entries(head.refused_by_reason).sort(([, one], [, other]) => other - one);
      const most = Math.max(1, ...reasons.map(([, number]) => number));
      this.sums.hidden = !reasons.length;
      this.sums.replaceChildren(
        h(".title", {}, h("h2", {}, many(head.refused, "refusal")), h("span.muted", {}, `of ${count(head.scheduled + head.refused)} requests since this Conductor began to lead`)),
        h(".reasons", {}, ...reasons.flatMap(([reason, number]) => {
          const bar = h("span");
          bar.style.width = `${(100 * number) / most}%`;
          return [h("span", { title: REASONS[reason]?.[1] || "" }, REASONS[reason]?.[0] || reason), h("span.track", {}, bar), h("span", {}, count(number))];
        })),
      );
    }
    if (changed.has("refusals") || !this.drawn) {
      this.drawn = true;
      const none = head.viewer.operator ? "None has been refused since this Conductor began to lead." : "None of yours has been refused of late.";
      this.table.set([...tables.refusals].sort(([, one], [, other]) => other.at - one.at), none);
    }
  }
}
