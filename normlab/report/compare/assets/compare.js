// The comparison page: the answer, the factors' filter and channels, the figures and the tables.

let CELLS, FACTORS, MARGINS; // of the data, set by `useData`
const CHANNELS = { x: "x axis", color: "colour", style: "line style", panel: "panels" };
const UNITS = {
  steps: ["step", () => 1],
  tokens: ["tokens", (cell) => cell.tokens_per_step],
  flops: ["FLOPs of training", (cell) => cell.tokens_per_step * cell.flops_per_token],
  hours: [
    "hours of training, at the cell's mean speed",
    (cell) => cell.tokens_per_s && cell.tokens_per_step / cell.tokens_per_s / 3600,
  ],
};
const MAX_BESTS = 6;
/** The states of runs that have not failed and have no result yet. */
const PENDING = ["not finished", "not started"];
/** A layer's gradient below this share of the gradient at the LM head counts as vanishing. */
const VANISHING = 0.1;
/** The comparison of a cell with a worse one; undefined without one. */
const marginOf = (better, worse) => MARGINS.get(`${CELLS.indexOf(better)},${CELLS.indexOf(worse)}`);
const isMissing = (value) => value === null || value === undefined;

const state = {
  channels: {},
  /** Whether the user has chosen channels. */
  isAssigned: false,
  /** The indices of the hidden levels, by option. */
  hidden: {},
  unit: "steps",
  series: "val_loss",
};

/** Replace the data, and keep what the user has chosen: channels and hidden levels. */
function useData(data) {
  const before = FACTORS ?? [];
  DATA = data;
  [CELLS, FACTORS] = [DATA.cells, DATA.factors];
  MARGINS = new Map(
    DATA.margins.map(([better, worse, isSignificant, text]) => [`${better},${worse}`, { isSignificant, text }]),
  );
  const hiddenLevels = (factor) => [...(state.hidden[factor.option] ?? [])].map((index) => factor.levels[index]);
  const hidden = new Map(before.map((factor) => [factor.option, hiddenLevels(factor)]));
  state.hidden = Object.fromEntries(
    FACTORS.map(({ option, levels }) => {
      const indices = (hidden.get(option) ?? []).map((level) => levels.indexOf(level)).filter((index) => index >= 0);
      return [option, new Set(indices.length < levels.length ? indices : [])];
    }),
  );
  const chosen = state.isAssigned ? state.channels : {};
  state.channels = {};
  for (const { option } of FACTORS) if (chosen[option]) state.channels[option] = chosen[option];
  // A new factor has a panel if the user has put another one on its channel.
  for (const [option, channel] of Object.entries(DATA.channels))
    state.channels[option] ??= Object.values(state.channels).includes(channel) ? "panel" : channel;
  document.title = DATA.title;
  byId("title").textContent = DATA.title;
  byId("about").textContent = DATA.about;
  const written = new Date(DATA.written * 1000).toISOString().slice(0, 16).replace("T", " ");
  byId("footer").textContent = `${DATA.command} · normlab ${DATA.version} · ${written} UTC`;
}

/** The index of a cell's level of a factor. */
const levelOf = (cell, factor) => factor.levels.indexOf(cell.levels[factor.option]);
const isVisible = (cell) => FACTORS.every((factor) => !state.hidden[factor.option].has(levelOf(cell, factor)));
const visibleCells = () => CELLS.filter(isVisible);
const dashOf = (factor, level) => DASHES[factor.styles[level] % DASHES.length];
const coloursOf = (factor) => factor[document.documentElement.dataset.theme];
const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
/** A label that breaks between its parts only: not between "depth" and "8". */
const unbroken = (label) => label.replaceAll(/(?<!,) /g, "\u00a0");
const list = (texts) => make("ul", {}, ...texts.map((text) => make("li", {}, text)));
/** A section that is closed at first; `key` names it while its title changes. */
const folded = (key, title, ...children) =>
  make("details", { "data-fold": key }, make("summary", {}, title), ...children);

// The answer

const sumOf = (cells, key) => cells.reduce((sum, cell) => sum + cell[key], 0);

