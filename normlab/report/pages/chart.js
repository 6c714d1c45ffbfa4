// Draw panels that share their axes, lines and points as SVG. Python has prepared every number.

const MAX_TICK = 18; // characters of a turned tick
const DASHES = { solid: "", dash: "6 4", dot: "2 3", dashdot: "8 3 2 3" };
let clips = 0; // the number of frames, for their ids

/** A colour, lighter on a dark ground. */
const themed = (colour) => `light-dark(${colour}, color-mix(in srgb, ${colour}, white 35%))`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** A function from values of an axis to pixels. */
function scaleOf({ low, high, is_log: isLog }, [from, to]) {
  const place = isLog ? Math.log : (value) => value;
  const slope = (to - from) / (place(high) - place(low) || 1);
  return (value) => from + (place(isLog ? Math.max(value, low / 10) : value) - place(low)) * slope;
}

/**
 * Draw line plots, one panel each.
 *
 * drawing: {x, y: {low, high, ticks: [[value, text]], is_log}, is_connected, is_band, panels: [{title, lines}]}; a line:
 * [index in DATA.lines, points, crosses of a band or highest rates]; a point: [x, y, low, high] of a band, else an object.
 */
function drawLines(place, drawing) {
  const { panels, x, y } = drawing;
  const total = place.clientWidth;
  const fitting = clamp(Math.floor(total / 200), 1, Math.min(panels.length, 4));
  const across = panels.length === 4 ? Math.min(fitting, 2) : fitting;
  place.style.setProperty("--across", across);
  const width = (total - 16 * (across - 1)) / across;
  const hasDiverged = panels.some(({ lines }) => lines.some(([, points]) => points.some((point) => point.diverged)));
  const margin = 10 + 6.6 * Math.max(0, ...y.ticks.map(([, text]) => text.length));
  const room = (width - margin) / Math.max(x.ticks.length, 1);
  const isTurned = !drawing.is_connected && 6.2 * Math.max(...x.ticks.map(([, text]) => text.length)) > room - 6;
  const shorten = (text) => (isTurned && text.length > MAX_TICK ? `${text.slice(0, MAX_TICK - 1)}…` : text);
  const ticks = x.ticks.map(([at, text]) => [at, shorten(text)]);
  const longest = 7 * Math.max(0, ...ticks.map(([, text]) => text.length));
  const bottom = isTurned ? longest * 0.6 + 16 : 20;
  const left = isTurned ? Math.max(margin, longest * 0.82 - room / 3) : margin; // the first name reaches to the left
  const top = hasDiverged || drawing.is_band ? 22 : 8;
  const height = clamp(width * 0.6, 150, 300) + bottom + top;
  const toX = scaleOf(x, [left + 4, width - 8]);
  const toY = scaleOf(y, [height - bottom, top]);
  const frame = { left, top, right: width, bottom: height - bottom, slot: (width - left) / Math.max(ticks.length, 1) };
  place.replaceChildren(
    ...panels.map(({ title, lines }) => {
      const label = title || y.name;
      const svg = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
      const clip = `clip${(clips += 1)}`;
      const inner = { x: left, y: top, width: width - left, height: height - bottom - top };
      svg.append(makeSvg("clipPath", { id: clip }, makeSvg("rect", inner)));
      for (const [at, text] of y.ticks)
        svg.append(
          makeSvg("line", { x1: left, x2: width, y1: toY(at), y2: toY(at), class: "grid-line" }),
          makeSvg("text", { x: left - 4, y: toY(at) + 4, "text-anchor": "end" }, text),
        );
      let free = -Infinity;
      for (const [at, text] of ticks) {
        const [px, half] = [toX(at), text.length * 3.1];
        if (!isTurned && px - half < free) continue; // a tick without room has no text
        free = px + half + 6;
        const turn = isTurned
          ? { x: px, transform: `rotate(-35 ${px} ${height - bottom + 14})`, "text-anchor": "end" }
          : { x: px + Math.min(0, width - px - text.length * 3.6), "text-anchor": "middle" };
        svg.append(makeSvg("text", { y: height - bottom + 15, ...turn }, text));
      }
      const shown = lines.filter(([style]) => !HIDDEN.has(DATA.lines[style][0]));
      const marks = { hits: [], drawn: new Map(), above: new Map() };
      for (const [index, line] of shown.entries()) {
        const offset = index - (shown.length - 1) / 2;
        const slot = clamp((frame.slot * 0.7) / shown.length, 2, 26);
        const shift = drawing.is_band ? 0 : offset * (drawing.is_connected ? 4 : slot);
        const [label, colour, dash] = DATA.lines[line[0]];
        const style = { label, colour: themed(colour), dash: DASHES[dash] };
        const place = { toX, toY, shift, frame, clip, drawing, shown, marks };
        (drawing.is_band ? drawBand : drawMarks)(svg, style, line, place);
      }
      svg.addEventListener("pointermove", (event) => showTip(svg, marks.hits, event));
      svg.addEventListener("pointerleave", hideTip);
      return make("div", { class: "panel" }, make("p", { class: "panel-title" }, title), svg);
    }),
  );
}

