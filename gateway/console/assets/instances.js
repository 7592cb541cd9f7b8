// Who does how much.

import { Canvas } from "./canvas.js";
import { color, count, engine, h, lasting, many, ms, share, swatch, text } from "./format.js";
import { lines, meter, Table } from "./table.js";

// Places in the row of an instance.
export const I = { role: 0, node: 1, ready: 2, load: 3, running: 4, waiting: 5, idle: 6, queue: 7, step: 8, slots: 9, used: 10, silent: 11 };
const STEPS = [[0.25, "cell-0"], [0.5, "cell-1"], [0.75, "cell-2"], [1.0001, "cell-3"]];

function shade(row) {
  if (!row[I.ready]) return "cell-down";
  return STEPS.find(([below]) => row[I.load] < below)?.[1] || "cell-over";
}

function stateOf(row) {
  if (row[I.ready]) return "ready";
  return row[I.silent] ? `silent for ${lasting(row[I.silent])}` : "not ready";
}

function engines(rows) {
  return new Set(rows.map(([name]) => engine(name))).size;
}

class PoolPanel {
  constructor(role, title) {
    this.role = role;
    this.summary = h("span.muted");
    this.figures = Object.fromEntries(["load", "running", "waiting", "slots"].map((name) => [name, h("dd")]));
    const names = { load: "load, mean / highest", running: "running", waiting: "waiting", slots: "KV memory in use" };
    this.canvas = new Canvas(() => this.draw(), (x, y) => this.explain(x, y));
    this.element = h(
      "section.panel", {},
      h(".title", {}, h("h2", {}, title), this.summary),
      h("dl.figures", {}, ...Object.entries(this.figures).map(([name, figure]) => h("", {}, h("dt", {}, names[name]), figure))),
      this.canvas.element,
    );
    this.rows = [];
  }

  set(pool, rows) {
    this.rows = rows;
    text(this.summary, `${pool.ready} of ${pool.instances} ready`);
    this.summary.className = pool.ready < pool.instances ? "bad-text small" : "muted";
    text(this.figures.load, `${share(pool.load.mean)} / ${share(pool.load.max)}`);
    text(this.figures.running, count(pool.running) + (pool.idle ? ` + ${count(pool.idle)} idle` : ""));
    text(this.figures.waiting, count(pool.waiting));
    text(this.figures.slots, pool.slots ? share(pool.slots_used / pool.slots) : "–");
    this.canvas.label(`${this.role} pool as cells, shaded by load: mean ${share(pool.load.mean)}, highest ${share(pool.load.max)}; the table below has the figures`);
    this.canvas.again();
  }

  draw() {
    const width = this.canvas.width;
    const number = this.rows.length;
    if (!width || !number) {
      this.canvas.cleared(0);
      return;
    }
    this.size = Math.max(6, Math.min(number <= 12 ? 46 : 28, Math.floor(Math.sqrt((width * 190) / number))));
    this.across = Math.max(1, Math.floor(width / this.size));
    const paint = this.canvas.cleared(Math.ceil(number / this.across) * this.size);
    const gap = this.size > 12 ? 3 : 1;
    const colors = {};
    const [ink, under] = ["text", "surface"].map(color);
    this.rows.forEach(([, row], place) => {
      const name = shade(row);
      paint.fillStyle = colors[name] ||= color(name);
      const x = (place % this.across) * this.size;
      const y = Math.floor(place / this.across) * this.size;
      paint.beginPath();
      paint.roundRect(x, y, this.size - gap, this.size - gap, Math.min(5, this.size / 6));
      paint.fill();
      if (row[I.ready] && this.size >= 40) {
        paint.fillStyle = name === "cell-0" || name === "cell-1" ? ink : under;
        paint.font = '12px system-ui, "Liberation Sans", "DejaVu Sans", sans-serif';
        paint.textAlign = "center";
        paint.textBaseline = "middle";
        paint.fillText(`${Math.round(100 * row[I.load])}%`, x + (this.size - gap) / 2, y + (this.size - gap) / 2);
      }
      if (!row[I.ready] && this.size > 12) {
        paint.strokeStyle = under;
        paint.lineWidth = 2;
        const inset = this.size * 0.3;
        paint.beginPath();
        paint.moveTo(x + inset, y + inset);
        paint.lineTo(x + this.size - gap - inset, y + this.size - gap - inset);
        paint.moveTo(x + this.size - gap - inset, y + inset);
        paint.lineTo(x + inset, y + this.size - gap - inset);
        paint.stroke();
      }
    });
  }

  explain(x, y) {
    const column = Math.floor(x / this.size);
    const found = column < this.across ? this.rows[Math.floor(y / this.size) * this.across + column] : null;
    if (!found) return null;
    const [name, row] = found;
    return [
      h("b", {}, engine(name)), h("", {}, `${stateOf(row)} · load ${share(row[I.load])}`),
      h("", {}, `${count(row[I.running])} running, ${count(row[I.waiting])} waiting`),
    ];
  }
}