/** The answer for the visible cells, with the sentences that Python has prepared for each cell and each pair. */
function drawAnswer() {
  const cells = visibleCells();
  const sizes = visibleSizes();
  const isOneSize = sizes.length < 2 || DATA.not_comparable;
  const ranked = isOneSize ? DATA.order.map((index) => CELLS[index]).filter(isVisible) : [];
  const [best, second] = ranked;
  const parts = [];
  const noResult = DATA.order.length ? "No run that is shown has a final loss." : DATA.no_result;
  if (!isOneSize) parts.push(make("p", { class: "eyebrow" }, `Lowest loss at each ${DATA.size_name}`));
  else if (!best || DATA.not_comparable || (best.is_bad && ranked.length > 1))
    parts.push(make("p", { class: "best" }, !best ? noResult : DATA.not_comparable || DATA.all_bad));
  else {
    const name = marginOf(best, second)?.isSignificant ? "Best" : "Lowest loss";
    const among = cells.length > 1 ? `${name} of ${counted(cells.length, "cell")}` : "The only cell";
    parts.push(
      make("p", { class: "eyebrow" }, among),
      make("p", { class: "best" }, unbroken(best.label)),
      make("p", { class: "loss" }, `validation loss ${best.loss_text}, ${best.lr_text}`),
    );
  }
  const facts = make("dl", { class: "facts" });
  const fact = (name, ...content) => facts.append(make("dt", {}, name), make("dd", {}, ...content));
  if (!isOneSize) for (const [size, members] of sizes.slice(0, MAX_BESTS)) fact(size, ...bestOfSize(members));
  if (!isOneSize && sizes.length > MAX_BESTS) fact("more", `${sizes.length - MAX_BESTS} more: see the table of cells`);
  if (best && second && !best.is_bad && !DATA.not_comparable) fact("by how much", ...marginParts(best, second));
  for (const line of CELLS[0]?.resolved_differences ?? []) fact("also differs", line);
  const x = mapping(true).x;
  const bests = DATA.not_comparable ? [] : bestAtEach(x, ranked);
  if (bests.length > 1) fact(`best at each ${x.name}`, make("ul", { class: "plain" }, ...bests));
  fact("what failed", ...failures(cells));
  const gradients = smallGradients(cells);
  if (gradients) fact("gradients", ...gradients);
  const [tokens, hours] = [sumOf(cells, "tokens"), sumOf(cells, "hours")];
  const time = hours < 1 ? `${(hours * 60).toPrecision(3)} minutes` : `${hours.toPrecision(3)} hours`;
  const isKnown = !cells.some((cell) => isMissing(cell.flops));
  const flops = isKnown ? `${sumOf(cells, "flops").toExponential(2).replace("e+", "e")} FLOPs, ` : "";
  fact("cost", `${counted(sumOf(cells, "runs"), "run")}, ${shortNumber(tokens)} tokens, ${flops}${time} of training`);
  parts.push(facts);
  const isFiltered = cells.length < CELLS.length;
  if (isFiltered)
    parts.push(
      make(
        "p",
        { class: "small muted" },
        `${cells.length} of ${CELLS.length} cells are shown. p-values are corrected for the comparisons with all of them.`,
      ),
    );
  if (DATA.caveats.length) parts.push(folded("caveats", `Caveats (${DATA.caveats.length})`, list(DATA.caveats)));
  replaceContent(byId("answer"), ...parts);
}

/** The visible cells with a result, the best first, of each size: [label of the size, cells]. */
const visibleSizes = () =>
  DATA.sizes
    .map(([size, indices]) => [size, indices.map((index) => CELLS[index]).filter(isVisible)])
    .filter(([, members]) => members.length);

/** A badge and the sentence of a comparison of two cells. */
function marginParts(best, second) {
  const margin = marginOf(best, second);
  const badge = margin?.isSignificant ? ["yes", "significant"] : ["no", "not significant"];
  const text = margin ? margin.text : `Not compared: only the ${DATA.max_compared} best cells are; select with --where.`;
  return [make("span", { class: `badge ${badge[0]}` }, badge[1]), text];
}

/** The best cell of a size with its loss, and its margin over the second best. */
function bestOfSize([best, second]) {
  if (best.is_bad && second) return [DATA.all_bad];
  const loss = `validation loss ${best.loss_text}, ${best.lr_text}`;
  const result = make("p", { class: "loss" }, make("b", {}, unbroken(best.arm)), `: ${loss}`);
  return second ? [result, ...marginParts(best, second)] : [result];
}

/** The best visible cell at each level of a factor, and whether its loss is significantly below that of the next. */
function bestAtEach(factor, ranked) {
  const others = FACTORS.filter((other) => other !== factor && other.levels.length > 1);
  if (!factor || !others.length || factor.levels.length > MAX_BESTS) return [];
  const textOf = (cell) =>
    `${others.map((other) => other.labels[levelOf(cell, other)]).join(", ")} (${cell.point.y?.toFixed(4) ?? "diverged"})`;
  return factor.levels.flatMap((_, index) => {
    const [best, second] = ranked.filter((cell) => levelOf(cell, factor) === index);
    if (!best || best.is_bad) return [];
    const isSignificant = marginOf(best, second)?.isSignificant ? "significantly" : "not significantly";
    const next = second ? `, ${isSignificant} better than ${textOf(second)}` : "";
    return [make("li", {}, make("b", {}, factor.titles[index]), ` ${textOf(best)}${next}`)];
  });
}

