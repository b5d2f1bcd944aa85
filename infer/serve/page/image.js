// An image for an image shaped input: drawn, or from a file; scaled to the model's size and range.

import { field, h } from "./dom.js";

const RANGES = {
  "0 to 1": (value) => value / 255,
  "−1 to 1": (value) => value / 127.5 - 1,
  "0 to 255": (value) => value,
  "ImageNet": (value, channel) => (value / 255 - [0.485, 0.456, 0.406][channel]) / [0.229, 0.224, 0.225][channel],
};
const DEFAULT_SIZE = 224;
const PAD = 256;

// Where channels, height and width are in a shape such as [batch, 3, 224, 224], or null if it is no image.
export function imageLayout(input, sizes) {
  if (input.shape.length !== 4 || !/^(FP|BF|UINT8)/.test(input.datatype)) return null;
  const fixed = input.shape.map((size) => (typeof size === "string" ? Math.min(sizes[size]?.[1] ?? DEFAULT_SIZE, DEFAULT_SIZE) : size));
  const channels = [1, 3];
  if (channels.includes(input.shape[1])) return { first: true, channels: fixed[1], height: fixed[2], width: fixed[3] };
  if (channels.includes(input.shape[3])) return { first: false, channels: fixed[3], height: fixed[1], width: fixed[2] };
  return null;
}

export class ImageInput {
  constructor(input, layout) {
    Object.assign(this, { input, layout });
    this.pad = h("canvas", { width: PAD, height: PAD, class: "pad", tabindex: 0, role: "img",
      "aria-label": "Drawing area. Draw with the pointer, or choose a file below." });
    this.small = h("canvas", { width: layout.width, height: layout.height, class: "seen", role: "img", "aria-label": "Model input" });
    for (const canvas of [this.pad, this.small]) canvas.getContext("2d", { willReadFrequently: true });
    const file = h("input", { type: "file", accept: "image/*", onchange: (event) => this.load(event.target.files[0]) });
    const range = h("select", { onchange: () => { this.range = range.value; } }, Object.keys(RANGES)
      .filter((name) => name !== "ImageNet" || layout.channels === 3).map((name) => h("option", {}, name)));
    this.range = input.datatype === "UINT8" ? "0 to 255" : "0 to 1";
    range.value = this.range;
    this.drawn = true; // what is on the pad was drawn by hand
    this.given = null; // an example, sent as it came until something is drawn over it
    const clear = h("button", { type: "button", onclick: () => this.clear() }, "Clear");
    this.element = h("div", { class: "image" },
      h("div", { class: "row top" }, this.pad,
        h("figure", { class: "preview" }, this.small, h("figcaption", { class: "hint" }, `${layout.width} × ${layout.height}, as the model sees it`), clear)),
      h("div", { class: "row" }, field("Image file", file), field("Values", range)));
    this.listen();
    this.clear();
  }

  clear() {
    const pen = this.pad.getContext("2d");
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, PAD, PAD);
    this.drawn = true;
    this.given = null;
    this.sample();
  }

  listen() {
    let last = null;
    const place = (event) => {
      const box = this.pad.getBoundingClientRect();
      return [(event.clientX - box.left) * PAD / box.width, (event.clientY - box.top) * PAD / box.height];
    };
    this.pad.addEventListener("pointerdown", (event) => {
      this.pad.setPointerCapture(event.pointerId);
      last = place(event);
      this.stroke(last, last);
    });
    this.pad.addEventListener("pointermove", (event) => {
      if (last === null) return;
      const next = place(event);
      this.stroke(last, next);
      last = next;
    });
    for (const end of ["pointerup", "pointercancel"]) this.pad.addEventListener(end, () => { last = null; });
  }

  stroke(from, to) {
    const pen = this.pad.getContext("2d");
    Object.assign(pen, { strokeStyle: "#fff", lineWidth: PAD / 10, lineCap: "round", lineJoin: "round" });
    pen.beginPath();
    pen.moveTo(...from);
    pen.lineTo(to[0] + 0.01, to[1]);
    pen.stroke();
    this.given = null;
    this.sample();
  }

  async load(file) {
    if (!file) return;
    const bitmap = await createImageBitmap(file);
    const pen = this.pad.getContext("2d");
    const scale = Math.max(PAD / bitmap.width, PAD / bitmap.height);
    const [width, height] = [bitmap.width * scale, bitmap.height * scale];
    pen.drawImage(bitmap, (PAD - width) / 2, (PAD - height) / 2, width, height);
    this.drawn = false;
    this.given = null;
    this.sample();
  }

  // Draw the pad small; a drawing is cut to what was drawn, for models see digits and letters that fill their frame.
  sample() {
    const { width, height } = this.layout;
    const pen = this.small.getContext("2d");
    const [left, top, size] = this.drawn && this.layout.channels === 1 ? this.bounds() : [0, 0, PAD];
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, width, height);
    let [source, box] = [this.pad, [left, top, size]];
    while (box[2] > 2 * Math.max(width, height)) { // halving is a mean over all pixels; one jump would skip most
      const half = Math.round(box[2] / 2);
      const step = new OffscreenCanvas(half, half);
      step.getContext("2d").drawImage(source, box[0], box[1], box[2], box[2], 0, 0, half, half);
      [source, box] = [step, [0, 0, half]];
    }
    pen.imageSmoothingQuality = "high";
    pen.drawImage(source, box[0], box[1], box[2], box[2], 0, 0, width, height);
  }

  bounds() {
    const pixels = this.pad.getContext("2d").getImageData(0, 0, PAD, PAD).data;
    let [left, top, right, bottom] = [PAD, PAD, -1, -1];
    for (let at = 0; at < PAD * PAD; at += 1) {
      if (pixels[4 * at] < 128) continue;
      const [x, y] = [at % PAD, Math.floor(at / PAD)];
      [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
    }
    if (right < 0) return [0, 0, PAD];
    const size = Math.max(right - left, bottom - top) + 2;
    return [(left + right - size) / 2, (top + bottom - size) / 2, size];
  }

  set(data, shape) {
    const { first, channels, width, height } = this.layout;
    const pen = this.small.getContext("2d");
    const image = pen.createImageData(width, height);
    const high = Math.max(...data), low = Math.min(...data);
    for (let at = 0; at < width * height; at += 1) {
      for (let c = 0; c < 3; c += 1) {
        const channel = Math.min(c, channels - 1);
        const value = data[first ? channel * width * height + at : at * channels + channel];
        image.data[4 * at + c] = 255 * (value - low) / (high - low || 1);
      }
      image.data[4 * at + 3] = 255;
    }
    pen.putImageData(image, 0, 0);
    const own = this.pad.getContext("2d");
    own.imageSmoothingEnabled = false;
    own.drawImage(this.small, 0, 0, PAD, PAD);
    own.imageSmoothingEnabled = true;
    this.drawn = false;
    this.given = { data, shape };
  }

  read() {
    const { input, layout } = this;
    const { first, channels, width, height } = layout;
    const shape = first ? [1, channels, height, width] : [1, height, width, channels];
    if (this.given) return { name: input.name, datatype: input.datatype, ...this.given };
    const pixels = this.small.getContext("2d").getImageData(0, 0, width, height).data;
    const data = new Array(channels * width * height);
    for (let at = 0; at < width * height; at += 1) {
      for (let c = 0; c < channels; c += 1) {
        data[first ? c * width * height + at : at * channels + c] = RANGES[this.range](pixels[4 * at + c], c);
      }
    }
    return { name: input.name, datatype: input.datatype, shape, data };
  }
}
