// Token by token, what the model considered: each token's chance, and what else was likely in its place.

import { generate, tokenize } from "./api.js";
import { $, announce, h, icon, notice, plural } from "./dom.js";
import { parameters, settings } from "./store.js";

const TOP = 5;

let prompt, asChat, limit, run, given, output, side;
let tokens = []; // {token_id, text, logprob, top}
let request = null; // that they came of
let chosen = -1;
let controller = null;

export function buildTokens() {
  prompt = h("textarea", { id: "token-prompt", rows: "3", placeholder: "Once upon a time" });
  asChat = h("input", { type: "checkbox", id: "token-chat" });
  limit = h("input", { type: "number", id: "token-limit", min: 1, max: 2000, value: 48, inputmode: "numeric" });
  run = h("button", { type: "submit", class: "filled" });
  given = h("span", { class: "given" });
  output = h("span", { role: "listbox", "aria-label": "Tokens", "aria-orientation": "horizontal" });
  side = h("div", { class: "token-side", "aria-live": "polite" });
  output.addEventListener("keydown", move);
  output.addEventListener("click", (event) => {
    const token = event.target.closest("[data-token]");
    if (token) choose(Number(token.dataset.token));
  });
  const form = h("form", { class: "token-form", onsubmit: (event) => {
    event.preventDefault();
    if (controller) controller.abort();
    else start();
  } },
  h("label", { for: "token-prompt" }, "Prompt"), prompt,
  h("div", { class: "row" },
    h("label", { class: "check" }, asChat, "as a chat message"),
    h("label", { class: "check", for: "token-limit" }, "Tokens", limit),
    run));
  $("#view-tokens").append(
    h("h1", {}, "What the model considered"),
    h("p", { class: "lead" }, "The stronger its colour, the less likely a token was. Choose one to see what else could have stood there, and to go on from that."),
    form,
    h("div", { class: "token-result" }, h("div", {}, h("div", { class: "token-text" }, given, output), legend()), side));
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!controller) start();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") controller?.abort();
  });
  showRun();
  showSide();
}

// Of a reply: its request again, with the chances told. It gives the same tokens.
export function showTokensOf(own) {
  location.hash = "#/tokens";
  const last = own.messages.at(-1);
  prompt.value = last.content;
  asChat.checked = true;
  go(own);
}

function start() {
  const text = prompt.value || prompt.placeholder;
  const max_tokens = limit.valueAsNumber || 48;
  const fields = { ...parameters(), max_tokens };
  if (!asChat.checked) go({ prompt: text, ...fields });
  else go({ messages: [...(settings.system ? [{ role: "system", content: settings.system }] : []), { role: "user", content: text }], ...fields });
}

// Tokens of `kept` stay, and what the request draws comes behind them.
async function go(own, kept = []) {
  controller?.abort();
  const mine = (controller = new AbortController());
  if (!kept.length) {
    request = own;
    given.textContent = typeof own.prompt === "string" ? own.prompt : "";
  }
  tokens = [...kept];
  chosen = kept.length - 1;
  output.replaceChildren(...tokens.map(tokenElement));
  showRun();
  showSide();
  // Where the alternatives lie over the page's end, the text is brought above them.
  if (matchMedia("(max-width: 760px)").matches) output.parentElement.scrollIntoView({ block: "start" });
  const result = await generate({ ...own, logprobs: TOP }, { signal: mine.signal, onToken: (token) => {
    if (mine !== controller) return;
    tokens.push(token);
    output.append(tokenElement(token, tokens.length - 1));
  } });
  if (mine !== controller) return;
  controller = null;
  showRun();
  if (result.status === "error") notice(result.error);
  announce(`${plural(tokens.length, "token")}`);
  if (chosen < 0 && tokens.length) choose(mostOpen(), { focus: false });
}

// Where the model was least sure.
function mostOpen() {
  let found = 0;
  tokens.forEach((token, at) => {
    if (token.logprob < tokens[found].logprob) found = at;
  });
  return found;
}

function showRun() {
  run.replaceChildren(icon(controller ? "stop" : "tokens"), controller ? "Stop" : "Show tokens");
}

// ---- the text

export function visible(text) {
  if (text === "") return "∅";
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length)).replace(/\ufffd/g, "▯");
}

function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  if (value >= 99.95 && value < 100) return "> 99.9 %";
  return value < 0.01 ? "< 0.01 %" : `${value >= 10 ? value.toFixed(1) : value.toPrecision(2)} %`;
}