/** The labels of the levels that all of some cells share: `, all with post-norm, depth 16`. */
function sharedBy(cells) {
  const common = FACTORS.filter(
    (factor) => factor.levels.length > 1 && new Set(cells.map((cell) => levelOf(cell, factor))).size === 1,
  );
  const labels = common.map((factor) => factor.labels[levelOf(cells[0], factor)]).join(", ");
  return labels && `, all with ${labels}`;
}

/** Where the gradient of a layer is far below that of the LM head, among the visible cells; null without gradients. */
function smallGradients(cells) {
  const measured = cells.filter((cell) => cell.gradient).sort((a, b) => a.gradient.ratio - b.gradient.ratio);
  if (!measured.length) return null;
  const textOf = ({ label, gradient: { layer, ratio } }) =>
    `${label}: layer ${layer} has ${shortNumber(+ratio.toPrecision(2))} times the gradient at the LM head`;
  const vanishing = measured.filter((cell) => cell.gradient.ratio < VANISHING);
  if (!vanishing.length) return [`do not vanish; the smallest is in ${textOf(measured[0])}`];
  const badge = make("span", { class: "badge bad" }, "vanish");
  if (vanishing.length === 1) return [badge, `in ${textOf(vanishing[0])}`];
  const title = `in ${vanishing.length} cells${sharedBy(vanishing)}`;
  return [badge, `most in ${textOf(vanishing[0])}`, folded("gradients", title, list(vanishing.map(textOf)))];
}

/** What happened to the runs that did not train, by state, with the cells. */
function failures(cells) {
  const total = new Map();
  for (const cell of cells)
    for (const [state, count] of Object.entries(cell.bad)) total.set(state, (total.get(state) ?? 0) + count);
  const isAll = cells.length === CELLS.length;
  for (const [state, count] of isAll ? DATA.missing : []) total.set(state, (total.get(state) ?? 0) + count);
  if (!total.size) return [cells.length ? "nothing: every run finished and trained" : "no run has started"];
  const bad = cells.filter((cell) => Object.keys(cell.bad).length);
  const lines = bad.map(
    (cell) =>
      `${cell.label} (${Object.entries(cell.bad)
        .map(([state, count]) => `${count} ${state}`)
        .join(
          ", ",
        )} of ${cell.runs}${cell.rates.length > 1 ? ` runs, at lr ${cell.bad_rates.join(", ")}` : ""})`,
  );
  const short = lines.length <= 3;
  return [
    ...[...total].map(([state, count]) => make("span", { class: `badge ${PENDING.includes(state) ? "no" : "bad"}` }, `${count} ${state}`)),
    short ? lines.join("; ") : folded("failures", `in ${lines.length} cells${sharedBy(bad)}`, list(lines)),
  ];
}

// Factors: their levels are the filter and the legend, and each is on a channel

function drawFactors() {
  const colour = mapping(true).color;
  const rows = FACTORS.filter((factor) => factor.levels.length > 1).map((factor) => {
    const hidden = state.hidden[factor.option];
    const chips = factor.titles.map((title, index) => {
      const swatch = factor === colour ? swatchOf({ colour: coloursOf(factor)[index], dash: "" }) : null;
      const pressed = String(!hidden.has(index));
      return make(
        "button",
        {
          type: "button",
          class: "chip",
          "aria-pressed": pressed,
          "data-level": factor.labels[index],
          click: () => toggle(factor.option, index),
        },
        swatch,
        title,
      );
    });
    const select = dropDown(
      factor.name,
      Object.entries(CHANNELS),
      state.channels[factor.option],
      (channel) => assign(factor.option, channel),
      { "data-option": factor.option, title: factor.option },
    );
    return make("div", { class: "factor" }, select, ...chips);
  });
  const isHidden = FACTORS.some((factor) => state.hidden[factor.option].size);
  const showAll = make(
    "button",
    {
      type: "button",
      class: "chip",
      id: "show-all",
      click: () => {
        for (const levels of Object.values(state.hidden)) levels.clear();
        redraw();
      },
    },
    "show all",
  );
  replaceContent(byId("factors"), ...rows, ...(isHidden ? [showAll] : []));
  byId("factors").hidden = !rows.length;
}

/** Show or hide a level; the last visible level of a factor stays. */
function toggle(option, index) {
  const factor = FACTORS.find((each) => each.option === option);
  const hidden = state.hidden[option];
  if (!hidden.delete(index) && hidden.size < factor.levels.length - 1) hidden.add(index);
  redraw();
}

