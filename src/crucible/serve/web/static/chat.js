// Conversations: what was said, what is being said, and what can be done with it.

import { generate, served } from "./api.js";
import { $, announce, copy, h, icon, iconButton, notice, plural, seconds } from "./dom.js";
import { update } from "./markdown.js";
import { openReproduction, reproduction } from "./reproduce.js";
import { onSettings, summary } from "./settings.js";
import {
  asMessages, getConversation, listConversations, newConversation, onConversations, parameters, randomSeed, removeConversation,
  saveConversation, settings,
} from "./store.js";
import { showTokensOf } from "./tokens.js";

const CURRENT = "crucible.current";
const FRAME = 50; // ms between two paints of a reply that grows

let conversation = null;
let running = null; // {controller, conversation, message}
let log, scroll, input, send;

export function buildChat() {
  [log, scroll, input, send] = ["#log", "#scroll", "#message", "#send"].map((one) => $(one));
  $("#new-chat").append(icon("plus"), "New chat");
  $("#new-chat").addEventListener("click", () => open(newConversation()));
  $("#open-list").append(icon("menu"));
  $("#open-list").addEventListener("click", () => showList(!document.body.classList.contains("with-list")));
  scroll.addEventListener("click", () => showList(false));
  $("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) stop();
    else submit();
  });
  input.addEventListener("keydown", (event) => {
    if (!isEnter(event)) return;
    event.preventDefault();
    if (!running) submit();
  });
  input.addEventListener("input", grow);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !event.defaultPrevented && !$("dialog[open]")) stop();
  });
  document.addEventListener("visibilitychange", () => document.hidden && keepPartial());
  addEventListener("pagehide", () => {
    keepPartial();
    stop();
  });
  onConversations(() => {
    if (!running) open(getConversation(conversation.id) ?? conversation, { focus: false });
  });
  const showSummary = () => ($("#summary").textContent = summary());
  onSettings(showSummary);
  showSummary();
  open(getConversation(sessionStorage.getItem(CURRENT)) ?? listConversations()[0] ?? newConversation());
}

export function focusChat() {
  if (matchMedia("(hover: hover)").matches) input.focus({ preventScroll: true });
}

