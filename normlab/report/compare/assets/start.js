// Build the page: header, controls for all figures, tables and figures.

const counted = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const written = new Date(DATA.written * 1000).toISOString().slice(0, 16).replace("T", " ");

byId("title").textContent = DATA.title;
byId("about").textContent =
  `${DATA.command} · normlab ${DATA.version} · ${written} UTC · ${counted(RUNS.length, "run")}, ` +
  `${counted(CELLS.length, "cell")} by ${DATA.by.join(", ")}`;
byId("cell-definition").textContent =
  `A cell is a group of runs with the same ${DATA.by.join(", ")}; its runs differ in learning rate and seed.`;
byId("theme-place").append(themeControl());
byId("sentences").append(...DATA.summary.map((text, index) => make("p", { class: index ? "" : "lead" }, text)));
if (DATA.banners.length) {
  const paragraphs = DATA.banners.map((text) => make("p", {}, text));
  byId("banners").append(make("div", { class: "note", role: "note" }, ...paragraphs));
}
if (DATA.warnings.length) {
  const title = make("summary", {}, counted(DATA.warnings.length, "warning"));
  const details = { id: "warnings", class: "note", open: DATA.warnings.length < 4 };
  byId("banners").append(make("details", details, title, list(DATA.warnings)));
}

function list(texts) {
  return make("ul", {}, ...texts.map((text) => make("li", {}, text)));
}

function setState(values) {
  Object.assign(state, values);
  changed();
}

const filter = make("input", {
  type: "search",
  id: "filter",
  size: 18,
  placeholder: "pre depth=8",
  title: "part of a name, or an option compared with a value: pre depth>4 lr=0.001 norm!=none",
  "aria-label": "filter: part of a name, or option=value, also != < <= > >=",
  input: () => setState({ filter: filter.value }),
});
const problem = make("span", { id: "filter-problem", class: "small", role: "status" });
LISTENERS.push(() => (problem.textContent = filterProblem()));
const showAll = () => {
  filter.value = "";
  setState({ ticked: new Set(RUNS.map((run) => run.index)), filter: "" });
};
const lines = [
  ["cells", "cell"],
  ["runs", "run"],
];
const rates = [
  ["best", "best learning rate"],
  ["all", "every learning rate"],
];
byId("bar").append(
  make("label", {}, "filter", filter),
  problem,
  dropDown("one line per", lines, state.group, (group) => setState({ group }), { id: "group" }),
);
if (CELLS.some((cell) => cell.learning_rates.length > 1)) {
  const choose = (rates) => setState({ rates });
  byId("bar").append(dropDown("at", rates, state.rates, choose, { id: "which-rates" }));
  // Each run has one learning rate, so the choice only applies to cells.
  const update = () => (byId("which-rates").disabled = state.group === "runs");
  LISTENERS.push(update);
  update();
}
byId("bar").append(make("button", { type: "button", id: "show-all", click: showAll }, "show all"));

const first = addFigure("losses", "Final validation loss of each cell", drawLosses);
first.inView = true;
drawNow(first).then(() => {
  performance.mark("first-picture");
  // Draw the other figures after the browser has displayed this one.
  requestAnimationFrame(() => setTimeout(addOthers));
});

function addOthers() {
  addCellTable();
  addRunTable();
  const explanation =
    "A check box shows or hides runs in the figures. It changes no number: the mean and the interval of a cell include " +
    "all its runs. To exclude runs from the numbers, use --where.";
  byId("cells").append(make("p", { class: "muted small" }, explanation));
  addCurves();
  addFigure("rates", "Final loss against learning rate", drawRates);
  addFigure("matrix", "Final loss by norm, placement and depth", drawMatrix);
  addProfiles();
  addNotes();
  LISTENERS.push(redrawAll);
  THEME_LISTENERS.push(redrawAll);
  new ResizeObserver(afterResize(redrawAll)).observe(document.body);
  document.documentElement.dataset.ready = "yes";
}

/** Add the notes on columns and on runs. */
function addNotes() {
  const ofRuns = RUNS.filter((run) => run.note).map((run) => `${runName(run)}: ${run.note}`);
  for (const [title, texts] of [
    ["Columns", DATA.notes],
    ["Runs", ofRuns],
  ])
    if (texts.length) byId("notes").append(make("h3", {}, title), list(texts));
}

/** A function that calls `call` 150 ms after the last change of the page's width. */
function afterResize(call) {
  let width = document.body.clientWidth;
  let waiting = null;
  return () => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(call, 150);
  };
}
