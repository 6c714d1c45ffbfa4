// The answer: each cell's final validation loss at its own best learning rate, with its interval, its seeds, and what diverged.

const LOSS = "Final validation loss: mean cross entropy over the held-out windows, nats a token";
const MOST_CELLS = 40;

/** 1.8321 ± 0.0102 (n=3), or what became of the runs. */
function lossText(row) {
  const mean = number(row.val_loss),
    n = row.seeds,
    diverged = row.seeds_diverged;
  if (mean === null) return "no result";
  if (diverged)
    return (
      `${diverged} of ${n} diverged` +
      (row.val_loss_of_others === null ? "" : `, others ${row.val_loss_of_others.toFixed(4)}`)
    );
  const high = number(row.val_loss_high);
  const interval = high === null ? "" : ` ± ${(high - mean).toFixed(4)}`;
  return `${mean.toFixed(4)}${interval} (n=${counted(n, row.seeds_crossed)})`;
}

/** The cells as they are ranked: no diverged seed before any, then by the loss. */
function ranked(cells) {
  const key = (cell) => {
    const mean = number(cell.val_loss);
    if (mean === null) return [2, 0];
    return Number.isFinite(mean) ? [0, mean] : [1 + cell.seeds_diverged / cell.seeds, cell.val_loss_of_others ?? 0];
  };
  return [...cells].sort((a, b) => key(a)[0] - key(b)[0] || key(a)[1] - key(b)[1]);
}

function drawAnswer(width) {
  const all = ranked(visibleCells());
  const cells = all.slice(0, MOST_CELLS);
  if (!cells.length)
    return {
      empty: CELLS.length ? "No cell is shown: tick one, or empty the filter." : "No run here has a result yet.",
    };
  const narrow = width < NARROW;
  const traces = [],
    rows = [["cell", "learning rate", "val loss", "low", "high", "n", "diverged", "of others"]];
  const annotations = [];
  cells.forEach((cell, place) => {
    const y = cells.length - place;
    const { colour, symbol } = styleOf(cell.index);
    const mean = number(cell.val_loss),
      finite = Number.isFinite(mean ?? NaN);
    const at = finite ? mean : number(cell.val_loss_of_others);
    const high = number(cell.val_loss_high);
    rows.push([
      cell.label,
      cell.lr,
      cell.val_loss,
      cell.val_loss_low,
      cell.val_loss_high,
      cell.seeds,
      cell.seeds_diverged,
      cell.val_loss_of_others,
    ]);
    const point = DATA.rates.curves.find((curve) => curve.cell === cell.index)?.points.find(({ lr }) => lr === cell.lr);
    // Of a run that diverged there is no final loss, whatever its last evaluation was.
    const seeds = (point?.losses ?? []).filter(({ run, loss }) => visible(RUNS[run]) && Number.isFinite(number(loss)));
    traces.push({
      x: seeds.map(({ loss }) => loss),
      y: seeds.map(() => y),
      mode: "markers",
      type: "scatter",
      showlegend: false,
      marker: { color: colour, size: 12, opacity: 0.7, symbol: "line-ns", line: { width: 1.5, color: colour } },
      text: seeds.map(({ run }) => plain(called(RUNS[run]))),
      hovertemplate: "%{text}: %{x:.4f}<extra></extra>",
    });
    if (at !== null && at !== undefined) {
      traces.push({
        x: [at],
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
        error_x:
          high === null || !finite
            ? {}
            : {
                type: "data",
                array: [high - mean],
                arrayminus: [mean - number(cell.val_loss_low)],
                color: colour,
                thickness: 2,
                width: 5,
              },
        text: [`${plain(lossText(cell))}<br>lr ${cell.lr}`],
        hovertemplate: "%{fullData.name}: %{text}<extra></extra>",
      });
    }
    // As much of a name as there is room for: on a phone beside its number, else to the left of the picture.
    const letters = narrow ? (width - 30) / 6 - lossText(cell).length - 2 : (width * 0.35 - 20) / 7.4;
    const name = plain(short(cell.label, letters));
    annotations.push({
      x: 0,
      xref: "paper",
      xanchor: narrow ? "left" : "right",
      xshift: narrow ? 2 : -8,
      y,
      yshift: narrow ? 15 : 0,
      showarrow: false,
      text: (cell.index === DATA.best ? `<b>${name}</b>` : name) + (narrow ? `: ${plain(lossText(cell))}` : ""),
      font: { size: narrow ? 11 : 13 },
    });
    if (!narrow)
      annotations.push({
        x: 1,
        xref: "paper",
        xanchor: "left",
        xshift: 8,
        y,
        showarrow: false,
        text: plain(lossText(cell)),
        font: { size: 12 },
      });
  });
  const widest = Math.max(...cells.map((cell) => cell.label.length)),
    said = Math.max(...cells.map((cell) => lossText(cell).length));
  const margin = narrow
    ? { l: 12, r: 12, t: 24 }
    : { l: Math.min(7.4 * widest + 20, width * 0.35), r: Math.min(6.6 * said + 20, width * 0.35), t: 12 };
  const left = all.length - cells.length;
  return {
    traces,
    layout: {
      height: Math.max(150, cells.length * (narrow ? 38 : 30) + 80),
      margin,
      annotations,
      xaxis: {
        title: { text: "final validation loss, nats a token" },
        zeroline: false,
        visible: traces.some((trace) => trace.x.length),
      },
      yaxis: { visible: false, range: [0.4, cells.length + (narrow ? 0.9 : 0.6)], fixedrange: true },
    },
    numbers: () => rows,
    caption:
      `${LOSS}, of each cell (${DATA.by.join(", ")}) at its own best learning rate: the mean with its ${(DATA.level * 100).toFixed(0)}% interval over n seeds (Student's t); ` +
      "strokes are the seeds. A hollow mark is the mean of the seeds that did not diverge. The best learning rate was chosen by this very loss. " +
      `Source: the runs' records, as \`normlab summarize --by ${DATA.by.join(",")}\`.` +
      (left ? ` ${left} more cells are in the table.` : ""),
  };
}