/** Draw a curve with the range of its seeds, and a cross for each seed that diverged. */
function drawBand(svg, { label, colour, dash }, [, points, crosses = []], { toX, toY, frame, clip, marks }) {
  const clipped = { "clip-path": `url(#${clip})` };
  const at = (x, y, index) => `${index ? "L" : "M"}${toX(x).toFixed(1)},${toY(y).toFixed(1)}`;
  const back = points.toReversed().map(([x, , low]) => at(x, low, 1)).join("");
  const band = `${points.map(([x, , , high], index) => at(x, high, index)).join("")}${back}Z`;
  const curve = points.map(([x, y], index) => at(x, y, index)).join("");
  svg.append(makeSvg("path", { d: band, fill: colour, "fill-opacity": 0.13, ...clipped }));
  svg.append(makeSvg("path", { d: curve, stroke: colour, "stroke-dasharray": dash, class: "curve", ...clipped }));
  if (points.length === 1)
    svg.append(makeSvg("circle", { cx: toX(points[0][0]), cy: toY(points[0][1]), r: 3.6, fill: colour }));
  for (const step of crosses) svg.append(cross(toX(step), frame.top - 6, colour));
  for (const [x, y] of points) {
    const text = `${label}: ${+y.toPrecision(5)} at ${+x.toPrecision(6)}`;
    marks.hits.push([toX(x), clamp(toY(y), frame.top, frame.bottom), text]);
  }
}

