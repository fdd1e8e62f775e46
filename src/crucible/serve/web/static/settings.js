// The panel of settings: what the next request is sent with.

import { $, h, icon, iconButton } from "./dom.js";
import { DEFAULT_SETTINGS, saveSettings, settings } from "./store.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", hint: "higher is more varied", min: 0.01, max: 10, step: "any", placeholder: "0.7" },
  { name: "top_k", label: "Top-k", hint: "only the k likeliest", min: 1, step: 1, placeholder: "off" },
  { name: "top_p", label: "Top-p", hint: "only the likeliest of this share", min: 0.01, max: 1, step: "any", placeholder: "off" },
  { name: "min_p", label: "Min-p", hint: "at least this share of the likeliest", min: 0, max: 1, step: "any", placeholder: "off" },
  { name: "seed", label: "Seed", hint: "empty draws one for each reply", min: 0, step: 1, placeholder: "random" },
];

const changed = new Set();

export function onSettings(listener) {
  changed.add(listener);
}

function apply() {
  saveSettings();
  for (const listener of changed) listener();
}

// One line of what the settings say.
export function summary() {
  const parts = settings.decoding === "greedy" ? ["Greedy"] : [
    `Sampled at ${settings.temperature ?? DEFAULT_SETTINGS.temperature}`,
    settings.top_k != null && `top-k ${settings.top_k}`,
    settings.top_p != null && `top-p ${settings.top_p}`,
    settings.min_p != null && `min-p ${settings.min_p}`,
    settings.seed != null && `seed ${settings.seed}`,
  ];
  if (settings.max_tokens != null) parts.push(`at most ${settings.max_tokens} tokens`);
  if (settings.system) parts.push("with a system prompt");
  return parts.filter(Boolean).join(", ");
}

export function buildSettings() {
  const panel = $("#settings");
  const toggle = $("#open-settings");
  toggle.append(icon("settings"));
  const show = (open) => {
    panel.hidden = !open;
    toggle.setAttribute("aria-expanded", String(open));
    document.body.classList.toggle("with-settings", open);
    if (open) $("input, textarea", panel).focus({ preventScroll: true });
    else toggle.focus();
  };
  toggle.addEventListener("click", () => show(panel.hidden));
  panel.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    show(false);
  });

  const fill = () => {
    panel.replaceChildren(
      h("div", { class: "panel-head" }, h("h2", {}, "Settings"), iconButton("close", "Close settings", () => show(false))),
      decoding(fill),
      h("div", { class: "fields", id: "sampling" }, NUMBERS.map(numberField)),
      numberField({ name: "max_tokens", label: "Max tokens", hint: "empty is what the context leaves", min: 1, step: 1, placeholder: "no limit" }),
      systemField(),
      h("div", { class: "row" },
        h("button", { type: "button", class: "outlined", onclick: () => {
          Object.assign(settings, DEFAULT_SETTINGS);
          apply();
          fill();
        } }, "Reset")),
      h("p", { class: "fine" }, "They hold from the next reply on, in this browser."));
    greyed();
  };
  const greyed = () => {
    for (const input of panel.querySelectorAll("#sampling input")) input.disabled = settings.decoding === "greedy";
  };
  fill();
}

function decoding(refill) {
  const choice = (value, label, hint) =>
    h("label", { class: "choice" },
      h("input", { type: "radio", name: "decoding", value, checked: settings.decoding === value, onchange: () => {
        settings.decoding = value;
        apply();
        refill();
        $(`#settings input[value=${value}]`).focus();
      } }),
      h("span", {}, h("strong", {}, label), h("small", {}, hint)));
  return h("fieldset", { class: "choices" }, h("legend", {}, "Decoding"),
    choice("greedy", "Greedy", "always the likeliest"),
    choice("sampled", "Sampled", "drawn by chance"));
}

function numberField({ name, label, hint, min, max, step, placeholder }) {
  const input = h("input", {
    id: `set-${name}`, type: "number", inputmode: step === 1 ? "numeric" : "decimal", min, max, step, placeholder,
    value: settings[name] ?? "", "aria-describedby": `hint-${name}`,
    oninput: () => {
      const isGood = input.validity.valid;
      input.setAttribute("aria-invalid", String(!isGood));
      if (!isGood) return;
      settings[name] = input.value === "" ? null : Number(input.value);
      apply();
    },
  });
  return h("div", { class: "field" },
    h("label", { for: `set-${name}` }, label), input, h("small", { id: `hint-${name}` }, hint));
}

function systemField() {
  const area = h("textarea", { id: "set-system", rows: "4", placeholder: "None", oninput: () => {
    settings.system = area.value.trim() ? area.value : "";
    apply();
  } });
  area.value = settings.system;
  return h("div", { class: "field tall" }, h("label", { for: "set-system" }, "System prompt"), area);
}
