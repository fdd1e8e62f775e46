// The page: which view is shown, light or dark, the key, and how the server is.

import { health, onKeyNeeded } from "./api.js";
import { buildChat, focusChat } from "./chat.js";
import { buildDashboard, showDashboard } from "./dashboard.js";
import { $, h, icon } from "./dom.js";
import { buildSettings } from "./settings.js";
import { buildTokens } from "./tokens.js";

const VIEWS = ["chat", "tokens", "service"];
const THEMES = ["auto", "light", "dark"];
const THEME = "crucible.theme";

// ---- views

function view() {
  const asked = location.hash.replace(/^#\/?/, "");
  return VIEWS.includes(asked) ? asked : "chat";
}

function showView() {
  if (location.hash === "#main") return; // the skip link
  const shown = view();
  for (const one of VIEWS) {
    $(`#view-${one}`).hidden = one !== shown;
    const link = $(`nav a[href="#/${one}"]`);
    if (one === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.body.dataset.view = shown;
  showDashboard(shown === "service");
  if (shown === "chat") focusChat();
}

// ---- theme

function showTheme(theme) {
  const button = $("#theme");
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const label = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" }[theme];
  button.replaceChildren(icon({ auto: "system", light: "sun", dark: "moon" }[theme]));
  button.setAttribute("aria-label", label);
  button.title = label;
}

function buildTheme() {
  let theme = THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "auto";
  showTheme(theme);
  $("#theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(THEME, theme);
    showTheme(theme);
  });
}

// ---- key

function askForKey(wasRefused) {
  return new Promise((resolve) => {
    const field = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
    const dialog = h("dialog", { class: "key-dialog", "aria-labelledby": "key-title" },
      h("form", { onsubmit: (event) => {
        event.preventDefault();
        dialog.close(field.value);
      } },
      h("h2", { id: "key-title" }, "This server asks for a key"),
      h("label", { for: "key" }, wasRefused ? "That key was not accepted. Another one:" : "It is kept until this tab is closed."),
      field,
      h("div", { class: "row" },
        h("button", { type: "button", class: "outlined", onclick: () => dialog.close("") }, "Cancel"),
        h("button", { type: "submit", class: "filled" }, "Continue"))));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue || null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

// ---- how the server is

async function watchHealth() {
  let wait = 10000;
  const [status, name] = [$("#model"), $("#model-name")];
  const set = (kind, words) => {
    status.className = `model ${kind}`;
    if (name.textContent !== words) name.textContent = words;
  };
  try {
    const said = await health();
    if (said.status === "ok") set("ok", said.model);
    else {
      set("busy", said.status);
      wait = 1000;
    }
  } catch {
    set("gone", "not reachable");
    wait = 2000;
  }
  setTimeout(watchHealth, document.hidden ? 60000 : wait);
}

buildTheme();
onKeyNeeded(askForKey);
buildSettings();
buildChat();
buildTokens();
buildDashboard();
addEventListener("hashchange", showView);
showView();
watchHealth();
