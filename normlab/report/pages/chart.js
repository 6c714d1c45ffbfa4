// Draw panels that share their axes: lines and points as SVG, heat maps as tables. Every number is prepared by Python.

const MAX_PANELS = 24;
const MAX_TICK = 18; // characters of a turned tick
const DASHES = ["", "6 4", "2 3", "8 3 2 3"];
const LAST_TENTHS = 0.1; // the range of a loss over training leaves out the first tenth of the steps
let clips = 0; // the number of frames, for their ids
const ROOM = 0.08; // room above and below the values, as a share of their range

const finite = (values) => values.filter((value) => value !== null && Number.isFinite(value));
/** The smallest and the largest value; a call with many arguments would overflow the stack. */
const extentOf = (values) =>
  values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** A number in few characters: 1.25, 12k, 3M, 1e-5. */
function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e4 && size < 1e12) {
    const [unit, letter] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
    return `${+(value / unit).toPrecision(3)}${letter}`;
  }
  return size && (size < 1e-3 || size >= 1e12) ? value.toExponential().replace("e+", "e") : `${+value.toPrecision(6)}`;
}

/** At most `count` round numbers in a range. */
function ticksIn([low, high], count, isLog) {
  if (isLog) {
    const decades = Math.log10(high / low);
    const factors = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 3, 5, 7];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const factor of factors) {
        const tick = +(factor * 10 ** power).toPrecision(12);
        if (tick >= low && tick <= high) ticks.push(tick);
      }
    const every = Math.ceil(ticks.length / count);
    if (ticks.length > 1) return ticks.filter((_, index) => index % every === 0);
  }
  const size = 10 ** Math.floor(Math.log10((high - low) / count));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((step) => (high - low) / step <= count);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, index) =>
    Number(((first + index) * step).toPrecision(12)),
  );
}

/** The number of panels side by side: complete groups if they fit, and 2 x 2 for four panels. */
function columnsOf(most, count, group = 1) {
  if (group > 1 && group <= most) return count === 4 && group < 4 ? 2 : most - (most % group);
  return count === 4 ? Math.min(most, 2) : most;
}

/** A function from values to pixels. */
function scaleOf([low, high], [from, to], isLog) {
  const place = isLog ? Math.log : (value) => value;
  const slope = (to - from) / (place(high) - place(low) || 1);
  return (value) => from + (place(value) - place(low)) * slope;
}

/** The range of the vertical axis: every value, and intervals up to the range of the values beyond them. */
function rangeOf(spec) {
  let points = spec.panels.flatMap((panel) => panel.lines.flatMap((line) => line.points));
  if (spec.isCurve) {
    const end = LAST_TENTHS * extentOf(points.map((point) => point.x))[1];
    const later = points.filter((point) => point.x >= end);
    if (new Set(later.map((point) => point.x)).size > 2) points = later;
  }
  // Stuck runs that would stretch the axis to more than twice its length end at its top.
  const valuesOf = (among) => finite(among.flatMap((point) => [point.y, ...(point.seeds ?? [])]));
  const spanOf = (among) => extentOf(valuesOf(among)).reduce((low, high) => high - low);
  const trained = points.filter((point) => !point.stuck);
  if (spanOf(trained) > 0 && spanOf(points) > 2 * spanOf(trained)) points = trained;
  const values = valuesOf(points);
  const ends = finite(points.flatMap((point) => [point.low, point.high]));
  if (!values.length) return { range: [0, 1], isLog: false };
  let [low, high] = extentOf(values);
  const isLog = Boolean(spec.mayBeLog) && low > 0 && high / low > 30;
  if (isLog) return { range: [low / 1.3, high * 1.3], isLog };
  const beyond = high - low || 0.1 * Math.abs(high) || 1;
  const [lowest, highest] = extentOf([low, high, ...ends]);
  low = Math.max(low - beyond, lowest);
  high = Math.min(high + beyond, highest);
  const room = ROOM * (high - low || beyond);
  return { range: [low - room, high + room], isLog };
}

/** The horizontal positions of the panels: range, ticks and their texts. */
function xAxisOf(spec, width) {
  if (spec.x.ticks) {
    const at = spec.x.ticks.map(([x]) => x);
    const [low, high] = extentOf(at);
    const pad = spec.isConnected ? (high - low) * 0.08 || 1 : 0.5;
    const factor = low > 0 ? (high / low) ** 0.08 : 1;
    const range = spec.x.isLog
      ? [low / (factor === 1 ? 2 : factor), high * (factor === 1 ? 2 : factor)]
      : [low - pad, high + pad];
    return { range, ticks: spec.x.ticks };
  }
  const lines = spec.panels.flatMap((panel) => panel.lines);
  const xs = finite(lines.flatMap((line) => [...line.points.map((point) => point.x), ...(line.crosses ?? [])]));
  const range = xs.length ? extentOf(xs) : [0, 1];
  if (range[0] === range[1]) range[1] = range[0] + 1;
  return { range, ticks: ticksIn(range, clamp(Math.floor(width / 34), 3, 8)).map((x) => [x, shortNumber(x)]) };
}

