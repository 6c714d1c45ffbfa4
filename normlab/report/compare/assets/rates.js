// Final loss against the learning rate, one line per cell; and the learning-rate sensitivity of each cell.

const MAX_BARS = 30;

function drawRates(width) {
  const cells = visibleCells().filter((cell) => DATA.rates[cell.index].length);
  if (!cells.length) return { empty: CELLS.length ? NOTHING_SELECTED : "No run has a final loss yet." };
  const pointsOf = (cell) => DATA.rates[cell.index];
  if (cells.every((cell) => pointsOf(cell).length < 2))
    return { empty: "Each cell has one learning rate. To compare learning rates, sweep optim.lr=1e-3,3e-3,1e-2." };
  const narrow = width < NARROW;
  const allPoints = cells.flatMap(pointsOf);
  const [low, high] = lossRange(allPoints);
  const crosses = new Map();
  const traces = [];
  for (const cell of cells) {
    const points = pointsOf(cell);
    const { colour, dash, symbol } = styleOf(cell.index);
    const values = (key) => points.map((point) => number(point[key]));
    const [means, lows, highs] = ["val_loss", "val_loss_low", "val_loss_high"].map(values);
    const seeds = points.flatMap(seedPoints);
    const diverged = points.filter((point) => point.seeds_diverged);
    traces.push({
      x: values("lr"),
      y: means.map((mean) => (Number.isFinite(mean) ? mean : NaN)),
      type: "scatter",
      mode: "lines+markers",
      name: plain(cell.label),
      line: { color: colour, dash, width: 2 },
      marker: { color: colour, symbol, size: 8 },
      connectgaps: false,
      error_y: {
        type: "data",
        symmetric: false,
        color: colour,
        thickness: 1.2,
        width: 4,
        array: highs.map((value, i) => (hasInterval(points[i]) ? value - means[i] : 0)),
        arrayminus: lows.map((value, i) => (hasInterval(points[i]) ? means[i] - value : 0)),
      },
      text: points.map(({ text }) => plain(text)),
      hovertemplate: "%{fullData.name}<br>lr %{x:g}: %{text}<extra></extra>",
      meta: { cell: cell.index },
    });
    traces.push({
      x: seeds.map(({ lr }) => lr),
      y: seeds.map(({ loss }) => loss),
      text: seeds.map(({ name }) => name),
      type: "scatter",
      mode: "markers",
      showlegend: false,
      marker: { color: colour, size: 4, opacity: 0.5 },
      hovertemplate: "%{text}<br>lr %{x:g}: %{y:.4f}<extra></extra>",
    });
    traces.push({
      x: diverged.map(({ lr }) => lr),
      y: diverged.map(({ lr }) => {
        const stacked = crosses.get(lr) ?? 0; // crosses of several cells at one learning rate are stacked
        crosses.set(lr, stacked + 1);
        return high + (0.08 + 0.1 * stacked) * (high - low);
      }),
      type: "scatter",
      mode: "markers+text",
      showlegend: false,
      marker: { color: colour, symbol: "x-thin", size: 10, line: { width: 3, color: colour } },
      text: diverged.map((point) => `${point.seeds_diverged}/${point.seeds}`),
      textposition: "middle left",
      textfont: { size: 10 },
      name: plain(cell.label),
      hovertemplate: "%{fullData.name}<br>lr %{x:g}: %{text} diverged<extra></extra>",
    });
  }
  const withS = cells.filter((cell) => cell.lr_sensitivity !== null);
  const bars = withS.slice(0, MAX_BARS).reverse();
  const unusable = cells.filter((cell) => cell.text.S === "-").map(({ label }) => label);
  traces.push({
    x: bars.map((cell) => cell.lr_sensitivity),
    y: bars.map((cell) => plain(cell.label)),
    type: "bar",
    orientation: "h",
    xaxis: "x2",
    yaxis: "y2",
    showlegend: false,
    marker: { color: bars.map((cell) => styleOf(cell.index).colour) },
    text: bars.map((cell) => cell.text.S),
    textposition: "auto",
    cliponaxis: false,
    customdata: bars.map((cell) => [cell.text["usable lr"] || "none", cell.text["edge lr"] || "not in the grid"]),
    hovertemplate: "%{y}: S = %{x:.4f}<br>usable %{customdata[0]}; edge %{customdata[1]}<extra></extra>",
    meta: { sensitivity: true },
  });
  const letters = Math.min(narrow ? 16 : 30, Math.max(...cells.map((cell) => cell.label.length)));
  const barsHeight = Math.max(120, bars.length * 22 + 60);
  const height = narrow ? 340 + barsHeight + 60 : Math.max(420, barsHeight);
  const split = narrow ? (barsHeight + 10) / height : 0;
  const learningRates = [...new Set(allPoints.map(({ lr }) => lr))].sort((a, b) => a - b);
  return {
    traces,
    layout: {
      height,
      xaxis: {
        type: "log",
        title: { text: "learning rate" },
        domain: narrow ? [0, 1] : [0, 0.74 - (7 * letters + 14) / (width - 72)],
        anchor: "y",
        tickvals: evenly(learningRates, narrow ? 3 : 8),
        tickformat: ".2~g",
        tickangle: 0,
      },
      yaxis: {
        title: { text: "final validation loss, nats/token" },
        range: [low - 0.05 * (high - low), high + (0.08 + 0.1 * Math.max(0, ...crosses.values())) * (high - low)],
        domain: narrow ? [split + 84 / height, 1] : [0, 1],
        anchor: "x",
      },
      xaxis2: { title: { text: "S, nats" }, domain: narrow ? [0, 1] : [0.76, 1], anchor: "y2", rangemode: "tozero" },
      yaxis2: {
        type: "category", // a cell's name can be a number
        domain: narrow ? [0, split] : [0, 1],
        anchor: "x2",
        fixedrange: true,
        tickvals: bars.map((cell) => plain(cell.label)),
        ticktext: bars.map((cell) => plain(short(cell.label, letters))),
      },
    },
    rows: () => [
      ["cell", ...LOSS_COLUMNS, "S"],
      ...cells.flatMap((cell) => pointsOf(cell).map((row) => [cell.label, ...lossValues(row), cell.lr_sensitivity])),
    ],
    caption:
      `${LOSS}, at each learning rate: mean with its ${INTERVAL}, and the seeds. Intervals wider than the plot are cut off. ` +
      "✕ with k/n: k of n seeds diverged, and the learning rate has no mean. " +
      "S: mean over the learning rates of min(loss, ln V), minus the lowest loss of a usable one, in nats; a diverged run counts as ln V " +
      "(Wortsman et al. 2023, arXiv:2309.14322). S depends on the grid of learning rates." +
      (unusable.length ? ` No S, because no learning rate is usable: ${unusable.join(", ")}.` : "") +
      (withS.length > bars.length ? ` S of ${withS.length - bars.length} more cells is in the table.` : ""),
  };
}

/** The range of the loss axis: all losses, and intervals up to the range of the losses beyond them. */
function lossRange(points) {
  const finite = (values) => values.map(number).filter(Number.isFinite);
  const losses = finite(
    points.flatMap((point) => [point.val_loss, point.val_loss_of_others, ...point.runs.map(({ loss }) => loss)]),
  );
  const [least, largest] = losses.length ? [leastOf(losses), largestOf(losses)] : [0, 1];
  const intervals = points.filter(hasInterval);
  const room = largest - least || 0.1 * Math.abs(largest) || 1;
  return [
    Math.max(least - room, Math.min(least, leastOf(finite(intervals.map((point) => point.val_loss_low))))),
    Math.min(largest + room, Math.max(largest, largestOf(finite(intervals.map((point) => point.val_loss_high))))),
  ];
}

/** At most `most` of the values, evenly spaced, with the first and the last. */
function evenly(values, most) {
  if (values.length <= most) return values;
  return Array.from({ length: most }, (_, i) => values[Math.round((i * (values.length - 1)) / (most - 1))]);
}