/** Put a factor on a channel. The factor that has an axis, the colours or the styles takes the other's channel. */
function assign(option, channel) {
  const factor = FACTORS.find((each) => each.option === option);
  state.isAssigned = true;
  const before = state.channels[factor.option];
  for (const [other, itsChannel] of Object.entries(state.channels))
    if (channel !== "panel" && itsChannel === channel) state.channels[other] = before;
  state.channels[factor.option] = channel;
  const many = FACTORS.filter((other) => other.levels.length > 1);
  if (!many.some((other) => state.channels[other.option] === "x"))
    state.channels[(many.find((other) => other !== factor) ?? factor).option] = "x"; // one factor is always on x
  redraw();
}

/** The factors on each channel, as in channels.py; without a factor on x, its factor has panels. */
function mapping(hasX) {
  const on = (channel) => FACTORS.filter((factor) => state.channels[factor.option] === channel);
  const [[x], [style], panel] = [on("x"), on("style"), on("panel")];
  let [color] = on("color");
  if (!color && x && !(hasX && x.is_numeric)) color = x;
  return { x: hasX ? x : undefined, color, style, panel: hasX || !x || x === color ? panel : [x, ...panel] };
}

/** The options of `normlab figure` for the channels and the filter. */
function flagsOf({ x, color, style, panel }) {
  const quote = (text) => (/^[\w.,=-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
  const flags = [
    ["--x", x?.option],
    ["--color", color === x ? undefined : color?.option],
    ["--style", style?.option],
    ["--panel", panel.map((factor) => factor.option).join(",")],
  ];
  const hidden = FACTORS.flatMap((factor) =>
    [...state.hidden[factor.option]].map((index) => `${factor.option}!=${factor.values[index]}`),
  );
  // With --where, a factor may have one level only, and is then named by --by.
  if (hidden.length) flags.push(["--by", DATA.by.join(",")], ["--where", hidden.join(",")]);
  return flags
    .filter(([, value]) => value)
    .map(([flag, value]) => ` ${flag} ${quote(value)}`)
    .join("");
}

// Figures

const FIGURES = [];

/** The cells in panels: [title, cells], in the order of the levels. */
function panelsOf(cells, factors) {
  const panels = new Map();
  const keyOf = (cell) => factors.map((factor) => levelOf(cell, factor));
  for (const cell of cells.toSorted(
    (a, b) =>
      keyOf(a)
        .map((level, index) => level - keyOf(b)[index])
        .find(Boolean) ?? 0,
  )) {
    const title = factors.map((factor) => factor.labels[levelOf(cell, factor)]).join(", ");
    panels.set(title, [...(panels.get(title) ?? []), cell]);
  }
  return [...panels];
}

/** The number of panels that differ in their last factor only, which share a row if there is room. */
const groupOf = ({ panel }) => {
  const last = panel.at(-1);
  return last ? last.levels.length - state.hidden[last.option].size : 1;
};

/** The panels of a line plot; `pointsOf` returns the points of the cells of one line. */
function linePanels(cells, channels, pointsOf) {
  const { color, style } = channels;
  const levels = (factor) => (factor ? factor.levels.map((_, index) => index) : [0]);
  return panelsOf(cells, channels.panel).map(([title, members]) => ({
    title,
    lines: levels(color).flatMap((c) =>
      levels(style).flatMap((s) => {
        const line = members.filter(
          (cell) => (!color || levelOf(cell, color) === c) && (!style || levelOf(cell, style) === s),
        );
        const points = pointsOf(line);
        if (!points.length) return [];
        const label = [color?.labels[c], style?.labels[s]].filter(Boolean).join(", ");
        return [
          {
            label,
            colour: color ? coloursOf(color)[c] : themed("accent"),
            dash: style ? dashOf(style, s) : "",
            points,
            crosses: line.flatMap((cell) => cell.crosses ?? []),
          },
        ];
      }),
    ),
  }));
}

/** A point of a final loss with the text of its tooltip. */
function lossPoint(point, x) {
  const interval = isMissing(point.low) ? "" : ` [${point.low.toFixed(4)}, ${point.high.toFixed(4)}]`;
  const text = point.diverged
    ? `${point.diverged} of ${point.n} seeds diverged`
    : `${point.y.toFixed(4)}${interval} (n=${point.n})`;
  return { ...point, x, text };
}

function drawFactor(place) {
  const channels = mapping(true);
  const x = channels.x ?? FACTORS[0];
  const cells = visibleCells().filter((cell) => cell.point);
  const levels = x.levels.map((_, index) => index).filter((index) => !state.hidden[x.option].has(index));
  const points = (members) =>
    members.map((cell) => lossPoint(cell.point, x.positions[levelOf(cell, x)])).sort((a, b) => a.x - b.x);
  const ticks = levels.map((index) => [x.positions[index], x.titles[index]]);
  drawLines(place, {
    title: "final loss",
    panels: linePanels(cells, channels, points),
    group: groupOf(channels),
    x: { ticks, isLog: x.is_log },
    isConnected: x.is_numeric,
  });
  return { y: DATA.series.val_loss, x: x.name, channels, flags: "factor" };
}

function drawCurves(place) {
  const channels = mapping(false);
  const [name, perStep] = UNITS[state.unit];
  const points = (members) =>
    members.flatMap((cell) => {
      const factor = perStep(cell);
      return factor
        ? cell.curves[state.series].map(([step, y, low, high]) => ({
            x: step * factor,
            y,
            low,
            high,
            text: `${shortNumber(y)} at step ${shortNumber(step)}`,
          }))
        : [];
    });
  const cells = visibleCells().map((cell) => ({
    ...cell,
    crosses: cell.diverged_at.map((step) => step * (perStep(cell) || 0)),
  }));
  drawLines(place, {
    title: "curves",
    panels: linePanels(cells, channels, points),
    group: groupOf(channels),
    x: { isSparse: true },
    isBand: true,
    isCurve: true,
    mayBeLog: state.series === "grad_norm",
  });
  return {
    y: DATA.series[state.series],
    x: name,
    channels,
    flags: `loss${state.series === "val_loss" ? "" : ` --statistic ${state.series}`}`,
  };
}

/** The runs without an outcome, one line each, with their own choice of the curve. */
function unfinishedFigure(own) {
  return (place) => {
    const channels = { ...mapping(false), style: undefined };
    const [name, perStep] = UNITS[state.unit];
    const runs = DATA.unfinished.filter((run) => isVisible(CELLS[run.cell]));
    const panels = panelsOf(visibleCells(), channels.panel).flatMap(([title, cells]) => {
      const lines = runs
        .filter((run) => cells.includes(CELLS[run.cell]))
        .map((run) => {
          const factor = perStep(CELLS[run.cell]);
          const colour = channels.color && coloursOf(channels.color)[levelOf(CELLS[run.cell], channels.color)];
          const points = (factor ? run.curves[own.series] : []).map(([step, y, low, high]) => ({
            x: step * factor,
            y,
            low,
            high,
            text: `${shortNumber(y)} at step ${shortNumber(step)}, ${run.state}`,
          }));
          return { label: run.label, colour: colour ?? themed("accent"), dash: "", points };
        });
      return lines.length ? [{ title, lines }] : [];
    });
    drawLines(place, { title: "unfinished runs", panels, x: { isSparse: true }, isBand: true, isCurve: true });
    const choose = (series) => {
      own.series = series;
      redraw();
    };
    return {
      y: DATA.series[own.series],
      x: name,
      channels,
      controls: [dropDown("show", Object.entries(DATA.series), own.series, choose)],
    };
  };
}

function drawRates(place) {
  const channels = mapping(false);
  const cells = visibleCells();
  const texts = new Map(cells.flatMap((cell) => cell.rates.map(({ x, text }) => [x, text])));
  const ticks = [...texts].sort(([a], [b]) => a - b);
  const points = (members) => members.flatMap((cell) => cell.rates.map((point) => lossPoint(point, point.x)));
  drawLines(place, {
    title: "learning rates",
    panels: linePanels(cells, channels, points),
    group: groupOf(channels),
    x: { ticks, isLog: ticks[0][0] > 0, isSparse: true },
    isConnected: true,
  });
  return { y: DATA.series.val_loss, x: "learning rate", channels, flags: "lr" };
}

function drawMatrix(place) {
  const first = mapping(true);
  const many = FACTORS.filter((factor) => factor.levels.length > 1);
  const rows = many.find((factor) => factor.option === state.rows) ?? first.color ?? many[0];
  const others = many.filter((factor) => factor !== rows);
  const columns =
    others.find((factor) => factor.option === state.columns) ??
    others.find((factor) => factor === first.x) ??
    others[0];
  const panel = others.filter((factor) => factor !== columns);
  const shown = (factor) =>
    factor.levels.map((_, index) => index).filter((index) => !state.hidden[factor.option].has(index));
  const bests = DATA.not_comparable ? [] : visibleSizes().map(([, [best]]) => best);
  const fields = (cells) =>
    Object.fromEntries(
      cells
        .filter((cell) => cell.point)
        .map((cell) => {
          const { y, diverged, n, stuck } = cell.point;
          const at = `${shown(columns).indexOf(levelOf(cell, columns))},${shown(rows).indexOf(levelOf(cell, rows))}`;
          return [
            at,
            {
              value: y,
              text: isMissing(y) ? `× ${diverged}/${n}` : `${y.toFixed(3)}${stuck ? " ○" : ""}`,
              isStuck: Boolean(stuck),
              isBest: bests.includes(cell) && !cell.is_bad,
              tip: `${cell.label}: ${cell.loss_text}`,
            },
          ];
        }),
    );
  const panels = panelsOf(visibleCells(), panel).map(([title, cells]) => ({ title, fields: fields(cells) }));
  drawGrid(place, {
    panels,
    columns: shown(columns).map((index) => columns.titles[index]),
    rows: shown(rows).map((index) => rows.titles[index]),
  });
  const options = many.map((factor) => [factor.option, factor.name]);
  const choose = (key) => (option) => {
    state[key] = option;
    redraw();
  };
  return {
    y: `${DATA.series.val_loss}; rows: ${rows.name}`,
    x: columns.name,
    channels: { x: columns, color: rows, panel },
    flags: "matrix",
    hasNoLegend: true,
    controls:
      many.length > 2
        ? [
            dropDown(
              "columns",
              options.filter(([option]) => option !== rows.option),
              columns.option,
              choose("columns"),
            ),
            dropDown("rows", options, rows.option, choose("rows")),
          ]
        : [],
  };
}

/** A figure of a statistic by layer, with its own choice of statistic and step. */
function layerFigure(own) {
  return (place) => {
    if (!DATA.statistics[own.statistic]) own.statistic = Object.keys(DATA.statistics)[0];
    const channels = mapping(false);
    const points = (members) =>
      members.flatMap((cell) =>
        (cell.layers[own.statistic]?.[own.moment] ?? []).map(([x, y, low, high]) => ({
          x,
          y,
          low,
          high,
          text: `${shortNumber(y)} in layer ${x}`,
        })),
      );
    drawLines(place, {
      title: own.statistic,
      panels: linePanels(visibleCells(), channels, points),
      group: groupOf(channels),
      x: { isSparse: true },
      isBand: true,
      mayBeLog: true,
    });
    const { unit, formula, question } = DATA.statistics[own.statistic];
    const hasEmbeddings = CELLS.some((cell) => cell.layers[own.statistic]?.[own.moment]?.[0]?.[0] === 0);
    const choose = (key) => (value) => {
      own[key] = value;
      redraw();
    };
    const names = Object.keys(DATA.statistics).map((name) => [name, name]);
    return {
      y: unit === "1" ? own.statistic : `${own.statistic}, ${unit}`,
      x: hasEmbeddings ? "layer (0: embeddings, last: LM head)" : "layer (last: LM head)",
      channels,
      flags: `layers --statistic '${own.statistic}' --at ${own.moment}`,
      definition: formula,
      question,
      controls: [
        dropDown("statistic", names, own.statistic, choose("statistic")),
        dropDown("at the", Object.entries(DATA.moments), own.moment, choose("moment")),
      ],
    };
  };
}

const RANGE = (what) => `Line: ${what} of the seeds at each cell's best learning rate; band: their range.`;
const MARKS = `Large point: mean over the seeds, with its ${Math.round(100 * DATA.level)}% interval if there are three or more; an arrow: the interval ends outside the frame. Small points: seeds. × k/n: k of n seeds diverged, so there is no mean. Open point: with runs that are stuck or regressed; a number at the top is the loss of one above the frame.`;

/** The figures of the page in their order: [id, title, how to read it, draw, whether the data have it, controls]. */
const layerDraw = (statistic) => layerFigure({ statistic, moment: "last" });
const hasLayers = () => Object.keys(DATA.statistics).length > 0;
const hasPoint = () => CELLS.some((cell) => cell.point);
const KINDS = [
  { id: "factor", title: "Final loss", how: MARKS, draw: drawFactor, isIn: hasPoint },
  {
    id: "unfinished",
    title: "Unfinished runs",
    how: "A line for each run that has no final loss yet.",
    draw: unfinishedFigure({ series: "train_loss" }),
    isIn: () => DATA.unfinished.length > 0,
  },
  {
    id: "curves",
    title: "Over training",
    how: `${RANGE("mean")} The axis fits the values after the first tenth of training. ×: a seed diverged at this step.`,
    draw: drawCurves,
    isIn: () => CELLS.some((cell) => Object.values(cell.curves).some((curve) => curve.length)),
    controls: () => [
      dropDown("show", Object.entries(DATA.series), state.series, change("series"), { id: "series" }),
      dropDown(
        "against",
        Object.entries(UNITS).map(([unit, [name]]) => [unit, name.split(" ")[0]]),
        state.unit,
        change("unit"),
        { id: "unit" },
      ),
    ],
  },
  { id: "rates", title: "Learning rates", how: MARKS, draw: drawRates, isIn: () => CELLS.some((cell) => cell.rates.length > 1) },
  {
    id: "matrix",
    title: "Interaction of two factors",
    how: "Mean final loss over the seeds; a frame marks the best cell of each size. × k/n: k of n seeds diverged; ○: with runs that are stuck or regressed.",
    draw: drawMatrix,
    isIn: () => FACTORS.filter((factor) => factor.levels.length > 1).length > 1 && hasPoint(),
  },
  { id: "gradients", title: "Gradient of each layer", how: RANGE("median"), draw: layerDraw("dresid_rms"), isIn: hasLayers },
  { id: "layers", title: "Residual stream of each layer", how: RANGE("median"), draw: layerDraw("resid_rms"), isIn: hasLayers },
];

function change(key) {
  return (value) => {
    state[key] = value;
    redraw();
  };
}

/** Add the figures that the data have and the page does not have yet, and hide those that the data no longer have. */
function addFigures(kinds) {
  for (const kind of kinds) {
    const isIn = kind.isIn();
    const figure = FIGURES.find(({ id }) => id === kind.id);
    if (figure) figure.element.hidden = !isIn;
    else if (isIn) addFigure(kind);
  }
}

function addFigure({ id, title, how, draw, controls }) {
  const figure = { id, draw, isDirty: true, isNear: false, parts: {} };
  for (const part of ["controls", "legend", "y", "x"])
    figure.parts[part] = make(part.length > 1 ? "div" : "p", { class: part.length > 1 ? part : `axis-name ${part}` });
  figure.parts.panels = make("div", { class: "panels" });
  figure.parts.how = make("p", { class: "small" });
  figure.parts.question = make("p", { class: "small muted" });
  figure.parts.command = make("p", { class: "small code" });
  figure.parts.paper = make("p", { class: "small" }, "For a paper:");
  const { panels, legend, y, x, command, paper } = figure.parts;
  const reading = folded(
    "reading",
    "How to read this",
    make("p", { class: "small" }, how),
    figure.parts.how,
    ...(DATA.figure ? [paper, command] : []),
  );
  figure.element = make(
    "div",
    { class: "chart", "data-figure": id },
    make("h2", {}, title),
    figure.parts.controls,
    figure.parts.question,
    legend,
    y,
    panels,
    x,
    reading,
  );
  figure.parts.controls.append(...(controls?.() ?? []));
  const parent = byId(id === "factor" ? "factor" : "figures");
  const place = KINDS.findIndex((kind) => kind.id === id);
  const next = FIGURES.find((other) => KINDS.findIndex((kind) => kind.id === other.id) > place);
  parent.insertBefore(figure.element, next?.element.parentNode === parent ? next.element : null);
  FIGURES.push(figure);
  FIGURES.sort((a, b) => KINDS.findIndex((kind) => kind.id === a.id) - KINDS.findIndex((kind) => kind.id === b.id));
  NEAR.observe(figure.element);
}

function drawNow(figure) {
  if (figure.element.hidden) return;
  figure.isDirty = false;
  const { parts } = figure;
  const { y, x, channels, flags, controls, definition, question, hasNoLegend } = figure.draw(parts.panels);
  const panels = panelsOf(visibleCells(), channels.panel).length;
  parts.y.textContent = `${hasNoLegend ? "" : "↑ "}${y}${parts.panels.dataset.isLog ? ", logarithmic" : ""}`;
  parts.question.textContent = question ?? "";
  parts.x.textContent = `${x} →`;
  const { color, style } = channels;
  const shown = (factor) =>
    factor
      ? factor.labels
          .map((label, index) => [label, index])
          .filter(([, index]) => !state.hidden[factor.option].has(index))
      : [];
  const entries = hasNoLegend
    ? []
    : [
        ...shown(color).map(([label, index]) => ({ label, colour: coloursOf(color)[index], dash: "" })),
        ...shown(style).map(([label, index]) => ({ label, colour: themed("muted"), dash: dashOf(style, index) })),
      ];
  parts.legend.replaceChildren(...legendEntries(entries));
  if (controls) replaceContent(parts.controls, ...controls);
  parts.how.textContent = definition ?? "";
  // `normlab figure` draws no more panels than the page.
  parts.command.hidden = parts.paper.hidden = !flags || panels > MAX_PANELS;
  const [kind, ...options] = (flags ?? "").split(/ (?=--)/);
  parts.command.textContent = [
    "normlab figure",
    kind,
    DATA.figure,
    ...options,
    flagsOf(channels).trim(),
    "-o figure.pdf",
  ]
    .filter(Boolean)
    .join(" ");
}

/** Figures are drawn when they come near the window, or all of them when the page is printed. */
const NEAR = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const figure = FIGURES.find(({ element }) => element === entry.target);
      figure.isNear = entry.isIntersecting;
      if (figure.isNear && figure.isDirty) drawNow(figure);
    }
  },
  { rootMargin: "300px" },
);

