// How figures are written, and elements made.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

/** The order of names, numbers in them by their value. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;

export function count(value) {
  return whole.format(value);
}

/** A rate, with a decimal where it is small. */
export function rate(value) {
  return value >= 100 || Number.isInteger(value) ? whole.format(value) : one.format(value);
}

/** Milliseconds in three digits and a unit; nothing for what is not known. */
export function ms(value) {
  if (value === undefined || value === null) return "–";
  if (value >= 99500) return `${whole.format(value / 1000)} s`;
  if (value >= 9950) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 999.5) return `${(value / 1000).toFixed(2)} s`;
  if (value >= 9.95) return `${Math.round(value)} ms`;
  return value > 0 ? `${value.toFixed(1)} ms` : "0 ms";
}

export function share(value) {
  if (!Number.isFinite(value)) return "–";
  return value > 0 && value < 0.0995 ? `${(value * 100).toFixed(1)}%` : `${Math.round(value * 100)}%`;
}

export function short(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${Math.round(value / 1e3)}k`;
  return value >= 10 || Number.isInteger(value) ? whole.format(value) : one.format(value);
}

export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1000 || unit === "TiB") return `${value >= 100 || unit === "B" ? Math.round(value) : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

export function lasting(seconds) {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

/** "1 request", "2 requests" */
export function many(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** The name of the engine that has this name, be it on either side: one that prefills and decodes has another as a prefill instance. */
export function engine(id) {
  return id.replace(/\.prefill$/, "");
}

/** An id as short as tells it from others. */
export function shortId(id) {
  const found = /^(.*-)([0-9a-f]{12,})(.*)$/.exec(id);
  return found ? `${found[1]}${found[2].slice(0, 8)}…${found[3]}` : id;
}

/** An element. Children are elements or text; text never is HTML. */
export function h(name, properties = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

/** An entry of a key: the color of that name, and what it stands for. */
export function swatch(name, said) {
  const box = h("i");
  box.style.background = `var(--${name})`;
  return h("span", {}, box, said);
}

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