/**
 * Draw line plots, one panel each.
 *
 * spec: {panels: [{title, lines: [{label, colour, dash, points, crosses}]}], x: {ticks, isLog}, isConnected, isBand,
 * isCurve, mayBeLog}; a point: {x, y, low, high, seeds, diverged, n, text}.
 */
function drawLines(place, spec) {
  const panels = spec.panels.slice(0, MAX_PANELS);
  const total = place.clientWidth;
  const across = columnsOf(clamp(Math.floor(total / 200), 1, Math.min(panels.length, 4)), panels.length, spec.group);
  place.style.setProperty("--across", across);
  place.dataset.isLog = "";
  const width = (total - 16 * (across - 1)) / across;
  const y = rangeOf({ ...spec, panels });
  if (y.isLog) place.dataset.isLog = "yes";
  const hasDiverged = panels.some((panel) => panel.lines.some((line) => line.points.some((point) => point.diverged)));
  const yTicks = ticksIn(y.range, 6, y.isLog);
  const margin = 10 + 6.6 * Math.max(...yTicks.map((tick) => shortNumber(tick).length));
  const x = xAxisOf({ ...spec, panels }, width - margin);
  const room = (width - margin) / Math.max(x.ticks.length, 1);
  const isTurned = !spec.x.isSparse && 6.2 * Math.max(...x.ticks.map(([, text]) => text.length)) > room - 6;
  const texts = x.ticks.map(([, text]) =>
    isTurned && text.length > MAX_TICK ? `${text.slice(0, MAX_TICK - 1)}…` : text,
  );
  const longest = 7 * Math.max(...texts.map((text) => text.length));
  const bottom = isTurned ? longest * 0.6 + 16 : 20;
  const left = isTurned ? Math.max(margin, longest * 0.82 - room / 3) : margin; // the first name reaches to the left
  const slot = (width - left) / Math.max(x.ticks.length, 1);
  const top = hasDiverged ? 22 : 8;
  const height = clamp(width * 0.6, 150, 300) + bottom + top;
  const toX = scaleOf(x.range, [left + 4, width - 8], spec.x.isLog);
  const toY = scaleOf(y.range, [height - bottom, top], y.isLog);
  place.replaceChildren(
    ...panels.map((panel) => {
      const svg = makeSvg("svg", {
        viewBox: `0 0 ${width} ${height}`,
        height,
        role: "img",
        "aria-label": `${spec.title} ${panel.title}`,
      });
      const clip = `clip${(clips += 1)}`;
      const frame = makeSvg("rect", { x: left, y: top, width: width - left, height: height - bottom - top });
      svg.append(makeSvg("clipPath", { id: clip }, frame));
      for (const tick of yTicks)
        svg.append(
          makeSvg("line", { x1: left, x2: width, y1: toY(tick), y2: toY(tick), class: "grid-line" }),
          makeSvg("text", { x: left - 4, y: toY(tick) + 4, "text-anchor": "end" }, shortNumber(tick)),
        );
      let free = -Infinity;
      for (const [index, [at]] of x.ticks.entries()) {
        const [px, text] = [toX(at), texts[index]];
        if (spec.x.isSparse && px - text.length * 3.1 < free) continue; // a tick without room has no text
        free = px + text.length * 3.1 + 6;
        const half = isTurned ? 0 : Math.min(0, width - px - text.length * 3.6);
        const turn = isTurned
          ? { transform: `rotate(-35 ${px} ${height - bottom + 14})`, "text-anchor": "end" }
          : { "text-anchor": "middle" };
        svg.append(makeSvg("text", { x: px + half, y: height - bottom + 15, ...turn }, text));
      }
      const hits = [];
      const divergedLines = (x) =>
        panel.lines.filter((line) => line.points.some((point) => point.x === x && point.diverged)).length;
      const [stacked, above] = [new Map(), new Map()];
      panel.lines.forEach((line, index) =>
        drawLine(svg, spec, line, index - (panel.lines.length - 1) / 2, {
          toX,
          toY,
          y,
          top,
          slot,
          hits,
          stacked,
          above,
          divergedLines,
          clip,
          count: panel.lines.length,
        }),
      );
      svg.addEventListener("pointermove", (event) => showTip(svg, hits, event));
      svg.addEventListener("pointerleave", hideTip);
      return make(
        "div",
        { class: "panel" },
        panel.title ? make("p", { class: "panel-title" }, panel.title) : null,
        svg,
      );
    }),
  );
  noteMissing(place, spec.panels.length);
}

