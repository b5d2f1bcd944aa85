// What a model is doing: readings of /ops/now become rates, percentiles and plots.

import { h } from "./dom.js";
import { bytes, count, percentile, rate, seconds, share, since } from "./numbers.js";
import { Plot, WINDOW } from "./plot.js";

const RATE_SECONDS = 3; // rates are over so long, or a single request would be a spike
const PERCENTILE_SECONDS = 10;

const total = (counts) => Object.values(counts).reduce((sum, number) => sum + number, 0);
const answered = (reading) => reading.requests["200"] ?? 0;
const failed = (reading) => Object.entries(reading.requests)
  .filter(([code]) => code >= "500" && code !== "503").reduce((sum, [, number]) => sum + number, 0);

// The readings of one model over the window, oldest first; starts anew when the server did.
export class History {
  constructor() {
    this.readings = [];
  }

  add(time, reading) {
    const last = this.readings[this.readings.length - 1];
    if (last && (time <= last.time || total(reading.requests) < total(last.requests))) this.readings = [];
    this.readings.push({ time, ...reading });
    while (this.readings[0].time < time - WINDOW - PERCENTILE_SECONDS) this.readings.shift();
  }

  get last() {
    return this.readings[this.readings.length - 1];
  }

  // The newest reading at least so many seconds before `index`, else the oldest there is.
  before(index, span) {
    let found = index;
    while (found > 0 && this.readings[index].time - this.readings[found].time < span) found -= 1;
    return this.readings[found];
  }

  perSecond(index, of) {
    const then = this.before(index, RATE_SECONDS);
    const passed = this.readings[index].time - then.time;
    return passed > 0 ? (of(this.readings[index]) - of(then)) / passed : null;
  }

  // Of what happened lately, `of` one per `per`; null when there was none.
  ratio(index, of, per) {
    const then = this.before(index, RATE_SECONDS);
    const steps = per(this.readings[index]) - per(then);
    return steps > 0 ? (of(this.readings[index]) - of(then)) / steps : null;
  }

  percentiles(index, of) {
    const counts = since(of(this.readings[index]), of(this.before(index, PERCENTILE_SECONDS)));
    return [0.5, 0.95, 0.99].map((wanted) => percentile(counts, wanted));
  }

  points(values) {
    return this.readings.map((reading, index) => [reading.time, values(index, reading)]);
  }

  // How many more since the window began.
  recently(of) {
    return of(this.last) - of(this.before(this.readings.length - 1, WINDOW));
  }
}

const SHARES = ["p50", "p95", "p99"];
const short = (text) => { const [number, unit] = text.split(" "); return `${Number(number.replace(/,/g, ""))} ${unit}`; };
const times = { format: seconds, axis: (value) => (value ? short(seconds(value)) : "0") };
const counts = { format: rate, axis: (value) => Number(value.toPrecision(6)).toLocaleString("en-US"), least: 1 };

function tensorPlots() {
  return [
    [new Plot("Throughput", ["requests/s", "rows/s"], counts), (history) => (index) =>
      [history.perSecond(index, answered), history.perSecond(index, (r) => r.rows)]],
    [new Plot("Latency", SHARES, { ...times, note: "of a request" }), (history) => (index) =>
      history.percentiles(index, (r) => r.request_times)],
    [new Plot("Queue", ["waiting", "running"], { ...counts, format: count, note: "requests, rows" }), () => (_, reading) =>
      [reading.waiting, reading.running]],
    [new Plot("Batch size", ["mean rows"], { ...counts }), (history) => (index) =>
      [history.ratio(index, (r) => weighted(r.batches), (r) => total(r.batches))]],
  ];
}

const weighted = (batches) => Object.entries(batches).reduce((sum, [rows, number]) => sum + rows * number, 0);

function textPlots() {
  return [
    [new Plot("Throughput", ["tokens/s", "prompt tokens/s"], counts), (history) => (index) =>
      [history.perSecond(index, (r) => r.tokens), history.perSecond(index, (r) => r.prompt_tokens)]],
    [new Plot("Time to first token", SHARES, times), (history) => (index) =>
      history.percentiles(index, (r) => r.first_token_times)],
    [new Plot("Between tokens", SHARES, times), (history) => (index) =>
      history.percentiles(index, (r) => r.inter_token_times)],
    [new Plot("Queue", ["waiting", "running"], { ...counts, format: count, note: "requests" }), () => (_, reading) =>
      [reading.waiting, reading.running]],
    [new Plot("Batch size", ["tokens a step"], counts), (history) => (index) =>
      [history.ratio(index, (r) => r.tokens, (r) => r.steps)]],
    [new Plot("KV cache", ["pages in use", "prefix hits"], { format: share, axis: (v) => `${Math.round(100 * v)} %`, least: 1, most: 1 }),
      (history) => (index, reading) => [
        reading.kv_pages[1] ? reading.kv_pages[0] / reading.kv_pages[1] : null,
        history.ratio(index, (r) => r.prefix[1], (r) => r.prefix[0])]],
  ];
}

export class LivePanel {
  constructor(model) {
    this.text = model.kind !== "tensors";
    this.plots = this.text ? textPlots() : tensorPlots();
    const first = this.text ? "tokens/s" : "requests/s";
    const names = [first, "p95 latency", "waiting", "refused", "failed", "memory"];
    this.tiles = names.map(() => h("dd", {}, "–"));
    const tiles = h("dl", { class: "tiles" }, names.map((name, index) => h("div", {}, h("dt", {}, name), this.tiles[index])));
    this.element = h("div", { class: "live" }, tiles, h("div", { class: "plots" }, this.plots.map(([plot]) => plot.element)));
  }

  update(history, memory) {
    const end = history.readings.length - 1;
    const made = this.text ? (r) => r.tokens : answered;
    const refused = history.recently((r) => total(r.rejected));
    const lost = history.recently(failed) + history.recently((r) => r.late);
    const values = [
      rate(history.perSecond(end, made)),
      seconds(history.percentiles(end, (r) => r.request_times)[1]),
      count(history.last.waiting),
      count(refused),
      count(lost),
      bytes(memory),
    ];
    this.tiles.forEach((tile, index) => { tile.textContent = values[index]; });
    this.tiles[3].parentElement.classList.toggle("warned", refused > 0);
    this.tiles[4].parentElement.classList.toggle("warned", lost > 0);
    for (const [plot, values_] of this.plots) plot.update(history.points(values_(history)));
  }
}
