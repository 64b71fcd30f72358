// What this browser keeps: conversations, one entry each, and the settings.

const PREFIX = "tandem.chat.";
const SETTINGS = "tandem.settings";

export const noSettings = { system: "", temperature: "", top_p: "", max_tokens: "", thinking: "", tools: "" };

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** False where nothing can be kept: the disk quota of this site is used up, or storage is switched off. */
function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const settings = () => ({ ...noSettings, ...read(SETTINGS, {}) });
export const keepSettings = (value) => write(SETTINGS, value);

export function conversations() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const found = keys.map((key) => read(key, null)).filter((each) => each && Array.isArray(each.messages));
  return found.sort((a, b) => b.changed - a.changed);
}

export function newConversation() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  const id = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", changed: Date.now(), messages: [] };
}

export function keep(conversation) {
  if (!conversation.messages.length) return true;
  conversation.changed = Date.now();
  return write(PREFIX + conversation.id, conversation);
}

export const drop = (id) => localStorage.removeItem(PREFIX + id);

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  const line = (conversation.title || first?.content || (first ? "A picture" : "New conversation")).trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

export function asMarkdown(conversation) {
  const names = { user: "You", assistant: "Model", tool: "Tool" };
  const said = conversation.messages.map((message) => {
    const calls = (message.calls ?? []).map((call) => `\n\n\`${call.name}(${call.arguments})\``).join("");
    const pictures = (message.pictures ?? []).map(() => "*a picture*\n\n").join("");
    return `## ${names[message.role]}\n\n${pictures}${message.content}${calls}\n`;
  });
  return `# ${titleOf(conversation)}\n\n${said.join("\n")}`;
}
