// Markdown to elements: markdown-it reads it, DOMPurify lets through what a text needs, and KaTeX draws formulas.

import "./vendor/markdown-it.umd.min.js";
import "./vendor/purify.min.js";
import { copy, make } from "./dom.js";
import { drawFormulas, texPlugin } from "./tex.js";

const UNSETTLED = 2; // blocks at the end: a line that is not complete may yet join the block before it
const ADDRESS = /^(?:https?:\/\/|mailto:)/i; // what opens a page or a mail; other links stay the text that they were
const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "strong", "em", "s", "code", "pre", "a", "ul", "ol", "li", "blockquote", "hr", "h3", "h4", "h5", "h6",
    "table", "thead", "tbody", "tr", "th", "td", "span",
  ],
  ALLOWED_ATTR: ["href", "start", "class", "data-tex"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: ADDRESS,
  ADD_URI_SAFE_ATTR: ["start", "data-tex"], // no addresses
  RETURN_DOM_FRAGMENT: true,
};

const md = globalThis.markdownit({ html: false, linkify: true, breaks: true }).use(texPlugin);
md.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
md.validateLink = (address) => ADDRESS.test(address);
md.core.ruler.push("page", ({ tokens }) => tokens.forEach(fit));
md.renderer.rules.image = (tokens, i) => { // nothing is fetched from other sites
  const { escapeHtml } = md.utils;
  return `<a href="${escapeHtml(tokens[i].attrGet("src"))}">${escapeHtml(tokens[i].content || tokens[i].attrGet("src"))}</a>`;
};

/** The page has h1 and h2 of its own, and its policy forbids styles in HTML. */
function fit(token) {
  if (/^heading/.test(token.type)) token.tag = `h${Math.min(6, Number(token.tag[1]) + 2)}`;
  const align = /^text-align:(\w+)$/.exec(token.attrGet("style") ?? "");
  if (align) token.attrs = [["class", align[1]]];
}

/** Draws a text that grows into `root`. Blocks that are as they were keep their elements. */
export class Markdown {
  constructor(root) {
    Object.assign(this, { root, offset: 0, settled: 0, shown: [] });
  }

  /** `text` begins with what was shown before. growing: more of it is to come. */
  show(text, growing = false) {
    const blocks = parse(text.slice(this.offset), growing);
    const shown = [...this.shown.slice(0, this.settled), ...blocks.map(({ html }) => html)];
    let same = this.settled;
    while (same < shown.length && this.shown[same] === shown[same]) same++;
    while (this.root.children.length > same) this.root.lastChild.remove();
    this.root.append(...shown.slice(same).map(draw));
    this.shown = shown;
    this.settle(blocks);
  }

  settle(blocks) {
    const unsettled = blocks.at(-UNSETTLED);
    if (!unsettled) return;
    this.offset += unsettled.start;
    this.settled += blocks.length - UNSETTLED;
  }
}

/** Blocks of the outermost level: [{html, start}], start in characters. */
function parse(text, growing) {
  const env = { growing };
  const tokens = md.parse(text, env);
  const starts = lineStarts(text);
  const blocks = [];
  for (let at = 0, first = 0; at < tokens.length; at++) {
    if (tokens[at].level > 0 || tokens[at].nesting > 0) continue;
    const html = md.renderer.render(tokens.slice(first, at + 1), md.options, env);
    blocks.push({ html, start: starts[tokens[first].map[0]] });
    first = at + 1;
  }
  return blocks;
}

function lineStarts(text) {
  return [0, ...Array.from(text.matchAll(/\r\n?|\n/g), (end) => end.index + end[0].length)];
}

function draw(html) {
  const fragment = globalThis.DOMPurify.sanitize(html, ALLOWED);
  for (const node of fragment.querySelectorAll("a")) { node.target = "_blank"; node.rel = "noopener noreferrer"; }
  for (const node of fragment.querySelectorAll("pre")) frame(node);
  for (const node of fragment.querySelectorAll("table")) {
    const box = make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
    node.replaceWith(box);
    box.append(node);
  }
  drawFormulas(fragment);
  return fragment.firstElementChild;
}

/** A block of code, with its language and a button above it. */
function frame(pre) {
  const code = pre.firstElementChild;
  code.textContent = code.textContent.replace(/\n$/, "");
  const button = make("button", { type: "button", class: "small" }, "Copy");
  button.addEventListener("click", () => copy(code.textContent, button));
  const language = code.className.replace("language-", "");
  const head = make("div", { class: "code-head" }, make("span", {}, language || "text"), button);
  const box = make("div", { class: "code" }, head);
  pre.replaceWith(box);
  pre.tabIndex = 0;
  box.append(pre);
}
