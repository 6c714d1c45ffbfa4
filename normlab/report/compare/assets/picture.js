// A picture: Plotly's drawing in a figure with its caption and its files; drawn when it comes into view.

const PICTURES = [];
const NOTHING_SHOWN = "Nothing is shown: tick a run, or empty the filter.";
const CONFIG = { displayModeBar: false, doubleClick: "reset", showTips: false };
const NARROW = 640;
const MOST_LETTERS = 80;
const MOST_LEGEND_ROWS = 14;

/** A text of at most so many letters. */
const short = (text, most) => (text.length > most ? `${text.slice(0, Math.max(4, Math.floor(most) - 3))}...` : text);

/**
 * A text as Plotly takes it, not too long for a legend. In labels it reads a little HTML, templates (%{x}) and, where
 * there are two dollars, mathematics: none of it is what the name of a run is meant to be.
 */
const plain = (text) =>
  short(String(text), MOST_LETTERS)
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll("$", "&#36;")
    .replaceAll("%{", "%&#123;");

/**
 * Put a picture into a section.
 *
 * @param {string} section - Its id, which is also the name of the picture's files.
 * @param {function(number): object} draw - Of the width in pixels: `traces`, `layout` and `numbers`, a function that
 *   gives the rows of the CSV, its heading first; or `empty`, what to say where there is nothing to draw. Also
 *   `caption`, what is drawn, with formula, unit, n and source, and `width`, where it must be wider than the screen.
 */
function addPicture(section, title, draw) {
  const plot = make("div", { class: "plot", role: "img", "aria-label": title });
  const message = make("p", { class: "muted", hidden: true });
  const caption = make("figcaption");
  const file = `${fileName(DATA.title)}-${section}`;
  const own = { section, title, draw, plot, dirty: true, near: false, made: null };
  const buttons = make(
    "div",
    { class: "buttons", role: "group", "aria-label": `Its numbers and its image: ${title}` },
    make("button", { type: "button", click: () => saveNumbers(own, file) }, "CSV"),
    ...["png", "svg"].map((format) =>
      make("button", { type: "button", click: () => saveImage(own, format, file) }, format.toUpperCase()),
    ),
  );
  const figure = make(
    "figure",
    { "data-picture": section },
    make("div", { class: "wide" }, plot),
    message,
    caption,
    buttons,
  );
  Object.assign(own, { message, caption, buttons, figure });
  byId(section).append(figure);
  PICTURES.push(own);
  IN_VIEW.observe(figure);
  return own;
}

const IN_VIEW = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const own = PICTURES.find((picture) => picture.figure === entry.target);
      own.near = entry.isIntersecting;
      if (own.near && own.dirty) drawNow(own);
    }
  },
  { rootMargin: "600px" },
);

/** Have a picture drawn anew: now where it is in view, else when it comes into view. */
function redraw(own) {
  own.dirty = true;
  if (own.near) drawNow(own);
}

function redrawAll() {
  for (const own of PICTURES) redraw(own);
}

/** Draw a picture now; `drawn` is kept when it is. */
function drawNow(own) {
  own.drawn = draw(own);
  return own.drawn;
}

async function draw(own) {
  own.dirty = false;
  const room = own.figure.clientWidth;
  const made = RUNS.some(visible) || !RUNS.length ? own.draw(room) : { empty: NOTHING_SHOWN };
  own.made = made;
  own.message.hidden = !made.empty;
  own.plot.hidden = own.buttons.hidden = Boolean(made.empty);
  own.message.textContent = made.empty ?? "";
  own.caption.textContent = made.empty ? "" : made.caption;
  if (made.empty) return;
  const { traces, layout } = dressed(made, Math.max(room, made.width ?? 0));
  if (!layout.showlegend)
    own.caption.textContent += " Its lines are too many to be named below; pointed at they say what they are.";
  await Plotly.react(own.plot, traces, layout, CONFIG);
}

