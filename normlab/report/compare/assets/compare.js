// The comparison page: facts, figures and tables. Python has prepared every text, number, axis and colour.

/** The figures of the page by key: {element, parts, spec, chosen, isNear, isDirty}. */
const FIGURES = new Map();
/** The labels of the lines that the user has hidden, in all figures. */
const HIDDEN = new Set();
const TABLES = [];

/** Replace the data; what the user has chosen stays. */
function useData(data) {
  DATA = data;
  document.title = DATA.title;
  byId("title").textContent = DATA.title;
  byId("about").textContent = DATA.about;
  const written = new Date(DATA.written * 1000).toISOString().slice(0, 16).replace("T", " ");
  byId("footer").textContent = `${DATA.command} · normlab ${DATA.version} · ${written} UTC`;
}

const list = (texts) => make("ul", {}, ...texts.map((text) => make("li", {}, text)));
/** A section that is closed at first; `key` names it while its title changes. */
const folded = (key, title, texts) => make("details", { "data-fold": key }, make("summary", {}, title), list(texts));

/** A table of texts; the first row is the head, the first column names the rows. */
function factTable([head, ...rows]) {
  const heads = head.map((name) => make("th", { scope: "col" }, name));
  const cells = ([name, ...texts]) => [
    make("th", { scope: "row" }, name),
    ...texts.map((text) => make("td", {}, text)),
  ];
  const body = rows.map((texts) => make("tr", {}, ...cells(texts)));
  return make(
    "div",
    { class: "scroll tall", tabindex: 0, role: "region", "aria-label": head.join(", ") },
    make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...body)),
  );
}

function drawFacts() {
  const rows = DATA.facts.flatMap(({ sentence, name, strong, text, badges, table }) => [
    make("dt", {}, name),
    make(
      "dd",
      {},
      ...badges.map(([word, kind]) => make("span", { class: `badge ${kind}` }, word)),
      strong ? make("p", { class: "best" }, strong) : null,
      text || sentence,
      table.length ? factTable(table) : null,
    ),
  ]);
  const { warnings } = DATA;
  const folds = warnings.length ? [folded("warnings", `Warnings (${warnings.length})`, warnings)] : [];
  replaceContent(byId("facts"), make("dl", { class: "facts" }, ...rows), ...folds);
}

// Figures

/** Figures are drawn when they come near the window, or all of them when the page is printed. */
const NEAR = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const figure = [...FIGURES.values()].find(({ element }) => element === entry.target);
      figure.isNear = entry.isIntersecting;
      if (figure.isNear && figure.isDirty) drawNow(figure);
    }
  },
  { rootMargin: "300px" },
);

/** Add the figures that the page does not have yet, and hide those that the data no longer have. */
function updateFigures() {
  const keys = new Set();
  for (const [order, spec] of DATA.figures.entries())
    for (const statistic of spec.first) {
      const key = `${spec.id} ${statistic}`;
      keys.add(key);
      if (!FIGURES.has(key)) FIGURES.set(key, newFigure(spec, statistic));
      const figure = FIGURES.get(key);
      figure.spec = spec;
      figure.element.style.order = order;
    }
  for (const [key, figure] of FIGURES) figure.element.hidden = !keys.has(key);
}

function newFigure(spec, statistic) {
  const parts = {};
  for (const part of ["controls", "legend", "panels"]) parts[part] = make("div", { class: part });
  for (const part of ["about", "y", "x", "caption"])
    parts[part] = make("p", { class: part.length > 1 ? "small muted" : `axis-name ${part}` });
  const { controls, about, legend, y, panels, x, caption } = parts;
  const title = make("h2", {}, spec.title);
  const children = [title, controls, about, legend, y, panels, x, caption];
  const element = make("div", { class: "chart", "data-figure": spec.id }, ...children);
  byId(spec.id === "factor" ? "factor" : "figures").append(element);
  NEAR.observe(element);
  return { element, parts, spec, chosen: statistic, isDirty: true, isNear: false };
}

