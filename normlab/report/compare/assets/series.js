// A run's series as the page has it: read, smoothed, and brought to other steps.

const DECODED = new WeakMap();

/**
 * A run's series: `steps` and `values` as they were kept, and of each bucket of the sampling its middle, its mean, its
 * least and its largest. Of a series that was not sampled a bucket is a point. Null where there is none.
 */
function curveOf(run, of) {
  const series = of === "val" ? run.evals : run[of];
  if (!series || !(of === "val" ? series.steps.length : series.n)) return null;
  if (!DECODED.has(series))
    DECODED.set(
      series,
      of === "val"
        ? { steps: series.steps, values: series.values.map((value) => number(value) ?? NaN) }
        : decoded(series),
    );
  const own = DECODED.get(series);
  own.middles ??= own.steps;
  own.means ??= own.lows ??= own.highs ??= own.values;
  own.lows ??= own.highs ??= own.values;
  return own;
}

function decoded(series) {
  const own = { steps: wholesOf(series.steps), values: floatsOf(series.values) };
  if (!series.means) return own;
  own.middles = floatsOf(series.mean_steps);
  own.means = floatsOf(series.means);
  own.lows = Float32Array.from(own.means);
  own.highs = Float32Array.from(own.means);
  let bucket = 0;
  for (let i = 0; i < own.steps.length; i += 1) {
    // Buckets follow one another: halfway between two middles one ends and the next begins.
    while (bucket < own.middles.length - 1 && own.steps[i] > (own.middles[bucket] + own.middles[bucket + 1]) / 2)
      bucket += 1;
    if (own.values[i] < own.lows[bucket]) own.lows[bucket] = own.values[i];
    if (own.values[i] > own.highs[bucket]) own.highs[bucket] = own.values[i];
  }
  return own;
}

/**
 * A straight line fitted to the points around each, read there: a point counts half as much with every so many steps of
 * distance. It lags behind nothing, and where a curve begins or ends it leans to no side, as a mean would. A point that
 * is no number is passed over, and stays none.
 */
function smoothed(steps, values, halfLife) {
  if (!halfLife) return values;
  const fits = Array.from(values, () => new Float64Array(5));
  const pass = (indices, sign) => {
    // Over the points passed: sums of w, w d, w d^2, w y and w d y; w the weight, d the distance to where we are.
    let [w, wd, wdd, wy, wdy] = [0, 0, 0, 0, 0];
    let last = null;
    for (const i of indices) {
      if (!Number.isFinite(values[i])) continue;
      if (last !== null) {
        const far = Math.abs(steps[i] - last);
        const kept = 0.5 ** (far / halfLife);
        [w, wd, wdd, wy, wdy] = [
          kept * w,
          kept * (wd - sign * far * w),
          kept * (wdd - 2 * sign * far * wd + far * far * w),
          kept * wy,
          kept * (wdy - sign * far * wy),
        ];
      }
      for (const [at, sum] of [w, wd, wdd, wy, wdy].entries()) fits[i][at] += sum;
      w += 1;
      wy += values[i];
      last = steps[i];
    }
  };
  const indices = [...values.keys()];
  pass(indices, 1);
  pass(indices.reverse(), -1);
  return Array.from(values, (value, i) => {
    if (!Number.isFinite(value)) return NaN;
    const [w, wd, wdd, wy, wdy] = [fits[i][0] + 1, fits[i][1], fits[i][2], fits[i][3] + value, fits[i][4]];
    const spread = w * wdd - wd * wd;
    return spread > 1e-9 * w * w ? (wdd * wy - wd * wdy) / spread : wy / w;
  });
}

/** The values of a curve at other steps: straight between its own, nothing beyond its ends. */
function valuesAt(grid, steps, values) {
  if (grid === steps) return values;
  let i = 0;
  return Array.from(grid, (step) => {
    if (step < steps[0] || step > steps[steps.length - 1]) return NaN;
    while (i < steps.length - 1 && steps[i + 1] < step) i += 1;
    if (step === steps[i] || i === steps.length - 1) return values[i];
    const share = (step - steps[i]) / (steps[i + 1] - steps[i]);
    return values[i] * (1 - share) + values[i + 1] * share;
  });
}

/** The value at a step, or the last before it that is a number. */
function nearestFinite(curve, step) {
  let value = NaN;
  for (let i = 0; i < curve.steps.length && curve.steps[i] <= step; i += 1)
    if (Number.isFinite(curve.values[i])) value = curve.values[i];
  return value;
}
