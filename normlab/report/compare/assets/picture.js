// Figures: a Plotly drawing with a caption and downloads, drawn when the figure scrolls into view.

const FIGURES = [];
const NOTHING_SELECTED = "Nothing is selected: tick a run, or clear the filter.";
const CONFIG = { displayModeBar: false, doubleClick: "reset", showTips: false };
const NARROW = 640;
const MAX_LETTERS = 80;
const MAX_LEGEND_ROWS = 14;

/** A text cut to a number of letters. */
const short = (text, most) => (text.length > most ? `${text.slice(0, Math.max(4, Math.floor(most) - 3))}...` : text);

/** A text escaped for Plotly's labels, which interpret some HTML, templates (%{x}) and mathematics ($x$). */
const plain = (text) =>
  short(String(text), MAX_LETTERS)
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll("$", "&#36;")
    .replaceAll("%{", "%&#123;");

/**
 * Add a figure to a section.
 *
 * `draw(width)` returns Plotly's `traces` and `layout`, the `caption`, a function `rows` with the rows of the CSV, and
 * the least `width` if the figure needs more than the screen's; or `empty`, a message if there is nothing to draw.
 */
function addFigure(section, title, draw) {
  const plot = make("div", { class: "plot", role: "img", "aria-label": title });
  const message = make("p", { class: "muted", hidden: true });
  const caption = make("figcaption");
  const figure = { section, draw, plot, message, caption, dirty: true, inView: false, drawing: null };
  const file = `${fileName(DATA.title)}-${section}`;
  const image = (format) =>
    make("button", { type: "button", click: () => saveImage(figure, format, file) }, format.toUpperCase());
  figure.buttons = make(
    "div",
    { class: "buttons", role: "group", "aria-label": `Download: ${title}` },
    make("button", { type: "button", click: () => saveRows(figure, file) }, "CSV"),
    image("png"),
    image("svg"),
  );
  const wide = make("div", { class: "wide" }, plot);
  figure.element = make("figure", { "data-figure": section }, wide, message, caption, figure.buttons);
  byId(section).append(figure.element);
  FIGURES.push(figure);
  IN_VIEW.observe(figure.element);
  return figure;
}

const IN_VIEW = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const figure = FIGURES.find(({ element }) => element === entry.target);
      figure.inView = entry.isIntersecting;
      if (figure.inView && figure.dirty) drawNow(figure);
    }
  },
  { rootMargin: "600px" },
);

/** Redraw a figure at once if it is in view, else when it scrolls into view. */
function redraw(figure) {
  figure.dirty = true;
  if (figure.inView) drawNow(figure);
}

function redrawAll() {
  for (const figure of FIGURES) redraw(figure);
}

function drawNow(figure) {
  figure.drawn = draw(figure);
  return figure.drawn;
}

async function draw(figure) {
  figure.dirty = false;
  const width = figure.element.clientWidth;
  const drawing = RUNS.some(visible) || !RUNS.length ? figure.draw(width) : { empty: NOTHING_SELECTED };
  figure.drawing = drawing;
  figure.message.hidden = !drawing.empty;
  figure.plot.hidden = figure.buttons.hidden = Boolean(drawing.empty);
  figure.message.textContent = drawing.empty ?? "";
  figure.caption.textContent = drawing.empty ? "" : drawing.caption;
  if (drawing.empty) return;
  const { traces, layout } = styled(drawing, Math.max(width, drawing.width ?? 0));
  if (!layout.showlegend) figure.caption.textContent += " Too many lines for a legend: point at a line for its name.";
  await Plotly.react(figure.plot, traces, layout, CONFIG);
}

/** A drawing in the colours of the theme, with room for the legend below. */
function styled({ traces, layout }, width) {
  const text = themed("text");
  const line = themed("line");
  const background = themed("ground");
  const margin = { l: 56, r: 16, t: 28, b: 48, ...layout.margin };
  const names = traces.filter((trace) => trace.showlegend !== false && trace.name).map((trace) => trace.name);
  const rows = legendRows(names, width - margin.l - margin.r);
  const showlegend = rows <= MAX_LEGEND_ROWS;
  const legendHeight = rows && showlegend ? rows * 20 + 16 : 0;
  // A name with an HTML entity is not cut, because a cut could split the entity.
  const fitting = (name) => (name.includes("&") ? name : short(name, (width - 70) / 6.6));
  const result = {
    ...layout,
    width,
    height: (layout.height ?? 380) + legendHeight,
    autosize: false,
    showlegend,
    uirevision: layout.uirevision ?? "same", // keeps the zoom through redraws
    margin: { ...margin, b: margin.b + legendHeight, autoexpand: true },
    paper_bgcolor: background,
    plot_bgcolor: background,
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: text },
    hoverlabel: { bgcolor: themed("panel"), bordercolor: themed("strong"), font: { color: text }, namelength: -1 },
    hovermode: "closest",
    dragmode: width < NARROW ? false : "zoom",
    legend: {
      orientation: "h",
      x: 0,
      xanchor: "left",
      xref: "container",
      y: 0,
      yanchor: "bottom",
      yref: "container",
      itemclick: false,
      itemdoubleclick: false,
      font: { size: 12 },
      tracegroupgap: 0,
    },
  };
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: themed("strong"), automargin: true };
  const axes = ["xaxis", "yaxis", ...Object.keys(result).filter((key) => /^[xy]axis\d+$/.test(key))];
  for (const key of axes) result[key] = { ...axis, exponentformat: "power", ...result[key] };
  return { traces: traces.map((trace) => (trace.name ? { ...trace, name: fitting(trace.name) } : trace)), layout: result };
}

