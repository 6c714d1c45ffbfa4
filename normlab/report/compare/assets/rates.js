// Final loss against the learning rate, a line a cell, with how much each cell's loss depends on it beside.

const MOST_BARS = 30;

function drawRates(width) {
  const cells = visibleCells()
    .map((cell) => [cell, DATA.rates.curves.find((curve) => curve.cell === cell.index)])
    .filter(([, curve]) => curve?.points.length);
  if (!cells.length)
    return { empty: CELLS.length ? "No cell that is shown has a result." : "No run here has a result yet." };
  if (cells.every(([, curve]) => curve.points.length < 2))
    return {
      empty: "Each cell was trained at one learning rate: sweep optim.lr=1e-3,3e-3,1e-2 to see how much it matters.",
    };
  const narrow = width < NARROW;
  const finite = (values) => values.map(number).filter((value) => Number.isFinite(value));
  const points = cells.flatMap(([, curve]) => curve.points);
  const seen = finite(
    points.flatMap((point) => [point.mean, point.of_others, ...point.losses.map(({ loss }) => loss)]),
  );
  const [least, most] = seen.length ? [Math.min(...seen), Math.max(...seen)] : [0, 1];
  // Of two seeds an interval may be ten times as wide as all that was seen: it may take as much room again, not more.
  const room = most - least || 0.1 * Math.abs(most) || 1;
  const low = Math.max(least - room, Math.min(least, ...finite(points.map((point) => point.low))));
  const high = Math.min(most + room, Math.max(most, ...finite(points.map((point) => point.high))));
  const crosses = new Map();
  const traces = [],
    rows = [["cell", "learning rate", "mean val loss", "low", "high", "n", "diverged", "of others"]];
  for (const [cell, { points }] of cells) {
    const { colour, dash, symbol } = styleOf(cell.index);
    const mean = (point) => number(point.mean);
    rows.push(
      ...points.map((point) => [
        cell.label,
        point.lr,
        point.mean,
        point.low,
        point.high,
        point.n,
        point.diverged,
        point.of_others,
      ]),
    );
    traces.push({
      x: points.map((point) => point.lr),
      y: points.map((point) => (Number.isFinite(mean(point)) ? mean(point) : NaN)),
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
        array: points.map((point) => (number(point.high) === null ? 0 : point.high - point.mean)),
        arrayminus: points.map((point) => (number(point.low) === null ? 0 : point.mean - point.low)),
      },
      text: points.map((point) => `n=${counted(point.n, point.crossed)}`),
      hovertemplate: "%{fullData.name}<br>lr %{x:g}: %{y:.4f} (%{text})<extra></extra>",
      meta: { cell: cell.index },
    });
    const seeds = points.flatMap((point) =>
      point.losses
        .filter(({ run, loss }) => visible(RUNS[run]) && Number.isFinite(number(loss)))
        .map(({ run, loss }) => [point.lr, loss, called(RUNS[run])]),
    );
    traces.push({
      x: seeds.map(([lr]) => lr),
      y: seeds.map(([, loss]) => loss),
      text: seeds.map(([, , name]) => plain(name)),
      type: "scatter",
      mode: "markers",
      showlegend: false,
      marker: { color: colour, size: 4, opacity: 0.5 },
      hovertemplate: "%{text}<br>lr %{x:g}: %{y:.4f}<extra></extra>",
    });
    // One above the other where several cells have them at one rate.
    const diverged = points.filter((point) => point.diverged);
    const heights = diverged.map((point) => {
      const stacked = crosses.get(point.lr) ?? 0;
      crosses.set(point.lr, stacked + 1);
      return high + (0.08 + 0.1 * stacked) * (high - low);
    });
    traces.push({
      x: diverged.map((point) => point.lr),
      y: heights,
      type: "scatter",
      mode: "markers+text",
      showlegend: false,
      marker: { color: colour, symbol: "x-thin", size: 10, line: { width: 3, color: colour } },
      text: diverged.map((point) => `${point.diverged}/${point.n}`),
      textposition: "middle left",
      textfont: { size: 10 },
      name: plain(cell.label),
      hovertemplate: "%{fullData.name}<br>lr %{x:g}: %{text} diverged<extra></extra>",
    });
  }
  const all = cells.map(([cell]) => cell).filter((cell) => cell.lr_sensitivity !== null);
  const known = all.slice(0, MOST_BARS).reverse();
  const unusable = cells.map(([cell]) => cell).filter((cell) => cell.text.S === "-");
  traces.push({
    x: known.map((cell) => cell.lr_sensitivity),
    y: known.map((cell) => plain(cell.label)),
    type: "bar",
    orientation: "h",
    xaxis: "x2",
    yaxis: "y2",
    showlegend: false,
    marker: { color: known.map((cell) => styleOf(cell.index).colour) },
    text: known.map((cell) => cell.lr_sensitivity.toFixed(3)),
    textposition: "auto",
    cliponaxis: false,
    customdata: known.map((cell) => [cell.text["usable lr"] || "none", cell.text["edge lr"] || "not in the grid"]),
    hovertemplate: "%{y}: S = %{x:.4f}<br>usable %{customdata[0]}; edge %{customdata[1]}<extra></extra>",
    meta: { sensitivity: true },
  });
  const letters = Math.min(narrow ? 16 : 30, Math.max(...cells.map(([cell]) => cell.label.length)));
  const bars = Math.max(120, known.length * 22 + 60);
  const height = narrow ? 340 + bars + 60 : Math.max(420, bars);
  const split = narrow ? (bars + 10) / height : 0;
  rows.push([], ["cell", "S"], ...all.map((cell) => [cell.label, cell.lr_sensitivity]));
  return {
    traces,
    layout: {
      height,
      xaxis: {
        type: "log",
        title: { text: "learning rate" },
        domain: narrow ? [0, 1] : [0, 0.74 - (7 * letters + 14) / (width - 72)],
        anchor: "y",
        tickvals: spread(
          [...new Set(points.map((point) => point.lr))].sort((a, b) => a - b),
          narrow ? 3 : 8,
        ),
        tickformat: ".2~g",
        tickangle: 0,
      },
      yaxis: {
        title: { text: "final validation loss, nats a token" },
        range: [low - 0.05 * (high - low), high + (0.08 + 0.1 * Math.max(0, ...crosses.values())) * (high - low)],
        domain: narrow ? [split + 84 / height, 1] : [0, 1],
        anchor: "x",
      },
      xaxis2: { title: { text: "S, nats" }, domain: narrow ? [0, 1] : [0.76, 1], anchor: "y2", rangemode: "tozero" },
      yaxis2: {
        type: "category", // a cell's name may be a number
        domain: narrow ? [0, split] : [0, 1],
        anchor: "x2",
        fixedrange: true,
        tickvals: known.map((cell) => plain(cell.label)),
        ticktext: known.map((cell) => plain(short(cell.label, letters))),
      },
    },
    numbers: () => rows,
    caption:
      `${LOSS}, at each learning rate: the mean with its ${(DATA.level * 100).toFixed(0)}% interval over n seeds, and the seeds; one that leaves the picture is wider than it. ✕: so many of its seeds diverged; such a rate has no mean. ` +
      "S = mean over the learning rates of min(loss, ln V) less the least of a usable one, nats; a diverged run counts as ln V (Wortsman et al. 2023, arXiv:2309.14322). Read it with what diverged; of another grid it is another number." +
      (unusable.length ? ` Without S, for no rate is usable: ${unusable.map(({ label }) => label).join(", ")}.` : "") +
      (all.length > known.length ? ` S of ${all.length - known.length} more cells is in the table.` : ""),
  };
}

/** At most so many of some values, the first and the last among them. */
function spread(values, most) {
  if (values.length <= most) return values;
  return Array.from({ length: most }, (_, i) => values[Math.round((i * (values.length - 1)) / (most - 1))]);
}
