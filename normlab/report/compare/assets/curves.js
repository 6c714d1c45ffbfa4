// Loss and gradient norm over training: a line per run, or per cell with a band over seeds, with optional smoothing.

const curves = { of: "loss", axis: "steps", logX: false, logY: false, halfLife: 0, marks: true, late: false };

const QUANTITIES = {
  loss: {
    name: "training loss",
    unit: "nats/token",
    formula: "mean cross entropy of the step's tokens, at every step, before its update",
  },
  val: {
    name: "validation loss",
    unit: "nats/token",
    formula: "mean cross entropy over the held-out windows, at every evaluation",
  },
  grad_norm: {
    name: "gradient norm",
    unit: "nats",
    formula: "|g|_2 over all parameters, at every step, before clipping",
  },
};
const AXES = { steps: "step", tokens: "tokens", seconds: "training time, s (without evaluations and checkpoints)" };
const HALF_LIVES = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const LAST_STEP = Math.max(0, ...RUNS.map((run) => run.step ?? 0));
/** The end of the first tenth of training, which the user can hide to enlarge the rest. */
const LATE = Math.floor(LAST_STEP / 10);

/** A function from a step of a run to its position on the selected axis. */
function axisOf(run) {
  if (curves.axis === "tokens") return (step) => (run.tokens_per_step === null ? NaN : step * run.tokens_per_step);
  if (curves.axis === "steps") return (step) => step;
  const start = run.paces.steps[0] === 0 ? [] : [0];
  const [steps, seconds] = [start.concat(run.paces.steps), start.concat(run.paces.seconds)];
  return (step) => (steps.length < 2 ? NaN : interpolate([Math.min(step, steps.at(-1))], steps, seconds)[0]);
}

function drawCurves(width) {
  const quantity = QUANTITIES[curves.of];
  const traces = [];
  const missing = [];
  let unmarked = 0;
  for (const group of groups()) {
    for (const run of group.runs)
      unmarked += (run.spike_counts[curves.of] ?? 0) - (run.spikes[curves.of]?.length ?? 0);
    const members = group.runs.map((run) => [run, curveOf(run, curves.of)]).filter(([, curve]) => curve);
    if (!members.length) missing.push(group.label);
    else traces.push(...(state.group === "runs" ? runTraces(group, ...members[0]) : cellTraces(group, members)));
    if (curves.marks) traces.push(...members.flatMap(([run, curve]) => marks(run, curve)));
  }
  if (!traces.length) return { empty: `No selected run has a ${quantity.name} on record.` };
  const shown = curves.late ? traces.map(withoutStart).filter((trace) => trace.x.length) : traces;
  const lines = shown.filter((trace) => trace.fill !== "toself");
  const axis = `${quantity.name}, ${quantity.unit}`;
  const rule = DATA.spike_rules[curves.of === "grad_norm" ? "grad_norm" : "loss"];
  return {
    traces: shown,
    layout: {
      height: width < NARROW ? 320 : 440,
      xaxis: { title: { text: AXES[curves.axis] }, type: curves.logX ? "log" : "linear" },
      yaxis: {
        title: { text: axis },
        ...scaled(
          curves.logY,
          lines.flatMap((trace) => trace.y),
        ),
      },
      uirevision: [curves.of, curves.axis, curves.logX, curves.logY, curves.late].join(),
    },
    rows: () => pointRows(["line", "kind", AXES[curves.axis], axis], shown),
    caption:
      `${quantity.name[0].toUpperCase()}${quantity.name.slice(1)}: ${quantity.formula}; ${quantity.unit}.` +
      (state.group === "cells"
        ? " Line: mean over a cell's seeds at the selected learning rate; band: minimum to maximum; dotted: mean of the remaining seeds after one diverged."
        : "") +
      (curves.halfLife && curves.of !== "val"
        ? ` Smoothed by a local linear fit whose weight halves every ${curves.halfLife} steps; pale: the measured values.`
        : "") +
      ` ✕: diverged. △: spike (${rule.formula}; ${rule.source}). Sampling: ${DATA.sampling}.` +
      (unmarked ? ` Only the first spikes of a run are marked; ${unmarked} spikes are not.` : "") +
      (missing.length ? ` No record: ${missing.join(", ")}.` : ""),
  };
}

/** A trace without the first tenth of training. */
function withoutStart(trace) {
  const late = (_, i) => trace.steps[i] >= LATE;
  return { ...trace, x: trace.x.filter(late), y: trace.y.filter(late), text: trace.text?.filter(late) };
}

function runTraces(group, run, curve) {
  const { colour, dash } = styleOf(group.cell);
  const axis = axisOf(run);
  const name = plain(group.label);
  const style = { color: colour, width: 1.4, dash };
  const raw = line(curve.steps, axis, curve.values, style, name, [group.label, "measured"]);
  if (!curves.halfLife || curves.of === "val") return [raw];
  const means = smoothed(curve.middles, curve.means, curves.halfLife);
  const behind = { showlegend: false, opacity: 0.25, hoverinfo: "skip", hovertemplate: "" };
  return [
    { ...raw, ...behind, line: { ...raw.line, dash: "solid", width: 1 } },
    line(curve.middles, axis, means, { ...style, width: 2 }, name, [group.label, "smoothed"]),
  ];
}