/** The approximate number of rows of a legend. */
function legendRows(names, width) {
  const longest = Math.max(0, ...names.map((name) => name.length)) * 6.6 + 48;
  return names.length ? Math.ceil(names.length / Math.max(1, Math.floor(width / longest))) : 0;
}

/** Minimum and maximum of many values; Math.min(...values) limits the number of values. */
const leastOf = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const largestOf = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

/** An axis type for values: logarithmic if requested and all values are positive. */
function scaled(logarithmic, values) {
  const finite = values.filter(Number.isFinite);
  if (!logarithmic || !finite.length || finite.some((value) => value <= 0)) return { type: "linear" };
  const decades = Math.log10(largestOf(finite) / leastOf(finite));
  const ticks = decades > 3 ? { dtick: 1 } : decades > 0.6 ? { dtick: "D2" } : {}; // few enough for the labels to fit
  return { type: "log", ...ticks };
}

/**
 * A grid of panels in one figure; `gap` is the space between two panels as a share of a panel.
 *
 * Returns a function that adds a panel's axes and title to a layout and returns the names of its axes for its traces.
 */
function panelGrid(columns, rows, gap) {
  const panelWidth = 1 / (columns + gap.x * (columns - 1));
  const panelHeight = 1 / (rows + gap.y * (rows - 1));
  return (layout, index, title, xaxis, yaxis) => {
    const suffix = axisSuffix(index);
    const left = (index % columns) * panelWidth * (1 + gap.x);
    const top = 1 - Math.floor(index / columns) * panelHeight * (1 + gap.y);
    layout[`xaxis${suffix}`] = { domain: [left, left + panelWidth], anchor: `y${suffix}`, ...xaxis };
    layout[`yaxis${suffix}`] = { domain: [Math.max(0, top - panelHeight), top], anchor: `x${suffix}`, ...yaxis };
    const corner = { x: left, y: top, xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom" };
    layout.annotations.push({ ...corner, showarrow: false, text: title, font: { size: 12 } });
    return { xaxis: `x${suffix}`, yaxis: `y${suffix}` };
  };
}

/** Plotly's suffix of the axes of a panel. */
const axisSuffix = (index) => (index ? String(index + 1) : "");

/** A small axis title for panels. */
const axisTitle = (text) => ({ text, font: { size: 11 }, standoff: 4 });

/** Download the rows of a figure, which may not have been drawn yet. */
async function saveRows(figure, file) {
  if (!figure.drawing) await drawNow(figure);
  if (!figure.drawing.empty) save(`${file}.csv`, "text/csv", csvText(figure.drawing.rows()));
}

async function saveImage(figure, format, file) {
  const drawing = figure.draw(figure.element.clientWidth);
  const url = await imageUrl(drawing, format, figure.element.clientWidth);
  const content = url.slice(url.indexOf(",") + 1);
  if (format === "svg") save(`${file}.svg`, "image/svg+xml", decodeURIComponent(content));
  else save(`${file}.png`, "image/png", bytesOf(content));
}

/** A drawing as an image, a data: URL. */
function imageUrl(drawing, format, width) {
  const { traces, layout } = styled(drawing, Math.max(width, drawing.width ?? 0));
  const size = { width: layout.width, height: layout.height, scale: format === "png" ? 2 : 1 };
  return Plotly.toImage({ data: traces, layout, config: CONFIG }, { format, ...size });
}

/** Every figure that is not empty as PNG, in the light theme, 1000 pixels wide; for `normlab compare --format png`. */
async function exportFigures() {
  while (document.documentElement.dataset.ready !== "yes") await new Promise((resume) => setTimeout(resume, 20));
  chosenTheme = "light";
  applyTheme();
  const images = [];
  for (const figure of FIGURES) {
    const drawing = figure.draw(1000);
    if (!drawing.empty) images.push({ name: figure.section, png: await imageUrl(drawing, "png", 1000) });
  }
  return images;
}

const fileName = (text) => text.replace(/[^\w.-]+/g, "_").slice(0, 60) || "compare";

/** The rows of a CSV of lines: each point with the columns of its line. */
function pointRows(heading, traces) {
  const rows = [heading];
  for (const trace of traces.filter(({ meta }) => meta))
    trace.x.forEach((x, i) => rows.push([...trace.meta.columns, x, trace.y[i]]));
  return rows;
}

const bytesOf = (base64) => Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
const float32Of = (base64) => new Float32Array(bytesOf(base64).buffer);
const uint32Of = (base64) => new Uint32Array(bytesOf(base64).buffer);

/** A check box with its label. */
function checkBox(label, checked, change) {
  const box = make("input", { type: "checkbox", checked, change: () => change(box.checked) });
  return make("label", {}, box, label);
}

/** A slider over values with its label; `text(value)` is displayed beside it. */
function slider(label, id, values, value, text, change, accessibleLabel) {
  const output = make("output", { id: `${id}-value` });
  const show = () => {
    output.textContent = text(values[input.value]);
    input.setAttribute("aria-valuetext", output.textContent);
  };
  const range = { type: "range", id, min: 0, max: values.length - 1, step: 1, value: values.indexOf(value) };
  const input = make("input", {
    ...range,
    "aria-label": accessibleLabel,
    input: () => {
      show();
      change(values[input.value]);
    },
  });
  show();
  return make("label", {}, label, input, output);
}

// Draw all figures before printing, including those that have not been in view.
addEventListener("beforeprint", () => FIGURES.filter(({ dirty }) => dirty).forEach(drawNow));
