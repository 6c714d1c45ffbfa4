// Loss and gradient over training: runs, or a cell's seeds as a line and a band, smoothed with what was measured behind.

const curves = { of: "loss", axis: "steps", logX: false, logY: false, halfLife: 0, marks: true, late: false };

const QUANTITIES = {
  loss: {
    name: "training loss",
    unit: "nats a token",
    formula: "mean cross entropy of the step's tokens, of every step, before its update",
  },
  val: {
    name: "validation loss",
    unit: "nats a token",
    formula: "mean cross entropy over the held-out windows, at every evaluation",
  },
  grad_norm: {
    name: "gradient norm",
    unit: "nats / of w",
    formula: "|g|_2 over all parameters, of every step, before clipping",
  },
};
const AXES = { steps: "step", tokens: "tokens", seconds: "seconds in steps, without evaluations and checkpoints" };
const HALF_LIVES = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const LONGEST = Math.max(0, ...RUNS.map((run) => run.step ?? 0));
/** The first tenth of training is left out, where that is asked: what comes after it is seen larger. */
const LATE = Math.floor(LONGEST / 10);

/** A run's step on the axis that is chosen. */
function along(run) {
  if (curves.axis === "tokens") return (step) => (run.tokens_per_step === null ? NaN : step * run.tokens_per_step);
  if (curves.axis === "seconds") {
    const { steps, seconds } = run.paces;
    const known =
      steps[0] === 0
        ? [steps, seconds]
        : [
            [0, ...steps],
            [0, ...seconds],
          ];
    return (step) => (known[0].length < 2 ? NaN : valuesAt([Math.min(step, known[0].at(-1))], ...known)[0]);
  }
  return (step) => step;
}

function drawCurves(width) {
  const kind = QUANTITIES[curves.of];
  const traces = [],
    missing = [];
  for (const group of groups()) {
    const known = group.runs.map((run) => [run, curveOf(run, curves.of)]).filter(([, curve]) => curve);
    if (!known.length) {
      missing.push(group.label);
      continue;
    }
    traces.push(...(state.group === "runs" ? runTraces(group, ...known[0]) : groupTraces(group, known)));
    if (curves.marks) traces.push(...known.flatMap(([run, curve]) => marks(run, curve)));
  }
  if (!traces.length) return { empty: `No run that is shown has a ${kind.name} on record.` };
  const unmarked = groups()
    .flatMap((group) => group.runs)
    .reduce((sum, run) => sum + (run.spike_counts[curves.of] ?? 0) - (run.spikes[curves.of]?.length ?? 0), 0);
  const kept = curves.late ? traces.map(withoutStart).filter((trace) => trace.x.length) : traces;
  const seeds =
    state.group === "cells"
      ? " A line is the mean over a cell's seeds at its own best learning rate (or at each, where that is chosen), its band from the least to the largest of them; dotted once a seed has diverged, of those that are left."
      : "";
  const smooth =
    curves.halfLife && curves.of !== "val"
      ? ` Smoothed: a line fitted to the steps around each, of half the weight with every ${curves.halfLife} steps of distance; what was measured is behind.`
      : "";
  return {
    traces: kept,
    layout: {
      height: width < NARROW ? 320 : 440,
      xaxis: { title: { text: AXES[curves.axis] }, type: curves.logX ? "log" : "linear" },
      yaxis: {
        title: { text: `${kind.name}, ${kind.unit}` },
        ...scaled(
          curves.logY,
          kept.filter((trace) => trace.fill !== "toself").flatMap((trace) => trace.y),
        ),
      },
      uirevision: [curves.of, curves.axis, curves.logX, curves.logY, curves.late].join(),
    },
    numbers: () => pointRows(["line", "kind", AXES[curves.axis], `${kind.name}, ${kind.unit}`], kept),
    caption:
      `${kind.name[0].toUpperCase()}${kind.name.slice(1)}: ${kind.formula}; ${kind.unit}.${seeds}${smooth} ✕: diverged, △: a spike (${curves.of === "grad_norm" ? "gradient" : "loss"} ` +
      `${DATA.spike_rules[curves.of === "grad_norm" ? "grad_norm" : "loss"].formula}; ${DATA.spike_rules.loss.source}). Sampling: ${DATA.sampling}.` +
      (unmarked ? ` ${unmarked} more spikes have no mark: a run's first ones have.` : "") +
      (missing.length ? ` Without a record of it: ${missing.join(", ")}.` : ""),
  };
}