function redraw() {
  drawAnswer();
  drawFactors();
  for (const figure of FIGURES) {
    figure.isDirty = true;
    if (figure.isNear || isPrinting) drawNow(figure);
  }
  for (const update of TABLES) update();
}

// Tables

const TABLES = [];

/** A table that a click on a column sorts; `read` returns {title, columns, rows: [texts, ...]} of the visible rows. */
function addTable(id, read) {
  let [by, direction] = [null, 1]; // the name of a column
  const [head, body] = [make("thead"), make("tbody")];
  const numberIn = (text) =>
    /^[-+]?[\d.,]+(e[-+]?\d+)?( |$|\/)/.test(text) && !text.includes("diverged")
      ? parseFloat(text.replaceAll(",", ""))
      : NaN;
  const compare = (a, b) => {
    const [x, y] = [numberIn(a), numberIn(b)];
    if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1; // texts come last
    return direction * (Number.isNaN(x) ? a.localeCompare(b) : x - y);
  };
  const update = () => {
    const { columns, rows } = read();
    const column = columns.indexOf(by);
    if (column >= 0) rows.sort((a, b) => compare(a[column], b[column]));
    const order = direction > 0 ? "ascending" : "descending";
    const heads = columns.map((name) =>
      make(
        "th",
        { scope: "col", "aria-sort": name === by && order },
        make("button", { type: "button", class: "sort", click: () => sort(name) }, name),
      ),
    );
    replaceContent(head, make("tr", {}, ...heads));
    body.replaceChildren(
      ...rows.map((texts) =>
        make(
          "tr",
          {},
          ...texts.map((text, index) =>
            make(
              "td",
              { class: columns[index] === "note" ? "long" : numberIn(text) >= -Infinity ? "number" : "" },
              text,
            ),
          ),
        ),
      ),
    );
  };
  const sort = (name) => {
    direction = by === name ? -direction : 1;
    by = name;
    update();
  };
  const summary = make("summary");
  const region = make("div", { class: "scroll tall", tabindex: 0, role: "region" }, make("table", {}, head, body));
  const details = make("details", { id }, summary, region);
  const whenOpen = () => {
    const { title, columns } = read();
    details.hidden = !columns.length;
    summary.textContent = title;
    region.setAttribute("aria-label", title);
    if (details.open) update();
  };
  details.addEventListener("toggle", whenOpen);
  TABLES.push(whenOpen);
  byId("tables").append(details);
  whenOpen();
}

