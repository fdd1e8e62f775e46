// What this browser keeps: conversations, settings, theme. Nothing of it is sent anywhere but in requests.

const CONVERSATION = "crucible.conversation.";
const SETTINGS = "crucible.settings";

export const DEFAULT_SETTINGS = {
  decoding: "sampled", temperature: 0.7, top_k: null, top_p: 0.9, min_p: null, seed: null, max_tokens: null, system: "",
};

function load(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function save(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

// ---- settings

export const settings = { ...DEFAULT_SETTINGS, ...load(SETTINGS, {}) };

export function saveSettings() {
  save(SETTINGS, settings);
}

// The fields of a request that the settings stand for.
export function parameters() {
  const fields = {};
  if (settings.max_tokens != null) fields.max_tokens = settings.max_tokens;
  if (settings.decoding === "greedy") return fields;
  fields.temperature = settings.temperature ?? DEFAULT_SETTINGS.temperature;
  for (const name of ["top_k", "top_p", "min_p"]) if (settings[name] != null) fields[name] = settings[name];
  fields.seed = settings.seed ?? randomSeed();
  return fields;
}

export function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
}

// ---- conversations: one entry each, so that two tabs do not write over each other's

// {id, title, updated, messages: [{role: "user", content} | {role: "assistant", variants: [reply], at}]}
const conversations = new Map();

function reload() {
  const found = Object.keys(localStorage).filter((key) => key.startsWith(CONVERSATION)).map((key) => load(key, null));
  conversations.clear();
  for (const one of found) if (one?.messages?.length) conversations.set(one.id, one);
}
reload();

// Newest first.
export function listConversations() {
  return [...conversations.values()].sort((a, b) => b.updated - a.updated);
}

export function getConversation(id) {
  return conversations.get(id);
}

export function newConversation() {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", updated: Date.now(), messages: [] };
}

// False where there was no room.
export function saveConversation(conversation) {
  conversation.updated = Date.now();
  conversations.set(conversation.id, conversation);
  return save(CONVERSATION + conversation.id, conversation);
}

export function removeConversation(id) {
  conversations.delete(id);
  localStorage.removeItem(CONVERSATION + id);
}

// Calls back when another tab has changed them.
export function onConversations(changed) {
  addEventListener("storage", (event) => {
    if (!event.key?.startsWith(CONVERSATION)) return;
    reload();
    changed();
  });
}

// What has been said, as a request's `messages`: of each reply the text that is shown. A question that got none is left
// out: templates want the roles in turn.
export function asMessages(messages, system) {
  const found = [];
  for (const one of messages) {
    const reply = one.variants?.[one.at];
    if (!reply) found.push({ role: "user", content: one.content });
    else if (reply.text || reply.status === "done") found.push({ role: "assistant", content: reply.text });
    else found.pop();
  }
  return system ? [{ role: "system", content: system }, ...found] : found;
}
