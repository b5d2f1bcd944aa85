// Numbers as people read them: three figures, a unit, and nothing pretended.

export function three(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return Math.round(value).toLocaleString("en-US");
  if (size >= 9.995) return value.toFixed(1);
  return value.toFixed(2);
}

function scaled(value, steps) {
  for (const [unit, scale] of steps) if (Math.abs(value) >= scale) return `${three(value / scale)} ${unit}`;
  const [unit, scale] = steps[steps.length - 1];
  return `${three(value / scale)} ${unit}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value === 0 ? "0 s" : scaled(value, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  return value < 1000 ? `${Math.round(value)} B` : scaled(value, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]);
}

// Minutes and seconds of a place in a sound.
export function clock(seconds) {
  return `${Math.floor(seconds / 60)}:${(seconds % 60).toFixed(2).padStart(5, "0")}`;
}

export function share(value) {
  if (value === null || value === undefined) return "–";
  const percent = 100 * value;
  if (percent === 0 || percent === 100) return `${percent} %`;
  return percent > 99.95 && percent < 100 ? `${Math.min(percent, 99.999).toFixed(3)} %` : `${percent.toFixed(1)} %`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en-US") : three(value);
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value === 0 ? "0" : three(value);
}

// One number of a tensor, short enough for a table.
export function entry(value) {
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : Number(value.toPrecision(4)).toString();
}

const PER_OCTAVE = 8;
const UNIT = 1e-6;

// Of two readings of bucket counts (see /ops/now): the times that were counted in between.
export function since(after, before) {
  const left = {};
  for (const [index, number] of Object.entries(after)) {
    const more = number - (before[index] ?? 0);
    if (more > 0) left[index] = more;
  }
  return left;
}

// Seconds below which the share lies, to half a bucket; null of nothing.
export function percentile(counts, wanted) {
  const indices = Object.keys(counts).map(Number).sort((a, b) => a - b);
  let left = wanted * indices.reduce((sum, index) => sum + counts[index], 0);
  for (const index of indices) {
    left -= counts[index];
    if (left <= 0) return UNIT * 2 ** ((index + 0.5) / PER_OCTAVE);
  }
  return null;
}