/** A drop-down list of the statistics or curves of a figure, or no element. */
function choices(figure) {
  const options = Object.keys(figure.spec.variants);
  if (!options.includes(figure.chosen)) figure.chosen = options[0];
  const change = (value) => {
    figure.chosen = value;
    drawNow(figure);
  };
  const texts = options.map((option) => [option, DATA.series[option] ?? option]);
  return options.length > 1 ? [dropDown("show", texts, figure.chosen, change)] : [];
}

function drawNow(figure) {
  if (figure.element.hidden) return;
  figure.isDirty = false;
  const { parts, spec } = figure;
  replaceContent(parts.controls, ...choices(figure));
  const drawing = spec.variants[figure.chosen];
  parts.about.textContent = spec.about[figure.chosen] ?? "";
  const { name, is_log: isLog } = drawing.y;
  parts.y.textContent = `↑ ${name}${isLog ? ", logarithmic" : ""}`;
  parts.x.textContent = `${drawing.x.name} →`;
  parts.caption.textContent = spec.caption;
  const styles = new Set(drawing.panels.flatMap(({ lines }) => lines.map(([style]) => style)));
  replaceContent(parts.legend, ...[...styles].map((style) => legendEntry(...DATA.lines[style])));
  drawLines(parts.panels, drawing);
}

/** A button of a legend, which hides and shows its lines in every figure. */
function legendEntry(label, colour, style) {
  const toggle = () => {
    if (!HIDDEN.delete(label)) HIDDEN.add(label);
    redraw();
  };
  const attributes = { type: "button", "aria-pressed": String(!HIDDEN.has(label)), "data-label": label, click: toggle };
  return make("button", attributes, swatchOf({ colour: themed(colour), dash: DASHES[style] }), label || "all runs");
}

function redraw() {
  drawFacts();
  updateFigures();
  for (const figure of FIGURES.values()) {
    figure.isDirty = true;
    if (figure.isNear) drawNow(figure);
  }
  for (const update of TABLES) update();
}

// Tables

/** A table that a click on a column sorts; `read` returns {title, columns, rows: [texts, ...]}. */
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
  const sort = (name) => {
    direction = by === name ? -direction : 1;
    by = name;
    update();
  };
  const update = () => {
    const { columns, rows } = read();
    const column = columns.indexOf(by);
    const sorted = column < 0 ? rows : rows.toSorted((a, b) => compare(a[column], b[column]));
    const order = direction > 0 ? "ascending" : "descending";
    const button = (name) => make("button", { type: "button", class: "sort", click: () => sort(name) }, name);
    const heads = columns.map((name) => make("th", { scope: "col", "aria-sort": name === by && order }, button(name)));
    const kind = (text, index) => (columns[index] === "note" ? "long" : Number.isNaN(numberIn(text)) ? "" : "number");
    const cells = (texts) => texts.map((text, index) => make("td", { class: kind(text, index) }, text));
    replaceContent(head, make("tr", {}, ...heads));
    body.replaceChildren(...sorted.map((texts) => make("tr", {}, ...cells(texts))));
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

function addTables() {
  addTable("cells", () => ({ title: `Cells (${DATA.cell_table.rows.length})`, ...DATA.cell_table }));
  addTable("runs", () => {
    const { columns, rows } = DATA.run_table;
    return { title: `Runs (${rows.length})`, columns, rows: rows.map(({ values }) => values) };
  });
  const place = make("div");
  const update = () => {
    const notes = [...DATA.notes, ...DATA.problems];
    replaceContent(place, ...(notes.length ? [folded("notes", `Definitions and notes (${notes.length})`, notes)] : []));
  };
  TABLES.push(update);
  byId("tables").append(place);
  update();
}

// The page

useData(DATA);
drawFacts();
updateFigures();
for (const figure of FIGURES.values()) if (figure.spec.id === "factor") drawNow(figure);
performance.mark("first-picture");
requestAnimationFrame(() =>
  setTimeout(() => {
    addTables();
    addEventListener("beforeprint", () => {
      for (const figure of FIGURES.values()) drawNow(figure);
    });
    whenResized(redraw);
    document.documentElement.dataset.ready = "yes";
  }),
);
