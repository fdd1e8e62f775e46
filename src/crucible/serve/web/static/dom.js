// Elements, formats and the few icons. Text becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

// h("button", { class: "x", onclick: f, "aria-label": "y" }, "text", child, ...)
export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

export const $ = (selector, root = document) => root.querySelector(selector);

const ICONS = {
  chat: "M4 5h16v11H9l-5 4z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M4 12.5l5 5L20 6.5",
  edit: "M4 20l1-5L16 4l4 4L9 19zM14 6l4 4",
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 4v7h-7",
  verify: "M12 3l8 3v6c0 5-3.5 8-8 9-4.5-1-8-4-8-9V6zM8.5 12l2.5 2.5 4.5-5",
  tokens: "M4 6h6v5H4zM13 6h7v5h-7zM4 14h9v5H4zM16 14h4v5h-4z",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  menu: "M4 7h16M4 12h16M4 17h16",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  system: "M4 5h16v11H4zM9 20h6M12 16v4",
};

export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

export function iconButton(name, label, onclick, properties) {
  return h("button", { type: "button", class: "quiet", title: label, "aria-label": label, onclick, ...properties }, icon(name));
}

// Copies, and says on the button that it did.
export async function copy(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Outside of https and this machine there is no clipboard but that of a selection.
    const area = h("textarea", { class: "hidden-text", readonly: true });
    area.value = text;
    (button.closest("dialog") ?? document.body).append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const was = [...button.childNodes];
  const name = button.getAttribute("aria-label");
  button.replaceChildren(icon(done ? "check" : "close"), ...(was.length > 1 ? [done ? "Copied" : "Could not copy"] : []));
  announce(done ? "Copied" : "Could not copy");
  setTimeout(() => {
    button.replaceChildren(...was);
    if (name) button.setAttribute("aria-label", name);
  }, 1400);
}

// For screen readers.
export function announce(text) {
  const region = $("#announcer");
  region.textContent = "";
  requestAnimationFrame(() => (region.textContent = text));
}

let noticeTimer = 0;

// For everyone, for a while.
export function notice(text) {
  const region = $("#notice");
  region.textContent = text;
  region.hidden = false;
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => (region.hidden = true), 7000);
}

export function plural(number, word) {
  return `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
}

export function seconds(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`;
}

export function number(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(1);
}

export function duration(value) {
  const days = Math.floor(value / 86400);
  const hours = Math.floor((value % 86400) / 3600);
  const minutes = Math.floor((value % 3600) / 60);
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(value)} s`;
}
