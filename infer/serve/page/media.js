// Trying a model of images or sound: a file goes in, and labels, boxes, masks or a text come out.

import { send } from "./api.js";
import { field, h } from "./dom.js";
import { clock, share } from "./numbers.js";
import { ranked, summary, timing } from "./result.js";

const COLORS = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"]; // Okabe and Ito
const WIDEST = 560; // pixels of the picture on the page
const MOST_SHOWN = 20; // labels, boxes or masks

export class MediaForm {
  constructor(model) {
    this.model = model;
    this.sound = model.files === "sound";
    this.file = h("input", { type: "file", accept: this.sound ? "audio/*" : "image/*", onchange: () => this.preview() });
    this.shown = h("div", { class: "media" });
    this.labels = model.task === "zero-shot-image-classification" ? h("textarea", { rows: 4, value: "a cat\na dog" }) : null;
    this.text = !this.sound && model.task === "text-generation" ? h("input", { type: "text" }) : null;
    const asked = this.labels ? [field("Labels to compare the image with, one a line", this.labels)] : [];
    if (this.text) asked.push(field("Question, task or beginning of the text", this.text, "Captions need none"));
    this.elements = [field(this.sound ? "Sound file" : "Image file", this.file), ...asked, this.shown];
    this.buttons = [];
  }

  async preview() {
    const file = this.file.files[0];
    this.drop();
    if (!file) return;
    this.url = URL.createObjectURL(file);
    if (this.sound) {
      this.shown.replaceChildren(h("audio", { controls: true, src: this.url, "aria-label": "The sound" }));
      return;
    }
    try {
      this.bitmap = await createImageBitmap(file);
      this.draw();
    } catch {
      this.shown.replaceChildren(h("p", { class: "hint" }, "This browser can't show the file; the server may read it."));
    }
  }

  drop() {
    if (this.url) URL.revokeObjectURL(this.url);
    this.url = this.bitmap = null;
    this.shown.replaceChildren();
  }

  // The image, as wide as fits, and what `over` paints on it, in pixels of the image.
  draw(over) {
    if (!this.bitmap) return;
    const { width, height } = this.bitmap;
    const scale = Math.min(1, WIDEST / width);
    const canvas = h("canvas", { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)),
      class: "picture", role: "img", "aria-label": over ? "The image, with what was found in it" : "The image" });
    const pen = canvas.getContext("2d");
    pen.drawImage(this.bitmap, 0, 0, canvas.width, canvas.height);
    if (over) over(pen, scale);
    this.shown.replaceChildren(canvas);
  }

  async run() {
    const file = this.file.files[0];
    if (!file) throw new Error(`Choose ${this.sound ? "a sound" : "an image"} file`);
    const speech = this.sound && this.model.task !== "audio-classification";
    const form = new FormData();
    form.set("model", this.model.name);
    form.set("file", file);
    for (const label of this.labels?.value.split("\n") ?? []) if (label.trim()) form.append("candidate_labels", label.trim());
    if (this.text?.value) form.set("text", this.text.value);
    if (speech) {
      form.set("response_format", "verbose_json");
      form.append("timestamp_granularities[]", "segment");
    }
    const began = performance.now();
    const answer = await (await send(speech ? "v1/audio/transcriptions" : "predict", form)).json();
    const time = timing({ seconds: (performance.now() - began) / 1000 });
    return [time, ...(speech ? transcript(answer) : await this.found(answer))];
  }

  async found(answer) {
    if (this.text) {
      this.draw();
      return [h("p", { class: "said" }, answer[0].generated_text || "The model wrote nothing about the image.")];
    }
    if (!answer.length) {
      this.draw();
      return [h("p", {}, "Nothing was found with a score above one half.")];
    }
    if (typeof answer[0] === "number") return [summary(answer)];
    const some = answer.slice(0, MOST_SHOWN);
    if (some[0].box) {
      this.draw((pen, scale) => some.forEach((each, at) => frame(pen, scale, each, COLORS[at % COLORS.length])));
      return [legend("Objects, the surest first", some, (each) => share(each.score))];
    }
    if (some[0].mask) {
      const masks = await Promise.all(some.map(async (each) => createImageBitmap(await bytes(each.mask))));
      const shares = masks.map(covered);
      this.draw((pen) => masks.forEach((mask, at) => tint(pen, mask, COLORS[at % COLORS.length])));
      return [legend("Classes, the largest first", some, (_, at) => share(shares[at]))];
    }
    this.draw();
    return [ranked("Labels, the likeliest first", some.map((each) => [each.label, each.score]), "label")];
  }
}

