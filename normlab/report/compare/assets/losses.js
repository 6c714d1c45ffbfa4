// Final validation loss of each cell at its best learning rate, with its interval and its seeds.

const LOSS = "Final validation loss: mean cross entropy over the held-out windows, nats/token";
const INTERVAL = `${(DATA.level * 100).toFixed(0)}% interval over three seeds or more (Student's t)`;
/** Whether a loss is drawn with its interval. The interval of two seeds is wider than the plot. */
const hasInterval = (row) => number(row.val_loss_high) !== null && row.seeds > 2;
const NO_RESULT = "no result";
const MAX_CELLS = 40;

/** The CSV columns of the loss of a cell, or of a cell at one learning rate. */
const LOSS_COLUMNS = ["learning rate", "val loss", "low", "high", "n", "diverged", "of others"];
const lossValues = (row) => [
  row.lr,
  row.val_loss,
  row.val_loss_low,
  row.val_loss_high,
  row.seeds,
  row.seeds_diverged,
  row.val_loss_of_others,
];

/** The seeds of a cell at one learning rate, without diverged runs, which have no final loss. */
function seedPoints(point) {
  return point.runs
    .filter(({ run, loss }) => visible(RUNS[run]) && Number.isFinite(number(loss)))
    .map(({ run, loss }) => ({ lr: point.lr, loss, name: plain(runName(RUNS[run])) }));
}

function drawLosses(width) {
  const all = visibleCells(DATA.order);
  const cells = all.slice(0, MAX_CELLS);
  if (!cells.length) return { empty: CELLS.length ? NOTHING_SELECTED : "No run has a final loss yet." };
  const narrow = width < NARROW;
  const lossText = (cell) => cell.text["val loss"] || NO_RESULT;
  const traces = [];
  const annotations = [];
  cells.forEach((cell, index) => {
    const y = cells.length - index;
    const { colour, symbol } = styleOf(cell.index);
    const mean = number(cell.val_loss);
    const high = number(cell.val_loss_high);
    const finite = Number.isFinite(mean);
    const x = finite ? mean : number(cell.val_loss_of_others);
    const seeds = DATA.rates[cell.index].filter(({ lr }) => lr === cell.lr).flatMap(seedPoints);
    traces.push({
      x: seeds.map(({ loss }) => loss),
      y: seeds.map(() => y),
      mode: "markers",
      type: "scatter",
      showlegend: false,
      marker: { color: colour, size: 12, opacity: 0.7, symbol: "line-ns", line: { width: 1.5, color: colour } },
      text: seeds.map(({ name }) => name),
      hovertemplate: "%{text}: %{x:.4f}<extra></extra>",
    });
    if (x !== null) {
      const bar = { type: "data", array: [high - mean], arrayminus: [mean - number(cell.val_loss_low)] };
      traces.push({
        x: [x],
        y: [y],
        mode: "markers",
        type: "scatter",
        showlegend: false,
        name: plain(cell.label),
        meta: { cell: cell.index },
        marker: {
          color: colour,
          size: 11,
          symbol: finite ? symbol : `${symbol}-open`,
          line: { width: 2, color: colour },
        },
        error_x: !hasInterval(cell) || !finite ? {} : { ...bar, color: colour, thickness: 2, width: 5 },
        text: [`${plain(lossText(cell))}<br>lr ${cell.lr}`],
        hovertemplate: "%{fullData.name}: %{text}<extra></extra>",
      });
    }
    // On a phone the name and the loss are above the mark, else to the left and to the right of the plot.
    const letters = narrow ? (width - 30) / 6 - lossText(cell).length - 2 : (width * 0.35 - 20) / 7.4;
    const name = plain(short(cell.label, letters));
    const bold = cell.index === DATA.best ? `<b>${name}</b>` : name;
    const label = { x: 0, xref: "paper", y, showarrow: false };
    if (narrow) {
      const text = `${bold}: ${plain(lossText(cell))}`;
      annotations.push({ ...label, xanchor: "left", xshift: 2, yshift: 15, text, font: { size: 11 } });
    } else {
      annotations.push({ ...label, xanchor: "right", xshift: -8, text: bold });
      const text = plain(lossText(cell));
      annotations.push({ ...label, x: 1, xanchor: "left", xshift: 8, text, font: { size: 12 } });
    }
  });
  const longestName = Math.max(...cells.map((cell) => cell.label.length));
  const longestLoss = Math.max(...cells.map((cell) => lossText(cell).length));
  const margin = narrow
    ? { l: 12, r: 12, t: 24 }
    : { l: Math.min(7.4 * longestName + 20, width * 0.35), r: Math.min(6.6 * longestLoss + 20, width * 0.35), t: 12 };
  const hidden = all.length - cells.length;
  return {
    traces,
    layout: {
      height: Math.max(150, cells.length * (narrow ? 38 : 30) + 80),
      margin,
      annotations,
      xaxis: {
        title: { text: "final validation loss, nats/token" },
        zeroline: false,
        visible: traces.some((trace) => trace.x.length),
      },
      yaxis: { visible: false, range: [0.4, cells.length + (narrow ? 0.9 : 0.6)], fixedrange: true },
    },
    rows: () => [["cell", ...LOSS_COLUMNS], ...cells.map((cell) => [cell.label, ...lossValues(cell)])],
    caption:
      `${LOSS}, of each cell (${DATA.by.join(", ")}) at its best learning rate, which is selected on this same loss. ` +
      `Mark: mean with its ${INTERVAL}; strokes: seeds; hollow mark: mean of the seeds that did not diverge. ` +
      `Source: \`normlab summarize --by ${DATA.by.join(",")}\`.` +
      (hidden ? ` ${hidden} more cells are in the table.` : ""),
  };
}
