// A drawing of which the place under the pointer is explained.

import { h } from "./format.js";
import { soon } from "./frames.js";

export class Canvas {
  /** draw() is called soon after there is another width, or again() was; explain(x, y) returns the elements that say what is there, or nothing. */
  constructor(draw, explain) {
    this.draw = draw;
    this.explain = explain;
    /** As last told: to ask for it would have the browser lay out the page at once. */
    this.width = 0;
    this.canvas = h("canvas", { role: "img" });
    this.tip = h(".tip", { hidden: true });
    this.element = h(".map", {}, this.canvas, this.tip);
    this.element.addEventListener("pointermove", (event) => this.point(event));
    this.element.addEventListener("pointerleave", () => (this.tip.hidden = true));
    new ResizeObserver(([{ contentRect }]) => {
      this.width = contentRect.width;
      this.again();
    }).observe(this.element);
  }

  again() {
    soon(this, this.draw);
  }

  label(said) {
    this.canvas.setAttribute("aria-label", said);
  }

  /** Empties it, and returns the context of one so high, in the page's pixels however many dots these have. */
  cleared(height) {
    const scale = devicePixelRatio || 1;
    this.canvas.width = this.width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const paint = this.canvas.getContext("2d");
    paint.scale(scale, scale);
    return paint;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    const said = this.explain(x, y);
    this.tip.hidden = !said;
    if (!said) return;
    this.tip.replaceChildren(...said);
    this.tip.style.left = `${Math.max(0, Math.min(x + 12, box.width - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${y + 14}px`;
  }
}
