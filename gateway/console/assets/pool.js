// Who holds which prefix.

import { Canvas } from "./canvas.js";
import { byName, bytes, color, count, h, lasting, many, share, short, swatch, text } from "./format.js";
import { lines, meter, Table } from "./table.js";

const LABELS = 190;
const NARROW_LABELS = 104;
const ROW = 24;
const FILL = 34;

export class Pool {
  constructor() {
    this.figures = Object.fromEntries(["dram", "ssd", "stores", "prefixes"].map((name) => [name, h("dd")]));
    const names = { dram: "in DRAM", ssd: "on SSD", stores: "stores", prefixes: "asked for often" };
    this.canvas = new Canvas(() => this.draw(), (x, y) => this.explain(x, y));
    this.nothing = h("p.empty", { hidden: true }, "No prefix has been asked for often enough of late to be listed: eight times within a minute or so.");
    this.prefixes = new Table("Prefixes that are asked for most", [
      { name: "Prefix", width: "minmax(104px, 1fr)", narrow: "minmax(0, 1fr)", draw: (cell, [id, row]) => lines(cell, id.slice(0, 10), row.tenant || "no tenant") },
      { name: "Tokens", width: "72px", narrow: "58px", number: true, sort: ([, row]) => row.blocks, draw: (cell, [, row]) => text(cell, count(row.blocks * this.block)) },
      { name: "Asked for", width: "minmax(110px, 1.2fr)", narrow: "minmax(0, 1.1fr)", number: true, sort: ([, row]) => row.asks, draw: (cell, [, row]) => meter(cell, row.asks / this.most, short(row.asks), "fetch") },
      { name: "Held whole by", width: "110px", number: true, wide: true, sort: ([, row]) => row.whole, draw: (cell, [, row]) => text(cell, many(row.whole, "store")) },
      { name: "In part by", width: "100px", number: true, wide: true, sort: ([, row]) => row.holders, draw: (cell, [, row]) => text(cell, row.holders > row.whole ? many(row.holders - row.whole, "store") : "–") },
    ], { rowHeight: 46, sorted: [2, true] });
    this.stores = new Table("Stores", [
      { name: "Store", width: "minmax(120px, 1.4fr)", narrow: "minmax(0, 1.2fr)", sort: ([name]) => name, draw: (cell, [name]) => text(cell, name) },
      { name: "DRAM in use", width: "minmax(110px, 1.4fr)", narrow: "minmax(0, 1.1fr)", number: true, sort: ([, row]) => row[0] / (row[2] || 1), draw: (cell, [, row]) => meter(cell, row[2] ? row[0] / row[2] : 0, row[2] ? share(row[0] / row[2]) : "–", "dram") },
      { name: "Blocks in DRAM", width: "120px", number: true, wide: true, sort: ([, row]) => row[0], draw: (cell, [, row]) => text(cell, count(row[0])) },
      { name: "Blocks on SSD", width: "104px", number: true, wide: true, sort: ([, row]) => row[1], draw: (cell, [, row]) => text(cell, row[1] ? count(row[1]) : "–") },
    ], { rowHeight: 36, sorted: [0, false], empty: "No store has told what it holds yet." });
    this.caches = new Table("Context caches", [
      { name: "Cache", width: "minmax(130px, 1.4fr)", narrow: "minmax(0, 1.4fr)", draw: (cell, [, row]) => lines(cell, row.name || row.id, `${row.tenant || "no tenant"}${row.name ? ` · ${row.id}` : ""}`) },
      { name: "State", width: "minmax(86px, 0.8fr)", narrow: "minmax(0, 0.8fr)", draw: (cell, [, row]) => lines(cell, row.status, row.error || `${row.strength} pin`) },
      { name: "Tokens", width: "72px", number: true, draw: (cell, [, row]) => text(cell, count(row.tokens)) },
      { name: "Pinned at", width: "minmax(120px, 1.4fr)", wide: true, draw: (cell, [, row]) => lines(cell, row.nodes.join(", ") || "no store yet", `${row.nodes.length} of ${row.replicas} wanted`) },
      { name: "Ends", width: "92px", number: true, wide: true, draw: (cell, [, row]) => text(cell, row.expires_at > this.now ? `in ${lasting(row.expires_at - this.now)}` : "has ended") },
    ], { rowHeight: 46, empty: "No context cache is kept." });
    this.element = h(
      "", {},
      h(".lead", {}, h("h1", {}, "Pool"), h("p", {}, "The KV cache that all nodes lend: beginnings of prompts that have been computed once and need not be again. Prefixes are named by their hashes; what they say is not known here.")),
      h("section.panel", {},
        h("dl.figures", {}, ...Object.entries(this.figures).map(([name, figure]) => h("", {}, h("dt", {}, names[name]), figure))),
        h(".title", {}, h("h2", {}, "Who holds which prefix"), h("span.muted", {}, "a row for each prefix that is asked for most, a column for each store; at the foot, how full each is")),
        this.canvas.element, this.nothing,
        h(".key", {}, swatch("dram", "in DRAM; the higher, the more of it"), swatch("ssd", "on SSD"), swatch("none", "not there"))),
      h(".grid.halves", {}, h("section.panel", {}, h(".title", {}, h("h2", {}, "Asked for most"), h("span.muted", {}, "times in the last minute or so")), this.prefixes.element),
        h("section.panel", {}, h(".title", {}, h("h2", {}, "Stores")), this.stores.element)),
      h("section.panel", {}, h(".title", {}, h("h2", {}, "Context caches"), h("span.muted", {}, "kept on request, pinned in the stores")), this.caches.element),
    );
    this.element.querySelector(".halves").style.marginTop = "16px";
  }

