// A line that says how a text came to be, and the proof: the same request again, compared token by token.

import { generate, health, served } from "./api.js";
import { copy, h, icon, iconButton, plural } from "./dom.js";
import { asMessages } from "./store.js";

// The line of a reply. `request` is a body of POST /v1/generate; of a reply that was stopped it asks for as many tokens.
export function reproduction(before, reply) {
  const request = { messages: asMessages(before, reply.system), ...reply.params };
  if (reply.status !== "done") request.max_tokens = reply.token_ids.length;
  return { model: reply.model, fingerprint: reply.fingerprint, request, token_ids: reply.token_ids };
}

// Shows a line and runs it; without one it asks for one.
export function openReproduction(line) {
  const area = h("textarea", { id: "line", rows: "7", spellcheck: "false", autocomplete: "off", placeholder: "{\"model\": …, \"request\": …, \"token_ids\": […]}" });
  if (line) area.value = JSON.stringify(line);
  const verdict = h("p", { class: "verdict", role: "status" });
  const text = h("div", { class: "again", tabindex: "0", role: "region", "aria-label": "The text again", hidden: true });
  const run = h("button", { type: "submit", class: "filled" }, icon("verify"), "Run it again");
  const copies = h("button", { type: "button", class: "outlined", onclick: () => copy(area.value, copies) }, icon("copy"), "Copy the line");
  let controller = null;
  const dialog = h("dialog", { class: "reproduce-dialog", "aria-labelledby": "reproduce-title" },
    h("form", { onsubmit: async (event) => {
      event.preventDefault();
      if (controller) return;
      controller = new AbortController();
      run.disabled = true;
      try {
        await verify(area.value, { verdict, text, signal: controller.signal });
      } finally {
        controller = null;
        run.disabled = false;
      }
    } },
    h("div", { class: "panel-head" }, h("h2", { id: "reproduce-title" }, "Reproduce"), iconButton("close", "Close", () => dialog.close())),
    h("label", { for: "line" }, line ? "This line is all it takes: model, request and the tokens that came of it." : "Paste a line of reproduction."),
    area,
    h("div", { class: "row" }, copies, run),
    verdict,
    text));
  dialog.addEventListener("close", () => {
    controller?.abort();
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
  (line ? run : area).focus();
}

async function verify(source, { verdict, text, signal }) {
  const say = (kind, words) => {
    verdict.className = `verdict ${kind}`;
    verdict.replaceChildren(words);
  };
  let line;
  try {
    line = JSON.parse(source);
    if (!line.request || !Array.isArray(line.token_ids)) throw new Error();
  } catch {
    say("bad", "This is no line of reproduction: JSON with “request” and “token_ids”.");
    return;
  }
  text.hidden = false;
  text.textContent = "";
  say("", "Running");
  const result = await generate(line.request, { signal, onToken: (token, so) => {
    text.textContent = so.text;
    say("", `Running: ${so.token_ids.length} of ${plural(line.token_ids.length, "token")}`);
  } });
  if (result.status === "stopped") return;
  if (result.status === "error") {
    say("bad", result.error);
    return;
  }
  const now = await health().catch(() => served);
  const at = firstDifference(line.token_ids, result.token_ids);
  if (at == null) {
    say("good", `The same text: all ${plural(line.token_ids.length, "token")} are identical.`);
    return;
  }
  const isOther = line.fingerprint && line.fingerprint !== now.fingerprint;
  say("bad", `Another text: it differs from token ${at + 1} on.${isOther ? " The line was made by another model, format or backend than is served here." : ""}`);
}

// The first place where two lists differ; null where they are the same.
export function firstDifference(a, b) {
  for (let at = 0; at < Math.max(a.length, b.length); at += 1) if (a[at] !== b[at]) return at;
  return null;
}
