// One message on the page: text, reasoning, tool calls, and what it took.

import { copy, make, number } from "./dom.js";
import { Markdown } from "./markdown.js";
import { thumbnail } from "./pictures.js";

export class MessageView {
  /** actions: {again(), result(call, text)}; `again` is missing where the message is not the last. */
  constructor(message, actions = {}) {
    this.message = message;
    this.actions = actions;
    this.node = make("li", { class: `message ${message.role}` }, make("h3", { class: "sr" }, heading(message)));
    if (message.role === "assistant") this.buildAnswer();
    else this.buildSaid();
  }

  buildSaid() {
    const { role, content, pictures = [] } = this.message;
    if (pictures.length) this.node.append(make("div", { class: "shown" }, ...pictures.map((id) => thumbnail(id))));
    if (!content && pictures.length) return;
    const body = make("div", { class: role === "tool" ? "result" : "said" }, content);
    this.node.append(body);
  }

  buildAnswer() {
    this.thoughts = make("div", { class: "text" });
    this.reasoning = make("details", { class: "reasoning", hidden: true }, make("summary", {}, "Reasoning"), this.thoughts);
    this.text = make("div", { class: "text" });
    this.calls = make("div", { class: "calls" });
    this.foot = make("p", { class: "foot" });
    this.error = make("p", { class: "error", role: "alert", hidden: true });
    this.node.append(this.reasoning, this.text, this.calls, this.error, this.foot);
    this.reasoning.addEventListener("toggle", () => this.drawSoon());
    this.markdown = new Markdown(this.text);
    this.thinking = new Markdown(this.thoughts);
    this.draw();
  }

  /** At most once a frame while tokens come, and a quarter of the time: a long list is drawn anew each time. `around` draws. */
  drawSoon(around = (draw) => draw()) {
    this.waiting ??= setTimeout(() => requestAnimationFrame(() => {
      const began = performance.now();
      this.waiting = null;
      around(() => this.draw());
      this.pause = 3 * (performance.now() - began);
    }), this.pause ?? 0);
  }

  draw() {
    const { content, reasoning, calls = [], running, error } = this.message;
    this.node.setAttribute("aria-busy", String(Boolean(running)));
    this.node.classList.toggle("running", Boolean(running));
    this.reasoning.hidden = !reasoning;
    this.reasoning.firstChild.textContent = running && !content ? "Reasoning…" : "Reasoning";
    if (reasoning && (this.reasoning.open || !running)) this.thinking.show(reasoning, running);
    this.markdown.show(content ?? "", running);
    if (this.callsDrawn !== this.callState(calls)) this.drawCalls(calls);
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    this.drawFoot();
  }

  callState(calls) {
    return JSON.stringify([calls, this.message.running, this.message.answered]);
  }

  drawCalls(calls) {
    this.callsDrawn = this.callState(calls);
    this.calls.replaceChildren(...calls.map((call) => this.callNode(call)));
  }

  callNode(call) {
    const parts = [make("div", { class: "code-head" }, make("span", {}, "Tool call ", make("b", {}, call.name))), make("pre", { tabindex: "0" }, make("code", {}, pretty(call.arguments)))];
    if (!this.message.running && !this.message.answered && this.actions.result) parts.push(this.resultForm(call));
    return make("div", { class: "code call" }, ...parts);
  }

  resultForm(call) {
    const input = make("input", { "aria-label": `Result of ${call.name}`, placeholder: "What the tool answers", required: true });
    const submit = (event) => { event.preventDefault(); this.actions.result(call, input.value); };
    return make("form", { class: "result-form", onsubmit: submit }, input, make("button", { class: "small" }, "Give result"));
  }

  drawFoot() {
    const { running, content, stopped, cut, times } = this.message;
    if (running) { this.foot.replaceChildren(content || this.message.reasoning ? "" : make("span", { class: "dots", "aria-label": "waiting" }, "···")); return; }
    const notes = [
      stopped && "stopped", cut && "cut at max tokens",
      times?.tokens && `${times.tokens}\u00a0tokens`, times?.rate && `${number(times.rate)}\u00a0tokens/s`, times?.first && `first after ${number(times.first, 2)}\u00a0s`,
    ].filter(Boolean).join(" · ");
    const copying = make("button", { type: "button", class: "small", onclick: (event) => copy(content, event.target) }, "Copy");
    const again = this.actions.again && make("button", { type: "button", class: "small", onclick: this.actions.again }, this.message.error ? "Try again" : "Again");
    this.foot.replaceChildren(...[content && copying, again, make("span", {}, notes)].filter(Boolean));
  }
}

const heading = ({ role }) => ({ user: "You", assistant: "Model", tool: "Tool" })[role];

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