/** Draw points with intervals, seeds and diverged seeds, and the highest rates that train. */
function drawMarks(svg, { label, colour, dash }, [, points, rates = []], { toX, toY, shift, frame, clip, drawing, shown, marks }) {
  const known = points.filter(({ y }) => y !== null);
  const at = ({ x }) => toX(x) + shift;
  const inside = (value) => clamp(toY(value), frame.top, frame.bottom);
  const curve = known.map((point, index) => `${index ? "L" : "M"}${at(point)},${toY(point.y)}`).join("");
  const clipped = { "clip-path": `url(#${clip})` };
  if (drawing.is_connected && known.length > 1)
    svg.append(
      makeSvg("path", { d: curve, stroke: colour, "stroke-dasharray": dash, class: "curve", ...clipped }),
    );
  let strokes = "";
  for (const { x, y, low, high, text } of rates) {
    const [px, py] = [toX(x), inside(y)];
    for (const end of low === null ? [] : [low, high]) {
      const to = clamp(toX(end), frame.left, frame.right);
      strokes += `M${px},${py}H${to}M${to},${py - 3.5}V${py + 3.5}`;
    }
    const diamond = { d: `M${px},${py - 5}l5,5l-5,5l-5,-5Z`, fill: "var(--ground)", stroke: colour, "stroke-width": 1.3 };
    svg.append(makeSvg("path", diamond));
    marks.hits.push([px, py, `${label}: ${text}`]);
  }
  for (const point of known) {
    const [px, isAbove] = [at(point), toY(point.y) < frame.top];
    marks.hits.push([px, inside(point.y), `${label}: ${point.text}`]);
    if (point.low !== null && !isAbove) {
      strokes += `M${px},${inside(point.low)}L${px},${inside(point.high)}`;
      for (const [end, direction] of [[point.low, 1], [point.high, -1]]) {
        const [py, isOut] = [inside(end), inside(end) !== toY(end)];
        const tail = 5 * direction;
        strokes += isOut
          ? `M${px - 4},${py - tail}L${px},${py}L${px + 4},${py - tail}`
          : `M${px - 3.5},${py}L${px + 3.5},${py}`;
      }
    }
    const fill = point.is_open ? { fill: "var(--ground)", stroke: colour, "stroke-width": 1.8 } : { fill: colour };
    svg.append(makeSvg("circle", { cx: px, cy: inside(point.y), r: 3.6, ...fill }));
    if (!isAbove) continue;
    const row = marks.above.get(point.x) ?? 0; // the numbers of several lines at one x are below each other
    marks.above.set(point.x, row + 1);
    const place = { x: px - 7, y: frame.top + 4 + 12 * row, class: "mark", "text-anchor": "end" };
    svg.append(makeSvg("text", place, point.y.toFixed(2)));
  }
  svg.append(makeSvg("path", { d: strokes, stroke: colour, "stroke-width": 1.3, fill: "none" }));
  for (const point of points) {
    for (const seed of point.seeds)
      if (toY(seed) >= frame.top)
        svg.append(makeSvg("circle", { cx: at(point), cy: inside(seed), r: 2, fill: colour, "fill-opacity": 0.45 }));
    if (!point.diverged) continue;
    // The marks of several lines at one x are side by side, and have room for no numbers.
    const total = shown.filter(([, others]) => others.some(({ x, diverged }) => x === point.x && diverged)).length;
    const drawn = marks.drawn.get(point.x) ?? 0;
    marks.drawn.set(point.x, drawn + 1);
    const aside = (drawn - (total - 1) / 2) * Math.min(10, (frame.slot - 8) / total);
    const px = drawing.is_connected ? toX(point.x) + aside : at(point);
    svg.append(cross(px, frame.top - 10, colour));
    const text = { x: px - 6, y: frame.top - 6, class: "mark", "text-anchor": "end" };
    if (!drawing.is_connected || total === 1) svg.append(makeSvg("text", text, point.diverged));
    marks.hits.push([px, frame.top - 10, `${label}: ${point.text}`]);
  }
}

const cross = (x, y, colour) =>
  makeSvg("path", { d: `M${x - 4},${y - 4}l8,8m0,-8l-8,8`, stroke: colour, "stroke-width": 2 });

/** Show the text of the point nearest to the pointer. */
function showTip(svg, hits, event) {
  const { left, top } = svg.getBoundingClientRect();
  const distance = ([x, y]) => (x - event.clientX + left) ** 2 + (y - event.clientY + top) ** 2;
  const nearest = hits.reduce((best, hit) => (!best || distance(hit) < distance(best) ? hit : best), null);
  if (!nearest || distance(nearest) > 40 ** 2) return hideTip();
  const box = byId("tip");
  box.textContent = nearest[2];
  box.hidden = false;
  box.style.left = `${Math.min(event.clientX + 12, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.max(event.clientY - box.offsetHeight - 10, 4)}px`;
}

const hideTip = () => (byId("tip").hidden = true);

const swatchOf = ({ colour, dash }) =>
  makeSvg(
    "svg",
    { width: 22, height: 10, "aria-hidden": "true" },
    makeSvg("line", { x1: 1, x2: 21, y1: 5, y2: 5, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash }),
  );

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