function transcript(answer) {
  const rows = (answer.segments ?? []).map((each) => h("tr", {},
    h("td", { class: "num" }, clock(each.start)), h("td", { class: "num" }, clock(each.end)), h("td", {}, each.text)));
  const heads = ["from", "to"].map((name) => h("th", { scope: "col", class: "num" }, name));
  const table = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Segments" }, h("table", { class: "segments" },
    h("caption", {}, `Segments of ${answer.duration.toFixed(1)} s`),
    h("thead", {}, h("tr", {}, ...heads, h("th", { scope: "col" }, "text"))), h("tbody", {}, rows)));
  return [h("p", { class: "said" }, answer.text || "No speech was heard."), rows.length ? table : null].filter(Boolean);
}

function legend(caption, found, number) {
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": caption }, h("table", {}, h("caption", {}, caption),
    h("tbody", {}, found.map((each, at) => h("tr", {}, h("th", { scope: "row" }, swatch(COLORS[at % COLORS.length]), " ", each.label),
      h("td", { class: "num" }, number(each, at)))))));
}

function swatch(color) {
  const canvas = h("canvas", { width: 12, height: 12, class: "swatch", role: "img", "aria-label": "its color" });
  const pen = canvas.getContext("2d");
  pen.fillStyle = color;
  pen.fillRect(0, 0, 12, 12);
  return canvas;
}

function frame(pen, scale, { label, box }, color) {
  const [left, top] = [box.xmin * scale, box.ymin * scale];
  Object.assign(pen, { strokeStyle: color, lineWidth: 3, font: "600 13px system-ui, sans-serif", textBaseline: "top" });
  pen.strokeRect(left, top, (box.xmax - box.xmin) * scale, (box.ymax - box.ymin) * scale);
  const width = pen.measureText(label).width + 8;
  pen.fillStyle = color;
  pen.fillRect(left, Math.max(0, top), width, 18);
  pen.fillStyle = "#000";
  pen.fillText(label, left + 4, Math.max(0, top) + 3);
}

async function bytes(base64) {
  const text = atob(base64);
  return new Blob([Uint8Array.from(text, (letter) => letter.charCodeAt(0))], { type: "image/png" });
}

// Paint a color over the pixels where a mask is white.
function tint(pen, mask, color) {
  const { width, height } = pen.canvas;
  const layer = new OffscreenCanvas(width, height);
  const own = layer.getContext("2d", { willReadFrequently: true });
  own.drawImage(mask, 0, 0, width, height);
  const image = own.getImageData(0, 0, width, height);
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  for (let at = 0; at < image.data.length; at += 4) {
    image.data.set([red, green, blue, image.data[at] > 127 ? 140 : 0], at);
  }
  own.putImageData(image, 0, 0);
  pen.drawImage(layer, 0, 0);
}

function covered(mask) {
  const own = new OffscreenCanvas(mask.width, mask.height).getContext("2d");
  own.drawImage(mask, 0, 0);
  const { data } = own.getImageData(0, 0, mask.width, mask.height);
  let white = 0;
  for (let at = 0; at < data.length; at += 4) white += data[at] > 127;
  return white / (data.length / 4);
}