  update({ head, tables }, changed) {
    if (!head.pools || (this.lines && !["stores", "prefixes", "caches"].some((name) => changed.has(name)))) return;
    this.block = head.block_tokens;
    this.now = head.taken_at;
    const stores = this.inOrder(tables.stores);
    const prefixes = [...tables.prefixes].sort(([, one], [, other]) => other.asks - one.asks);
    this.most = Math.max(1, ...prefixes.map(([, row]) => row.asks));
    const dram = stores.reduce((sum, [, row]) => sum + row[0], 0);
    const room = stores.reduce((sum, [, row]) => sum + row[2], 0);
    const ssd = stores.reduce((sum, [, row]) => sum + row[1], 0);
    text(this.figures.dram, `${bytes(dram * head.bytes_per_block)}${room ? ` (${share(dram / room)})` : ""}`);
    text(this.figures.ssd, ssd ? bytes(ssd * head.bytes_per_block) : "nothing");
    text(this.figures.stores, count(stores.length));
    text(this.figures.prefixes, count(prefixes.length));
    this.columns = stores;
    this.lines = prefixes;
    this.prefixes.set(prefixes, head.viewer.operator ? "None is asked for often just now." : "None of yours is asked for often just now.");
    this.stores.set(stores);
    this.caches.set([...tables.caches].sort(([, one], [, other]) => other.expires_at - one.expires_at));
    this.canvas.again();
  }

  /** By their names, of which there are seldom others than before. */
  inOrder(stores) {
    if (!this.names || this.names.length !== stores.size || !this.names.every((name) => stores.has(name))) this.names = [...stores.keys()].sort(byName);
    return this.names.map((name) => [name, stores.get(name)]);
  }

