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

/** The number of seeds: `3`; `6x6` where seeds and data seeds are crossed, `11 of 6x6` where not every pair ran. */
function counted(n, crossed) {
  if (!crossed) return `${n}`;
  const crossing = crossed.join("x");
  return n === crossed[0] * crossed[1] ? crossing : `${n} of ${crossing}`;
}

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

/** What a run can be filtered by, by word. */
const wordsOf = (run) => ({
  norm: run.norm,
  placement: run.placement,
  "model.depth": run.depth,
  "model.width": run.width,
  "optim.lr": run.lr,
  seed: run.seed,
  state: run.state,
  ...run.settings,
});

/** Whether a run meets every term of the filter: `depth=8` is a word and its value, anything else part of a name. */
function meets(run) {
  const terms = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  return terms.every((term) => {
    const [word, ...rest] = term.split("=");
    const value = rest.join("=");
    const words = Object.entries(wordsOf(run));
    if (!rest.length)
      return [called(run), run.id, ...words.map(([, of]) => of)].some((of) => String(of).toLowerCase().includes(term));
    if (!value) return true; // still being typed
    const same = (of) =>
      String(of).toLowerCase() === value || (of !== null && of !== "" && Number(of) === Number(value));
    return words.some(([key, of]) => (key === word || key.endsWith(`.${word}`)) && same(of));
  });
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