// Of 0 (certain) to 4: by halves, tenths, hundredths.
function surprise(logprob) {
  const chance = Math.exp(logprob);
  return chance > 0.75 ? 0 : chance > 0.4 ? 1 : chance > 0.15 ? 2 : chance > 0.04 ? 3 : 4;
}

function own(token) {
  return token.top.find((one) => one.token_id === token.token_id)?.text ?? token.text;
}

function tokenElement(token, at) {
  const text = own(token);
  return h("span", {
    class: `token s${surprise(token.logprob)}${token.forced ? " forced" : ""}${text.includes("\n") ? " breaks" : ""}`, role: "option", "data-token": at, tabindex: at === 0 ? "0" : "-1",
    "aria-selected": String(at === chosen), "aria-label": `${text.trim() || visible(text)}, ${percent(token.logprob)}`,
  }, text.replace(/\n/g, "↵\n") || visible(text));
}

function choose(at, { focus = true } = {}) {
  for (const old of output.querySelectorAll("[aria-selected=true]")) {
    old.setAttribute("aria-selected", "false");
    old.tabIndex = -1;
  }
  chosen = at;
  const element = output.children[at];
  element.setAttribute("aria-selected", "true");
  output.firstElementChild.tabIndex = -1;
  element.tabIndex = 0;
  if (focus) element.focus();
  showSide();
}

function move(event) {
  const to = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (to === undefined && event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  choose(Math.min(tokens.length - 1, Math.max(0, to ?? Number(event.target.dataset.token))));
}

function legend() {
  const names = ["over 75 %", "40 to 75", "15 to 40", "4 to 15", "below 4"];
  return h("p", { class: "legend fine" }, names.map((name, at) => h("span", {}, h("i", { class: `token s${at}` }), name)));
}

// ---- the alternatives

function showSide() {
  const token = tokens[chosen];
  if (!token) {
    side.replaceChildren(h("p", { class: "fine" }, tokens.length || controller ? "Choose a token." : "Nothing was asked yet."));
    return;
  }
  const options = token.top.some((one) => one.token_id === token.token_id)
    ? token.top
    : [...token.top, { token_id: token.token_id, text: own(token), logprob: token.logprob }];
  const rest = Math.max(0, 1 - options.reduce((sum, one) => sum + Math.exp(one.logprob), 0));
  side.replaceChildren(
    h("h2", {}, `Token ${chosen + 1} of ${tokens.length}`),
    h("ol", { class: "bars" }, options.map((one) => bar(one, one.token_id === token.token_id)),
      h("li", { class: "rest" }, h("span", { class: "name" }, "all others"), meter(rest), h("span", { class: "share" }, percent(Math.log(rest))))),
    h("p", { class: "fine" }, "Chances are those of the model itself, before temperature and filters."));
}

function bar(one, isDrawn) {
  const name = h("span", { class: "name" }, h("code", {}, visible(one.text)), h("small", {}, ` ${one.token_id}`));
  const label = isDrawn ? `${one.text}, drawn` : `Go on with ${one.text}`;
  return h("li", { class: isDrawn ? "drawn" : null },
    h("button", { type: "button", disabled: isDrawn, title: isDrawn ? "It was drawn" : "Go on from here with this token", "aria-label": label, onclick: () => branch(one) },
      name, meter(Math.exp(one.logprob)), h("span", { class: "share" }, percent(one.logprob))));
}

function meter(share) {
  const fill = h("i");
  fill.style.width = `${Math.max(0.5, share * 100)}%`;
  return h("span", { class: "meter" }, fill);
}

// The same request, made to say another token here.
async function branch(one) {
  try {
    const { messages, prompt: text, max_tokens, ...fields } = request;
    const ids = Array.isArray(text) ? text : (await tokenize(messages ? { messages } : { prompt: text })).token_ids;
    const kept = tokens.slice(0, chosen);
    kept.push({ ...tokens[chosen], token_id: one.token_id, text: one.text, logprob: one.logprob, forced: true });
    const left = max_tokens == null ? {} : { max_tokens: Math.max(1, max_tokens - kept.length) };
    go({ ...fields, ...left, prompt: [...ids, ...kept.map((token) => token.token_id)] }, kept);
  } catch (error) {
    notice(error.message);
  }
}