  /** Columns of several stores each where there are more stores than pixels. */
  draw() {
    const width = this.canvas.width;
    if (!width || !this.lines) return;
    this.nothing.hidden = this.lines.length > 0;
    const labels = width < 520 ? NARROW_LABELS : LABELS;
    const room = width - labels;
    const number = this.columns.length;
    const together = Math.max(1, Math.ceil(number / (room / 3)));
    const shown = Math.ceil(number / together);
    this.geometry = { labels, together, step: Math.min(110, room / Math.max(1, shown)) };
    const { step } = this.geometry;
    const named = step >= 60;
    const paint = this.canvas.cleared(this.lines.length * ROW + FILL + 8 + (named ? 20 : 0));
    this.canvas.label(`${many(this.lines.length, "prefix")} against ${many(number, "store")}; the tables below have the figures`.replace("prefixs", "prefixes"));
    const [dram, ssd, none, ink, muted] = ["dram", "ssd", "none", "text", "muted"].map(color);
    const place = new Map(this.columns.map(([name], at) => [name, Math.floor(at / together)]));
    const gap = step > 8 ? 2 : step > 4 ? 1 : 0;
    paint.textBaseline = "middle";
    this.lines.forEach(([id, row], at) => {
      const y = at * ROW;
      paint.fillStyle = ink;
      paint.font = '12.5px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace';
      paint.fillText(id.slice(0, 8), 0, y + ROW / 2);
      if (labels === LABELS) {
        paint.fillStyle = muted;
        paint.font = '12px system-ui, "Liberation Sans", "DejaVu Sans", sans-serif';
        paint.fillText(clipped(paint, row.tenant, 62), 68, y + ROW / 2);
      }
      const wide = (row.asks / this.most) * (labels === LABELS ? 44 : 28);
      paint.fillStyle = ssd;
      paint.fillRect(labels - (labels === LABELS ? 54 : 36), y + 8, wide, ROW - 16);
      paint.fillStyle = none;
      for (let column = 0; column < shown; column++) paint.fillRect(labels + column * step, y + 2, step - gap, ROW - 4);
      const held = new Map();
      for (const [node, blocks, inDram] of row.nodes) {
        const column = place.get(node);
        if (column === undefined) continue;
        const [all, fast] = held.get(column) || [0, 0];
        held.set(column, [Math.max(all, blocks), Math.max(fast, inDram)]);
      }
      for (const [column, [all, fast]] of held) {
        const tall = ROW - 4;
        const whole = (all / row.blocks) * tall;
        paint.fillStyle = ssd;
        paint.fillRect(labels + column * step, y + 2 + tall - whole, step - gap, whole);
        const part = (fast / row.blocks) * tall;
        paint.fillStyle = dram;
        paint.fillRect(labels + column * step, y + 2 + tall - part, step - gap, part);
      }
    });
    const foot = this.lines.length * ROW + 8;
    paint.fillStyle = muted;
    paint.font = '12px system-ui, "Liberation Sans", "DejaVu Sans", sans-serif';
    paint.fillText(labels === LABELS ? "DRAM in use" : "in use", 0, foot + FILL / 2);
    for (let column = 0; column < shown; column++) {
      const some = this.columns.slice(column * together, (column + 1) * together);
      const full = Math.max(...some.map(([, row]) => (row[2] ? row[0] / row[2] : 0)));
      paint.fillStyle = none;
      paint.fillRect(labels + column * step, foot, step - gap, FILL);
      paint.fillStyle = muted;
      paint.fillRect(labels + column * step, foot + FILL * (1 - Math.min(1, full)), step - gap, FILL * Math.min(1, full));
      if (named) paint.fillText(clipped(paint, some[0][0].replace(/^node-/, ""), step - gap - 4), labels + column * step + 1, foot + FILL + 12);
    }
  }

  explain(x, y) {
    if (!this.geometry) return null;
    const { labels, together, step } = this.geometry;
    const column = Math.floor((x - labels) / step);
    const line = this.lines[Math.floor(y / ROW)];
    const some = x >= labels ? this.columns.slice(column * together, (column + 1) * together) : [];
    if (!some.length) return null;
    const names = some.map(([name]) => name);
    const said = [h("b", {}, names.length > 2 ? `${names[0]} to ${names[names.length - 1]}` : names.join(", "))];
    if (line) {
      const [id, row] = line;
      const found = row.nodes.filter(([node]) => names.includes(node));
      const most = found.reduce((best, [, blocks]) => Math.max(best, blocks), 0);
      said.push(h("", {}, `${id.slice(0, 10)}: ${most ? `${count(most * this.block)} of ${count(row.blocks * this.block)} tokens` : "not there"}`));
    } else if (some[0][1][2]) said.push(h("", {}, `${share(some[0][1][0] / some[0][1][2])} of its DRAM in use`));
    return said;
  }

  repaint() {
    this.draw();
  }
}

function clipped(paint, words, width) {
  let said = words;
  while (said.length > 1 && paint.measureText(said).width > width) said = said.slice(0, -1);
  return said === words ? said : `${said.slice(0, -1)}…`;
}
