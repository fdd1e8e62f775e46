// Lines over time with axes, as SVG. A sample has the time `at`, in seconds, and a number for each series, null where
// there was nothing to measure.

import { h, svg } from "./dom.js";

const [WIDTH, HEIGHT] = [480, 190];
const [LEFT, RIGHT, TOP, BOTTOM] = [52, 8, 10, 24];

// About four round steps from 0 to at least a value; whole ones where things are counted.
export function ticks(highest, isWhole = false) {
  const rough = Math.max((highest || 1) / 4, isWhole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999 && !(isWhole && one % 1));
  return Array.from({ length: Math.ceil((highest || 1) / step - 1e-9) + 1 }, (_, at) => at * step);
}

// A figure that `show` redraws. `series`: [{name, key, kind: "main" | "other", area}].
export class Plot {
  constructor({ title, unit, series, format, limit, least, isWhole, span }) {
    Object.assign(this, { series, format, limit, least, isWhole, span, samples: [] });
    this.unit = h("small", {}, unit);
    this.canvas = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    this.values = series.map(() => h("b", {}, "–"));
    this.title = title;
    this.figure = h("figure", { class: "plot" },
      h("figcaption", {},
        h("span", { class: "plot-title" }, title, this.unit),
        h("span", { class: "plot-keys" }, series.map((one, at) => h("span", { class: `key ${one.kind}` }, h("i"), one.name, " ", this.values[at])))),
      this.canvas);
    this.canvas.addEventListener("pointermove", (event) => {
      const box = this.canvas.getBoundingClientRect();
      this.hover = ((event.clientX - box.left) / box.width) * WIDTH;
      this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.hover = null;
      this.draw();
    });
  }

  show(samples) {
    this.samples = samples;
    this.draw();
  }

  x(sample) {
    return WIDTH - RIGHT - ((this.samples.at(-1).at - sample.at) * (WIDTH - LEFT - RIGHT)) / this.span;
  }

  draw() {
    const { samples, series } = this;
    const known = samples.flatMap((sample) => series.map((one) => sample[one.key])).filter(Number.isFinite);
    const highestKnown = Math.max(0, ...known);
    // A limit that is far away would press the line to the ground; it is told in words.
    const limit = this.limit?.() < highestKnown * 4 ? this.limit() : null;
    const marks = ticks(Math.max(highestKnown, limit ?? 0, this.least ?? 0), this.isWhole);
    const highest = marks.at(-1);
    const y = (value) => HEIGHT - BOTTOM - (value / highest) * (HEIGHT - TOP - BOTTOM);
    const at = this.hover == null ? samples.length - 1 : samples.findIndex((one) => this.x(one) >= this.hover);
    const shown = samples.at(at);
    const words = series.map((one) => this.format(shown?.[one.key]));
    words.forEach((word, one) => (this.values[one].textContent = word));
    this.canvas.setAttribute("aria-label", `${this.title}, now: ${series.map((one, i) => `${one.name} ${words[i]}`).join(", ")}`);
    this.canvas.replaceChildren(
      ...marks.map((mark) => svg("g", { class: "grid" },
        svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(mark), y2: y(mark) }),
        svg("text", { x: LEFT - 7, y: y(mark) + 4, "text-anchor": "end" }, this.format(mark)))),
      ...this.times(),
      ...series.toReversed().flatMap((one) => this.lines(one, y)),
      ...(limit ? [svg("line", { class: "limit", x1: LEFT, x2: WIDTH - RIGHT, y1: y(limit), y2: y(limit) })] : []),
      ...(this.hover != null && shown ? [svg("line", { class: "hover", x1: this.x(shown), x2: this.x(shown), y1: TOP, y2: HEIGHT - BOTTOM })] : []));
  }

  times() {
    const width = (WIDTH - LEFT - RIGHT) / 4;
    return [0, 1, 2, 3, 4].map((one) => {
      const ago = ((4 - one) * this.span) / 4;
      return svg("text", { class: "time", x: LEFT + one * width, y: HEIGHT - 6, "text-anchor": one === 4 ? "end" : one ? "middle" : "start" }, ago ? `−${ago} s` : "now");
    });
  }

  // One path for each stretch without a hole.
  lines(one, y) {
    const runs = [[]];
    this.samples.forEach((sample) => {
      const value = sample[one.key];
      if (Number.isFinite(value)) runs.at(-1).push([this.x(sample), y(value)]);
      else if (runs.at(-1).length) runs.push([]);
    });
    return runs.filter((points) => points.length).flatMap((points) => {
      const path = points.map(([x, height], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${height.toFixed(1)}`).join("");
      const dot = points.length === 1 ? "h0.1" : "";
      const base = y(0).toFixed(1);
      return [
        one.area && svg("path", { class: `area ${one.kind}`, d: `${path}V${base}H${points[0][0].toFixed(1)}Z` }),
        svg("path", { class: `line ${one.kind}`, d: path + dot }),
      ].filter(Boolean);
    });
  }
}