/** A trace from the first tenth of training on. */
function withoutStart(trace) {
  const there = [...trace.steps.keys()].filter((i) => trace.steps[i] >= LATE);
  const picked = (values) => there.map((i) => values[i]);
  return { ...trace, x: picked(trace.x), y: picked(trace.y), ...(trace.text ? { text: picked(trace.text) } : {}) };
}

function runTraces(group, run, curve) {
  const { colour, dash } = styleOf(group.cell);
  const at = along(run),
    name = plain(group.label);
  const raw = line(curve.steps, at, curve.values, { color: colour, width: 1.4, dash }, name, [group.label, "measured"]);
  if (!curves.halfLife || curves.of === "val") return [raw];
  const means = smoothed(curve.middles, curve.means, curves.halfLife);
  return [
    {
      ...raw,
      showlegend: false,
      opacity: 0.25,
      hoverinfo: "skip",
      hovertemplate: "",
      line: { ...raw.line, dash: "solid", width: 1 },
    },
    line(curve.middles, at, means, { color: colour, width: 2, dash }, name, [group.label, "smoothed"]),
  ];
}

function groupTraces(group, known) {
  const { colour, dash } = styleOf(group.cell);
  const [longest, widest] = known.reduce((a, b) => (b[1].middles.at(-1) > a[1].middles.at(-1) ? b : a));
  const grid = widest.middles,
    at = along(longest);
  const halfLife = curves.of === "val" ? 0 : curves.halfLife;
  const each = known.map(([, curve]) => valuesAt(grid, curve.middles, smoothed(curve.middles, curve.means, halfLife)));
  const lows = known.map(([, curve]) => valuesAt(grid, curve.middles, curve.lows));
  const highs = known.map(([, curve]) => valuesAt(grid, curve.middles, curve.highs));
  const over = (columns, fold) =>
    Array.from(grid, (_, i) => fold(columns.map((column) => column[i]).filter(Number.isFinite)));
  const mean = over(each, (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN));
  const least = (values) => (values.length ? Math.min(...values) : NaN),
    most = (values) => (values.length ? Math.max(...values) : NaN);
  const ends = known.map(([run, curve]) => (run.diverged_at === null ? Infinity : curve.middles.at(-1)));
  const whole = Math.min(...ends);
  const name = plain(labelled(group, known.length));
  const found = [];
  if (known.length > 1 || widest.lows !== widest.means || halfLife)
    found.push(stretch(grid, at, over(lows, least), over(highs, most), colour, halfLife ? 0.1 : 0.18));
  if (known.length > 1 && halfLife) found.push(stretch(grid, at, over(each, least), over(each, most), colour, 0.22));
  const before = mean.map((value, i) => (grid[i] <= whole ? value : NaN));
  const columns = [group.label, `mean of ${known.length}`];
  found.push(
    line(
      grid,
      at,
      before,
      { color: colour, width: 2.2, dash },
      name,
      columns,
      curves.of === "val" ? styleOf(group.cell).symbol : null,
    ),
  );
  if (known.length > 1 && ends.some((end) => end < grid.at(-1))) {
    const after = mean.map((value, i) => (grid[i] >= whole ? value : NaN));
    const left = ends.filter((end) => end > whole).length;
    if (left)
      found.push({
        ...line(grid, at, after, { color: colour, width: 1.4, dash: "dot" }, name, [
          group.label,
          `mean of the ${left} that are left`,
        ]),
        showlegend: false,
      });
  }
  return found;
}

function line(steps, at, y, style, name, columns, symbol = null) {
  return {
    steps,
    x: Array.from(steps, at),
    y: Array.from(y),
    type: "scatter",
    mode: symbol ? "lines+markers" : "lines",
    line: style,
    name,
    meta: { columns },
    marker: symbol ? { symbol, size: 6, color: style.color } : {},
    hovertemplate: "%{fullData.name}<br>%{x}: %{y:.4f}<extra></extra>",
  };
}

