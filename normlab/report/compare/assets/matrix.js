// Norm by placement, one panel per depth: the final loss at each combination's best learning rate.

const COLOUR_SCALE = "Cividis"; // uniform in lightness, and readable with any colour vision

function drawMatrix(width) {
  const { norms, placements, depths } = DATA.matrix;
  const cells = DATA.matrix.cells.filter((cell) => cell.runs.some((index) => visible(RUNS[index])));
  if (!cells.length) return { empty: "No selected run has its settings on record." };
  const losses = cells.map((cell) => number(cell.val_loss)).filter(Number.isFinite);
  const [least, largest] = losses.length ? [leastOf(losses), largestOf(losses)] : [0, 1];
  const panels = depths.filter((depth) => cells.some((cell) => cell.depth === depth));
  const narrow = width < NARROW;
  const room = (names, least) =>
    Math.max(least, ...names.map((name) => 7.2 * Math.min(name.length, MAX_LETTERS) + 14));
  const columnWidth = room(norms, 92);
  const side = room(placements, 50);
  const fitting = Math.floor((width - side - 80) / (norms.length * columnWidth + 20));
  const columns = narrow ? 1 : Math.min(panels.length, Math.max(1, fitting));
  const rows = Math.ceil(panels.length / columns);
  const rowHeight = 58;
  const addPanel = panelGrid(columns, rows, { x: narrow ? 0.3 : 0.06, y: 80 / (placements.length * rowHeight + 80) });
  const colorbar = { title: { text: "nats", side: "right" }, thickness: 12, len: Math.min(1, 260 / (rows * 200)) };
  const layout = {
    annotations: [],
    height: rows * (placements.length * rowHeight + 80) + 40,
    coloraxis: {
      colorscale: COLOUR_SCALE,
      cmin: least,
      cmax: largest,
      colorbar: { ...colorbar, y: 1, yanchor: "top" },
    },
  };
  // List the categories, because Plotly cannot infer them from an empty heatmap.
  const category = (names) => ({ type: "category", categoryarray: names, showgrid: false, fixedrange: true });
  const traces = panels.map((depth, index) => {
    const axes = addPanel(
      layout,
      index,
      `depth ${depth}`,
      { ...category(norms.map(plain)), range: [-0.5, norms.length - 0.5], tickangle: 0 },
      {
        ...category(placements.map(plain)),
        range: [placements.length - 0.5, -0.5],
        showticklabels: index % columns === 0, // panels of a row share their labels
      },
    );
    const ofPanel = cells.filter((cell) => cell.depth === depth);
    const z = placements.map(() => norms.map(() => null));
    for (const cell of ofPanel) {
      const [row, column] = [placements.indexOf(cell.placement), norms.indexOf(cell.norm)];
      const loss = number(cell.val_loss);
      const finite = Number.isFinite(loss);
      if (finite) z[row][column] = loss;
      const light = finite && (largest > least ? (loss - least) / (largest - least) : 1) > 0.55;
      layout.annotations.push({
        x: column,
        y: row,
        xref: axes.xaxis,
        yref: axes.yaxis,
        showarrow: false,
        text: matrixText(cell),
        align: "center",
        font: { size: 11, color: !finite ? themed("text") : light ? "#111111" : "#ffffff" },
      });
    }
    return {
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
    };
  });
  const mixed = [...new Set(cells.map(mixtures))].filter(Boolean);
  return {
    traces,
    layout,
    width: columns * (norms.length * columnWidth + 20) + side + 80,
    rows: () => [
      ["norm", "placement", "depth", ...LOSS_COLUMNS, "runs"],
      ...cells.map((cell) => [cell.norm, cell.placement, cell.depth, ...lossValues(cell), cell.runs.length]),
    ],
    caption:
      `${LOSS}, at each combination's best learning rate: mean ± its ${INTERVAL} or both of two seeds, and the number of diverged runs at all learning rates. Darker is lower. ` +
      "A combination with a diverged seed has no mean and no colour. Source: `normlab summarize --by norm,placement,model.depth`." +
      (mixed.length ? ` * is a mean over runs that also differ in: ${mixed.join("; ")}.` : ""),
  };
}

/** The options in which the averaged runs of a combination differ. */
const mixtures = (cell) =>
  cell.warnings
    .filter((warning) => warning.startsWith("mixes "))
    .map((warning) => warning.replace("mixes ", ""))
    .join(", ");

/** The text of a field of the matrix: the loss, its interval and n, and the number of diverged runs. */
function matrixText(cell) {
  const [first, ...others] = (cell.text || NO_RESULT).split(/ (?=±)| (?=\()|(?<=and) |, /);
  if (!Number.isFinite(number(cell.val_loss))) return [first, ...others].join("<br>");
  const lines = [`<b>${first}${mixtures(cell) ? "*" : ""}</b>`, others.join(" ")];
  if (cell.diverged) lines.push(`${cell.diverged} diverged`);
  return lines.join("<br>");
}
