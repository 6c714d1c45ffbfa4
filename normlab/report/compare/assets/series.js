// The series of a run: decoded, smoothed and interpolated.

const DECODED = new WeakMap();

/**
 * A run's series, or null: `steps` and `values` of the kept points; `middles`, `means`, `lows` and `highs` of the
 * buckets of the downsampling. Without downsampling each point is a bucket.
 */
function curveOf(run, of) {
  const series = of === "val" ? run.evals : run[of];
  if (!series?.steps.length) return null;
  if (!DECODED.has(series)) DECODED.set(series, of === "val" ? decodeEvaluations(series) : decodeCurve(series));
  return DECODED.get(series);
}

function decodeEvaluations({ steps, values }) {
  const losses = values.map((value) => number(value) ?? NaN);
  return { steps, values: losses, middles: steps, means: losses, lows: losses, highs: losses };
}

function decodeCurve(series) {
  const [steps, values] = [uint32Of(series.steps), float32Of(series.values)];
  if (!series.means) return { steps, values, middles: steps, means: values, lows: values, highs: values };
  const [middles, means] = [float32Of(series.mean_steps), float32Of(series.means)];
  const [lows, highs] = [means.slice(), means.slice()];
  let bucket = 0;
  steps.forEach((step, i) => {
    // A bucket ends halfway between its middle and the next.
    while (bucket < middles.length - 1 && step > (middles[bucket] + middles[bucket + 1]) / 2) bucket += 1;
    if (values[i] < lows[bucket]) lows[bucket] = values[i];
    if (values[i] > highs[bucket]) highs[bucket] = values[i];
  });
  return { steps, values, middles, means, lows, highs };
}

/**
 * Local linear regression at each point: a point's weight halves with every `halfLife` steps of distance.
 *
 * Unlike a moving average, the fit has no lag and no bias at the ends. A value that is not finite is skipped and stays
 * NaN.
 */
function smoothed(steps, values, halfLife) {
  if (!halfLife) return values;
  const sums = Array.from(values, () => new Float64Array(5));
  const addFrom = (indices, sign) => {
    // Sums over the previous points of w, w d, w d^2, w y and w d y: w is the weight, d the distance to the current point.
    let [w, wd, wdd, wy, wdy] = [0, 0, 0, 0, 0];
    let last = null;
    for (const i of indices) {
      if (!Number.isFinite(values[i])) continue;
      if (last !== null) {
        const distance = Math.abs(steps[i] - last);
        const decay = 0.5 ** (distance / halfLife);
        [w, wd, wdd, wy, wdy] = [
          decay * w,
          decay * (wd - sign * distance * w),
          decay * (wdd - 2 * sign * distance * wd + distance * distance * w),
          decay * wy,
          decay * (wdy - sign * distance * wy),
        ];
      }
      for (const [at, sum] of [w, wd, wdd, wy, wdy].entries()) sums[i][at] += sum;
      w += 1;
      wy += values[i];
      last = steps[i];
    }
  };
  const indices = [...values.keys()];
  addFrom(indices, 1);
  addFrom(indices.reverse(), -1);
  return Array.from(values, (value, i) => {
    if (!Number.isFinite(value)) return NaN;
    const [others, wd, wdd, otherValues, wdy] = sums[i];
    const [w, wy] = [others + 1, otherValues + value]; // the point itself has weight 1 and distance 0
    const spread = w * wdd - wd * wd;
    return spread > 1e-9 * w * w ? (wdd * wy - wd * wdy) / spread : wy / w;
  });
}

/** The values of a curve at other steps: linear between its points, NaN outside. */
function interpolate(grid, steps, values) {
  if (grid === steps) return values;
  let i = 0;
  return Array.from(grid, (step) => {
    if (step < steps[0] || step > steps.at(-1)) return NaN;
    while (i < steps.length - 1 && steps[i + 1] < step) i += 1;
    if (step === steps[i] || i === steps.length - 1) return values[i];
    const share = (step - steps[i]) / (steps[i + 1] - steps[i]);
    return values[i] * (1 - share) + values[i + 1] * share;
  });
}

/** The last finite value of a curve up to a step. */
function lastFinite(curve, step) {
  const index = curve.steps.findLastIndex((at, i) => at <= step && Number.isFinite(curve.values[i]));
  return index < 0 ? NaN : curve.values[index];
}

const meanOf = (values) => values.reduce((a, b) => a + b, 0) / values.length;
