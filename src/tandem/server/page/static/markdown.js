// Markdown to elements. What is not understood stays text. No HTML is parsed, so there is nothing to escape.

import { copy, make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MOST_DEEP = 16; // of quotes, lists and emphasis inside each other

/** Draws a text that grows into `root`. Blocks that are as they were keep their elements. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.blocks = [];
  }

  show(text) {
    const blocks = split(text.split("\n"));
    const sources = blocks.map((block) => `${block.kind}\n${block.lines.join("\n")}`);
    let same = 0;
    while (same < sources.length && this.blocks[same] === sources[same]) same++;
    while (this.root.children.length > same) this.root.lastChild.remove();
    this.root.append(...blocks.slice(same).map((block) => draw(block, 0)));
    this.blocks = sources;
  }
}

function split(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at++; continue; }
    const block = next(lines, at);
    blocks.push(block);
    at += block.taken;
  }
  return blocks;
}

function next(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  if (HEADING.test(line)) return { kind: "heading", lines: [line], taken: 1 };
  if (RULE.test(line)) return { kind: "rule", lines: [line], taken: 1 };
  if (/^ {0,3}>/.test(line)) return run(lines, at, "quote", (each) => /^ {0,3}>/.test(each));
  if (ITEM.test(line)) return list(lines, at);
  if (isTable(lines, at)) return run(lines, at, "table", (each) => each.includes("|"));
  return run(lines, at, "paragraph", (each, index) => index === at || (each.trim() && !begins(lines, index)));
}

const begins = (lines, at) =>
  FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at]) || /^ {0,3}>/.test(lines[at]) ||
  ITEM.test(lines[at]) || isTable(lines, at);

const isTable = (lines, at) =>
  lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DIVIDER.test(lines[at + 1]);

function run(lines, at, kind, goesOn) {
  let end = at;
  while (end < lines.length && goesOn(lines[end], end)) end++;
  return { kind, lines: lines.slice(at, end), taken: end - at };
}

function fenced(lines, at, [, fence, language]) {
  const close = new RegExp(`^ {0,3}${fence[0] === "`" ? "`" : "~"}{${fence.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end++;
  const indent = /^ */.exec(lines[at])[0].length;
  const body = lines.slice(at + 1, end).map((line) => line.replace(new RegExp(`^ {0,${indent}}`), ""));
  return { kind: "code", lines: [language, ...body], taken: Math.min(end + 1, lines.length) - at };
}

/** A list goes on over blank lines as long as an item or something indented follows. */
function list(lines, at) {
  let end = at + 1;
  for (; end < lines.length; end++) {
    if (lines[end].trim()) {
      const continues = ITEM.test(lines[end]) || /^\s{2,}/.test(lines[end]) || lines[end - 1].trim();
      if (!continues || (!/^\s/.test(lines[end]) && !ITEM.test(lines[end]) && begins(lines, end))) break;
    } else if (!(end + 1 < lines.length && (ITEM.test(lines[end + 1]) || /^\s{2,}\S/.test(lines[end + 1])))) break;
  }
  return { kind: "list", lines: lines.slice(at, end), taken: end - at };
}

function draw(block, depth) {
  switch (depth < MOST_DEEP ? block.kind : "paragraph") {
    case "code": return code(block.lines[0], block.lines.slice(1).join("\n"));
    case "heading": return heading(block.lines[0], depth);
    case "rule": return make("hr");
    case "quote": return make("blockquote", {}, ...inner(block.lines.map((line) => line.replace(/^ {0,3}> ?/, "")), depth));
    case "list": return items(block.lines, depth);
    case "table": return table(block.lines, depth);
    default: return make("p", {}, ...inline(block.lines.map((line) => line.trim()).join("\n"), depth));
  }
}

const inner = (lines, depth) => split(lines).map((block) => draw(block, depth + 1));

function heading(line, depth) {
  const [, marks, text] = HEADING.exec(line);
  return make(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text, depth)); // the page has h1 and h2
}

