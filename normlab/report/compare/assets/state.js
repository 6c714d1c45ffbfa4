// The selection: which runs are ticked and match the filter, how they are grouped into lines, and their styles.

const RUNS = DATA.runs;
const CELLS = DATA.cells;

const state = {
  ticked: new Set(RUNS.map((run) => run.index)),
  filter: "",
  /** What a line is: "cells" or "runs". */
  group: CELLS.some((cell) => cell.runs.length > 1) ? "cells" : "runs",
  /** The learning rates of a cell's lines: "best" or "all". */
  rates: "best",
  /** The cells in the order of the table. */
  order: DATA.order,
};

const LISTENERS = [];

/** Notify figures and tables that the selection has changed. */
function changed() {
  for (const listen of LISTENERS) listen();
}

/** The display name of each run: its name, followed by the id if the name is not unique. */
const RUN_NAMES = RUNS.map((run) => {
  const unique = RUNS.every((other) => other === run || other.run !== run.run);
  return unique || run.run === run.id ? run.run : `${run.run} (${run.id})`;
});
const runName = (run) => RUN_NAMES[run.index];

const COMPARISONS = {
  "=": (a, b) => a === b,
  "==": (a, b) => a === b,
  "!=": (a, b) => a !== b,
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
};
const TERM = /^([\w.+-]*)(==|!=|<=|>=|=|<|>)(.*)$/;

/** A run's value of an option; `state` is its state. */
const optionOf = (run, option) =>
  option === "state" ? run.state : DATA.options[option][DATA.options[option].length > 1 ? run.index : 0];

const missing = (value) => value === null || value === undefined;

/**
 * Parse a term of the filter to a `test` of a run, or to a `problem`.
 *
 * `depth>4` compares an option, by its name or the end of its name. A term without a comparison is a part of a name or
 * of a value.
 */
function parseTerm(term) {
  const parts = term.match(TERM);
  if (!parts) {
    const texts = (run) => [runName(run), run.id, run.norm, run.placement, run.state, ...Object.values(run.settings)];
    return { test: (run) => texts(run).some((text) => String(text).toLowerCase().includes(term)) };
  }
  const [, name, comparison, operand] = parts;
  if (!name || !operand || /[=<>!]/.test(operand))
    return { problem: `${term}: write option, comparison and value, such as depth>4` };
  const complete = name === "state" || Object.hasOwn(DATA.options, name);
  const options = complete ? [name] : Object.hasOwn(DATA.short_names, name) ? DATA.short_names[name] : [];
  if (!options.length) return { problem: `${name}: no run has this option` };
  if (options.length > 1) return { problem: `${name}: ambiguous, write ${options.join(" or ")}` };
  const [option] = options;
  const compare = COMPARISONS[comparison];
  const operandNumber = operand.trim() === "" ? NaN : Number(operand);
  const isNumber = Number.isFinite(operandNumber);
  const ordered = /[<>]/.test(comparison);
  const values = RUNS.map((run) => optionOf(run, option)).filter((value) => !missing(value));
  if (ordered && (!isNumber || values.some((value) => typeof value !== "number")))
    return { problem: `${term}: ${comparison} compares numbers; use = or !=` };
  return {
    test: (run) => {
      const value = optionOf(run, option);
      if (missing(value)) return !ordered && compare("null", operand);
      if (typeof value === "number" && isNumber) return compare(value, operandNumber);
      return compare(String(value).toLowerCase(), operand);
    },
  };
}

/** The parsed terms of the filter; a run must match every valid term. */
let parsedFilter = { text: "", terms: [] };
function filterTerms() {
  const text = state.filter;
  if (parsedFilter.text !== text)
    parsedFilter = { text, terms: text.toLowerCase().split(/\s+/).filter(Boolean).map(parseTerm) };
  return parsedFilter.terms;
}

const matches = (run) => filterTerms().every(({ test }) => !test || test(run));

/** The problems of the filter; empty if there are none. */
function filterProblem() {
  const problems = filterTerms().flatMap(({ problem }) => (problem ? [problem] : []));
  if (!problems.length && RUNS.length && !RUNS.some(matches)) problems.push("no run matches the filter");
  return problems.join("; ");
}

const visible = (run) => state.ticked.has(run.index) && matches(run);

/** The cells with a visible run, in the order of `order`. */
const visibleCells = (order = state.order) =>
  order.map((index) => CELLS[index]).filter((cell) => cell.runs.some((index) => visible(RUNS[index])));

/** Runs or units in the order of their cells, those without a cell last. */
function inOrder(items) {
  const order = new Map(state.order.map((cell, position) => [cell, position]));
  return items.toSorted((a, b) => (order.get(a.cell) ?? 1e9) - (order.get(b.cell) ?? 1e9));
}

// Cells differ in colour (eight colours that are distinct with any colour vision, after Okabe and Ito), in dashes and in
// symbols, so that no distinction depends on colour alone.

const LIGHT_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#a0458a", "#b07d00", "#2f8fc4", "#5b4ba8", "#5f6670"];
const DARK_COLOURS = ["#56a9e8", "#ff8a3d", "#35c79b", "#e79bd0", "#e8b530", "#9bd4f7", "#b3a5ff", "#b7bec8"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "star", "pentagon", "hexagon"];

/** The style of a cell; grey for runs without a cell. */
function styleOf(cell) {
  const colours = document.documentElement.dataset.theme === "dark" ? DARK_COLOURS : LIGHT_COLOURS;
  if (missing(cell)) return { colour: themed("muted"), dash: "dot", symbol: "x" };
  return {
    colour: colours[cell % colours.length],
    dash: DASHES[Math.floor(cell / colours.length) % DASHES.length],
    symbol: SYMBOLS[cell % SYMBOLS.length],
  };
}

/** The lines to draw: runs, or the runs of a cell at one learning rate (all runs of a cell without a result). */
function groups() {
  if (state.group === "runs")
    return inOrder(RUNS.filter(visible)).map((run) => ({ label: runName(run), cell: run.cell, runs: [run], total: 1 }));
  return visibleCells().flatMap((cell) => {
    const best = cell.at_best.length ? cell.at_best : cell.runs;
    const sets = state.rates === "best" ? [[cell.label, best]] : runsByRate(cell);
    return sets
      .map(([label, indices]) => {
        const runs = indices.map((index) => RUNS[index]).filter(visible);
        return { label, cell: cell.index, runs, total: indices.length };
      })
      .filter((group) => group.runs.length);
  });
}

/** [label, runs] for each learning rate of a cell, the lowest first. */
function runsByRate(cell) {
  const rates = [...new Set(cell.runs.map((index) => RUNS[index].lr))].sort((a, b) => a - b);
  return rates.map((rate) => [`${cell.label} lr ${rate}`, cell.runs.filter((index) => RUNS[index].lr === rate)]);
}

/** A group's label with the number of drawn runs, and the total if some runs are hidden. */
function labelWithCount(group, drawn) {
  if (group.total === 1 && drawn === 1) return group.label;
  return `${group.label} (n=${drawn}${drawn < group.total ? ` of ${group.total}` : ""})`;
}