/** Draw one line with its points, intervals, seeds and diverged seeds. */
function drawLine(
  svg,
  spec,
  line,
  offset,
  { toX, toY, y, top, slot, hits, stacked, above, divergedLines, clip, count },
) {
  const [low, high] = y.range;
  const shift = spec.isBand ? 0 : offset * (spec.isConnected ? 4 : clamp((slot * 0.7) / count, 2, 26));
  const at = (point) => toX(point.x) + shift;
  const inside = (value) => toY(clamp(value, low, high));
  const known = line.points.filter((point) => point.y !== null);
  const stroke = {
    stroke: line.colour,
    "stroke-width": 1.8,
    fill: "none",
    "stroke-dasharray": line.dash,
    "stroke-linejoin": "round",
  };
  const positive = (value) => (y.isLog ? Math.max(value, low / 10) : value);
  const path = (points, value) =>
    points
      .map((point, index) => `${index ? "L" : "M"}${at(point).toFixed(1)},${toY(positive(value(point))).toFixed(1)}`)
      .join("");
  const clipped = { "clip-path": `url(#${clip})` };
  if (spec.isBand && known.length > 1) {
    const back = path(known.toReversed(), (point) => point.low).replace("M", "L");
    svg.append(
      makeSvg("path", {
        d: `${path(known, (point) => point.high)}${back}Z`,
        fill: line.colour,
        "fill-opacity": 0.13,
        ...clipped,
      }),
    );
  }
  if (known.length > 1 && (spec.isConnected || spec.isBand))
    svg.append(makeSvg("path", { d: path(known, (point) => point.y), ...stroke, ...clipped }));
  for (const point of known) hits.push([at(point), inside(point.y), line, point]);
  for (const step of line.crosses ?? []) svg.append(cross(toX(step), top - 6, line.colour));
  if (spec.isBand && known.length > 1) return;
  let marks = "";
  for (const point of known) {
    const px = at(point);
    if (point.low !== null && point.low !== undefined && point.y <= high) {
      marks += `M${px},${inside(point.low)}L${px},${inside(point.high)}`;
      for (const [end, direction, isOut] of [
        [point.low, 1, point.low < low],
        [point.high, -1, point.high > high],
      ]) {
        const py = inside(end);
        marks += isOut
          ? `M${px - 4},${py - 5 * direction}L${px},${py}L${px + 4},${py - 5 * direction}`
          : `M${px - 3.5},${py}L${px + 3.5},${py}`;
      }
    }
    const open = { fill: themed("ground"), stroke: line.colour, "stroke-width": 1.8 };
    const circle = { cx: px, cy: inside(point.y), r: 3.6, ...(point.stuck ? open : { fill: line.colour }) };
    svg.append(makeSvg("circle", circle));
    if (point.y <= high) continue;
    const row = above.get(point.x) ?? 0; // the numbers of several lines at one x are below each other
    above.set(point.x, row + 1);
    const place = { x: px - 7, y: top + 4 + 12 * row, class: "mark", "text-anchor": "end" };
    svg.append(makeSvg("text", place, point.y.toFixed(2)));
  }
  svg.append(makeSvg("path", { d: marks, stroke: line.colour, "stroke-width": 1.3, fill: "none" }));
  for (const point of line.points) {
    if (point.n > 1)
      for (const seed of (point.seeds ?? []).filter((seed) => seed <= high))
        svg.append(
          makeSvg("circle", { cx: at(point), cy: inside(seed), r: 2, fill: line.colour, "fill-opacity": 0.45 }),
        );
    if (!point.diverged) continue;
    // The marks of several lines at one x are side by side, and have room for no numbers.
    const marked = stacked.get(point.x) ?? { total: divergedLines(point.x), drawn: 0 };
    stacked.set(point.x, marked);
    const step = Math.min(10, (slot - 8) / marked.total);
    const px = spec.isConnected ? toX(point.x) + (marked.drawn - (marked.total - 1) / 2) * step : at(point);
    marked.drawn += 1;
    svg.append(cross(px, top - 10, line.colour));
    if (!spec.isConnected || marked.total === 1)
      svg.append(
        makeSvg("text", { x: px - 6, y: top - 6, class: "mark", "text-anchor": "end" }, `${point.diverged}/${point.n}`),
      );
    hits.push([px, top - 10, line, point]);
  }
}

