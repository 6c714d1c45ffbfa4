// Placements drawn: boxes and lines where they were laid out, from the formula.

/** A node: a box with its words, a circle with its sign, or a point. */
function drawNode(node) {
  const { x, y, width, height, kind } = node;
  const words = (text, at = y, name = "") =>
    draw("text", { x, y: at, class: name, "dominant-baseline": "central", "text-anchor": "middle" }, text);
  const box = (rx) => draw("rect", { x: x - width / 2, y: y - height / 2, width, height, rx });
  const group = draw("g", {
    class: `node ${kind}${node.learned ? " learned" : ""}`,
    "data-kind": kind,
    "data-expression": node.expression,
  });
  if (kind === "enter" || kind === "leave") {
    group.append(draw("circle", { cx: x, cy: y, r: width / 2 }));
    if (node.label)
      group.append(
        draw("text", { x: x + 9, y: y - 9, class: "stream-name", "dominant-baseline": "central" }, node.label),
      );
  } else if (kind === "add" || kind === "subtract") {
    group.append(draw("circle", { cx: x, cy: y, r: width / 2 }), words(node.label));
  } else if (kind === "embeddings" || kind === "head") {
    group.append(words(node.label));
  } else if (node.norms.length) {
    group.append(box(6), words(node.label, y - 9));
    node.norms.forEach((name, at) => {
      const left = x + (at - node.norms.length / 2) * 26;
      group.append(
        draw(
          "g",
          { class: "inner", "data-kind": "norm" },
          draw("rect", { x: left + 2, y: y + 1, width: 22, height: 16, rx: 4 }),
          draw("text", { x: left + 13, y: y + 9, "dominant-baseline": "central", "text-anchor": "middle" }, name),
        ),
      );
    });
  } else {
    group.append(box({ norm: 13, scale: 12, divide: 12 }[kind] ?? 6), words(node.label));
  }
  return group;
}

/** A line with its arrow head, and a dot where it leaves another. */
function drawLine(line) {
  const points = line.points;
  const [[x0, y0], [x1, y1]] = points.slice(-2);
  const length = Math.hypot(x1 - x0, y1 - y0) || 1;
  const [dx, dy] = [(x1 - x0) / length, (y1 - y0) / length];
  const back = line.arrow ? 5 : 0;
  const path = [...points.slice(0, -1), [x1 - dx * back, y1 - dy * back]];
  const parts = [draw("polyline", { points: path.map((point) => point.join(",")).join(" ") })];
  if (line.arrow) {
    const corner = (along, aside) => `${x1 - dx * along - dy * aside},${y1 - dy * along + dx * aside}`;
    parts.push(draw("polygon", { points: `${x1},${y1} ${corner(8, 4)} ${corner(8, -4)}` }));
  }
  if (line.dot) parts.push(draw("circle", { cx: line.dot[0], cy: line.dot[1], r: 3 }));
  return draw("g", { class: `line${line.stream ? " stream" : ""}` }, ...parts);
}

/** One drawing, whole. */
function drawFlow(flow, name) {
  const norms = flow.nodes.reduce((count, node) => count + (node.kind === "norm") + node.norms.length, 0);
  const { x, y, width, height } = flow.frame;
  const drawing = draw(
    "svg",
    {
      viewBox: `0 0 ${flow.width} ${flow.height}`,
      width: flow.width,
      height: flow.height,
      class: "flow",
      role: "img",
      "aria-label": `${name}${flow.when ? `, ${flow.when}` : ""}, drawn: ${norms} norms from the embeddings to the head`,
    },
    draw("rect", { class: "frame", x, y, width, height, rx: 10 }),
    draw(
      "text",
      {
        class: "times",
        x: x - 11,
        y: y + height / 2,
        "text-anchor": "middle",
        "dominant-baseline": "central",
        transform: `rotate(-90 ${x - 11} ${y + height / 2})`,
      },
      flow.when ? "a block" : "block, L times",
    ),
    ...flow.lines.map(drawLine),
    ...flow.nodes.map(drawNode),
  );
  return make("figure", { class: "drawing" }, flow.when ? make("figcaption", {}, flow.when) : null, drawing);
}

/** A placement: its formula, its drawing, and what is known of it. */
function placementCard(placement) {
  const statements = placement.formula.split("; ");
  return make(
    "article",
    {
      class: `card${placement.flows.length > 1 ? " wide" : ""}`,
      id: `placement-${placement.name}`,
      "data-placement": placement.name,
    },
    make("h3", {}, placement.name),
    make(
      "p",
      { class: "formula" },
      ...statements.flatMap((one, at) => [
        at ? make("br") : null,
        formulaOf(one, at < statements.length - 1 ? ";" : ""),
      ]),
    ),
    make("div", { class: "drawings" }, ...placement.flows.map((flow) => drawFlow(flow, placement.name))),
    facts([
      ["embeddings", placement.opens && formulaOf(placement.opens)],
      ["before the head", placement.closes && formulaOf(placement.closes)],
      ["inside", placement.inside && formulaOf(placement.inside)],
      [
        "learns",
        placement.learns === "0"
          ? "nothing beside matrices and norms"
          : `${placement.learns} numbers beside matrices and norms`,
      ],
      ["init rule", placement.init],
      ["equals", placement.equals],
      ["the name", placement.note],
      ["source", placement.source],
    ]),
  );
}

/** What the signs of the drawings mean, drawn with the same pen. */
function flowLegend() {
  const sample = (kind, label, words, more = {}) => {
    const width = kind === "add" ? 22 : Math.max(40, 7.2 * label.length + 18);
    const node = {
      kind,
      label,
      expression: "",
      norms: [],
      x: width / 2 + 1,
      y: 15,
      width,
      height: kind === "add" ? 22 : 26,
      ...more,
    };
    return make(
      "li",
      {},
      draw("svg", { class: "flow", width: width + 2, height: 30, "aria-hidden": "true" }, drawNode(node)),
      words,
    );
  };
  return make(
    "ul",
    { class: "legend small" },
    sample("norm", "norm", "the run\u2019s norm; q, k, v inside attention likewise"),
    sample("box", "MLP", "a sub-layer, or a part of one"),
    sample("add", "+", "sum; \u2212 takes away what comes from the side"),
    sample("scale", "\u00d7 2L", "a fixed factor"),
    sample("scale", "\u00d7 scale", "a learned one", { learned: true }),
    sample("unit", "length 1", "divided by its own length"),
  );
}
