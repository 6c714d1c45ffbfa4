// What is shown: which runs are ticked and meet the filter, what is drawn as one, and in which style.

const RUNS = DATA.runs;
const CELLS = DATA.cells;

const state = {
  ticked: new Set(RUNS.map((run) => run.index)),
  filter: "",
  /** "cells" or "runs": what a line is. */
  group: CELLS.some((cell) => cell.runs.length > 1) ? "cells" : "runs",
  /** "best" or "all": of a cell, the runs at its own best learning rate, or a line for each rate. */
  rates: "best",
  /** The cells in the order of their table. */
  order: CELLS.map((cell) => cell.index),
};

const LISTENERS = [];

/** Call when anything changes that pictures or tables follow. */
function changed() {
  for (const listen of LISTENERS) listen();
}

/** What a run is called: its name, with its id where another is called the same. */
const CALLED = new Map();
for (const run of RUNS) {
  const twin = RUNS.some((other) => other.index !== run.index && other.run === run.run);
  CALLED.set(run.index, twin && run.run !== run.id ? `${run.run} (${run.id})` : run.run);
}
const called = (run) => CALLED.get(run.index);

const COMPARE = {
  "=": (a, b) => a === b,
  "==": (a, b) => a === b,
  "!=": (a, b) => a !== b,
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
};
const TERM = /^([\w.+-]*)(==|!=|<=|>=|=|<|>)(.*)$/;

/** What a run has of an option; the state is how it ended. */
const optionOf = (run, option) =>
  option === "state" ? run.state : DATA.options[option][DATA.options[option].length > 1 ? run.index : 0];

const asNumber = (value) => (typeof value === "number" ? value : String(value).trim() === "" ? NaN : Number(value));

/**
 * A term of the filter as a test of a run, or as the problem with it: `depth>4` compares an option, by its name or
 * the end of it; anything without a comparison is part of a name or a value.
 */
function readTerm(term) {
  const parts = term.match(TERM);
  if (!parts) {
    const told = (run) => [called(run), run.id, run.norm, run.placement, run.state, ...Object.values(run.settings)];
    return { test: (run) => told(run).some((value) => String(value).toLowerCase().includes(term)) };
  }
  const [, name, sign, wanted] = parts;
  const known = name === "state" || Object.hasOwn(DATA.options, name);
  const options = known ? [name] : Object.hasOwn(DATA.short_names, name) ? DATA.short_names[name] : [];
  if (!name || !wanted || /[=<>!]/.test(wanted)) return { problem: `${term}: write option, comparison and value, as depth>4` };
  if (!options.length) return { problem: `${name}: no run has such an option` };
  if (options.length > 1) return { problem: `${name}: could be ${options.join(" or ")}` };
  const [option] = options;
  const number = asNumber(wanted);
  const ordered = !sign.includes("=") || sign === "<=" || sign === ">=";
  const values = RUNS.map((run) => optionOf(run, option)).filter((value) => value !== null && value !== undefined);
  if (ordered && (!Number.isFinite(number) || values.some((value) => typeof value !== "number")))
    return { problem: `${term}: ${sign} compares numbers; use = or !=` };
  return {
    test: (run) => {
      const value = optionOf(run, option);
      if (value === null || value === undefined) return !ordered && COMPARE[sign]("null", wanted);
      if (typeof value === "number" && Number.isFinite(number)) return COMPARE[sign](value, number);
      return COMPARE[sign](String(value).toLowerCase(), wanted);
    },
  };
}

/** The filter's terms, read once for each text; a run must meet all that can be read. */
let readFilter = { text: "", terms: [] };
function termsOf(text) {
  if (readFilter.text !== text)
    readFilter = { text, terms: text.toLowerCase().split(/\s+/).filter(Boolean).map(readTerm) };
  return readFilter.terms;
}

const meets = (run) => termsOf(state.filter).every(({ test }) => !test || test(run));

/** What is wrong with the filter, or that no run meets it; empty where all is well. */
function filterProblem() {
  const problems = termsOf(state.filter).flatMap(({ problem }) => (problem ? [problem] : []));
  if (!problems.length && RUNS.length && !RUNS.some(meets)) problems.push("no run meets the filter");
  return problems.join("; ");
}

const visible = (run) => state.ticked.has(run.index) && meets(run);

/** The cells of which a run is visible, in the order of their table. */
const visibleCells = () =>
  state.order.map((index) => CELLS[index]).filter((cell) => cell.runs.some((index) => visible(RUNS[index])));

// Styles: eight colours that the colour-blind tell apart (Okabe and Ito, with a grey and a violet), then dashes; and a
// symbol each, so that a colour is never alone in telling who is who.

const LIGHT_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#a0458a", "#b07d00", "#2f8fc4", "#5b4ba8", "#5f6670"];
const DARK_COLOURS = ["#56a9e8", "#ff8a3d", "#35c79b", "#e79bd0", "#e8b530", "#9bd4f7", "#b3a5ff", "#b7bec8"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "star", "pentagon", "hexagon"];

/** Colour, dash and symbol of a cell, by its index; of what is in no cell, grey. */
function styleOf(index) {
  const colours = document.documentElement.dataset.theme === "dark" ? DARK_COLOURS : LIGHT_COLOURS;
  if (index === null || index === undefined) return { colour: themed("muted"), dash: "dot", symbol: "x" };
  return {
    colour: colours[index % colours.length],
    dash: DASHES[Math.floor(index / colours.length) % DASHES.length],
    symbol: SYMBOLS[index % SYMBOLS.length],
  };
}

/**
 * What is drawn as one line: a run, or the runs of a cell at one learning rate.
 *
 * Of a cell without any result the runs that there are: one that is still running has curves all the same.
 */
function groups() {
  if (state.group === "runs") {
    const order = new Map(state.order.map((cell, place) => [cell, place]));
    const shown = RUNS.filter(visible).sort((a, b) => (order.get(a.cell) ?? 1e9) - (order.get(b.cell) ?? 1e9));
    return shown.map((run) => ({ label: called(run), cell: run.cell, runs: [run], of: 1 }));
  }
  return visibleCells().flatMap((cell) => {
    const known = cell.at_best.length ? cell.at_best : cell.runs;
    const sets = state.rates === "best" ? [[null, known]] : byRate(cell);
    return sets
      .map(([rate, indices]) => {
        const runs = indices.map((index) => RUNS[index]).filter(visible);
        const label = rate === null ? cell.label : `${cell.label} lr ${rate}`;
        return { label, cell: cell.index, runs, of: indices.length };
      })
      .filter((group) => group.runs.length);
  });
}

function byRate(cell) {
  const sets = new Map();
  for (const index of cell.runs) {
    const rate = RUNS[index].lr;
    sets.set(rate, [...(sets.get(rate) ?? []), index]);
  }
  return [...sets].sort((a, b) => a[0] - b[0]);
}

/** A group's label with how many runs it is of; where some are hidden, of how many. */
function labelled(group, shown = group.runs.length) {
  if (group.of === 1 && shown === 1) return group.label;
  return `${group.label} (n=${shown}${shown < group.of ? ` of ${group.of}` : ""})`;
}
