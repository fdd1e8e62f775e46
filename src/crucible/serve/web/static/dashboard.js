// The service, live: what it counts, asked for once a second while somebody looks, as numbers and as plots.

import { health, metrics } from "./api.js";
import { $, duration, h, number, seconds } from "./dom.js";
import { Plot } from "./plot.js";

const EVERY = 1; // s
const SPAN = 120; // s that are shown
const WINDOW = 10; // samples that a latency is the quantile of

let isShown = false;
let timer = 0;
let asks = false;
let last = null; // the last answer, and when it came
const answers = []; // of the window
const samples = [];
let limits = {};
let tiles, about, trouble, plots;

const PLOTS = [
  { title: "Throughput", unit: "tokens/s", format: number, series: [
    { name: "generated", key: "rate", kind: "main", area: true }, { name: "prompts", key: "promptRate", kind: "other" }] },
  { title: "Requests", unit: "", format: number, isWhole: true, least: 4, series: [
    { name: "active", key: "active", kind: "main", area: true }, { name: "queued", key: "queued", kind: "other" }] },
  { title: "Batch", unit: "requests per step", format: number, isWhole: true, least: 4, series: [
    { name: "mean", key: "batch", kind: "main", area: true }] },
  { title: "Cache", unit: "pages", format: number, isWhole: true, least: 4, limit: () => limits.pages, series: [
    { name: "in use", key: "pages", kind: "main", area: true }] },
  { title: "Time to first token", unit: "", format: seconds, least: 0.01, series: [
    { name: "median", key: "first50", kind: "main" }, { name: "95 %", key: "first95", kind: "other" }] },
  { title: "Gap between tokens", unit: "", format: seconds, least: 0.001, series: [
    { name: "median", key: "gap50", kind: "main" }, { name: "95 %", key: "gap95", kind: "other" }] },
];

const TILES = [
  ["Tokens/s", (now) => number(now.rate)],
  ["Active", (now) => number(now.active)],
  ["Queued", (now) => number(now.queued)],
  ["First token", (now) => seconds(now.first50)],
  ["Gap", (now) => seconds(now.gap50)],
  ["Completed", (now, told) => number(told.completed)],
  ["Cancelled", (now, told) => number(told.cancelled)],
  ["Refused", (now, told) => number(told.refused)],
];

export function buildDashboard() {
  tiles = TILES.map(([name]) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, "–")));
  about = h("dl", { class: "about" });
  trouble = h("p", { class: "verdict bad", role: "alert", hidden: true });
  plots = PLOTS.map((one) => new Plot({ ...one, span: SPAN }));
  $("#view-service").append(
    h("h1", {}, "Service"),
    trouble,
    h("dl", { class: "tiles" }, tiles),
    h("div", { class: "plots" }, plots.map((plot) => plot.figure)),
    about);
  for (const plot of plots) plot.draw();
  document.addEventListener("visibilitychange", schedule);
}

export function showDashboard(shown) {
  isShown = shown;
  schedule();
}

function schedule() {
  clearTimeout(timer);
  if (isShown && !document.hidden && !asks) poll();
}

async function poll() {
  asks = true;
  const began = performance.now();
  try {
    const told = await metrics();
    if (!(limits.at > began - 10000)) await describe();
    take(told, performance.now() / 1000);
    trouble.hidden = true;
  } catch (error) {
    last = null;
    answers.length = 0;
    push({ at: performance.now() / 1000 });
    trouble.textContent = error.message;
    trouble.hidden = false;
  }
  asks = false;
  clearTimeout(timer);
  if (isShown && !document.hidden) timer = setTimeout(poll, Math.max(100, EVERY * 1000 - (performance.now() - began)));
}

async function describe() {
  const said = await health();
  limits = { at: performance.now(), pages: said.pages };
  for (const plot of plots) if (plot.limit && limits.pages) plot.unit.textContent = `pages of ${number(limits.pages)}`;
  const facts = [
    ["Model", said.model], ["Device", said.device], ["Backend", [said.backend, said.weights].filter(Boolean).join(", ")],
    ["Context", said.context && `${said.context.toLocaleString("en")} tokens`], ["Batch", said.max_batch && `${said.max_batch} at once, ${said.max_in_flight} in flight`],
    ["Fingerprint", said.fingerprint], ["Version", said.version],
  ];
  about.replaceChildren(...facts.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
    h("dt", {}, "Up for"), h("dd", { id: "uptime" }, "–"));
}

function take(told, at) {
  // A service that was restarted counts from zero again; a page that slept has no rate.
  const before = last && told.uptime > last.told.uptime && at - last.at < 10 ? last : null;
  if (!before) answers.length = 0;
  last = { told, at };
  answers.push(told);
  if (answers.length > WINDOW + 1) answers.shift();
  const rate = (count) => (before ? (count(told) - count(before.told)) / (told.uptime - before.told.uptime) : null);
  const plans = before ? told.decode.plans - before.told.decode.plans : 0;
  const first = (share) => quantile(answers[0].latency.first_token, told.latency.first_token, share);
  const gap = (share) => quantile(answers[0].latency.inter_token, told.latency.inter_token, share);
  push({
    at, rate: rate((one) => one.tokens.generated), promptRate: rate((one) => one.tokens.prompt),
    active: told.active + told.prefilling, queued: told.queued,
    batch: plans > 0 ? (told.decode.rows - before.told.decode.rows) / plans : 0,
    pages: told.pages.used, first50: first(0.5), first95: first(0.95), gap50: gap(0.5), gap95: gap(0.95),
  });
  TILES.forEach(([, value], one) => (tiles[one].lastChild.textContent = value(samples.at(-1), told)));
  const uptime = $("#uptime");
  if (uptime) uptime.textContent = duration(told.uptime) + (told.restarts ? `, the engine was started ${told.restarts + 1} times` : "");
}

function push(sample) {
  samples.push(sample);
  while (samples[0].at < sample.at - SPAN) samples.shift();
  for (const plot of plots) plot.show(samples);
}

// Of what was counted between two histograms {bounds, counts}; within a bucket values are taken to be spread evenly.
export function quantile(before, after, share) {
  const counts = after.counts.map((count, at) => count - before.counts[at]);
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) return null;
  let left = share * total;
  for (let at = 0; at < counts.length; at += 1) {
    if (counts[at] && left <= counts[at]) {
      const low = at ? after.bounds[at - 1] : 0;
      return at < after.bounds.length ? low + ((after.bounds[at] - low) * left) / counts[at] : low;
    }
    left -= counts[at];
  }
  return after.bounds.at(-1);
}