/** A band over steps. */
function stretch(steps, at, low, high, colour, opacity) {
  const there = [...low.keys()].filter((i) => Number.isFinite(low[i]) && Number.isFinite(high[i]));
  const picked = (values) => there.map((i) => values[i]);
  return {
    ...band(picked(Array.from(steps, at)), picked(low), picked(high), colour, opacity),
    steps: [...picked(steps), ...picked(steps).reverse()],
  };
}

/** The ground between two lines, left out where they are no numbers. */
function band(x, low, high, colour, opacity) {
  const there = [...x.keys()].filter(
    (i) => Number.isFinite(low[i]) && Number.isFinite(high[i]) && Number.isFinite(x[i]),
  );
  const back = [...there].reverse();
  return {
    x: [...there, ...back].map((i) => x[i]),
    y: [...there.map((i) => high[i]), ...back.map((i) => low[i])],
    type: "scatter",
    mode: "none",
    fill: "toself",
    fillcolor: translucent(colour, opacity),
    hoverinfo: "skip",
    showlegend: false,
  };
}

function translucent(colour, opacity) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return `rgba(${r},${g},${b},${opacity})`;
}

/** Where a run diverged, at its last finite value, and where it spiked. */
function marks(run, curve) {
  const { colour } = styleOf(run.cell);
  const at = along(run),
    found = [];
  const point = (steps, symbol, size, said) => ({
    steps,
    x: steps.map(at),
    y: steps.map((step) => nearestFinite(curve, step)),
    type: "scatter",
    mode: "markers",
    showlegend: false,
    marker: { symbol, size, color: colour, line: { width: symbol === "x-thin" ? 3 : 1.5, color: colour } },
    text: steps.map((step) => `${plain(called(run))} ${said} at step ${step}`),
    hovertemplate: "%{text}<extra></extra>",
    meta: { columns: [called(run), said] },
  });
  const spikes = curves.of === "val" ? [] : (run.spikes[curves.of] ?? []);
  if (spikes.length) found.push(point(spikes, "triangle-up-open", 9, "spiked"));
  if (run.diverged_at !== null) found.push(point([run.diverged_at], "x-thin", 12, "diverged"));
  return found;
}

function addCurves() {
  const own = () => redraw(picture);
  // Noise of single steps hides what runs differ in: about a hundredth of training is smoothed over, to begin with.
  curves.halfLife = HALF_LIVES.findLast((steps) => steps <= LONGEST / 100) ?? 0;
  const set = (key) => (value) => {
    curves[key] = value;
    own();
  };
  const told = make("output", { id: "half-life-told" });
  const slider = make("input", {
    type: "range",
    min: 0,
    max: HALF_LIVES.length - 1,
    step: 1,
    value: HALF_LIVES.indexOf(curves.halfLife),
    id: "smooth",
    "aria-label": "smoothing: half-life in steps",
    input: () => {
      curves.halfLife = HALF_LIVES[slider.value];
      tell();
      own();
    },
  });
  const tell = () => {
    told.textContent = curves.halfLife ? `${curves.halfLife} steps` : "off";
    slider.setAttribute("aria-valuetext", told.textContent);
  };
  tell();
  byId("curves").append(
    make(
      "div",
      { class: "controls" },
      choice(
        "of",
        Object.entries(QUANTITIES).map(([key, { name }]) => [key, name]),
        curves.of,
        set("of"),
        "quantity",
      ),
      choice(
        "against",
        Object.keys(AXES).map((key) => [key, key]),
        curves.axis,
        set("axis"),
        "axis",
      ),
      tickBox("log x", curves.logX, set("logX")),
      tickBox("log y", curves.logY, set("logY")),
      make("label", {}, "smoothing, half-life", slider, told),
      tickBox("without the first tenth", curves.late, set("late")),
      tickBox("marks", curves.marks, set("marks")),
    ),
  );
  const picture = addPicture("curves", "Loss and gradient norm over training", drawCurves);
}
