// A table of any number of rows, of which only those in sight are made.

import { byName, h, text } from "./format.js";
import { soon } from "./frames.js";

const BEYOND = 6;
// That console.css lets it have, in pixels: to ask for its own would have the browser lay out the page at once.
const TALLEST = 720;

/**
 * columns: {name, width, narrow, number, wide, sort(row), draw(cell, row)}; on phones `wide` ones are left out, and others `narrow`. `label` says what the table is of.
 */
export class Table {
  constructor(label, columns, { rowHeight = 38, sorted = null, empty = "Nothing here." } = {}) {
    this.columns = columns;
    this.rowHeight = rowHeight;
    this.sorted = sorted;
    this.rows = [];
    this.pool = [];
    this.scrolled = 0;
    this.narrow = matchMedia("(max-width: 600px)");
    this.narrow.addEventListener("change", () => this.layOut());
    this.heads = columns.map((column, place) => {
      const name = column.sort
        ? h("button", { type: "button", onclick: () => this.sortBy(place) }, column.name)
        : h("span", {}, column.name);
      return h(`.cell${column.number ? ".number" : ""}${column.wide ? ".wide" : ""}`, { role: "columnheader" }, name);
    });
    this.space = h(".space");
    this.body = h(".body", { tabindex: "0", role: "rowgroup", "aria-label": `${label}, scrollable`, onscroll: () => this.scroll() }, this.space);
    this.grid = h(".table", { role: "table", "aria-label": label }, h("", { role: "rowgroup" }, h(".head", { role: "row" }, ...this.heads)), this.body);
    this.nothing = h("p.empty", { hidden: true }, empty);
    this.element = h("", {}, this.grid, this.nothing);
    this.layOut();
  }

  layOut() {
    const shown = this.columns.filter((column) => !(column.wide && this.narrow.matches));
    this.grid.style.setProperty("--columns", shown.map((column) => (this.narrow.matches && column.narrow) || column.width).join(" "));
    this.draw();
  }

  sortBy(place) {
    const [by, down] = this.sorted || [-1, false];
    this.sorted = [place, by === place ? !down : Boolean(this.columns[place].number)];
    this.set(this.rows);
  }

  scroll() {
    this.scrolled = this.body.scrollTop;
    this.draw();
  }

  /** Shows these, soon. */
  set(rows, empty) {
    soon(this, () => this.take(rows, empty));
  }

  take(rows, empty) {
    if (empty) text(this.nothing, empty);
    this.rows = this.sorted ? this.inOrder(rows) : rows;
    this.grid.hidden = !rows.length;
    this.nothing.hidden = rows.length > 0;
    this.heads.forEach((head, place) => {
      const mine = this.sorted?.[0] === place;
      if (mine) head.setAttribute("aria-sort", this.sorted[1] ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
      if (this.columns[place].sort) text(head.firstChild, this.columns[place].name + (mine ? (this.sorted[1] ? " ↓" : " ↑") : ""));
    });
    this.space.style.height = `${rows.length * this.rowHeight}px`;
    this.grid.setAttribute("aria-rowcount", rows.length + 1);
    this.draw();
  }

  inOrder(rows) {
    const [place, down] = this.sorted;
    const value = this.columns[place].sort;
    const keyed = rows.map((row) => [value(row), row]);
    const compare = (one, other) => (typeof one === "string" ? byName(one, other) : one - other);
    keyed.sort(([one], [other]) => (down ? compare(other, one) : compare(one, other)));
    return keyed.map(([, row]) => row);
  }

  draw() {
    if (!this.rows) return;
    // Fewer rows than were may have scrolled it back, of which it is not told before the next frame.
    const scrolled = Math.min(this.scrolled, Math.max(0, this.rows.length * this.rowHeight - TALLEST));
    const first = Math.max(0, Math.floor(scrolled / this.rowHeight) - BEYOND);
    const last = Math.min(this.rows.length, first + Math.ceil(TALLEST / this.rowHeight) + 2 * BEYOND);
    while (this.pool.length < last - first) this.pool.push(this.makeRow());
    this.pool.forEach((row, place) => {
      const number = first + place;
      const shown = number < last;
      if (row.shown !== shown) {
        row.shown = shown;
        row.element.hidden = !shown;
        row.element.style.display = shown ? "" : "none";
      }
      if (!shown) return;
      if (row.number !== number) {
        row.number = number;
        row.element.style.top = `${number * this.rowHeight}px`;
        row.element.setAttribute("aria-rowindex", number + 2);
      }
      this.columns.forEach((column, at) => column.draw(row.cells[at], this.rows[number]));
    });
  }

  makeRow() {
    const cells = this.columns.map((column) =>
      h(`.cell${column.number ? ".number" : ""}${column.wide ? ".wide" : ""}`, { role: "cell" }),
    );
    const element = h(".row", { role: "row" }, ...cells);
    element.style.height = `${this.rowHeight}px`;
    this.space.append(element);
    return { element, cells };
  }
}

/** A bar with its share beside it. */
export function meter(cell, value, said, kind = "compute") {
  if (!cell.firstChild) cell.append(h("span.meter", {}, h("span.track", {}, h("span")), h("b")));
  const [track, label] = cell.firstChild.children;
  track.firstChild.style.width = `${Math.min(100, 100 * value)}%`;
  track.firstChild.style.background = `var(--${kind})`;
  text(label, said);
}

/** A link in a cell, with a line below it. */
export function linked(cell, href, label, below) {
  if (!cell.firstChild) cell.append(h("a"), h("span.sub"));
  const [link, sub] = cell.children;
  if (link.getAttribute("href") !== href) link.setAttribute("href", href);
  text(link, label);
  text(sub, below);
}

export function lines(cell, above, below) {
  if (!cell.firstChild) cell.append(h("span"), h("span.sub"));
  text(cell.children[0], above);
  text(cell.children[1], below);
}
