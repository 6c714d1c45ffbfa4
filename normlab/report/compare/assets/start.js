// The page: what stands at its top, what all pictures share, and the pictures in their order.

byId("title").textContent = DATA.title;
byId("about").textContent =
  `${DATA.command} · normlab ${DATA.version} · ${new Date(DATA.written * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC · ${RUNS.length} ${RUNS.length === 1 ? "run" : "runs"}, ${CELLS.length} ${CELLS.length === 1 ? "cell" : "cells"} of ${DATA.by.join(", ")}`;
byId("theme-place").append(themeControl());
byId("sentences").append(...DATA.answer.map((sentence, place) => make("p", { class: place ? "" : "lead" }, sentence)));
if (DATA.banners.length)
  byId("banners").append(
    make("div", { class: "note", role: "note" }, ...DATA.banners.map((text) => make("p", {}, text))),
  );

if (DATA.warnings.length) {
  const many = DATA.warnings.length === 1 ? "One thing" : `${DATA.warnings.length} things`;
  const items = DATA.warnings.map((text) => make("li", {}, text));
  const said = make("summary", {}, `${many} to be known before these numbers are believed`);
  byId("banners").append(
    make("details", { id: "warnings", class: "note", open: items.length < 4 }, said, make("ul", {}, ...items)),
  );
}

const filter = make("input", {
  type: "search",
  id: "filter",
  size: 18,
  placeholder: "pre depth=8",
  title: "part of a name, or an option compared with a value: pre depth>4 lr=0.001 norm!=none",
  "aria-label": "filter: part of a name, or option=value, also != < <= > >=",
  input: () => {
    state.filter = filter.value;
    changed();
  },
});
const filterSays = make("span", { id: "filter-problem", class: "small", role: "status" });
LISTENERS.push(() => (filterSays.textContent = filterProblem()));
byId("bar").append(
  make("label", {}, "filter", filter),
  filterSays,
  choice(
    "a line is",
    [
      ["cells", "a cell"],
      ["runs", "a run"],
    ],
    state.group,
    (value) => {
      state.group = value;
      changed();
    },
    "group",
  ),
);
if (CELLS.some((cell) => cell.learning_rates.length > 1)) {
  byId("bar").append(
    choice(
      "at",
      [
        ["best", "each cell's best learning rate"],
        ["all", "every learning rate"],
      ],
      state.rates,
      (value) => {
        state.rates = value;
        changed();
      },
      "which-rates",
    ),
  );
  // Of runs each has its own, and all are drawn.
  const offer = () => (byId("which-rates").disabled = state.group === "runs");
  LISTENERS.push(offer);
  offer();
}
byId("bar").append(
  make(
    "button",
    {
      type: "button",
      id: "show-all",
      click: () => {
        state.ticked = new Set(RUNS.map((run) => run.index));
        state.filter = filter.value = "";
        changed();
      },
    },
    "show all",
  ),
);

state.order = ranked(CELLS).map((cell) => cell.index);
const first = addPicture("answer", "Final validation loss of each cell", drawAnswer);
first.near = true;
drawNow(first).then(() => {
  performance.mark("first-picture");
  // The rest after the browser has shown it.
  requestAnimationFrame(() => setTimeout(addTheRest));
});

function addTheRest() {
  addTables();
  byId("cells").append(
    make(
      "p",
      { class: "muted small" },
      "A tick shows a run, or a cell's runs, or hides them, here and in every picture. It leaves nothing out of a number: a cell's mean and interval are of all its runs, so that no seed can be dropped to taste. To leave runs out of the numbers too: --where.",
    ),
  );
  addCurves();
  addPicture("rates", "Final loss against learning rate", drawRates);
  addPicture("matrix", "Final loss by norm, placement and depth", drawMatrix);
  addProfiles();
  if (MEASURED.size) addPicture("signatures", "The stream and the gradient, placement by placement", drawSignatures);
  else byId("heatmaps").hidden = byId("signatures").hidden = true;
  addNotes();
  LISTENERS.push(redrawAll);
  THEME_LISTENERS.push(redrawAll);
  new ResizeObserver(later(redrawAll)).observe(document.body);
  document.documentElement.dataset.ready = "yes";
}

/** What is to be known of the numbers, and what is wrong with runs. */
function addNotes() {
  const list = (title, texts) =>
    texts.length ? [make("h3", {}, title), make("ul", {}, ...texts.map((text) => make("li", {}, text)))] : [];
  byId("notes").append(...list("What they are", DATA.notes));
  const wrong = RUNS.filter((run) => run.note);
  byId("notes").append(
    ...list(
      "What happened to runs",
      wrong.map((run) => `${called(run)}: ${run.note}`),
    ),
  );
}

/** A function that is called once when calls of it have ceased for a moment, and only where the width is another. */
function later(call) {
  let waiting = null,
    width = document.body.clientWidth;
  return () => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(call, 150);
  };
}
