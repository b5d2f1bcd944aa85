// Outputs as people read them: the best classes, how near texts are, a few numbers and what they are like.

import { h } from "./dom.js";
import { entry, seconds, share } from "./numbers.js";
import { nest, product } from "./tensors.js";

const TOP = 5;
const MOST_ROWS = 8;
const MOST_CELLS = 256;

// {outputs, parameters, seconds} of `infer` as elements.
export function shown(model, result) {
  return [timing(result), ...result.outputs.map((output) => tensor(model, output))];
}

export function timing({ parameters, seconds: whole }) {
  const parts = [`${seconds(whole)} in all`];
  if (parameters) {
    parts.push(`${seconds(parameters.compute_us / 1e6)} in the model`, `${seconds(parameters.queue_us / 1e6)} in the queue`);
    parts.push(`batch of ${parameters.batch_size}`);
  }
  return h("p", { class: "timing" }, parts.join(" · "));
}

function tensor(model, { name, datatype, shape, data }) {
  const heading = h("h4", {}, name, h("span", { class: "soft" }, ` ${datatype} [${shape.join(", ")}]`));
  const width = shape[shape.length - 1] ?? 1;
  const rows = Math.min(product(shape.slice(0, -1)), MOST_ROWS);
  const scores = shape.length === 2 && width > 1 && (model.task === "classification" || /logit|score|prob/i.test(name));
  const body = scores
    ? Array.from({ length: rows }, (_, row) => classes(data.slice(row * width, (row + 1) * width), rows > 1 ? row : null))
    : [grid(data, shape)];
  return h("div", { class: "output" }, heading, ...body, raw(data, shape));
}

function softmax(values) {
  const top = Math.max(...values);
  const powers = values.map((value) => Math.exp(value - top));
  const sum = powers.reduce((all, power) => all + power, 0);
  return powers.map((power) => power / sum);
}

function classes(values, row) {
  const numbers = values.map(Number);
  const sum = numbers.reduce((all, value) => all + value, 0);
  const already = numbers.every((value) => value >= 0) && Math.abs(sum - 1) < 1e-3;
  const shares = already ? numbers : softmax(numbers);
  const order = shares.map((_, index) => index).sort((a, b) => shares[b] - shares[a]).slice(0, TOP);
  const caption = `${row === null ? "" : `Row ${row}: `}most likely ${order.length} of ${values.length} classes`;
  return h("table", { class: "classes" },
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "class"), h("th", { scope: "col" }, "share"), h("th", { scope: "col", class: "num" }, already ? "" : "logit"))),
    h("tbody", {}, order.map((index, place) => h("tr", { class: place === 0 ? "best" : null },
      h("th", { scope: "row" }, String(index)),
      h("td", {}, h("meter", { min: 0, max: 1, value: shares[index], "aria-hidden": "true" }), " ", share(shares[index])),
      h("td", { class: "num" }, already ? "" : entry(numbers[index]))))));
}

function grid(data, shape) {
  const width = shape[shape.length - 1] ?? 1;
  if (data.length > MOST_CELLS || width > 16) return summary(data);
  const rows = Array.from({ length: data.length / width }, (_, row) => data.slice(row * width, (row + 1) * width));
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Values" }, h("table", { class: "cells" },
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value) => h("td", { class: "num" }, entry(value))))))));
}

// What many numbers are like, and the first of them.
export function summary(data) {
  const numbers = data.filter((value) => typeof value === "number");
  const sum = numbers.reduce((all, value) => all + value, 0);
  const squares = numbers.reduce((all, value) => all + value * value, 0);
  const least = numbers.reduce((a, b) => Math.min(a, b), Infinity);
  const most = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
  const facts = [["least", least], ["mean", sum / numbers.length], ["most", most], ["length", Math.sqrt(squares)]];
  return h("div", {},
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, entry(value))))),
    h("p", { class: "values" }, `${data.slice(0, 8).map(entry).join("  ")}${data.length > 8 ? "  …" : ""}`));
}

function raw(data, shape) {
  const text = h("pre", { tabindex: 0 });
  const details = h("details", {}, h("summary", {}, "All values as JSON"), text);
  details.addEventListener("toggle", () => {
    if (details.open && !text.textContent) text.textContent = JSON.stringify(nest(data, shape));
  });
  return details;
}

// How near each text is to each other: a table of cosines, darker is nearer.
export function cosines(texts, vectors) {
  const norms = vectors.map((vector) => Math.sqrt(vector.reduce((sum, value) => sum + value * value, 0)) || 1);
  const cosine = (a, b) => vectors[a].reduce((sum, value, at) => sum + value * vectors[b][at], 0) / norms[a] / norms[b];
  const short = (text) => (text.length > 60 ? `${text.slice(0, 59)}…` : text);
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Cosines" }, h("table", { class: "cosines" },
    h("caption", {}, "Cosine of each pair: 1 means the same"),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "text"), texts.map((_, index) => h("th", { scope: "col", class: "num" }, String(index + 1))))),
    h("tbody", {}, texts.map((text, row) => h("tr", {}, h("th", { scope: "row" }, `${row + 1}  ${short(text)}`), texts.map((_, column) => {
      const cell = h("td", { class: "num" }, cosine(row, column).toFixed(2));
      cell.style.setProperty("--near", Math.max(cosine(row, column), 0).toFixed(2));
      return cell;
    }))))));
}

// Texts with a score each.
export function ranked(caption, rows, name = "text") {
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption }, h("table", {},
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, name), h("th", { scope: "col", class: "num" }, "score"))),
    h("tbody", {}, rows.map(([text, score]) => h("tr", {}, h("th", { scope: "row" }, text), h("td", { class: "num" }, score.toFixed(4)))))));
}
