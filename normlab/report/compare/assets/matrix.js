// Norm by placement, a panel a depth: the final loss at each cell's own best learning rate, with n and what diverged.

const SCALE = "Cividis"; // even in lightness, the same to every eye

function drawMatrix(width) {
  const { norms, placements, depths } = DATA.matrix;
  const cells = DATA.matrix.cells.filter((cell) => cell.runs.some((index) => visible(RUNS[index])));
  if (!cells.length) return { empty: "No run that is shown says what it was." };
  const means = cells.map((cell) => number(cell.val_loss)).filter((value) => Number.isFinite(value));
  const [least, most] = means.length ? [Math.min(...means), Math.max(...means)] : [0, 1];
  const panels = depths.filter((depth) => cells.some((cell) => cell.depth === depth));
  const narrow = width < NARROW;
  const room = (names, least) =>
    Math.max(least, ...names.map((name) => 7.2 * Math.min(name.length, MOST_LETTERS) + 14));
  const column = room(norms, 80),
    side = room(placements, 50);
  const across = narrow
    ? 1
    : Math.min(panels.length, Math.max(1, Math.floor((width - side - 80) / (norms.length * column + 20))));
  const down = Math.ceil(panels.length / across);
  const mixed = [...new Set(cells.map(mixes))].filter(Boolean);
  const traces = [],
    annotations = [];
  const panel = panelsOf(across, down, { x: narrow ? 0.3 : 0.06, y: 80 / (placements.length * 58 + 80) });
  const layout = {
    annotations,
    coloraxis: {
      colorscale: SCALE,
      cmin: least,
      cmax: most,
      colorbar: {
        title: { text: "nats", side: "right" },
        thickness: 12,
        len: Math.min(1, 260 / (down * 200)),
        y: 1,
        yanchor: "top",
      },
    },
  };
  panels.forEach((depth, place) => {
    const axes = panel(
      layout,
      place,
      `depth ${depth}`,
      {
        type: "category",
        categoryarray: norms.map(plain), // with nothing to colour Plotly would not know of them
        range: [-0.5, norms.length - 0.5],
        showgrid: false,
        fixedrange: true,
        tickangle: 0,
      },
      {
        type: "category",
        categoryarray: placements.map(plain),
        range: [placements.length - 0.5, -0.5],
        showgrid: false,
        fixedrange: true,
        showticklabels: place % across === 0, // the same beside every panel
      },
    );
    const at = (norm, placement) =>
      cells.find((cell) => cell.depth === depth && cell.norm === norm && cell.placement === placement);
    const z = placements.map((placement) =>
      norms.map((norm) => {
        const mean = number(at(norm, placement)?.val_loss ?? null);
        return Number.isFinite(mean ?? NaN) ? mean : null;
      }),
    );
    traces.push({
      z,
      x: norms.map(plain),
      y: placements.map(plain),
      type: "heatmap",
      ...axes,
      coloraxis: "coloraxis",
      xgap: 2,
      ygap: 2,
      hoverinfo: "skip",
      showlegend: false,
      meta: { depth },
    });
    placements.forEach((placement, row) =>
      norms.forEach((norm, column) => {
        const cell = at(norm, placement);
        if (!cell) return;
        const mean = z[row][column];
        const light = mean !== null && (most > least ? (mean - least) / (most - least) : 1) > 0.55;
        annotations.push({
          x: column,
          y: row,
          xref: axes.xaxis,
          yref: axes.yaxis,
          showarrow: false,
          text: matrixText(cell),
          align: "center",
          font: { size: 11, color: mean === null ? themed("text") : light ? "#111111" : "#ffffff" },
        });
      }),
    );
  });
  return {
    traces,
    layout: { ...layout, height: down * (placements.length * 58 + 80) + 40 },
    width: across * (norms.length * column + 20) + side + 80,
    numbers: () => [
      ["norm", "placement", "depth", "learning rate", "val loss", "low", "high", "n", "diverged", "of others", "runs"],
      ...cells.map((cell) => [
        cell.norm,
        cell.placement,
        cell.depth,
        cell.lr,
        cell.val_loss,
        cell.val_loss_low,
        cell.val_loss_high,
        cell.seeds,
        cell.seeds_diverged,
        cell.val_loss_of_others,
        cell.runs.length,
      ]),
    ],
    caption:
      `${LOSS}, at each combination's own best learning rate: mean ± its ${(DATA.level * 100).toFixed(0)}% interval over n seeds, and how many of all its runs diverged. Darker is lower. A cell in which a seed diverged has no mean and no colour. Source: the runs' records, as \`normlab summarize --by norm,placement,model.depth\`.` +
      (mixed.length ? ` * is the mean of runs that differ in more: ${mixed.join("; ")}.` : ""),
  };
}

/** What a cell of the matrix holds that should not be averaged: it has runs of every width, say, that was swept. */
const mixes = (cell) =>
  cell.warnings
    .filter((warning) => warning.startsWith("mixes "))
    .map((warning) => warning.replace("mixes ", ""))
    .join(", ");

/** What stands in a cell of the matrix. */
function matrixText(cell) {
  const mean = number(cell.val_loss),
    high = number(cell.val_loss_high);
  const lines = [];
  if (mean === null) lines.push("no result");
  else if (!Number.isFinite(mean)) {
    lines.push(`${cell.seeds_diverged} of ${cell.seeds}`, "diverged");
    if (cell.val_loss_of_others !== null) lines.push(`others ${cell.val_loss_of_others.toFixed(3)}`);
  } else
    lines.push(
      `<b>${mean.toFixed(4)}${mixes(cell) ? "*" : ""}</b>`,
      (high === null ? "" : `±${(high - mean).toFixed(4)} `) + `n=${counted(cell.seeds, cell.seeds_crossed)}`,
    );
  if (cell.diverged && Number.isFinite(mean ?? NaN)) lines.push(`${cell.diverged} diverged`);
  return lines.join("<br>");
}