/** A drawing in the page's colours and of a width, with room below for its legend. */
function dressed({ traces, layout }, width) {
  const text = themed("text"),
    line = themed("line"),
    ground = themed("ground");
  const axis = {
    gridcolor: line,
    zerolinecolor: line,
    linecolor: themed("strong"),
    automargin: true,
    exponentformat: "power",
  };
  const margin = { l: 56, r: 16, t: 28, b: 48, ...layout.margin };
  const rows = legendRows(
    traces.filter((trace) => trace.showlegend !== false && trace.name).map((trace) => trace.name),
    width - margin.l - margin.r,
  );
  const inner = layout.height ?? 380;
  const named = rows <= MOST_LEGEND_ROWS;
  // A name with an entity in it is left whole: it must not be cut in the middle of one.
  const fitting = (name) => (name.includes("&") ? name : short(name, (width - 70) / 6.6));
  traces = traces.map((trace) => (trace.name ? { ...trace, name: fitting(trace.name) } : trace));
  const legend = rows && named ? rows * 20 + 16 : 0;
  const whole = {
    ...layout,
    width,
    height: inner + legend,
    autosize: false,
    showlegend: named,
    uirevision: layout.uirevision ?? "same", // what was zoomed stays so, whatever else is redrawn
    margin: { ...margin, b: margin.b + legend, autoexpand: true },
    paper_bgcolor: ground,
    plot_bgcolor: ground,
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
  for (const key of Object.keys(whole)) if (/^[xy]axis\d*$/.test(key)) whole[key] = { ...axis, ...whole[key] };
  for (const key of ["xaxis", "yaxis"]) whole[key] ??= axis;
  return { traces, layout: whole };
}

/** An axis of these values, logarithmic if that is asked for and they are all above zero. */
function scaled(logged, values) {
  const finite = values.filter(Number.isFinite);
  if (!logged || !finite.length || finite.some((value) => value <= 0)) return { type: "linear" };
  const decades = Math.log10(finite.reduce((a, b) => Math.max(a, b)) / finite.reduce((a, b) => Math.min(a, b)));
  // More labels than have room would lie on each other.
  return { type: "log", ...(decades > 3 ? { dtick: 1 } : decades > 0.6 ? { dtick: "D2" } : {}) };
}

/** How many rows a legend of these names takes, about. */
function legendRows(names, width) {
  const longest = Math.max(0, ...names.map((name) => name.length)) * 6.6 + 48;
  return names.length ? Math.ceil(names.length / Math.max(1, Math.floor(width / longest))) : 0;
}

/** The rows of what is drawn, to be saved; it may not have come into view yet. */
async function saveNumbers(own, file) {
  if (!own.made) await drawNow(own);
  if (!own.made.empty) save(`${file}.csv`, "text/csv", csvText(own.made.numbers()));
}

async function saveImage(own, format, file) {
  const url = await imageOf(own, format, own.figure.clientWidth);
  const content = await (format === "svg"
    ? new Blob([decodeURIComponent(url.slice(url.indexOf(",") + 1))]).text()
    : bytesOf(url.slice(url.indexOf(",") + 1)));
  save(`${file}.${format}`, format === "svg" ? "image/svg+xml" : "image/png", content);
}

/** A picture as an image, a data: URL. */
function imageOf(own, format, width) {
  const made = own.draw(width);
  const { traces, layout } = dressed(made, Math.max(width, made.width ?? 0));
  return Plotly.toImage(
    { data: traces, layout, config: CONFIG },
    { format, width: layout.width, height: layout.height, scale: format === "png" ? 2 : 1 },
  );
}

/** Every picture that there is something in, for print: light, and of one width. For `normlab compare --format png`. */
async function exportPictures() {
  while (document.documentElement.dataset.ready !== "yes") await new Promise((go) => setTimeout(go, 20));
  chosenTheme = "light";
  applyTheme();
  const images = [];
  for (const own of PICTURES) {
    const made = own.draw(1000);
    if (!made.empty) images.push({ name: own.section, png: await imageOf(own, "png", 1000) });
  }
  return images;
}

const fileName = (text) => text.replace(/[^\w.-]+/g, "_").slice(0, 60) || "compare";

/** The rows of a CSV of lines: each point with the line that it is on. */
function pointRows(heading, traces) {
  const rows = [heading];
  for (const trace of traces) {
    if (!trace.meta) continue;
    for (let i = 0; i < trace.x.length; i += 1) rows.push([...trace.meta.columns, trace.x[i], trace.y[i]]);
  }
  return rows;
}

/** The bytes of base64. */
function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}
const floatsOf = (text) => new Float32Array(bytesOf(text).buffer);
const wholesOf = (text) => new Uint32Array(bytesOf(text).buffer);

/** A check box with its label. */
function tickBox(label, checked, change) {
  const box = make("input", { type: "checkbox", checked, change: () => change(box.checked) });
  return make("label", {}, box, label);
}

/** A choice of few, with its label; options are [value, text]. */
function choice(label, options, value, change, id) {
  const select = make(
    "select",
    { id, change: () => change(select.value) },
    ...options.map(([key, text]) => make("option", { value: key, selected: key === value }, text)),
  );
  return make("label", {}, label, select);
}

// What is printed is the whole page, and not what has come into view of it.
addEventListener("beforeprint", () => PICTURES.filter((own) => own.dirty).forEach(drawNow));