function code(language, text) {
  const button = make("button", { type: "button", class: "small" }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  const head = make("div", { class: "code-head" }, make("span", {}, language || "text"), button);
  return make("div", { class: "code" }, head, make("pre", { tabindex: "0" }, make("code", {}, text)));
}

function items(lines, depth) {
  const [, lead, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const node = make(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {});
  for (const item of itemsOf(lines, lead.length)) node.append(make("li", {}, ...tight(item, depth)));
  return node;
}

/** Lines of each item, without its mark and its indentation. */
function itemsOf(lines, lead) {
  const found = [];
  let width = 0;
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= lead + 1) {
      found.push([match[3]]);
      width = lead + match[2].length + 1;
    } else found.at(-1).push(line.replace(new RegExp(`^\\s{0,${width}}`), ""));
  }
  return found;
}

/** An item's first paragraph stands in it without a <p>. */
function tight(lines, depth) {
  const drawn = inner(lines, depth);
  return drawn[0]?.tagName === "P" ? [...drawn[0].childNodes, ...drawn.slice(1)] : drawn;
}

function table(lines, depth) {
  const aligned = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
  const row = (line, tag) => make("tr", {}, ...aligned.map((align, i) =>
    make(tag, align ? { class: align } : {}, ...inline(cells(line)[i] ?? "", depth))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  const drawn = make("table", {}, make("thead", {}, row(lines[0], "th")), make("tbody", {}, ...body));
  return make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, drawn);
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

const INLINE = [
  [/\\([\\`*_{}[\]()#+\-.!|~<>])/y, (m) => m[1]],
  [/(`+)([^`]|[^`][^]*?[^`])\1(?!`)/y, (m) => make("code", {}, m[2].trim() || m[2])],
  [/!?\[((?:[^[\]\\]|\\.){0,1000})\]\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/y, (m, depth) => link(m[2], m[1] ? inline(m[1], depth + 1) : [m[2]], m[0])],
  [/<?(https?:\/\/[^\s<>"`]*[^\s<>"`.,;:!?)\]}'*_])>?/y, (m) => link(m[1], [m[1]], m[0])],
  [/(\*\*|__)(?=\S)([^]{1,5000}?\S)\1/y, (m, depth) => make("strong", {}, ...inline(m[2], depth + 1))],
  [/~~(?=\S)([^]{1,5000}?\S)~~/y, (m, depth) => make("del", {}, ...inline(m[1], depth + 1))],
  [/\*(?=[^\s*])((?:[^*]|\*\*[^*]+\*\*){0,5000}?[^\s*])\*(?!\*)/y, (m, depth) => make("em", {}, ...inline(m[1], depth + 1))],
  [/_(?=[^\s_])([^_]{0,5000}?[^\s_])_(?!\w)/y, (m, depth) => make("em", {}, ...inline(m[1], depth + 1))],
  [/\n/y, () => make("br")],
];
const SPECIAL = /[\\`![<h*_~\n]/g;

function inline(text, depth) {
  const found = [];
  let plain = 0;
  for (let at = 0; at < text.length;) {
    SPECIAL.lastIndex = at;
    const hit = SPECIAL.exec(text);
    if (!hit) break;
    at = hit.index;
    const [node, length] = depth < MOST_DEEP && boundary(text, at) ? special(text, at, depth) : [null, 1];
    if (node != null) {
      found.push(text.slice(plain, at), node);
      plain = at + length;
    }
    at += length;
  }
  return [...found, text.slice(plain)].filter((piece) => piece !== "");
}

/** snake_case is no emphasis, and a link begins a word. */
const boundary = (text, at) => !("_h".includes(text[at]) && at > 0 && /\w/.test(text[at - 1]));

function special(text, at, depth) {
  for (const [pattern, build] of INLINE) {
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (match) return [build(match, depth), match[0].length];
  }
  return [null, 1];
}

/** Only addresses that open a page or a mail. Anything else stays the text that it was. */
function link(address, children, source) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return source;
  return make("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, ...children);
}