function cellTraces(group, members) {
  const { colour, dash } = styleOf(group.cell);
  const [longestRun, longest] = members.reduce((a, b) => (b[1].middles.at(-1) > a[1].middles.at(-1) ? b : a));
  const grid = longest.middles;
  const axis = axisOf(longestRun);
  const halfLife = curves.of === "val" ? 0 : curves.halfLife;
  const onGrid = (values) => members.map(([, curve]) => interpolate(grid, curve.middles, values(curve)));
  const over = (columns, reduce) =>
    Array.from(grid, (_, i) => {
      const finite = columns.map((column) => column[i]).filter(Number.isFinite);
      return finite.length ? reduce(finite) : NaN;
    });
  const smooth = onGrid((curve) => smoothed(curve.middles, curve.means, halfLife));
  const mean = over(smooth, meanOf);
  const band = (low, high, opacity) => bandTrace(grid, axis, over(low, leastOf), over(high, largestOf), colour, opacity);
  const traces = [];
  if (members.length > 1 || longest.lows !== longest.means || halfLife) {
    const [lows, highs] = [onGrid((curve) => curve.lows), onGrid((curve) => curve.highs)];
    traces.push(band(lows, highs, halfLife ? 0.1 : 0.18));
  }
  if (members.length > 1 && halfLife) traces.push(band(smooth, smooth, 0.22));
  // The solid mean ends where the first seed diverges; the dotted mean of the remaining seeds continues.
  const ends = members.map(([run, curve]) => (run.diverged_at === null ? Infinity : curve.middles.at(-1)));
  const firstEnd = leastOf(ends);
  const complete = mean.map((value, i) => (grid[i] <= firstEnd ? value : NaN));
  const name = plain(labelWithCount(group, members.length));
  const solid = line(grid, axis, complete, { color: colour, width: 2, dash }, name, [group.label, `mean of ${members.length}`]);
  const symbol = { mode: "lines+markers", marker: { symbol: styleOf(group.cell).symbol, size: 6, color: colour } };
  traces.push(curves.of === "val" ? { ...solid, ...symbol } : solid);
  const remaining = ends.filter((end) => end > firstEnd).length;
  if (remaining && firstEnd < grid.at(-1)) {
    const rest = mean.map((value, i) => (grid[i] >= firstEnd ? value : NaN));
    const columns = [group.label, `mean of the ${remaining} remaining`];
    const dotted = line(grid, axis, rest, { color: colour, width: 1.4, dash: "dot" }, name, columns);
    traces.push({ ...dotted, showlegend: false });
  }
  return traces;
}

function line(steps, axis, y, style, name, columns) {
  return {
    steps,
    x: Array.from(steps, axis),
    y: Array.from(y),
    type: "scatter",
    mode: "lines",
    line: style,
    name,
    meta: { columns },
    hovertemplate: "%{fullData.name}<br>%{x}: %{y:.4f}<extra></extra>",
  };
}

/** The area between two lines, without points that are not finite. */
function bandTrace(steps, axis, low, high, colour, opacity) {
  const x = Array.from(steps, axis);
  const finite = [...x.keys()].filter((i) => [x[i], low[i], high[i]].every(Number.isFinite));
  const outline = [...finite, ...finite.toReversed()];
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return {
    steps: outline.map((i) => steps[i]),
    x: outline.map((i) => x[i]),
    y: outline.map((i, place) => (place < finite.length ? high[i] : low[i])),
    type: "scatter",
    mode: "none",
    fill: "toself",
    fillcolor: `rgba(${r},${g},${b},${opacity})`,
    hoverinfo: "skip",
    showlegend: false,
  };
}

/** Marks of a run's divergence, at its last finite value, and of its spikes. */
function marks(run, curve) {
  const { colour } = styleOf(run.cell);
  const axis = axisOf(run);
  const marksAt = (steps, symbol, size, event) => ({
    steps,
    x: steps.map(axis),
    y: steps.map((step) => lastFinite(curve, step)),
    type: "scatter",
    mode: "markers",
    showlegend: false,
    marker: { symbol, size, color: colour, line: { width: symbol === "x-thin" ? 3 : 1.5, color: colour } },
    text: steps.map((step) => `${plain(runName(run))}: ${event} at step ${step}`),
    hovertemplate: "%{text}<extra></extra>",
    meta: { columns: [runName(run), event] },
  });
  const spikes = run.spikes[curves.of] ?? [];
  const diverged = run.diverged_at === null ? [] : [run.diverged_at];
  return [
    ...(spikes.length ? [marksAt(spikes, "triangle-up-open", 9, "spike")] : []),
    ...(diverged.length ? [marksAt(diverged, "x-thin", 12, "diverged")] : []),
  ];
}

function addCurves() {
  // The noise of single steps hides the differences between runs, so about 1% of training is smoothed at first.
  curves.halfLife = HALF_LIVES.findLast((steps) => steps <= LAST_STEP / 100) ?? 0;
  const set = (key) => (value) => {
    curves[key] = value;
    redraw(figure);
  };
  const quantities = Object.entries(QUANTITIES).map(([key, { name }]) => [key, name]);
  const axes = Object.keys(AXES).map((key) => [key, key]);
  const text = (steps) => (steps ? `${steps} steps` : "off");
  byId("curves").append(
    make(
      "div",
      { class: "controls" },
      dropDown("quantity", quantities, curves.of, set("of"), { id: "quantity" }),
      dropDown("against", axes, curves.axis, set("axis"), { id: "axis" }),
      checkBox("log x", curves.logX, set("logX")),
      checkBox("log y", curves.logY, set("logY")),
      slider("smoothing", "smooth", HALF_LIVES, curves.halfLife, text, set("halfLife"), "smoothing: half-life in steps"),
      checkBox("without the first tenth", curves.late, set("late")),
      checkBox("marks", curves.marks, set("marks")),
    ),
  );
  const figure = addFigure("curves", "Loss and gradient norm over training", drawCurves);
}
