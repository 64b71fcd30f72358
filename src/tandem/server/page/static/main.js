// Starts the page: views, settings, the key, and the pulse that says how the server is.

import { choose, chosen, hasKey, json, models, ofModel, ServerError, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { $, make, number } from "./dom.js";
import { Live } from "./live.js";
import { keepSettings, settings } from "./store.js";

const PULSE_MS = 1000;
const AWAY_MS = 2000; // between two tries to reach a server that is away

const chat = new Chat({ wantsKey: askForKey, notice: say });
const live = new Live();
let described = null; // of which engine the plan is shown
let saidUntil = 0;
let named = null; // names of several models; []: there is one

// --- the pulse

async function pulse() {
  if (document.hidden || $("key").open) return PULSE_MS;
  try {
    if (named === null) offer(await models());
    const point = await json(ofModel("tandem/live"));
    show(point);
    const start = point.engine.restarts + (point.engine.wakes ?? 0);
    if (point.engine.up && described !== start) await describe(start);
    return PULSE_MS;
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    if (error.status === 401) askForKey();
    else away(error.message);
    return AWAY_MS;
  }
}

/** A choice in the place of the name. */
function offer(names) {
  named = names;
  if (!names.length) return;
  const box = make("select", { "aria-label": "Model" }, ...names.map((name) => make("option", { value: name }, name)));
  box.value = chosen();
  box.addEventListener("change", () => { choose(box.value); described = null; });
  $("model").replaceChildren(box);
}

function show(point) {
  if (!named?.length) $("model").textContent = point.model;
  $("model").title = point.model;
  const { up, asleep, why_down: why } = point.engine;
  const rate = live.history.rates.at(-1)?.[1] ?? 0;
  state(up ? "up" : "down", up ? (rate > 0.05 ? `${number(rate)} tokens/s` : "ready") : asleep ? "asleep" : "not ready");
  live.take(point);
  if (!up) banner(`${sentence(why)} This page goes on by itself.`);
  else if (Date.now() > saidUntil) banner("");
  $("send").disabled = !up && !asleep;
  if (up || asleep) chat.attached.show(Boolean(point.vision));
  $("empty-text").textContent = up || asleep ? `${point.model} answers.` : "The engine is not ready yet.";
}

function away(why) {
  state("down", "away");
  $("send").disabled = true;
  banner(`${why} Trying again.`);
}

async function describe(start) {
  const info = await json(ofModel("get_server_info"));
  live.plan(info);
  described = start;
}

function state(name, text) {
  const status = $("status");
  status.dataset.state = name;
  if (status.textContent !== text) status.textContent = text;
}

function banner(text) {
  if ($("banner").textContent !== text) $("banner").textContent = text;
  $("banner").hidden = !text;
}

/** For a few seconds. */
function say(text) {
  saidUntil = Date.now() + 6000;
  banner(text);
}

const sentence = (text) => text && `${text[0].toUpperCase()}${text.slice(1).replace(/\.$/, "")}.`;

async function beat() {
  let pause = AWAY_MS;
  try {
    pause = await pulse();
  } finally {
    setTimeout(beat, pause);
  }
}

// --- the key

function askForKey() {
  if ($("key").open) return;
  $("key-error").hidden = !hasKey();
  $("key-error").textContent = "The server does not take this key.";
  $("key").showModal();
}

$("key").querySelector("form").addEventListener("submit", (event) => {
  const input = event.target.elements.key;
  setKey(input.value.trim());
  input.value = "";
  described = null;
});
$("key").addEventListener("cancel", (event) => event.preventDefault());

// --- settings

function fillSettings() {
  const form = $("settings").querySelector("form");
  for (const [name, value] of Object.entries(settings())) form.elements[name].value = value;
  $("settings-error").hidden = true;
  $("settings").showModal();
}

$("settings").querySelector("form").addEventListener("submit", (event) => {
  const form = event.target;
  const values = Object.fromEntries(Object.keys(settings()).map((name) => [name, form.elements[name].value]));
  if (isJsonList(values.tools)) keepSettings(values);
  else {
    event.preventDefault();
    $("settings-error").textContent = "The tools are no JSON list.";
    $("settings-error").hidden = false;
  }
});

function isJsonList(text) {
  try {
    return !text.trim() || Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
}

// --- views, theme, keyboard

function view(name) {
  document.body.dataset.view = name;
  $("to-chat").setAttribute("aria-pressed", String(name === "chat"));
  $("to-live").setAttribute("aria-pressed", String(name === "live"));
  history.replaceState(null, "", name === "live" ? "#experts" : "#");
}

function otherTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("tandem.theme", root.dataset.theme);
  } catch { /* then it holds until the page is closed */ }
  live.recolour();
}

function openSide(open) {
  document.body.classList.toggle("side-open", open);
  $("menu").setAttribute("aria-expanded", String(open));
}

function key(event) {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (document.body.classList.contains("side-open")) openSide(false);
    else chat.stop();
  }
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    view("chat");
    chat.begin();
  }
}

$("to-chat").addEventListener("click", () => view("chat"));
$("to-live").addEventListener("click", () => view("live"));
$("theme").addEventListener("click", otherTheme);
$("open-settings").addEventListener("click", fillSettings);
$("export-all").addEventListener("click", () => chat.exportAll());
$("delete-all").addEventListener("click", () => { $("settings").close(); chat.deleteAll(); });
$("menu").addEventListener("click", () => openSide(!document.body.classList.contains("side-open")));
document.addEventListener("keydown", key);
document.addEventListener("visibilitychange", () => { if (!document.hidden) pulse().catch(() => {}); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.recolour());
if (location.hash === "#experts") view("live");
$("input").focus();
beat();
