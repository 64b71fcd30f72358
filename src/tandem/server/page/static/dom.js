// Elements without HTML text: nothing that a model writes is ever parsed as HTML.

export const $ = (id) => document.getElementById(id);

/** make("a", {href, class: "x", onclick: f}, child, "text", ...) */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch { // without HTTPS browsers have no clipboard
    button.textContent = copyBySelection(text) ? "Copied" : "Cannot copy";
  }
  setTimeout(() => { button.textContent = before; }, 1200);
}

function copyBySelection(text) {
  const area = make("textarea", { class: "sr" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export const gib = (bytes) => bytes >= 2 ** 29 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${(bytes / 2 ** 20).toFixed(0)} MiB`;

export function number(value, digits = 1) {
  if (!Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: value >= 100 ? 0 : digits, minimumFractionDigits: value >= 100 ? 0 : digits });
}
