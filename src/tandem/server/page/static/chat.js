// The conversations, the one that is shown, and the answer that is being written.

import { stream } from "./api.js";
import { $, download, make } from "./dom.js";
import { MessageView } from "./message.js";
import { Attached, drop as dropPictures, withPictures } from "./pictures.js";
import * as store from "./store.js";

const NEAR_END = 80; // pixels: so near to the end the page follows what is written

export class Chat {
  /** wantsKey(): the server has refused the key. notice(text): something that the user should know. */
  constructor({ wantsKey, notice }) {
    Object.assign(this, { wantsKey, notice, running: null, views: [], attached: new Attached(notice) });
    $("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    $("input").addEventListener("keydown", (event) => this.key(event));
    $("input").addEventListener("input", fit);
    $("stop").addEventListener("click", () => this.stop());
    $("new").addEventListener("click", () => this.begin());
    const last = store.conversations()[0];
    last ? this.open(last) : this.begin();
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  begin() {
    this.open(store.newConversation());
    $("input").focus();
  }

  open(conversation) {
    const writing = this.running?.conversation;
    this.shown = writing?.id === conversation.id ? writing : conversation;
    this.draw();
    this.drawList();
    $("scroll").scrollTop = $("scroll").scrollHeight;
    document.body.classList.remove("side-open");
    $("menu").setAttribute("aria-expanded", "false");
  }

  // --- the list

  drawList() {
    const all = store.conversations();
    if (this.shown.messages.length === 0) all.unshift(this.shown);
    $("conversations").replaceChildren(...all.map((each) => this.entry(each)));
  }

  entry(conversation) {
    const current = conversation.id === this.shown.id;
    const title = store.titleOf(conversation);
    const open = make("button", { class: "open", "aria-current": current ? "true" : null, onclick: () => this.open(conversation) }, title);
    if (!conversation.messages.length) return make("li", {}, open);
    const save = make("button", { class: "icon", title: "Export", "aria-label": `Export ${title}`, onclick: () => this.export(conversation) }, "↓");
    const drop = make("button", { class: "icon", title: "Delete", "aria-label": `Delete ${title}`, onclick: () => this.delete(conversation) }, "×");
    return make("li", {}, open, save, drop);
  }

  export(conversation) {
    const name = store.titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
    download(`${name || "conversation"}.md`, store.asMarkdown(conversation), "text/markdown");
  }

  exportAll() {
    download("tandem-conversations.json", JSON.stringify(store.conversations(), null, 1), "application/json");
  }

  delete(conversation) {
    if (!confirm(`Delete “${store.titleOf(conversation)}”?`)) return;
    if (this.running?.conversation.id === conversation.id) this.stop(true);
    forget(conversation);
    if (conversation.id !== this.shown.id) this.drawList();
    else this.open(store.conversations()[0] ?? store.newConversation());
  }

  deleteAll() {
    if (!confirm("Delete all conversations of this browser?")) return;
    this.stop(true);
    store.conversations().forEach(forget);
    this.begin();
  }

  keep(conversation) {
    if (conversation.dropped) return;
    if (!store.keep(conversation)) this.notice("This browser has no room for more conversations. Export or delete some.");
    this.drawList();
  }

  // --- the conversation

  draw() {
    const messages = this.shown.messages;
    this.views = messages.map((message, i) => new MessageView(message, this.actions(message, i === messages.length - 1)));
    $("messages").replaceChildren(...this.views.map((view) => view.node));
    $("empty").hidden = messages.length > 0;
    this.drawButtons();
  }

  actions(message, last) {
    if (message.role !== "assistant" || !last) return {};
    return { again: () => this.again(), result: (call, text) => this.result(message, call, text) };
  }

  drawButtons() {
    $("stop").hidden = !this.running;
    $("send").hidden = Boolean(this.running);
  }

  /** Draws. Who is at the end stays there, however much has come. */
  follow(draw) {
    const box = $("scroll");
    const near = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
    draw();
    if (near) box.scrollTop = box.scrollHeight;
  }

  // --- asking

  async send() {
    await this.attached.ready;
    const content = $("input").value.trim();
    if (this.running || $("send").disabled) return; // Enter comes here, too, while the engine starts
    if (!content && !this.attached.ids.length) return;
    const pictures = this.attached.taken();
    $("input").value = "";
    fit();
    this.shown.messages.push({ role: "user", content, ...(pictures.length ? { pictures } : {}) });
    this.answer();
  }

  again() {
    if (this.running) return;
    this.shown.messages.pop();
    this.answer();
  }

  /** Asks the model to go on when every call has its result. */
  result(message, call, content) {
    if (this.running) return;
    const results = this.results ??= new Map();
    results.set(call.id, content);
    if (message.calls.some((each) => !results.has(each.id))) {
      this.notice("Kept. The model goes on when every call has its result.");
      return;
    }
    message.answered = true;
    this.shown.messages.push(...message.calls.map((each) => ({ role: "tool", call: each.id, content: results.get(each.id) })));
    this.results = null;
    this.answer();
  }

  async answer() {
    const conversation = this.shown;
    const message = { role: "assistant", content: "", running: true };
    let body;
    try {
      body = request(conversation.messages);
    } catch {
      this.notice("The tools in the settings are no JSON list.");
      return;
    }
    conversation.messages.push(message);
    this.running = { conversation, message, abort: new AbortController(), asked: performance.now() };
    this.draw();
    this.keep(stored(conversation));
    $("scroll").scrollTop = $("scroll").scrollHeight;
    await this.read(body, this.running);
  }

  async read(body, running) {
    const { message, abort } = running;
    try {
      body.messages = await Promise.all(body.messages.map(withContent));
      await stream(body, abort.signal, (chunk) => this.take(chunk, running));
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else message.error = error.message;
      if (error.status === 401) this.wantsKey();
    }
    this.end(running);
  }

  take(chunk, running) {
    const { message } = running;
    const choice = chunk.choices[0];
    if (chunk.usage) running.tokens = chunk.usage.completion_tokens;
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if (content || reasoning || calls) running.first ??= performance.now();
    message.content += content ?? "";
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    for (const call of calls ?? []) addCall(message, call);
    message.cut = choice.finish_reason === "length";
    this.views.find((view) => view.message === message)?.drawSoon((draw) => this.follow(draw));
  }

  end(running) {
    const { conversation, message, first, asked, tokens } = running;
    message.running = false;
    const seconds = (performance.now() - first) / 1000;
    if (first) message.times = { tokens, first: (first - asked) / 1000, rate: tokens > 1 ? (tokens - 1) / seconds : 0 };
    this.running = null;
    this.keep(conversation);
    if (this.shown.id === conversation.id) this.follow(() => this.draw());
    else this.drawButtons();
  }

  /** dropped: nothing of it is to be kept. */
  stop(dropped = false) {
    if (!this.running) return;
    this.running.conversation.dropped = dropped;
    this.running.abort.abort();
  }
}

/** As it is if the page is closed now. */
function stored(conversation) {
  const messages = conversation.messages.filter((message) => !message.running);
  return { ...conversation, messages };
}

function addCall(message, { index, id, function: { name, arguments: text } }) {
  message.calls ??= [];
  message.calls[index] ??= { id: "", name: "", arguments: "" };
  const call = message.calls[index];
  call.id = id ?? call.id;
  call.name += name ?? "";
  call.arguments += text ?? "";
}

/** Throws SyntaxError when the tools are no JSON. */
function request(messages) {
  const settings = store.settings();
  const body = { messages: messages.filter((message) => !message.error || message.content).map(plain) };
  if (settings.system.trim()) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of ["temperature", "top_p", "max_tokens"]) if (settings[name] !== "") body[name] = Number(settings[name]);
  if (settings.thinking) body.enable_thinking = settings.thinking === "on";
  if (settings.tools.trim()) body.tools = JSON.parse(settings.tools);
  return body;
}

function plain({ role, content, pictures, reasoning, calls, call }) {
  if (role === "tool") return { role, tool_call_id: call, content };
  if (role === "user") return { role, content, pictures };
  const said = { role, content: content || (calls ? null : "") };
  if (reasoning) said.reasoning_content = reasoning;
  if (calls) said.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return said;
}

/** With its pictures in place of their ids. */
async function withContent({ pictures, ...message }) {
  return pictures ? { ...message, content: await withPictures(message.content, pictures) } : message;
}

function forget(conversation) {
  store.drop(conversation.id);
  dropPictures(conversation.messages.flatMap((message) => message.pictures ?? []));
}

function fit() {
  const input = $("input");
  input.style.height = "auto"; // else it never shrinks
  input.style.height = `${Math.min(input.scrollHeight + 2, innerHeight * 0.4)}px`;
}
