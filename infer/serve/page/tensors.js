// Tensors to and from the KServe protocol: JSON where it can carry them, raw bytes for half precision.

import { post } from "./api.js";

const BINARY_ONLY = ["FP16", "BF16"];

export function product(shape) {
  return shape.reduce((size, each) => size * each, 1);
}

// Numbers of a nested list in order, and its shape; throws for ragged lists and for what is no number.
export function flatten(nested) {
  const shape = [];
  for (let inner = nested; Array.isArray(inner); inner = inner[0]) shape.push(inner.length);
  const data = [];
  const walk = (value, depth) => {
    if (depth === shape.length) {
      if (typeof value !== "number" && typeof value !== "boolean") throw new Error(`expected a number, got ${JSON.stringify(value)}`);
      data.push(value);
      return;
    }
    if (!Array.isArray(value) || value.length !== shape[depth]) throw new Error("lists of one depth must be equally long");
    value.forEach((each) => walk(each, depth + 1));
  };
  walk(nested, 0);
  return { data, shape };
}

export function nest(data, shape) {
  if (shape.length <= 1) return Array.from(data);
  const size = product(shape.slice(1));
  return Array.from({ length: shape[0] }, (_, row) => nest(data.slice(row * size, (row + 1) * size), shape.slice(1)));
}

const view = new DataView(new ArrayBuffer(4));

function bits(value) {
  view.setFloat32(0, value);
  return view.getUint32(0);
}

function half(value) {
  const word = bits(value);
  const sign = (word >>> 16) & 0x8000;
  const exponent = ((word >>> 23) & 255) - 112;
  if (exponent >= 31) return sign | (Number.isNaN(value) ? 0x7e00 : 0x7c00);
  const mantissa = (word & 0x7fffff) | 0x800000;
  const shift = exponent > 0 ? 13 : 14 - exponent;
  if (shift > 24) return sign;
  const kept = mantissa >>> shift;
  const rest = mantissa & ((1 << shift) - 1);
  const middle = 1 << (shift - 1);
  const rounded = kept + (rest > middle || (rest === middle && kept & 1) ? 1 : 0);
  return sign | (exponent > 0 ? rounded + ((exponent - 1) << 10) : rounded);
}

function unhalf(word) {
  const exponent = (word >>> 10) & 31;
  const mantissa = word & 1023;
  const sign = word & 0x8000 ? -1 : 1;
  if (exponent === 31) return mantissa ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + mantissa / 1024) : 2 ** -14 * (mantissa / 1024));
}

function unbfloat(word) {
  view.setUint32(0, word << 16);
  return view.getFloat32(0);
}

function bfloat(value) {
  const word = bits(value);
  return Number.isNaN(value) ? 0x7fc0 : ((word + 0x7fff + ((word >>> 16) & 1)) >>> 16) & 0xffff;
}

function encode(datatype, data) {
  return new Uint8Array(Uint16Array.from(data, datatype === "FP16" ? half : bfloat).buffer);
}

function decode(datatype, buffer) {
  return Array.from(new Uint16Array(buffer), datatype === "FP16" ? unhalf : unbfloat);
}

// Run a model. `inputs`: [{name, datatype, shape, data}]. Gives {outputs, parameters, seconds}.
export async function infer(model, inputs) {
  const raw = [];
  const described = inputs.map(({ name, datatype, shape, data }) => {
    if (!BINARY_ONLY.includes(datatype)) return { name, datatype, shape, data };
    raw.push(encode(datatype, data));
    return { name, datatype, shape, parameters: { binary_data_size: raw[raw.length - 1].length } };
  });
  const outputs = model.outputs.map(({ name, datatype }) => ({ name, parameters: { binary_data: BINARY_ONLY.includes(datatype) } }));
  const request = { inputs: described, outputs };
  const began = performance.now();
  const answer = await post(`v2/models/${model.name}/infer`, request, raw.length ? packed(request, raw) : {});
  const result = await unpacked(answer);
  return { ...result, seconds: (performance.now() - began) / 1000 };
}

function packed(request, raw) {
  const head = new TextEncoder().encode(JSON.stringify(request));
  const headers = { "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(head.length) };
  return { body: new Blob([head, ...raw]), headers };
}

async function unpacked(answer) {
  const length = answer.headers.get("inference-header-content-length");
  if (length === null) return answer.json();
  const buffer = await answer.arrayBuffer();
  const result = JSON.parse(new TextDecoder().decode(buffer.slice(0, Number(length))));
  let at = Number(length);
  for (const output of result.outputs) {
    const size = output.parameters?.binary_data_size;
    if (size === undefined) continue;
    output.data = decode(output.datatype, buffer.slice(at, at + size));
    at += size;
  }
  return result;
}
