// The tables of cells and of runs. A click on a heading sorts a table; check boxes show or hide runs.

/** A sample of a cell's line, as in a legend. */
function lineSample(cell) {
  const { colour, dash } = styleOf(cell);
  const dashes = { solid: "", dash: "6 4", dot: "2 3", dashdot: "6 3 2 3" }[dash];
  const style = { stroke: colour, "stroke-width": 3, "stroke-dasharray": dashes };
  const line = makeSvg("line", { x1: 1, x2: 25, y1: 5, y2: 5, ...style });
  return makeSvg("svg", { width: 26, height: 10, "aria-hidden": "true" }, line);
}

const isEmpty = (value) => missing(value) || value === "" || Number.isNaN(value);

/** Compare values for sorting: numbers by size, then texts; empty values last in either direction. */
function compareValues(a, b, direction = 1) {
  if (isEmpty(a) || isEmpty(b)) return isEmpty(a) - isEmpty(b);
  if (typeof a !== typeof b) return direction * (typeof a === "number" ? -1 : 1);
  if (typeof a === "number") return a === b ? 0 : direction * (a - b);
  return direction * String(a).localeCompare(String(b), "en", { numeric: true });
}

/**
 * Add a table to the section `name`.
 *
 * `columns`: each has `name`, `text(row)`, `value(row)` for sorting, and `number` or `long` for its layout. `rows()`:
 * the rows that match the filter, in their order before any click. `runsOf(row)`: the runs of its check box.
 * `cellOf(row)`: the cell that gives its style. `sorted(rows)`: called after a click on a heading.
 */
function addTable(name, { columns, rows, runsOf, cellOf, sorted = () => {} }) {
  let sortColumn = null;
  let descending = false;
  const body = make("tbody");
  const heads = columns.map((column, index) => {
    const click = () => {
      descending = sortColumn === index && !descending;
      sortColumn = index;
      heads.forEach((head, i) =>
        head.setAttribute("aria-sort", i !== index ? "none" : descending ? "descending" : "ascending"),
      );
      sorted(sortedRows());
      changed();
    };
    const button = make("button", { type: "button", class: "sort", click }, column.name);
    return make("th", { scope: "col", class: column.number ? "number" : "" }, button);
  });
  const checkAll = make("input", {
    type: "checkbox",
    "aria-label": `show all listed ${name}`,
    change: () => tick(rows().flatMap(runsOf), checkAll.checked),
  });
  const count = make("p", { class: "muted small", role: "status" });
  const download = () => {
    const texts = sortedRows().map((row) => columns.map((column) => column.text(row)));
    save(`${fileName(DATA.title)}-${name}.csv`, "text/csv", csvText([columns.map((column) => column.name), ...texts]));
  };
  const head = make("thead", {}, make("tr", {}, make("th", {}, checkAll), ...heads));
  const region = { class: "scroll tall", tabindex: "0", role: "region", "aria-label": `table of ${name}` };
  byId(name).append(
    count,
    make("div", region, make("table", {}, head, body)),
    make("div", { class: "buttons" }, make("button", { type: "button", click: download }, "CSV")),
  );

  function tick(indices, on) {
    for (const index of indices) on ? state.ticked.add(index) : state.ticked.delete(index);
    changed();
  }

  function sortedRows() {
    if (sortColumn === null) return rows();
    const { value } = columns[sortColumn];
    return rows().toSorted((a, b) => compareValues(value(a), value(b), descending ? -1 : 1));
  }

  /** Check a box if all of its runs are ticked; make it indeterminate if some are. */
  function setBox(box, indices) {
    const ticked = indices.filter((index) => state.ticked.has(index)).length;
    box.checked = ticked > 0 && ticked === indices.length;
    box.indeterminate = ticked > 0 && ticked < indices.length;
    return ticked;
  }

  function tableCell(column, row) {
    const text = column.text(row);
    const title = text.length > 40 ? text : null;
    return make("td", { class: column.number ? "number" : column.long ? "long" : "", title }, text);
  }

  function show() {
    const listed = sortedRows();
    let ticked = 0;
    const elements = listed.map((row) => {
      const change = () => tick(runsOf(row), box.checked);
      const box = make("input", { type: "checkbox", "aria-label": `show ${columns[0].text(row)}`, change });
      const on = setBox(box, runsOf(row)) > 0;
      ticked += on;
      const first = make("td", { class: "tick" }, box, lineSample(cellOf(row)));
      return make("tr", { class: on ? "" : "hidden-row" }, first, ...columns.map((column) => tableCell(column, row)));
    });
    body.replaceChildren(...elements);
    setBox(checkAll, listed.flatMap(runsOf));
    count.textContent = `${listed.length} ${name}, ${ticked} selected`;
  }

  LISTENERS.push(show);
  THEME_LISTENERS.push(show);
  show();
}