function isEnter(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, innerHeight * 0.4)}px`;
}

function showList(shown) {
  document.body.classList.toggle("with-list", shown);
  $("#open-list").setAttribute("aria-expanded", String(shown));
}

// ---- the list

function open(one, { focus = true } = {}) {
  if (running && running.conversation !== one) stop();
  conversation = one;
  sessionStorage.setItem(CURRENT, one.id);
  showList(false);
  showAll();
  showTitles();
  scroll.scrollTop = scroll.scrollHeight;
  if (focus) focusChat();
}

function showTitles() {
  const titles = listConversations().map((one) =>
    h("li", { class: one.id === conversation.id ? "current" : null },
      h("button", { type: "button", class: "title", "aria-current": one.id === conversation.id ? "true" : null, onclick: () => open(one) }, one.title),
      iconButton("trash", `Delete “${one.title}”`, () => {
        if (!confirm(`Delete “${one.title}”?`)) return;
        if (running?.conversation === one) stop();
        removeConversation(one.id);
        if (one.id === conversation.id) open(listConversations()[0] ?? newConversation());
        else showTitles();
      })));
  $("#conversations").replaceChildren(...titles);
}

function save(one) {
  if (!saveConversation(one)) notice("This browser has no room left for conversations. Delete some to keep new ones.");
  showTitles();
}

// What has come of a reply so far, in case that the page is not shown again.
function keepPartial() {
  if (!running) return;
  const { message, conversation: own } = running;
  const reply = message.variants[message.at];
  if (reply.status === "running") saveConversation({ ...own, messages: own.messages.map((one) =>
    one === message ? { ...one, variants: one.variants.map((it) => (it === reply ? { ...it, status: "stopped" } : it)) } : one) });
}

// ---- sending

function submit() {
  const content = input.value;
  if (!content.trim()) return;
  input.value = "";
  grow();
  ask(content);
}

function ask(content) {
  const own = conversation;
  own.messages.push({ role: "user", content });
  own.title ||= content.trim().replace(/\s+/g, " ").slice(0, 80);
  own.messages.push({ role: "assistant", variants: [], at: 0 });
  answer(own, own.messages.at(-1));
}

function again(message) {
  if (running) return;
  const was = message.variants[message.at];
  const fields = parameters();
  if (fields.temperature != null) fields.seed = randomSeed();
  else if (was.status === "done" && was.params.temperature == null) {
    notice("Greedy decoding gives this text every time. Choose Sampled in the settings for others.");
    return;
  }
  if (!was.token_ids.length) message.variants.splice(message.at, 1);
  answer(conversation, message, fields);
}

async function answer(own, message, fields = parameters()) {
  const before = own.messages.slice(0, own.messages.indexOf(message));
  const request = { messages: asMessages(before, settings.system), ...fields };
  const reply = { text: "", token_ids: [], status: "running", params: fields, system: settings.system, model: served.model, fingerprint: served.fingerprint };
  message.variants.push(reply);
  message.at = message.variants.length - 1;
  const controller = new AbortController();
  running = { controller, conversation: own, message };
  showState();
  showAll();
  save(own);
  follow(true);
  announce("Writing");

  const body = $(`[data-at="${own.messages.indexOf(message)}"] .text`, log);
  let painting = 0;
  const paint = () => {
    painting = 0;
    const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
    update(body, reply.text);
    follow(isAtEnd);
  };
  const result = await generate(request, {
    signal: controller.signal,
    onToken: (token, so) => {
      reply.text = so.text;
      reply.token_ids = so.token_ids;
      painting ||= setTimeout(paint, FRAME);
    },
  });
  clearTimeout(painting);
  Object.assign(reply, result);
  running = null;
  showState();
  save(own);
  if (own !== conversation) return;
  const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 120;
  showAll();
  follow(isAtEnd);
  if (document.activeElement === document.body) focusChat(); // what had the focus was drawn anew
  announce(`${said(reply)} ${reply.text.slice(0, 4000)}`);
}

function stop() {
  running?.controller.abort();
}

function follow(wanted) {
  if (wanted) scroll.scrollTop = scroll.scrollHeight;
}

function showState() {
  const label = running ? "Stop" : "Send";
  send.replaceChildren(icon(running ? "stop" : "send"));
  send.setAttribute("aria-label", label);
  send.title = running ? "Stop (Esc)" : "Send (Enter)";
  send.classList.toggle("stops", Boolean(running));
}

// ---- what was said

function showAll() {
  showState();
  if (!conversation.messages.length) {
    log.replaceChildren(h("div", { class: "empty" },
      h("img", { src: "web/icon.svg", alt: "", width: "56", height: "56" }),
      h("h1", {}, "What shall it write?"),
      h("p", {}, "Every reply can be had again, to the token: its line of reproduction says how."),
      h("button", { type: "button", class: "outlined", onclick: () => openReproduction(null) }, icon("verify"), "Verify a line")));
    return;
  }
  log.replaceChildren(...conversation.messages.map((message, at) => (message.role === "user" ? userMessage(message, at) : replyMessage(message, at))));
}

function userMessage(message, at) {
  const element = h("article", { class: "user", "data-at": at, "aria-label": "You" },
    h("div", { class: "said" }, message.content),
    h("div", { class: "actions" },
      iconButton("edit", "Edit and send again", () => edit(element, message, at)),
      iconButton("copy", "Copy this message", (event) => copy(message.content, event.currentTarget))));
  return element;
}

function edit(element, message, at) {
  if (running) return;
  const area = h("textarea", { rows: Math.min(12, message.content.split("\n").length + 1), "aria-label": "Message" });
  area.value = message.content;
  const cancel = () => {
    element.replaceWith(userMessage(message, at));
    focusChat();
  };
  const resend = () => {
    if (!area.value.trim() || running) return;
    conversation.messages.length = at;
    if (!at) conversation.title = "";
    ask(area.value);
    focusChat();
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    else if (isEnter(event)) {
      event.preventDefault();
      resend();
    }
  });
  element.replaceChildren(h("form", { class: "edit", onsubmit: (event) => {
    event.preventDefault();
    resend();
  } },
  area,
  h("div", { class: "row" },
    h("span", { class: "fine" }, at < conversation.messages.length - 2 ? "What follows is replaced." : ""),
    h("button", { type: "button", class: "outlined", onclick: cancel }, "Cancel"),
    h("button", { type: "submit", class: "filled" }, "Send"))));
  area.focus();
}

function replyMessage(message, at) {
  const reply = message.variants[message.at];
  const isRunning = running?.message === message && reply.status === "running";
  const text = h("div", { class: "text" });
  update(text, reply.text);
  return h("article", { class: `reply ${isRunning ? "running" : reply.status}`, "data-at": at, "aria-label": "Reply", "aria-busy": String(isRunning) },
    text,
    isRunning ? null : footer(message, reply, at));
}

function said(reply) {
  if (reply.status === "error") return reply.error;
  if (reply.status !== "done") return "Stopped.";
  return { length: "Ended at the limit of tokens.", error: "The model's numbers became unusable." }[reply.finish] ?? "";
}

function footer(message, reply, at) {
  const label = said(reply);
  const facts = [
    plural(reply.usage?.completion_tokens ?? reply.token_ids.length, "token"),
    reply.first != null && `${seconds(reply.first)} to the first`,
    reply.rate != null && `${reply.rate.toFixed(reply.rate < 100 ? 1 : 0)} tokens/s`,
    reply.params.temperature == null ? "greedy" : `seed ${reply.params.seed}`,
  ].filter(Boolean);
  const isLast = at === conversation.messages.length - 1;
  const before = () => conversation.messages.slice(0, at);
  return h("footer", {},
    label && h("p", { class: "label", role: reply.status === "error" ? "alert" : null }, label),
    h("div", { class: "actions" },
      // Only of the last one: what follows was said to the others.
      isLast && message.variants.length > 1 && variants(message),
      h("span", { class: "facts" }, facts.map((fact) => h("span", {}, fact))),
      h("span", { class: "buttons" },
        iconButton("copy", "Copy this reply", (event) => copy(reply.text, event.currentTarget)),
        isLast && iconButton("again", "Regenerate with another seed", () => again(message), { class: "quiet regenerate" }),
        reply.token_ids.length > 0 && iconButton("tokens", "What the model considered", () => showTokensOf(reproduction(before(), reply).request)),
        reply.token_ids.length > 0 && iconButton("verify", "Reproduce this reply", () => openReproduction(reproduction(before(), reply)), { class: "quiet reproduce" }))));
}

function variants(message) {
  const move = (by) => {
    if (running) return;
    message.at = Math.min(message.variants.length - 1, Math.max(0, message.at + by));
    save(conversation);
    showAll();
  };
  return h("span", { class: "variants" },
    iconButton("left", "Previous reply", () => move(-1), { disabled: message.at === 0 }),
    h("span", {}, `${message.at + 1} of ${message.variants.length}`),
    iconButton("right", "Next reply", () => move(1), { disabled: message.at === message.variants.length - 1 }));
}
