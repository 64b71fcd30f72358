// The server: JSON, a stream of events, and the key, which this tab alone knows.

const KEY = "tandem.key";

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => Boolean(sessionStorage.getItem(KEY));
export const setKey = (key) => sessionStorage.setItem(KEY, key);

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (!response.ok) throw new ServerError(await reason(response), response.status);
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

export const json = async (path, options) => (await ask(path, options)).json();

// --- which of several models

const MODEL = "tandem.model";
let several = false;

/** The names of all models, once there are several. */
export async function models() {
  const names = (await json("v1/models")).data.map((card) => card.id);
  several = names.length > 1;
  if (several && !names.includes(chosen())) choose(names[0]);
  return several ? names : [];
}

export const chosen = () => sessionStorage.getItem(MODEL);
export const choose = (name) => sessionStorage.setItem(MODEL, name);
export const ofModel = (path) => (several ? `${path}?model=${encodeURIComponent(chosen())}` : path);

/** Calls `take(chunk)` with each event of a chat completion. Throws ServerError, or AbortError when `signal` says so. */
export async function stream(body, signal, take) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...(several ? { model: chosen() } : {}), ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let ended = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") { ended = true; break; }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message);
    take(chunk);
  }
  if (!ended) throw new ServerError("The connection was lost in the middle of the answer.");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection was lost in the middle of the answer.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