/** The value of a cell by which a column of `summarize` is sorted; other columns are sorted by their text. */
const CELL_VALUES = {
  runs: (cell) => cell.runs.length,
  "best lr": (cell) => cell.lr,
  "val loss": (cell) => number(cell.val_loss),
  "best val": (cell) => number(cell.best_val_loss),
  S: (cell) => cell.lr_sensitivity,
  "tok/s": (cell) => cell.tokens_per_s,
  memory: (cell) => cell.peak_memory_bytes,
  "edge lr": (cell) => cell.edge_lr,
};
for (const outcome of ["stuck", "regressed", "diverged", "failed", "damaged", "unfinished"])
  CELL_VALUES[outcome] = (cell) => cell[outcome];

function addCellTable() {
  const options = DATA.by.map((option) => ({
    name: option,
    text: (cell) => String(cell[option] ?? "-"),
    value: (cell) => cell[option],
  }));
  const columns = DATA.cell_columns.slice(1).map((name) => ({
    name,
    text: (cell) => cell.text[name] ?? "",
    value: CELL_VALUES[name] ?? ((cell) => cell.text[name]),
    number: name in CELL_VALUES,
  }));
  addTable("cells", {
    columns: [...options, ...columns],
    rows: () => DATA.order.map((index) => CELLS[index]).filter((cell) => cell.runs.some((run) => matches(RUNS[run]))),
    runsOf: (cell) => cell.runs.filter((index) => matches(RUNS[index])),
    cellOf: (cell) => cell.index,
    sorted: (cells) => {
      const listed = cells.map((cell) => cell.index);
      state.order = [...listed, ...state.order.filter((index) => !listed.includes(index))];
    },
  });
}

function addRunTable() {
  /** A numeric column of a run's record. */
  const numeric = (name, key) => ({
    name,
    text: (run) => run.text[key],
    value: (run) => number(run[key]),
    number: true,
  });
  const diverged = (run) => run.state === "diverged";
  const loss = numeric("val loss", "val_loss");
  const settings = DATA.differing.map((option) => {
    const value = ({ settings: { [option]: text } }) => (text && Number.isFinite(Number(text)) ? Number(text) : text);
    const numbers = RUNS.every((run) => typeof value(run) === "number");
    return { name: option, text: (run) => run.settings[option] ?? "", value, number: numbers };
  });
  const last = RUNS.some((run) => run.last_val_loss !== null) ? [numeric("last val", "last_val_loss")] : [];
  const note = { name: "note", text: (run) => run.note ?? "", value: (run) => run.note, long: true };
  addTable("runs", {
    columns: [
      { name: "run", text: runName, value: runName },
      { name: "state", text: (run) => run.state, value: (run) => run.state },
      ...settings,
      {
        ...loss, // a diverged run has no final loss
        text: (run) => (diverged(run) ? "diverged" : loss.text(run)),
        value: (run) => (diverged(run) ? Infinity : loss.value(run)),
      },
      numeric("best val", "best_val_loss"),
      ...last,
      numeric("train loss", "train_loss"),
      {
        ...numeric("step", "step"),
        text: ({ text }) => (text.step === "" ? "" : `${text.step}/${text.steps || "?"}`),
      },
      numeric("tok/s", "tokens_per_s"),
      ...(RUNS.some((run) => run.note) ? [note] : []),
    ],
    rows: () => RUNS.filter(matches).sort((a, b) => compareValues(finalLoss(a), finalLoss(b))),
    runsOf: (run) => [run.index],
    cellOf: (run) => run.cell,
  });
}

const finalLoss = (run) => (Number.isFinite(number(run.val_loss)) ? run.val_loss : null);
