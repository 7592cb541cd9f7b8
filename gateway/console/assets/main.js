// The page: who sees it, which view is shown, and whether what it shows is up to date.

import { again, follow, key, setKey, state } from "./feed.js";
import { h, lasting, text } from "./format.js";
import { soon } from "./frames.js";
import { Instances } from "./instances.js";
import { Overview } from "./overview.js";
import { Pool } from "./pool.js";
import { Refusals } from "./refusals.js";
import { Request } from "./request.js";
import { Requests } from "./requests.js";

const VIEWS = { "": Overview, instances: Instances, requests: Requests, pool: Pool, refusals: Refusals, request: Request };
const TITLES = { "": "Overview", instances: "Instances", requests: "Requests", pool: "Pool", refusals: "Refusals", request: "Request" };
const THEMES = ["auto", "light", "dark"];

const main = document.getElementById("main");
const notice = document.getElementById("notice");
let view = null;
let trouble = "";
let changes = new Set();

function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const id = decodeURIComponent(rest.join("/"));
  if (name === "request" && !id) return ["requests", ""];
  return [name in VIEWS ? name : "", id];
}

function show() {
  const [name, id] = route();
  for (const link of document.querySelectorAll("#nav a")) {
    const mine = link.getAttribute("href") === `#/${name === "request" ? "requests" : name}`;
    if (mine) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${TITLES[name]} · Springtide`;
  view?.close?.();
  view = null;
  if (!state.head) {
    main.replaceChildren(h("p.empty", {}, trouble ? "Nothing to show yet: " + trouble + ". It is tried again." : "Asking the gateway…"));
    return;
  }
  view = new VIEWS[name](id);
  main.replaceChildren(view.element);
  later(["head", ...Object.keys(state.tables)]);
}

function askForKey(refused) {
  const field = h("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false", placeholder: "sk-st-…" });
  const form = h(
    "form.panel.key-form",
    {
      onsubmit: (event) => {
        event.preventDefault();
        setKey(field.value.trim());
        trouble = "";
        show();
        again();
      },
    },
    h("h1", {}, "An API key is wanted"),
    h("p.muted", {}, "An operator’s key shows the whole cluster, a tenant’s key its own requests. It is kept in this tab only."),
    refused ? h("p.bad-text", { role: "alert" }, "The key that was given is not known here.") : null,
    h("label", {}, "API key", field),
    h("button.primary", { type: "submit" }, "Show the cluster"),
  );
  state.head = null;
  view = null;
  main.replaceChildren(form);
  field.focus();
  drawStatus();
}

function drawStatus() {
  const head = state.head;
  const status = document.getElementById("status");
  const [kind, said] = health(head);
  status.className = `pill ${kind}`;
  text(status, said);
  text(document.getElementById("model"), head?.model || "");
  const who = document.getElementById("who");
  const viewer = head?.viewer;
  if (viewer && key()) {
    const name = viewer.operator ? "operator" : `tenant ${viewer.tenant}`;
    if (who.dataset.said !== name) {
      who.dataset.said = name;
      who.replaceChildren(name, " ", h("button.quiet", { type: "button", onclick: leave }, "Sign out"));
    }
  }
  const stale = trouble
    ? `What is shown is ${state.heardAt ? lasting((Date.now() - state.heardAt) / 1000) + " old" : "not there yet"}: ${trouble}. It is tried again.`
    : head?.problem
      ? `What is shown is not up to date: ${head.problem}.`
      : head && head.leads === false
        ? "No Conductor leads just now: what is shown is what a standby knows."
        : "";
  notice.hidden = !stale || !head;
  text(notice, stale);
}

function leave() {
  setKey("");
  document.getElementById("who").replaceChildren();
  delete document.getElementById("who").dataset.said;
  state.head = null;
  show();
  again();
}

function health(head) {
  if (trouble) return ["bad", "No connection"];
  if (!head) return ["plain", "Connecting"];
  if (head.problem) return ["bad", "No Conductor"];
  if (!head.leads) return ["bad", "No leader"];
  if (!head.ready) return ["bad", "Not ready"];
  const { both, prefill, decode, away } = head.engines;
  return away ? ["warn", `${away} of ${both + prefill + decode} away`] : ["good", "Ready"];
}

function draw() {
  if (!state.head) return;
  const changed = changes;
  changes = new Set();
  drawStatus();
  if (!view) show();
  else view.update(state, changed);
}

function later(changed) {
  changed.forEach((name) => changes.add(name));
  soon(draw, draw);
}

function theme(next) {
  const name = THEMES[next % THEMES.length];
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  localStorage.setItem("springtide-theme", name);
  text(document.getElementById("theme"), `Theme: ${name}`);
  view?.repaint?.();
}

document.getElementById("theme").addEventListener("click", () => {
  theme(THEMES.indexOf(localStorage.getItem("springtide-theme") || "auto") + 1);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.repaint?.());
theme(Math.max(0, THEMES.indexOf(localStorage.getItem("springtide-theme") || "auto")));
addEventListener("hashchange", () => {
  show();
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
});
show();
drawStatus();
follow({
  onState: (changed) => {
    trouble = "";
    later(changed);
  },
  onTrouble: (said) => {
    trouble = said;
    if (!state.head) show();
    drawStatus();
  },
  onKeyWanted: askForKey,
});
