// Markdown as models write it, to elements. Everything of the text ends in text nodes; what is no Markdown stays as it is.

import { copy, h, icon } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*)|)$/;
const QUOTE = /^ {0,3}> ?/;
const ROW_RULE = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;

// Brings an element's children up to a text that grows: blocks that are still the same are left alone.
export function update(element, text) {
  const parts = blocks(text);
  parts.forEach((part, index) => {
    const source = part.join("\n");
    const child = element.children[index];
    if (child?.source === source) return;
    const made = block(part);
    made.source = source;
    if (child) child.replaceWith(made);
    else element.append(made);
  });
  while (element.children.length > parts.length) element.lastElementChild.remove();
}

let nesting = 0;

// Blocks within a block; so deep that no reader follows, text.
function render(text) {
  if (nesting > 12) return [h("p", {}, text)];
  nesting += 1;
  try {
    return blocks(text).map(block);
  } finally {
    nesting -= 1;
  }
}

// The lines of each block.
function blocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = blockEnd(lines, at);
    found.push(lines.slice(at, end));
    at = end;
  }
  return found;
}

function blockEnd(lines, start) {
  const first = lines[start];
  const fence = FENCE.exec(first);
  let end = start + 1;
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(first) || RULE.test(first)) return end;
  if (QUOTE.test(first)) {
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return end;
  }
  if (ITEM.test(first)) return listEnd(lines, start);
  if (isTable(lines, start)) {
    while (end < lines.length && lines[end].includes("|")) end += 1;
    return end;
  }
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  return end;
}

function closes(line, mark) {
  const trimmed = line.trim();
  return trimmed.length >= mark.length && trimmed === mark[0].repeat(trimmed.length);
}

function listEnd(lines, start) {
  const isOrdered = /\d/.test(ITEM.exec(lines[start])[2]);
  let end = start + 1;
  let fence = null;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (fence) {
      if (closes(line, fence)) fence = null;
      continue;
    }
    fence = /^\s/.test(line) ? (FENCE.exec(line.trimStart())?.[1] ?? null) : null;
    const item = ITEM.exec(line);
    if (item && (item[1] || /\d/.test(item[2]) === isOrdered)) continue;
    if (/^\s+\S/.test(line)) continue;
    if (!line.trim()) {
      // A blank line ends a list unless something of the list comes behind it.
      const next = lines.slice(end).find((one) => one.trim());
      const after = next && ITEM.exec(next);
      if (next && (/^\s{2,}\S/.test(next) || (after && /\d/.test(after[2]) === isOrdered))) continue;
      return end;
    }
    if (interrupts(lines, end) || !lines[end - 1].trim()) return end;
  }
  return end;
}

function interrupts(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || /^ {0,3}([-*+]|1[.)]) +\S/.test(line);
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && lines[at + 1].includes("|") && ROW_RULE.test(lines[at + 1]);
}

function block(lines) {
  const first = lines[0];
  const fence = FENCE.exec(first);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(first);
  // The page's own headings are above those of a reply.
  if (heading) return h(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2].trimEnd().replace(/(^| )#+$/, "")));
  if (RULE.test(first)) return h("hr");
  if (QUOTE.test(first)) return h("blockquote", {}, render(lines.map((line) => line.replace(QUOTE, "")).join("\n")));
  if (ITEM.test(first)) return list(lines);
  if (isTable(lines, 0)) return table(lines);
  return h("p", {}, inline(lines.map((line) => line.trimStart()).join("\n")));
}

function code(lines, fence) {
  const body = lines.slice(1, lines.length > 1 && closes(lines.at(-1), fence[1]) ? -1 : undefined).join("\n");
  const button = h("button", { type: "button", class: "quiet small", onclick: () => copy(body, button) }, icon("copy"), "Copy");
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, fence[2] || "text"), button),
    h("pre", { tabindex: "0" }, h("code", {}, body)));
}

