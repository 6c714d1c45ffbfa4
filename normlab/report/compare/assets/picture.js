// A picture: Plotly's drawing in a figure with its caption and its files; drawn when it comes into view.

const PICTURES = [];
const CONFIG = { displayModeBar: false, doubleClick: "reset", showTips: false };
const NARROW = 640;

/** A text as Plotly takes it: it reads a little HTML in labels, which no name of a run is meant to be. */
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

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
    make(
      "button",
      { type: "button", click: () => save(`${file}.csv`, "text/csv", csvText(own.made.numbers())) },
      "CSV",
    ),
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
  const made = own.draw(room);
  own.made = made;
  own.message.hidden = !made.empty;
  own.plot.hidden = own.buttons.hidden = Boolean(made.empty);
  own.message.textContent = made.empty ?? "";
  own.caption.textContent = made.empty ? "" : made.caption;
  if (made.empty) return;
  const { traces, layout } = dressed(made, Math.max(room, made.width ?? 0));
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
  const legend = rows ? rows * 20 + 16 : 0;
  const whole = {
    ...layout,
    width,
    height: inner + legend,
    autosize: false,
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

/** How many rows a legend of these names takes, about. */
function legendRows(names, width) {
  const longest = Math.max(0, ...names.map((name) => name.length)) * 6.6 + 48;
  return names.length ? Math.ceil(names.length / Math.max(1, Math.floor(width / longest))) : 0;
}

async function saveImage(own, format, file) {
  const url = await imageOf(own, format, own.plot.clientWidth);
  const content = await (format === "svg"
    ? new Blob([decodeURIComponent(url.slice(url.indexOf(",") + 1))]).text()
    : bytesOf(url.slice(url.indexOf(",") + 1)));
  save(`${file}.${format}`, format === "svg" ? "image/svg+xml" : "image/png", content);
}

/** A picture as an image, a data: URL. */
function imageOf(own, format, width) {
  const { traces, layout } = dressed(own.draw(width), width);
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
    if (!made.empty)
      images.push({ name: own.section, png: await imageOf(own, "png", Math.max(1000, made.width ?? 0)) });
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
