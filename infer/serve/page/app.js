// The page: tabs of models, one panel at a time, and a reading of the server each second.

import { get, hasKey, setKey } from "./api.js";
import { chatBox } from "./chat.js";
import { card, h } from "./dom.js";
import { tensorForm } from "./form.js";
import { History, LivePanel } from "./live.js";
import { rate } from "./numbers.js";
import { reportCard } from "./report.js";

const calm = matchMedia("(prefers-reduced-motion: reduce)");
const byId = (id) => document.getElementById(id);
const views = new Map(); // name → {tab, panel, live, history}

function say(state, text = state) {
  const place = byId("state");
  if (place.textContent === text) return;
  place.dataset.state = state;
  place.textContent = text;
}

async function askKey(wrong) {
  const dialog = byId("key");
  const input = byId("key-field");
  byId("key-error").textContent = wrong ? "The server rejected this API key." : "";
  say("waiting", "needs a key");
  dialog.showModal();
  input.focus();
  await new Promise((resolve) => { dialog.addEventListener("close", resolve, { once: true }); });
  setKey(input.value);
  input.value = "";
}

// The overview, after as many questions for the key as it takes.
async function load() {
  while (true) {
    try {
      return await get("ops/models");
    } catch (error) {
      if (error.status === 401) await askKey(hasKey());
      else {
        say("gone", "unreachable");
        await new Promise((resolve) => { setTimeout(resolve, 2000); });
      }
    }
  }
}

function facts(model) {
  const { backend, precision, device } = model.report;
  const known = [model.task.replaceAll("-", " "), backend, precision, device, `version ${model.version}`];
  if (model.context) known.push(`${model.context.toLocaleString("en-US")} tokens of context`);
  return known.filter(Boolean);
}

function view(model) {
  const live = new LivePanel(model);
  const tried = model.kind === "tensors" || model.files !== null;
  const title = tried ? "Try it" : { chat: "Chat", text: "Continue a text" }[model.kind];
  const body = tried ? tensorForm(model) : chatBox(model);
  const panel = h("div", { id: `panel-${model.name}`, class: "panel", role: "tabpanel", "aria-labelledby": `tab-${model.name}` },
    h("div", { class: "title" }, h("h1", {}, model.name), h("ul", { class: "facts-line" }, facts(model).map((fact) => h("li", {}, fact)))),
    h("div", { class: "split" }, card(title, body), card("Live", live.element)),
    reportCard(model));
  const speed = h("span", { class: "speed" });
  const tab = h("button", { id: `tab-${model.name}`, type: "button", role: "tab", "aria-controls": panel.id, tabindex: -1,
    onclick: () => show(model.name), onkeydown: step }, h("span", { class: "name" }, model.name), h("span", { class: "soft" }, model.task.replaceAll("-", " ")), speed);
  return { model, tab, panel, live, speed, history: new History() };
}

function show(name) {
  for (const [own, { tab, panel }] of views) {
    const chosen = own === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    panel.hidden = !chosen;
  }
  history.replaceState(null, "", `#${name}`);
  document.title = `${name} · infer`;
  draw();
}

function step(event) {
  const names = [...views.keys()];
  const at = names.findIndex((name) => views.get(name).tab === event.currentTarget);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const name = names[(to + names.length) % names.length];
  show(name);
  views.get(name).tab.focus();
}

let memory = null;
let heard = { instance: null, at: 0 }; // of several servers behind one address, the one whose numbers are shown
const PATIENCE = 15000;

// Whether a reading goes with those before; numbers of two servers have no difference that means anything.
function ours(instance) {
  const at = performance.now();
  if (instance !== heard.instance && heard.instance !== null && at - heard.at < PATIENCE) return false;
  if (instance !== heard.instance) for (const view of views.values()) view.history = new History();
  heard = { instance, at };
  return true;
}

function draw() {
  for (const { panel, live, history: readings, speed, model } of views.values()) {
    if (!readings.last) continue;
    const end = readings.readings.length - 1;
    const of = model.kind === "tensors" ? (r) => r.requests["200"] ?? 0 : (r) => r.tokens;
    speed.textContent = `${rate(readings.perSecond(end, of) ?? 0)} ${model.kind === "tensors" ? "requests" : "tokens"}/s`;
    if (!panel.hidden) live.update(readings, memory);
  }
}

async function watch() {
  while (true) {
    const began = performance.now();
    if (!document.hidden) await read();
    const rest = (calm.matches ? 5000 : 1000) - (performance.now() - began);
    await new Promise((resolve) => { setTimeout(resolve, Math.max(rest, 200)); });
  }
}

async function read() {
  try {
    const now = await get("ops/now");
    if (!ours(now.instance)) return;
    say(now.state);
    memory = now.memory;
    for (const [name, reading] of Object.entries(now.models)) views.get(name)?.history.add(now.time, reading);
    draw();
  } catch (error) {
    if (error.status === 401) await askKey(true);
    else say("gone", "unreachable");
  }
}

async function start() {
  const overview = await load();
  byId("version").textContent = overview.version;
  byId("change-key").hidden = !hasKey();
  for (const link of document.querySelectorAll("nav a")) link.hidden = hasKey(); // a plain link carries no key
  byId("change-key").addEventListener("click", async () => { await askKey(false); location.reload(); });
  say(overview.state);
  for (const model of overview.models) views.set(model.name, view(model));
  byId("tabs").append(...[...views.values()].map(({ tab }) => tab));
  byId("tabs").hidden = views.size < 2;
  byId("main").append(...[...views.values()].map(({ panel }) => panel));
  const wanted = decodeURIComponent(location.hash.slice(1));
  show(views.has(wanted) ? wanted : [...views.keys()][0]);
  await watch();
}

start();