/** Whether a label or a contrast, such as `depth 2, (post-norm - DeepNorm) x (...)`, names a hidden level. */
function hasHidden(text) {
  const names = text.split(/, | - | x |[()]/);
  return FACTORS.some((factor) =>
    [...state.hidden[factor.option]].some((index) => names.includes(factor.labels[index])),
  );
}

function addTables() {
  addTable("cells", () => {
    const { columns, rows } = DATA.cell_table;
    const order = [...DATA.order, ...CELLS.keys()].filter((index, place, all) => all.indexOf(index) === place);
    const shown = order.filter((index) => isVisible(CELLS[index])).map((index) => rows[index]);
    return { title: `Cells (${CELLS.length}), the lowest loss first`, columns, rows: shown };
  });
  addTable("runs", () => {
    const { columns, rows } = DATA.run_table;
    const shown = rows.filter(({ cell }) => isMissing(cell) || isVisible(CELLS[cell])).map(({ values }) => values);
    return { title: `Runs (${rows.length})`, columns, rows: shown };
  });
  addTable("interactions", () => {
    const { columns, rows } = DATA.interactions;
    const shown = rows.filter(([where, contrast]) => !hasHidden(`${where}, ${contrast}`));
    return { title: `Interactions of two factors (${rows.length})`, columns, rows: shown };
  });
  const place = make("div");
  const update = () => {
    const notes = [...DATA.notes, ...DATA.interactions.notes, ...DATA.problems];
    const content = notes.length ? [folded("notes", `Definitions and notes (${notes.length})`, list(notes))] : [];
    replaceContent(place, ...content);
  };
  TABLES.push(update);
  byId("tables").append(place);
  update();
}

// The page

useData(DATA);
byId("theme-place").append(themeControl());
drawAnswer();
drawFactors();
addFigures(KINDS.slice(0, 1));
for (const figure of FIGURES) drawNow(figure);
performance.mark("first-picture");
requestAnimationFrame(() =>
  setTimeout(() => {
    addFigures(KINDS);
    addTables();
    THEME_LISTENERS.push(redraw);
    whenResized(redraw);
    document.documentElement.dataset.ready = "yes";
  }),
);
