// The tables of cells and of runs.

const fixed = (value, digits) => {
  const known = number(value);
  return known === null ? "" : Number.isFinite(known) ? known.toFixed(digits) : String(value);
};
const grouped = (value) => (number(value) === null ? "" : Math.round(number(value)).toLocaleString("en"));

/** A diverged run has no final loss; its last finite one has a column of its own. */
const finalLoss = (run) => (run.state === "diverged" ? "diverged" : fixed(run.val_loss, 4));

function addTables() {
  const listed = () => CELLS.filter((cell) => cell.runs.some((index) => meets(RUNS[index])));
  const sortable = {
    runs: (cell) => cell.runs.length,
    "best lr": (cell) => cell.lr,
    "val loss": (cell) => number(cell.val_loss),
    "best val": (cell) => number(cell.best_val_loss),
    S: (cell) => cell.lr_sensitivity,
    "tokens/s": (cell) => cell.tokens_per_s,
    memory: (cell) => cell.peak_memory_bytes,
    "edge lr": (cell) => cell.edge_lr,
    ...Object.fromEntries(
      ["stuck", "regressed", "diverged", "failed", "damaged", "unfinished"].map((ending) => [
        ending,
        (cell) => cell[ending],
      ]),
    ),
  };
  const words = DATA.by.map((word) => ({ name: word, text: (cell) => shown(cell[word]), value: (cell) => cell[word] }));
  const columns = DATA.cell_columns.slice(1).map((heading) => ({
    name: heading,
    text: (cell) => cell.text[heading] ?? "",
    value: sortable[heading] ?? ((cell) => cell.text[heading]),
    number: heading in sortable,
  }));
  addTable("cells", {
    name: "cells",
    columns: [...words, ...columns],
    rows: listed,
    runsOf: (cell) => cell.runs.filter((index) => meets(RUNS[index])),
    cellOf: (cell) => cell.index,
    first: ranked,
    sorted: (cells) => {
      state.order = [
        ...cells.map((cell) => cell.index),
        ...state.order.filter((index) => !cells.some((cell) => cell.index === index)),
      ];
    },
  });

  const settings = DATA.differing.map((word) => ({
    name: word,
    text: (run) => run.settings[word] ?? "",
    value: (run) => numeric(run.settings[word]),
    number: RUNS.every((run) => typeof numeric(run.settings[word]) === "number"),
  }));
  addTable("runs", {
    name: "runs",
    columns: [
      { name: "run", text: called, value: called },
      { name: "state", text: (run) => run.state, value: (run) => run.state },
      ...settings,
      {
        name: "val loss",
        text: finalLoss,
        value: (run) => (run.state === "diverged" ? Infinity : number(run.val_loss)),
        number: true,
      },
      {
        name: "best val",
        text: (run) => fixed(run.best_val_loss, 4),
        value: (run) => number(run.best_val_loss),
        number: true,
      },
      ...(RUNS.some((run) => run.last_val_loss !== null)
        ? [
            {
              name: "last val",
              text: (run) => fixed(run.last_val_loss, 4),
              value: (run) => number(run.last_val_loss),
              number: true,
            },
          ]
        : []),
      {
        name: "train loss",
        text: (run) => fixed(run.train_loss, 4),
        value: (run) => number(run.train_loss),
        number: true,
      },
      {
        name: "step",
        text: (run) => (run.step === null ? "" : `${run.step}/${run.steps ?? "?"}`),
        value: (run) => run.step,
        number: true,
      },
      {
        name: "tokens/s",
        text: (run) => grouped(run.tokens_per_s),
        value: (run) => number(run.tokens_per_s),
        number: true,
      },
      ...(RUNS.some((run) => run.note)
        ? [{ name: "what happened", text: (run) => run.note ?? "", value: (run) => run.note, long: true }]
        : []),
    ],
    rows: () => RUNS.filter(meets),
    runsOf: (run) => [run.index],
    cellOf: (run) => run.cell,
    first: (runs) =>
      [...runs].sort((a, b) =>
        before(
          Number.isFinite(number(a.val_loss) ?? NaN) ? a.val_loss : null,
          Number.isFinite(number(b.val_loss) ?? NaN) ? b.val_loss : null,
        ),
      ),
  });
}

/** A value as it is typed. */
const shown = (value) => (value === null || value === undefined ? "-" : String(value));

/** A setting that is a number, as one. */
function numeric(text) {
  return text !== undefined && text !== "" && text !== "-" && Number.isFinite(Number(text)) ? Number(text) : text;
}
