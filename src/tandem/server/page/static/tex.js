// Mathematics in Markdown: a plugin of markdown-it says where it is, KaTeX draws it.

import "./vendor/katex.min.js";

// No word stands beside a single dollar, no space inside of it, and no code: else it is a price, or a shell's variable.
const FORMS = [
  { begin: "\\(", all: /\\\(((?:[^\\]|\\[^)])+)\\\)/y },
  { begin: "\\[", all: /\\\[((?:[^\\]|\\[^\]])+)\\\]/y, display: true },
  { begin: "\\begin{", all: /(\\begin\{([a-zA-Z]+\*?)\}[^]*?\\end\{\2\})/y, display: true },
  { all: /\$\$((?:[^\\$]|\\[^]|\$(?!\$))+)\$\$/y, display: true },
  { all: /\$(?![\s$])((?:[^\\$`]|\\[^])+)(?<!\s)\$(?![\w$])/y, notBehind: /[\w$]/ },
];
const BEGIN = /^(?:\\\[|\$\$|\\begin\{([a-zA-Z]+\*?)\})|(?:\\\[|(?<!\$)\$\$)$/; // of a display, where it may span lines
const CLOSE = /\\[^e]|\$\$|\\end\{[a-zA-Z]+\*?\}/g; // escaped backslashes, too, which are none
const NAME = /[a-zA-Z]+\*?(?=\})/y;
const MOST_DRAWN = 500; // formulas that are kept for the next frame

/** env.growing: the end of the text is still to come, and a display without its end is shown as it is written. */
export function texPlugin(md) {
  md.inline.ruler.before("escape", "tex", formula);
  md.block.ruler.before("lheading", "tex", display, { alt: ["paragraph", "reference", "blockquote", "list"] });
  const escape = md.utils.escapeHtml;
  md.renderer.rules.tex = ([...tokens], i) => {
    const { content, meta } = tokens[i];
    return `<span class="math${meta.display ? " display" : ""}" data-tex="${escape(meta.tex)}">${escape(content)}</span>`;
  };
  md.renderer.rules.tex_begun = (tokens, i) => `<p class="source">${escape(tokens[i].content)}</p>`;
}

function formula(state, silent) {
  for (const { begin = "", all, display = false, notBehind } of FORMS) {
    if (begin && !closes(state, begin)) continue;
    all.lastIndex = state.pos;
    const match = all.exec(state.src);
    if (!match || notBehind?.test(state.src[state.pos - 1] ?? "")) continue;
    if (!silent) Object.assign(state.push("tex", "span", 0), { content: match[0], meta: { tex: match[1].trim(), display } });
    state.pos += match[0].length;
    return true;
  }
  return false;
}

const known = new WeakMap(); // by markdown-it's state: {closes, stops}, so that no opening searches the text again

function knownOf(state) {
  if (!known.has(state)) known.set(state, { closes: closesIn(state.src), stops: new Map() });
  return known.get(state);
}

/** Where each closing text is, in ascending order. */
function closesIn(src) {
  const closes = new Map();
  for (const { 0: close, index } of src.matchAll(CLOSE)) {
    if (!closes.has(close)) closes.set(close, []);
    closes.get(close).push(index);
  }
  return closes;
}

/** The first place of `close` at or behind `from`; Infinity: there is none. */
function nextClose(state, close, from) {
  const places = knownOf(state).closes.get(close) ?? [];
  let low = 0;
  for (let high = places.length; low < high;) {
    const middle = (low + high) >> 1;
    if (places[middle] < from) low = middle + 1;
    else high = middle;
  }
  return places[low] ?? Infinity;
}

/** Whether what `begin` opens here has an end. */
function closes(state, begin) {
  if (!state.src.startsWith(begin, state.pos)) return false;
  const from = state.pos + begin.length;
  if (begin !== "\\begin{") return nextClose(state, begin === "\\(" ? "\\)" : "\\]", from) < Infinity;
  const name = NAME.exec((NAME.lastIndex = from, state.src));
  return Boolean(name) && nextClose(state, `\\end{${name[0]}}`, from) < Infinity;
}

/** Keeps a display's lines together, whatever else they look like: they become a paragraph, where `formula` sees them. */
function display(state, first, end, silent) {
  if (state.sCount[first] - state.blkIndent >= 4) return false; // code
  const line = lineOf(state, first);
  const begin = BEGIN.exec(line);
  if (!begin) return false;
  const close = begin[1] ? `\\end{${begin[1]}}` : begin[0] === "$$" ? "$$" : "\\]";
  if (line.includes(close, begin.index + 2)) return false; // all on one line
  const last = lineWith(close, state, first + 1, end);
  if (last === null || (last === end && !state.env.growing)) return false;
  if (!silent) keepTogether(state, first, Math.min(last + 1, end), last === end);
  return true;
}

const lineOf = (state, at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]).trimEnd();

/** `end` if the text ends before it. null: the list item or the quote ends, or, for dollars, a paragraph does. */
function lineWith(close, state, at, end) {
  const place = at < end ? nextClose(state, close, state.bMarks[at] + state.tShift[at]) : Infinity;
  const stop = stopLine(state, at, end, close === "$$");
  if (stop < end && !(place < state.bMarks[stop])) return null;
  if (place > state.eMarks[end - 1]) return end;
  let low = at;
  for (let high = end - 1; low < high;) {
    const middle = (low + high) >> 1;
    if (state.eMarks[middle] < place) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The first line that ends a display, whatever is open: all lines before it have the same. `end`: there is none. */
function stopLine(state, first, end, dollars) {
  const { stops } = knownOf(state);
  const key = `${state.level} ${state.blkIndent} ${end} ${dollars}`;
  const last = stops.get(key);
  if (last && last.first <= first && first <= last.stop) return last.stop;
  let stop = first;
  while (stop < end && !(state.isEmpty(stop) ? dollars : state.sCount[stop] < state.blkIndent)) stop++;
  stops.set(key, { first, stop });
  return stop;
}

function keepTogether(state, first, end, begun) {
  const content = state.getLines(first, end, state.blkIndent, false).trim();
  const map = [first, end];
  state.line = end;
  if (begun) Object.assign(state.push("tex_begun", "p", 0), { content, map });
  else {
    state.push("tex_open", "p", 1).map = map; // a "paragraph_open" would have no <p> in a list
    Object.assign(state.push("inline", "", 0), { content, map, children: [] });
    state.push("tex_close", "p", -1);
  }
}

const drawn = new Map(); // by what was drawn: the element, or null

/** What KaTeX does not know stays as it was written. */
export const drawFormulas = (root) => root.querySelectorAll(".math").forEach(drawFormula);

function drawFormula(node) {
  const display = node.classList.contains("display");
  const key = `${display} ${node.dataset.tex}`;
  if (!drawn.has(key)) {
    if (drawn.size >= MOST_DRAWN) drawn.clear();
    drawn.set(key, rendered(node.dataset.tex, display));
  }
  const copy = drawn.get(key)?.cloneNode(true);
  if (!copy) return;
  node.replaceChildren(copy);
  if (display) node.tabIndex = 0; // it is scrolled where it is too wide
}

/** Elements, not HTML: KaTeX sets their styles one by one, as the page's policy wants it. */
function rendered(tex, displayMode) {
  const node = document.createElement("span");
  try {
    globalThis.katex.render(tex, node, { displayMode, trust: false, strict: "ignore", maxSize: 20, maxExpand: 300 });
    return node.firstChild;
  } catch {
    return null;
  }
}
