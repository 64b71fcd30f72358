// Pictures of messages: pasted, dropped or chosen, made small enough, and kept in this browser.

import { $, make } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // that the server reads
const MOST_PIXELS = 2_000_000;
const MOST_BYTES = 4 * 2 ** 20; // of a file that is sent as it is
const MOST = 20; // of a message
const STORE = "pictures";

// --- kept: by an id, which messages have

const known = new Map(); // of this page
let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("tandem", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

async function inStore(mode, act) {
  const request = act((await database()).transaction(STORE, mode).objectStore(STORE));
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Where nothing can be kept, it is there until the page is closed. */
async function keep(blob) {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  known.set(id, blob);
  await inStore("readwrite", (store) => store.put(blob, id)).catch(() => {});
  return id;
}

/** undefined: this browser has it no more. */
async function find(id) {
  const blob = known.get(id) ?? await inStore("readonly", (store) => store.get(id)).catch(() => undefined);
  if (blob) known.set(id, blob);
  return blob;
}

export function drop(ids) {
  for (const id of ids) {
    known.delete(id);
    inStore("readwrite", (store) => store.delete(id)).catch(() => {});
  }
}

/** A message's content as the server takes it: pictures before the text. */
export async function withPictures(content, ids) {
  if (!ids?.length) return content;
  const parts = await Promise.all(ids.map(part));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

async function part(id) {
  const blob = await find(id);
  if (!blob) return { type: "text", text: "[a picture that is not there any more]" };
  return { type: "image_url", image_url: { url: await dataUrl(blob) } };
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** An element that shows it. */
export function thumbnail(id, alt = "Picture") {
  const image = make("img", { class: "picture", alt });
  find(id).then((blob) => {
    if (!blob) return;
    const url = URL.createObjectURL(blob);
    image.onload = () => URL.revokeObjectURL(url);
    image.src = url;
  });
  return image;
}

/** As it is, or drawn anew: smaller, or of a type that the server reads. Throws what no browser reads. */
async function small(file) {
  const bitmap = await createImageBitmap(file);
  const pixels = bitmap.width * bitmap.height;
  if (pixels <= MOST_PIXELS && file.size <= MOST_BYTES && TYPES.includes(file.type)) return file;
  const scale = Math.min(1, Math.sqrt(MOST_PIXELS / pixels));
  const [width, height] = [bitmap.width, bitmap.height].map((length) => Math.max(1, Math.floor(length * scale)));
  const canvas = make("canvas", { width, height });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, width, height);
  const type = file.type === "image/jpeg" ? file.type : "image/png"; // JPEG has no transparency
  return new Promise((resolve) => canvas.toBlob(resolve, type, 0.92));
}

// --- beside the message that is being written

export class Attached {
  /** notice(text): something that the user should know. */
  constructor(notice) {
    Object.assign(this, { notice, ids: [], sees: false, ready: Promise.resolve() });
    $("attach").addEventListener("click", () => $("files").click());
    $("files").addEventListener("change", (event) => { this.add(event.target.files); event.target.value = ""; });
    $("input").addEventListener("paste", (event) => {  // tables come as text with a picture of them
      if (!event.clipboardData.types.includes("text/plain")) this.take(event, event.clipboardData);
    });
    $("chat").addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
    $("chat").addEventListener("drop", (event) => { if (hasFiles(event)) this.take(event, event.dataTransfer); });
  }

  /** sees: whether the model does. */
  show(sees) {
    this.sees = sees;
    $("attach").hidden = !sees;
    $("composer").classList.toggle("sees", sees);
  }

  take(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    this.add(files);
  }

  /** `ready` is then a promise of when they are there: a message is not sent without them. */
  add(files) {
    if (!this.sees) return this.notice("This model reads text only.");
    for (const file of files) this.ready = this.ready.then(() => this.addOne(file));
  }

  async addOne(file) {
    if (this.ids.length >= MOST) return this.notice(`A message has ${MOST} pictures at most.`);
    try {
      const id = await keep(await small(file));
      this.ids.push(id);
    } catch {
      this.notice(`${file.name || "This file"} is no picture that can be read.`);
    }
    this.draw();
  }

  /** The pictures of a message that is sent now. */
  taken() {
    const ids = this.ids;
    this.ids = [];
    this.draw();
    return ids;
  }

  draw() {
    $("attached").replaceChildren(...this.ids.map((id, i) => make("li", {}, thumbnail(id, `Picture ${i + 1}`), this.dropButton(id, i))));
  }

  dropButton(id, i) {
    const remove = () => { this.ids = this.ids.filter((each) => each !== id); drop([id]); this.draw(); $("input").focus(); };
    return make("button", { type: "button", class: "icon", title: "Remove", "aria-label": `Remove picture ${i + 1}`, onclick: remove }, "×");
  }
}

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