function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push({ width: item[1].length + item[2].length + 1, lines: [item[3] ?? ""] });
    else {
      const { width, lines: own } = items.at(-1);
      own.push(line.slice(Math.min(width, line.search(/\S|$/))));
    }
  }
  const isLoose = lines.some((line, at) => !line.trim() && at < lines.length - 1);
  const children = items.map((item) => {
    const parts = render(item.lines.join("\n"));
    // Items that stand close have no paragraphs.
    return h("li", {}, parts.map((part) => (!isLoose && part.tagName === "P" ? [...part.childNodes] : part)));
  });
  if (!/\d/.test(mark)) return h("ul", {}, children);
  return h("ol", { start: parseInt(mark, 10) === 1 ? null : parseInt(mark, 10) }, children);
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const align = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
  const row = (line, tag) => h("tr", {}, cells(line).map((cell, at) => h(tag, { class: align[at] }, inline(cell))));
  return h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row(lines[0], "th")), h("tbody", {}, lines.slice(2).map((line) => row(line, "td")))));
}

// ---- within a line

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

function inline(text, depth = 0) {
  const found = [];
  let plain = "";
  const flush = () => {
    if (plain) found.push(plain);
    plain = "";
  };
  let at = 0;
  while (at < text.length) {
    const taken = depth < 8 && special(text, at, depth);
    if (taken) {
      flush();
      found.push(taken.node);
      at = taken.end;
    } else if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return found;
}

// What begins at a character, if it is more than that: {node, end}.
function special(text, at, depth) {
  const sign = text[at];
  if (sign === "\n") return { node: h("br"), end: at + 1 };
  if (sign === "`") return codeSpan(text, at);
  if (sign === "[") return link(text, at, depth);
  if (sign === "!" && text[at + 1] === "[") return link(text, at + 1, depth);
  if (sign === "<" || (sign === "h" && !/\w/.test(text[at - 1] ?? " "))) return bareLink(text, at);
  return emphasis(text, at, depth);
}

function codeSpan(text, at) {
  let width = 1;
  while (text[at + width] === "`") width += 1;
  const mark = "`".repeat(width);
  let end = text.indexOf(mark, at + width);
  while (end > 0 && text[end + width] === "`") {
    while (text[end] === "`") end += 1;
    end = text.indexOf(mark, end);
  }
  if (end < 0) return { node: mark, end: at + width };
  const body = text.slice(at + width, end).replace(/\n/g, " ");
  const isPadded = body.length > 2 && body.startsWith(" ") && body.endsWith(" ");
  return { node: h("code", {}, isPadded ? body.slice(1, -1) : body), end: end + width };
}

// Images are links too: nothing is loaded from elsewhere.
function link(text, at, depth) {
  const found = /^\[((?:[^\][\\]|\\.|\[[^\][]*\])*)\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'][^"'\n]*["'])?\s*\)/.exec(text.slice(at, at + 2000));
  if (!found || !isSafe(found[2])) return null;
  return { node: anchor(found[2], inline(found[1], depth + 1)), end: at + found[0].length };
}

function bareLink(text, at) {
  const found = /^<?(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_])>?/.exec(text.slice(at, at + 2000));
  return found && isSafe(found[1]) ? { node: anchor(found[1], [found[1]]), end: at + found[0].length } : null;
}

function anchor(href, children) {
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

function isSafe(href) {
  return /^(https?:\/\/|mailto:)/i.test(href);
}

function emphasis(text, at, depth) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const start = at + mark.length;
    if (/\s|^$/.test(text[start] ?? "") || (mark[0] === "_" && /\w/.test(text[at - 1] ?? ""))) continue;
    const limit = start + 2000;
    for (let end = text.indexOf(mark, start + 1); end > 0 && end < limit; end = text.indexOf(mark, end + 1)) {
      // Of three, the first closes what is within.
      if (mark.length === 2 && text[end + 2] === mark[0]) end += 1;
      const isClosing = !/\s/.test(text[end - 1]) && text[end - 1] !== "\\" && !(mark[0] === "_" && /\w/.test(text[end + mark.length] ?? ""));
      const isDouble = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
      if (isClosing && !isDouble) return { node: h(tag, {}, inline(text.slice(start, end), depth + 1)), end: end + mark.length };
    }
  }
  return null;
}
