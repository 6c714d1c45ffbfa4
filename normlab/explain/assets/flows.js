// The block diagrams of the placements, at the coordinates in the data.

const CENTRED = { "dominant-baseline": "central", "text-anchor": "middle" };

/** A node: a box with a label, a circle with a sign, or a point. */
function drawNode(node) {
  const { x, y, width, height, kind, label } = node;
  const text = (content, at = y) => makeSvg("text", { x, y: at, ...CENTRED }, content);
  const box = (rx) => makeSvg("rect", { x: x - width / 2, y: y - height / 2, width, height, rx });
  const circle = () => makeSvg("circle", { cx: x, cy: y, r: width / 2 });
  const parts = () => {
    if (kind === "embeddings" || kind === "head") return [text(label)];
    if (kind === "add" || kind === "subtract") return [circle(), text(label)];
    if (kind === "enter" || kind === "leave") {
      const name = { x: x + 9, y: y - 9, class: "stream-name", "dominant-baseline": "central" };
      return label ? [circle(), makeSvg("text", name, label)] : [circle()];
    }
    if (!node.norms.length) return [box({ norm: 13, scale: 12, divide: 12 }[kind] ?? 6), text(label)];
    const norms = node.norms.map((name, i) => {
      const left = x + (i - node.norms.length / 2) * 26;
      const rectangle = makeSvg("rect", { x: left + 2, y: y + 1, width: 22, height: 16, rx: 4 });
      const inner = makeSvg("text", { x: left + 13, y: y + 9, ...CENTRED }, name);
      return makeSvg("g", { class: "inner", "data-kind": "norm" }, rectangle, inner);
    });
    return [box(6), text(label, y - 9), ...norms];
  };
  const attributes = { class: `node ${kind}${node.learned ? " learned" : ""}`, "data-kind": kind };
  return makeSvg("g", { ...attributes, "data-expression": node.expression }, ...parts());
}

/** A line with its arrow head, and a dot where it branches off another line. */
function drawLine(line) {
  const [[x0, y0], [x1, y1]] = line.points.slice(-2);
  const length = Math.hypot(x1 - x0, y1 - y0) || 1;
  const [dx, dy] = [(x1 - x0) / length, (y1 - y0) / length];
  const shorter = line.arrow ? 5 : 0; // the line ends inside the arrow head
  const path = [...line.points.slice(0, -1), [x1 - dx * shorter, y1 - dy * shorter]];
  const parts = [makeSvg("polyline", { points: path.join(" ") })];
  if (line.arrow) {
    const corner = (along, aside) => [x1 - dx * along - dy * aside, y1 - dy * along + dx * aside];
    parts.push(makeSvg("polygon", { points: [[x1, y1], corner(8, 4), corner(8, -4)].join(" ") }));
  }
  if (line.dot) parts.push(makeSvg("circle", { cx: line.dot[0], cy: line.dot[1], r: 3 }));
  return makeSvg("g", { class: `line${line.stream ? " stream" : ""}` }, ...parts);
}

function drawFlow(flow, name) {
  const norms = flow.nodes.reduce((count, node) => count + (node.kind === "norm") + node.norms.length, 0);
  const { x, y, width, height } = flow.frame;
  const label = `${name}${flow.when ? `, ${flow.when}` : ""}: ${norms} norms from the embeddings to the LM head`;
  const [labelX, labelY] = [x - 11, y + height / 2];
  const rotated = { class: "times", x: labelX, y: labelY, ...CENTRED, transform: `rotate(-90 ${labelX} ${labelY})` };
  const size = { viewBox: `0 0 ${flow.width} ${flow.height}`, width: flow.width, height: flow.height };
  const diagram = makeSvg(
    "svg",
    { ...size, class: "flow", role: "img", "aria-label": label },
    makeSvg("rect", { class: "frame", x, y, width, height, rx: 10 }),
    makeSvg("text", rotated, flow.when ? "a block" : "block, L times"),
    ...flow.lines.map(drawLine),
    ...flow.nodes.map(drawNode),
  );
  return make("figure", { class: "drawing" }, flow.when ? make("figcaption", {}, flow.when) : null, diagram);
}

/** A placement with its formula, diagrams and facts. */
function placementCard(placement) {
  const code = (text) => text && make("code", {}, text);
  const statements = placement.formula.split("; ");
  const formula = statements.flatMap((statement, i) => [
    i ? make("br") : null,
    code(statement + (i < statements.length - 1 ? ";" : "")),
  ]);
  const id = { id: `placement-${placement.name}`, "data-placement": placement.name };
  return make(
    "article",
    { class: `card${placement.flows.length > 1 ? " wide" : ""}`, ...id },
    make("h3", {}, placement.name),
    make("p", { class: "formula" }, ...formula),
    make("div", { class: "drawings" }, ...placement.flows.map((flow) => drawFlow(flow, placement.name))),
    facts([
      ["embeddings", code(placement.embedding_formula)],
      ["before the LM head", code(placement.head_formula)],
      ["inside", code(placement.inside)],
      ["parameters", `${placement.parameters}, apart from matrices and norms`],
      ["init rule", placement.init],
      ["equals", placement.equals],
      ["name", placement.note],
      ["source", placement.source],
    ]),
  );
}

/** The legend of the block diagrams. */
function flowLegend() {
  const sample = (kind, label, text, learned = false) => {
    const sum = kind === "add";
    const width = sum ? 22 : Math.max(40, 7.2 * label.length + 18);
    const position = { x: width / 2 + 1, y: 15, width, height: sum ? 22 : 26 };
    const node = drawNode({ kind, label, expression: "", norms: [], learned, ...position });
    return make("li", {}, makeSvg("svg", { class: "flow", width: width + 2, height: 30, "aria-hidden": "true" }, node), text);
  };
  return make(
    "ul",
    { class: "legend small" },
    sample("norm", "norm", "a norm of the selected kind, also q, k and v inside attention"),
    sample("box", "MLP", "a sub-layer or a part of one"),
    sample("add", "+", "sum; \u2212 subtracts the input from the side"),
    sample("scale", "\u00d7 2L", "fixed factor"),
    sample("scale", "\u00d7 scale", "learned factor", true),
    sample("unit", "length 1", "division by the vector's length"),
  );
}