const cross = (x, y, colour) =>
  makeSvg("path", { d: `M${x - 4},${y - 4}l8,8m0,-8l-8,8`, stroke: colour, "stroke-width": 2 });

/** Show the text of the point nearest to the pointer. */
function showTip(svg, hits, event) {
  const box = svg.getBoundingClientRect();
  const [px, py] = [event.clientX - box.left, event.clientY - box.top];
  let nearest = null;
  let least = 40 ** 2;
  for (const hit of hits) {
    const distance = (hit[0] - px) ** 2 + (hit[1] - py) ** 2;
    if (distance < least) [nearest, least] = [hit, distance];
  }
  if (!nearest) return hideTip();
  const [, , line, point] = nearest;
  tip(event, [line.label, point.text].filter(Boolean).join(": "));
}

function tip(event, text) {
  const box = byId("tip");
  box.textContent = text;
  box.hidden = false;
  box.style.left = `${Math.min(event.clientX + 12, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.max(event.clientY - box.offsetHeight - 10, 4)}px`;
}

const hideTip = () => (byId("tip").hidden = true);

const HEAT = [
  [0, 32, 81],
  [60, 77, 110],
  [127, 124, 117],
  [187, 175, 113],
  [253, 234, 69],
]; // cividis

/** The colours of a field and its text, for a share from 0 to 1. */
function heatColours(share) {
  const at = clamp(share, 0, 1) * (HEAT.length - 1);
  const index = Math.min(Math.floor(at), HEAT.length - 2);
  const parts = HEAT[index].map((part, place) => Math.round(part + (HEAT[index + 1][place] - part) * (at - index)));
  return [`rgb(${parts.join(" ")})`, 0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2] > 115 ? "#000" : "#fff"];
}

/** Draw heat maps, one panel each: {panels: [{title, fields}], columns, rows}; fields: {"column,row": {value, text, isBest}}. */
function drawGrid(place, spec) {
  const fields = spec.panels.flatMap((panel) => Object.values(panel.fields));
  const trained = fields.filter((field) => !field.isStuck);
  const [low, high] = extentOf(finite((trained.length > 1 ? trained : fields).map((field) => field.value)));
  const most = Math.floor(
    place.clientWidth / (20 + 7 * Math.max(...spec.rows.map((row) => row.length)) + 62 * spec.columns.length),
  );
  place.style.setProperty("--across", clamp(most, 1, Math.min(spec.panels.length, 4)));
  place.replaceChildren(
    ...spec.panels.slice(0, MAX_PANELS).map((panel) => {
      const head = make("tr", {}, make("th", {}), ...spec.columns.map((title) => make("th", { scope: "col" }, title)));
      const rows = spec.rows.map((title, row) => {
        const fields = spec.columns.map((_, column) => {
          const field = panel.fields[`${column},${row}`];
          if (!field) return make("td", {});
          const cell = make(
            "td",
            {
              class: `${field.value === null || field.isStuck ? "bad" : ""} ${field.isBest ? "is-best" : ""}`,
              pointermove: (event) => tip(event, field.tip),
              pointerleave: hideTip,
            },
            field.text,
          );
          if (field.value !== null && !(field.isStuck && trained.length > 1))
            [cell.style.background, cell.style.color] = heatColours((field.value - low) / (high - low || 1));
          return cell;
        });
        return make("tr", {}, make("th", { scope: "row" }, title), ...fields);
      });
      const table = make("table", { class: "heat" }, make("thead", {}, head), make("tbody", {}, ...rows));
      return make(
        "div",
        { class: "panel" },
        panel.title ? make("p", { class: "panel-title" }, panel.title) : null,
        make("div", { class: "wide" }, table),
      );
    }),
  );
  noteMissing(place, spec.panels.length);
}

/** Say how many panels are not drawn. */
function noteMissing(place, panels) {
  if (panels <= MAX_PANELS) return;
  const text = `${panels - MAX_PANELS} more panels are not drawn: hide levels, or move a factor to colour or style.`;
  place.append(make("p", { class: "small muted" }, text));
}

const swatchOf = ({ colour, dash }) =>
  makeSvg(
    "svg",
    { width: 22, height: 10, "aria-hidden": "true" },
    makeSvg("line", { x1: 1, x2: 21, y1: 5, y2: 5, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash }),
  );

/** The entries of a legend for lines with a label, a colour and dashes. */
const legendEntries = (lines) => lines.map((line) => make("span", {}, swatchOf(line), line.label));

/** Call a function 150 ms after the last change of the page's width. */
function whenResized(call) {
  let [width, waiting] = [document.body.clientWidth, null];
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(call, 150);
  }).observe(document.body);
}
