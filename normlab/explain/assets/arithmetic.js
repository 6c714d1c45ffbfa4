// The arithmetic of the page, in float64: statistics of a group of numbers, and the normalisers that are live.

const STATISTICS = ["mean", "variance", "rms", "min", "max"];

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** The mean; a second pass takes back what the first lost to rounding. */
function mean(values) {
  const first = sum(values) / values.length;
  return first + sum(values.map((value) => value - first)) / values.length;
}

/** Mean, variance (over n), root mean square, smallest and largest of a group. */
function statistics(values) {
  const middle = mean(values);
  return {
    mean: middle,
    variance: sum(values.map((value) => (value - middle) ** 2)) / values.length,
    rms: Math.sqrt(sum(values.map((value) => value ** 2)) / values.length),
    min: Math.min(...values),
    max: Math.max(...values),
  };
}

const transposed = (matrix) => matrix[0].map((_, column) => matrix.map((row) => row[column]));

/** Normalise each row, or each column: `one` makes a group of its numbers and their statistics. */
function grouped(matrix, over, one) {
  if (over === "column") return transposed(grouped(transposed(matrix), "row", one));
  return matrix.map((row) => one(row, statistics(row)));
}

/** What BatchNorm keeps for evaluation after so many updates on one batch: from mean 0, variance 1; over n - 1. */
function running(batch, updates, momentum) {
  const kept = transposed(batch).map(() => ({ mean: 0, variance: 1 }));
  const seen = transposed(batch).map((column) => {
    const { mean: middle, variance } = statistics(column);
    return { mean: middle, variance: (variance * column.length) / Math.max(1, column.length - 1) };
  });
  for (let update = 0; update < updates; update += 1) {
    kept.forEach((channel, at) => {
      channel.mean += momentum * (seen[at].mean - channel.mean);
      channel.variance += momentum * (seen[at].variance - channel.variance);
    });
  }
  return kept;
}

/** The live normalisers, by their keys: (matrix, {over, eps, kept}) -> matrix. Gains are 1 and biases 0. */
const NORMALISERS = {
  zscore: (matrix, { over, eps }) =>
    grouped(matrix, over, (row, of) => row.map((value) => (value - of.mean) / (Math.sqrt(of.variance) + eps))),
  minmax: (matrix, { over, eps }) =>
    grouped(matrix, over, (row, of) => row.map((value) => (value - of.min) / (of.max - of.min + eps))),
  batchnorm: (matrix, { eps }) =>
    grouped(matrix, "column", (column, of) => column.map((value) => (value - of.mean) / Math.sqrt(of.variance + eps))),
  batchnorm_eval: (matrix, { eps, kept }) =>
    matrix.map((row) => row.map((value, at) => (value - kept[at].mean) / Math.sqrt(kept[at].variance + eps))),
  layernorm: (matrix, { eps }) =>
    grouped(matrix, "row", (row, of) => row.map((value) => (value - of.mean) / Math.sqrt(of.variance + eps))),
  rmsnorm: (matrix, { eps }) =>
    grouped(matrix, "row", (row, of) => row.map((value) => value / Math.sqrt(of.rms ** 2 + eps))),
};
