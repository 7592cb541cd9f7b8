// Lines over the last hour.

import { clock, h, text } from "./format.js";
import { soon } from "./frames.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 150;
const LEFT = 46;
const BELOW = 20;

function svg(name, properties = {}, content = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(properties)) element.setAttribute(key, value);
  if (content) element.textContent = content;
  return element;
}

/** The next 1, 2 or 5 times a power of ten, for three rules below it. */
function top(most) {
  if (!(most > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((times) => times * unit).find((value) => value >= most);
}

export class Chart {
  /** series: {name, color, value(bucket)} of which the figure is written by `format`; `goal` is an objective, with its name. */
  constructor(title, series, format, { note = "" } = {}) {
    this.series = series;
    this.format = format;
    this.buckets = [];
    this.goal = 0;
    this.width = 0;
    this.svg = svg("svg", { role: "img", "aria-label": title });
    this.tip = h(".tip", { hidden: true });
    this.chart = h(".chart", {}, this.svg, this.tip);
    this.key = h(".key");
    this.element = h("section.panel", {}, h(".title", {}, h("h2", {}, title), h("span.muted", {}, note)), this.chart, this.key);
    this.legend = series.map((one) => {
      const swatch = h("i.line");
      swatch.style.background = `var(--${one.color})`;
      return h("span", {}, swatch, one.name);
    });
    this.key.append(...this.legend);
    this.chart.addEventListener("pointermove", (event) => this.point(event));
    this.chart.addEventListener("pointerleave", () => this.unpoint());
    new ResizeObserver(([{ contentRect }]) => {
      this.width = contentRect.width;
      soon(this, () => this.draw());
    }).observe(this.chart);
  }

  set(buckets, goal) {
    this.goal = goal?.value || 0;
    if (goal && !this.goalKey) {
      this.goalKey = h("span", {}, h("i.line"), "");
      this.goalKey.firstChild.style.background = "var(--bad)";
      this.key.append(this.goalKey);
    }
    if (goal) text(this.goalKey.lastChild, goal.name);
    this.buckets = buckets;
    soon(this, () => this.draw());
  }

  draw() {
    const { width } = this;
    if (!width) return;
    const parts = [];
    const values = this.series.map((one) => this.buckets.map(one.value));
    const most = Math.max(0, ...values.flat().filter(Number.isFinite));
    this.most = top(this.goal && this.goal < 4 * most ? Math.max(most, this.goal * 1.1) : most);
    const bottom = HEIGHT - BELOW;
    this.y = (value) => bottom - (value / this.most) * (bottom - 8);
    this.x = (place) => LEFT + ((place + 360 - this.buckets.length) / 359) * (width - LEFT - 4);
    for (const part of [0, 0.5, 1]) {
      const y = this.y(part * this.most);
      parts.push(svg("line", { class: "rule", x1: LEFT, x2: width, y1: y, y2: y }));
      parts.push(svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, this.format(part * this.most)));
    }
    for (const minutes of width > 420 ? [60, 45, 30, 15, 0] : [60, 30, 0]) {
      const x = LEFT + ((60 - minutes) / 60) * (width - LEFT - 4);
      const anchor = minutes === 0 ? "end" : minutes === 60 ? "start" : "middle";
      parts.push(svg("text", { x, y: HEIGHT - 3, "text-anchor": anchor }, minutes ? `${minutes} min ago` : "now"));
    }
    if (this.goal && this.goal <= this.most) {
      const y = this.y(this.goal);
      parts.push(svg("line", { class: "goal", x1: LEFT, x2: width, y1: y, y2: y }));
    }
    this.series.forEach((one, place) => {
      const path = svg("path", { d: this.path(values[place]) });
      path.style.stroke = `var(--${one.color})`;
      if (one.dim) path.style.opacity = one.dim;
      parts.push(path);
    });
    this.cross = svg("line", { class: "cross", y1: 4, y2: bottom, visibility: "hidden" });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts, this.cross);
  }

  /** What is not known is a gap; what stands alone a short line. */
  path(values) {
    let path = "";
    let open = false;
    values.forEach((value, place) => {
      if (!Number.isFinite(value)) {
        open = false;
        return;
      }
      path += `${open ? "L" : "M"}${this.x(place).toFixed(1)} ${this.y(value).toFixed(1)}`;
      if (!open && !Number.isFinite(values[place + 1])) path += "h1.5";
      open = true;
    });
    return path;
  }

  point(event) {
    if (!this.buckets.length || !this.x) return;
    const box = this.chart.getBoundingClientRect();
    const at = event.clientX - box.left;
    const step = this.x(1) - this.x(0);
    const place = Math.min(this.buckets.length - 1, Math.max(0, Math.round((at - this.x(0)) / step)));
    const bucket = this.buckets[place];
    const x = this.x(place);
    this.cross.setAttribute("x1", x);
    this.cross.setAttribute("x2", x);
    this.cross.setAttribute("visibility", "visible");
    const said = this.series.map((one) => {
      const value = one.value(bucket);
      return h("", {}, `${one.name}: ${Number.isFinite(value) ? this.format(value) : "–"}`);
    });
    this.tip.replaceChildren(h("", {}, clock(bucket[0])), ...said);
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(x + 10, box.width - this.tip.offsetWidth)}px`;
    if (x + 10 + this.tip.offsetWidth > box.width) this.tip.style.left = `${Math.max(0, x - 10 - this.tip.offsetWidth)}px`;
  }

  unpoint() {
    this.tip.hidden = true;
    this.cross?.setAttribute("visibility", "hidden");
  }
}
