// What was measured when the artifact was made: speed beside what it was compared with, size, fidelity.

import { card, h } from "./dom.js";
import { bytes, count, entry, seconds, share } from "./numbers.js";

// Fields of the report's memory, as people read them.
const MEMORY = [
  ["weights", "weights", ""],
  ["runtime", "runtime", "Python and torch, before the model is loaded"],
  ["opened", "opened", "weights, compiled code, the backend's libraries"],
  ["run", "run", "activations and workspace, at their peak"],
  ["steady", "steady", "resident after calls"],
  ["peak", "peak", "resident at most"],
  ["gpu_steady", "GPU steady", "allocated before a call"],
  ["gpu_peak", "GPU peak", "allocated at most"],
  ["gpu_reserved", "GPU reserved", "held by the allocator"],
];

export function reportCard(model) {
  const report = model.report;
  if (!report.headline) return null;
  return card("Measured during optimization",
    h("p", { class: "headline" }, report.headline),
    ...(report.failure ? [h("p", { class: "error" }, report.failure)] : []),
    h("div", { class: "columns" }, latency(report), size(report), fidelity(report)),
    h("p", { class: "hint" }, [report.made_with, report.machine?.cpu ?? report.machine?.gpu].filter(Boolean).join(" · ")));
}

function bar(label, value, most, text, kind) {
  const meter = h("div", { class: `bar ${kind}`, "aria-hidden": "true" }, h("span", {}));
  meter.firstChild.style.width = `${Math.max(100 * Math.min(value / most, 1), 0.5)}%`;
  return h("div", { class: "bars" }, h("span", { class: "name" }, label), meter, h("b", {}, text));
}

function latency(report) {
  if (!report.latency?.length) return null;
  const what = report.decodes ? "Time of one decode step" : "Latency";
  const whole = report.baseline || "the original";
  const baseline = whole.split(" (")[0];
  const compared = whole === baseline ? null : h("p", { class: "hint" }, `Compared with ${whole}`);
  return h("div", {}, h("h3", {}, what, h("span", { class: "soft" }, " median")), compared, report.latency.map((row) => {
    const { a, b, ratio, verdict } = row.pair;
    const most = Math.max(a.p50, b.p50);
    const factor = ratio > 1 ? ratio : 1 / ratio;
    const said = verdict === "faster" || verdict === "slower" ? `${factor.toFixed(2)} × ${verdict}` : verdict;
    return h("div", { class: "measured" },
      h("p", {}, `${report.decodes ? `${row.batch} sequence${row.batch === 1 ? "" : "s"}` : `Batch ${row.batch}`}: ${said}`),
      bar("this artifact", a.p50, most, seconds(a.p50), "ours"),
      bar(baseline, b.p50, most, seconds(b.p50), "base"),
      h("p", { class: "hint" }, `${count(Number(row.per_second.toPrecision(3)))} ${report.decodes ? "tokens" : "samples"}/s; 99 % below ${seconds(a.p99)}`));
  }));
}

function size(report) {
  const most = Math.max(report.original_size ?? 0, report.size ?? 0);
  const memory = MEMORY.filter(([name]) => report.memory?.[name]);
  return h("div", {}, h("h3", {}, "Size and memory"),
    h("div", { class: "measured" },
      h("p", {}, "On disk"),
      bar("this artifact", report.size, most, bytes(report.size), "ours"),
      report.original_size ? bar("the original", report.original_size, most, bytes(report.original_size), "base") : null),
    memory.length ? h("dl", { class: "pairs" }, memory.map(([name, label, hint]) => [
      h("dt", {}, label), h("dd", {}, bytes(report.memory[name]), h("span", { class: "hint" }, ` ${hint}`))])) : null);
}

function fidelity(report) {
  const rows = (report.fidelity ?? []).filter((row) => row.limit !== null);
  if (!rows.length) return null;
  const value = (row) => (row.metric === "top1" ? share(row.value) : `${entry(row.value)}${row.unit ? ` ${row.unit}` : ""}`);
  return h("div", {}, h("h3", {}, "Fidelity", h("span", { class: "soft" }, " to the float original")),
    h("table", { class: "fidelity" },
      h("thead", {}, h("tr", {}, ["what", "value", "limit"].map((name, at) => h("th", { scope: "col", class: at ? "num" : null }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {},
        h("th", { scope: "row" }, row.what.replace(/_/g, " ").replace(".", " · ")),
        h("td", { class: `num ${row.ok ? "ok" : "over"}` }, value(row)),
        h("td", { class: "num" }, `${row.larger_is_worse ? "≤" : "≥"} ${entry(row.limit)}`))))));
}