export class Instances {
  constructor() {
    this.pools = { prefill: new PoolPanel("prefill", "Prefill: prompts are computed"), decode: new PoolPanel("decode", "Decode: outputs are made") };
    this.note = h("p");
    this.filter = h("input", { type: "search", placeholder: "Name or node", "aria-label": "Find instances by name or node", oninput: () => this.drawTable() });
    this.found = h("span.muted.small");
    const text_ = (value) => (cell, row) => text(cell, value(row));
    this.table = new Table("Instances", [
      { name: "Instance", width: "minmax(130px, 1.5fr)", narrow: "minmax(0, 1.2fr)", sort: ([name]) => name,
        draw: (cell, [name, row]) => lines(cell, engine(name), this.sided.has(engine(name)) ? `${row[I.role]}: ${stateOf(row)}` : stateOf(row)) },
      { name: "Role", width: "80px", wide: true, sort: ([, row]) => row[I.role], draw: text_(([, row]) => row[I.role]) },
      { name: "Load", width: "minmax(104px, 1.2fr)", narrow: "minmax(0, 1fr)", number: true, sort: ([, row]) => row[I.load],
        draw: (cell, [, row]) => meter(cell, row[I.load], share(row[I.load]), shade(row) === "cell-over" ? "cell-over" : "compute") },
      { name: "Running", width: "66px", number: true, sort: ([, row]) => row[I.running], draw: text_(([, row]) => count(row[I.running])) },
      { name: "Waiting", width: "66px", number: true, wide: true, sort: ([, row]) => row[I.waiting], draw: text_(([, row]) => count(row[I.waiting])) },
      { name: "Queue", width: "82px", number: true, wide: true, sort: ([, row]) => row[I.queue], draw: text_(([, row]) => (row[I.role] === "prefill" ? ms(row[I.queue]) : "–")) },
      { name: "Step", width: "82px", number: true, wide: true, sort: ([, row]) => row[I.step], draw: text_(([, row]) => (row[I.role] === "decode" && row[I.step] ? ms(row[I.step]) : "–")) },
      { name: "KV memory", width: "minmax(104px, 1.2fr)", number: true, wide: true, sort: ([, row]) => row[I.used] / (row[I.slots] || 1),
        draw: (cell, [, row]) => meter(cell, row[I.slots] ? row[I.used] / row[I.slots] : 0, row[I.slots] ? share(row[I.used] / row[I.slots]) : "–", "emit") },
      { name: "Node", width: "minmax(90px, 1fr)", wide: true, sort: ([, row]) => row[I.node], draw: text_(([, row]) => row[I.node]) },
    ], { rowHeight: 46, sorted: [0, false], empty: "No instance has announced itself yet." });
    this.element = h(
      "", {},
      h(".lead", {}, h("h1", {}, "Instances"), this.note),
      h(".grid.halves", {}, this.pools.prefill.element, this.pools.decode.element),
      h("", {},
        h(".key.legend", {}, "Load, of what the objectives allow:", swatch("cell-0", "below 25%"), swatch("cell-1", "below 50%"), swatch("cell-2", "below 75%"), swatch("cell-3", "up to 100%"), swatch("cell-over", "more"), swatch("cell-down", "not ready"))),
      h("section.panel", {}, h(".tools", {}, this.filter, this.found), this.table.element,
        h("p.muted.small.note", {}, "Queue: predicted time until all that waits is computed. Step: time for one token of every request in the batch. KV memory: blocks that running requests hold.")),
    );
  }

  update({ head, tables }, changed) {
    if (!head.pools) return;
    const parts = [];
    if (head.wanted_prefill !== null && head.wanted_prefill !== undefined) {
      const ready = head.pools.prefill.ready + head.pools.decode.ready;
      parts.push(`The demand of the last minutes asks for ${head.wanted_prefill} prefill and ${ready - head.wanted_prefill} decode instances.`);
    }
    if (head.switching) parts.push(`${head.switching} is changing its role.`);
    text(this.note, parts.join(" ") || (head.engines.both ? "An instance of both roles is in both pools." : "Groups that compute prompts, and nodes that make outputs."));
    if (changed.has("instances") || !this.rows) {
      this.rows = [...tables.instances];
      this.sided = new Set(this.rows.map(([name]) => name).filter((name) => engine(name) !== name).map(engine));
      this.drawTable();
      for (const [role, panel] of Object.entries(this.pools)) panel.set(head.pools[role], this.rows.filter(([, row]) => row[I.role] === role));
    }
  }

  drawTable() {
    const wanted = this.filter.value.trim().toLowerCase();
    const rows = wanted ? this.rows.filter(([name, row]) => name.toLowerCase().includes(wanted) || row[I.node].toLowerCase().includes(wanted)) : this.rows;
    this.table.set(rows, wanted ? `No instance has “${wanted}” in its name or node.` : undefined);
    text(this.found, (wanted ? `${engines(rows)} of ` : "") + many(engines(this.rows), "instance"));
  }

  repaint() {
    Object.values(this.pools).forEach((panel) => panel.draw());
  }
}
