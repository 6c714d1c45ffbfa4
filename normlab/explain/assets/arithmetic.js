// Statistics of a group of numbers and the live norms, in float64.

const STATISTICS = ["mean", "variance", "rms", "min", "max"];

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** The mean, with a second pass that corrects rounding. */
function mean(values) {
  const first = sum(values) / values.length;
  return first + sum(values.map((value) => value - first)) / values.length;
}

/** Mean, variance (over n), root mean square, minimum and maximum of a group. */
function statistics(values) {
  const average = mean(values);
  return {
    mean: average,
    variance: sum(values.map((value) => (value - average) ** 2)) / values.length,
    rms: Math.sqrt(sum(values.map((value) => value ** 2)) / values.length),
    min: Math.min(...values),
    max: Math.max(...values),
  };
}

const transposed = (matrix) => matrix[0].map((_, column) => matrix.map((row) => row[column]));

/** Apply `normalise(value, statistics of its group)` to each value, over rows or columns. */
function overGroups(matrix, over, normalise) {
  if (over === "column") return transposed(overGroups(transposed(matrix), "row", normalise));
  return matrix.map((row) => {
    const group = statistics(row);
    return row.map((value) => normalise(value, group));
  });
}

/** BatchNorm's running statistics after updates on one batch, from mean 0 and variance 1; the variance is over n - 1. */
function runningStatistics(batch, updates, momentum) {
  const remaining = (1 - momentum) ** updates;
  const update = (start, value) => remaining * start + (1 - remaining) * value;
  return transposed(batch).map((column) => {
    const { mean, variance } = statistics(column);
    const unbiased = (variance * column.length) / Math.max(1, column.length - 1);
    return { mean: update(0, mean), variance: update(1, unbiased) };
  });
}

const standardised = (value, { mean, variance }, eps) => (value - mean) / Math.sqrt(variance + eps);

/** The live norms by key: (matrix, {over, eps, running}) -> matrix, with gains of 1 and biases of 0. */
const NORMS = {
  zscore: (matrix, { over, eps }) =>
    overGroups(matrix, over, (value, { mean, variance }) => (value - mean) / (Math.sqrt(variance) + eps)),
  minmax: (matrix, { over, eps }) => overGroups(matrix, over, (value, { min, max }) => (value - min) / (max - min + eps)),
  batchnorm: (matrix, { eps }) => overGroups(matrix, "column", (value, group) => standardised(value, group, eps)),
  batchnorm_eval: (matrix, { eps, running }) =>
    matrix.map((row) => row.map((value, channel) => standardised(value, running[channel], eps))),
  layernorm: (matrix, { eps }) => overGroups(matrix, "row", (value, group) => standardised(value, group, eps)),
  rmsnorm: (matrix, { eps }) => overGroups(matrix, "row", (value, { rms }) => value / Math.sqrt(rms ** 2 + eps)),
};
