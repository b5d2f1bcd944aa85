// A small plot of what just happened: lines over the last two minutes, axes with units, a legend with numbers.

import { h, svg } from "./dom.js";

const HEIGHT = 148;
const MARGIN = { left: 52, right: 10, top: 8, bottom: 22 };
export const WINDOW = 120;

// 0 and two to four steps of 1, 2 or 5 times a power of ten (of 1024 nothing: sizes are decimal here).
function ticks(top) {
  if (!(top > 0)) return [0, 1];
  const rough = top / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const marks = [];
  for (let mark = 0; mark < top + step * 0.999; mark += step) marks.push(mark);
  return marks;
}

export class Plot {
  // `series`: names, at most four. `format`: number → text with unit. `least`: the axis reaches at least so far.
  constructor(title, series, { format, axis = format, least = 0, most = Infinity, note = "" }) {
    Object.assign(this, { title, series, format, axis, least, most, points: [], cursor: null });
    this.drawing = svg("svg", { role: "img", height: HEIGHT, class: "plot" });
    this.values = series.map(() => h("b", {}, "–"));
    const legend = h("ul", { class: "legend" }, series.map((name, index) =>
      h("li", {}, svg("svg", { width: 18, height: 8, "aria-hidden": "true" },
        svg("line", { class: `line line${index}`, x1: 0, x2: 18, y1: 4, y2: 4 })), `${name} `, this.values[index])));
    const heading = h("h3", {}, title, note ? h("span", { class: "soft" }, ` ${note}`) : null);
    this.element = h("figure", { class: "chart" }, heading, this.drawing, legend);
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => { this.cursor = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  // `points`: [seconds, [a number or null per series]], oldest first.
  update(points) {
    this.points = points;
    this.draw();
  }

  point(event) {
    const box = this.drawing.getBoundingClientRect();
    const width = box.width - MARGIN.left - MARGIN.right;
    this.cursor = WINDOW * (1 - (event.clientX - box.left - MARGIN.left) / width);
    this.draw();
  }

  draw() {
    const whole = this.element.clientWidth;
    if (whole < 80) return;
    const width = whole - MARGIN.left - MARGIN.right;
    const height = HEIGHT - MARGIN.top - MARGIN.bottom;
    const last = this.points.length ? this.points[this.points.length - 1][0] : 0;
    const seen = this.points.flatMap(([, values]) => values.filter((value) => value !== null));
    const marks = ticks(Math.min(Math.max(this.least, ...seen), this.most));
    const top = marks[marks.length - 1];
    const x = (time) => MARGIN.left + width * (1 - (last - time) / WINDOW);
    const y = (value) => MARGIN.top + height * (1 - Math.min(value / top, 1));
    this.drawing.setAttribute("viewBox", `0 0 ${whole} ${HEIGHT}`);
    this.drawing.replaceChildren(...this.grid(marks, x, y, last, whole), ...this.lines(x, y));
    const shown = this.cursor === null ? this.points[this.points.length - 1] : this.nearest(last - this.cursor);
    if (this.cursor !== null && shown) {
      const at = x(shown[0]);
      this.drawing.append(svg("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: MARGIN.top + height }));
    }
    const texts = this.series.map((_, index) => (shown && shown[1][index] !== null ? this.format(shown[1][index]) : "–"));
    texts.forEach((text, index) => { this.values[index].textContent = text; });
    const words = this.series.map((name, index) => `${name} ${texts[index]}`).join(", ");
    this.drawing.setAttribute("aria-label", `${this.title}, last two minutes; now ${words}`);
  }

  nearest(time) {
    return this.points.reduce((best, point) =>
      (best === null || Math.abs(point[0] - time) < Math.abs(best[0] - time) ? point : best), null);
  }

  grid(marks, x, y, last, whole) {
    const parts = marks.flatMap((mark) => [
      svg("line", { class: mark === 0 ? "axis" : "grid", x1: MARGIN.left, x2: whole - MARGIN.right, y1: y(mark), y2: y(mark) }),
      svg("text", { x: MARGIN.left - 6, y: y(mark) + 4, "text-anchor": "end" }, this.axis(mark)),
    ]);
    const words = [[WINDOW, "2 min ago", "start"], [WINDOW / 2, "1 min", "middle"], [0, "now", "end"]];
    return [...parts, ...words.map(([ago, text, anchor]) =>
      svg("text", { x: x(last - ago), y: HEIGHT - 6, "text-anchor": anchor }, text))];
  }

  lines(x, y) {
    return this.series.map((_, index) => {
      let path = "";
      let down = false;
      for (const [time, values] of this.points) {
        const value = values[index];
        if (value === null) { down = false; continue; }
        path += `${down ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
        if (!down) path += "h.1";
        down = true;
      }
      return svg("path", { class: `line line${index}`, d: path });
    }).reverse();
  }
}
