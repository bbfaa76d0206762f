// Numbers as people read them: times, sizes, and round ticks for an axis.

const TIME_UNITS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
const SIZE_UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];

function unitFor(value, units) {
  return units.find(([, scale]) => Math.abs(value) >= scale * 0.9999) ?? units.at(-1);
}

/** Formats a number to about four digits without trailing zeros. */
function shortNumber(value, digits = 4) {
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value) || 1)));
  return String(Number(value.toFixed(Math.min(decimals, 12))));
}

function formatTime(seconds, digits = 4) {
  const [unit, scale] = unitFor(seconds, TIME_UNITS);
  return seconds === 0 ? "0 s" : `${shortNumber(seconds / scale, digits)} ${unit}`;
}

function formatSize(bytes) {
  const [unit, scale] = unitFor(bytes, SIZE_UNITS);
  return `${shortNumber(bytes / scale, 3)} ${unit}`;
}

/** The smallest of 1, 2, 5 times a power of ten that gives at most about `count` steps in `span`. */
function roundStep(span, count) {
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.9999);
}

/** Round values from `low` to `high` as [value, text], in the unit chosen for `high`. */
function ticks(low, high, count, units) {
  const [unit, scale] = unitFor(high, units);
  const step = roundStep((high - low) / scale, count);
  const decimals = Math.min(9, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const values = [];
  for (let n = Math.ceil(low / scale / step - 1e-9); n * step * scale <= high * (1 + 1e-12); n += 1) {
    values.push([n * step * scale, `${(n * step).toFixed(decimals)} ${unit}`]);
  }
  return values;
}
