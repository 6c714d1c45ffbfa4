// A matrix as a table: coloured values, outlined groups, and five statistics of each row and column.

const SHORT_NAMES = { mean: "mean", variance: "var", rms: "RMS", min: "min", max: "max" };
const [ROWS, COLUMNS] = [DATA.original.length, DATA.original[0].length];
/** The value that a dependency map marks, by its index. */
const MARKED = 2 * COLUMNS + 4;

/** A number in at most six characters; the tooltip has all digits. */
function shown(value) {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return String(value).replace("Infinity", "inf").replace("-", "\u2212");
  let text = value.toExponential(1);
  if (size < 5e-7) text = "0";
  else if (size < 0.005) text = value.toExponential(0);
  else if (size < 9.995) text = value.toFixed(2);
  else if (size < 99.95) text = value.toFixed(1);
  else if (size < 9999.5) text = value.toFixed(0);
  return text.replace("e+", "e").replaceAll("-", "\u2212");
}

/** Set a cell's number: rounded as text, in full precision as tooltip and data. */
function setNumber(cell, value) {
  cell.textContent = shown(value);
  cell.title = cell.dataset.value = String(value);
}

/** Colour a cell: orange above 0, blue below, stronger for values near the table's largest. */
function setColour(cell, value, largest) {
  const share = largest > 0 && Number.isFinite(value) ? Math.sqrt(Math.abs(value) / largest) : 0;
  cell.classList.toggle("warm", value > 0);
  cell.classList.toggle("cold", value < 0);
  cell.style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
}

/** Draw an edge between cells of different groups, if the inputs of the values form groups of several values. */
function outline(cells, inputs) {
  const grouped = inputs.every((group) => group.length > 1 && group.every((i) => String(inputs[i]) === String(group)));
  const groupAt = (row, column) => (cells[row]?.[column] ? inputs[row * COLUMNS + column][0] : -1);
  const edges = { top: [-1, 0], bottom: [1, 0], left: [0, -1], right: [0, 1] };
  cells.forEach((line, row) =>
    line.forEach((cell, column) => {
      for (const [side, [down, right]] of Object.entries(edges)) {
        const differs = grouped && groupAt(row + down, column + right) !== groupAt(row, column);
        cell.classList.toggle(`edge-${side}`, differs);
      }
    }),
  );
}

const channelHeads = () =>
  Array.from({ length: COLUMNS }, (_, column) =>
    make("th", { scope: "col", "aria-label": `channel ${column + 1}` }, `ch ${column + 1}`),
  );

/** A table in a box that scrolls sideways. */
function scrollBox(caption, attributes, ...parts) {
  const table = make("table", attributes, make("caption", { class: "hidden" }, caption), ...parts);
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${caption}: table` }, table);
}

/**
 * A table of a matrix, with functions to update it.
 *
 * `content(row, column)` creates the content of a value's cell; without it a cell contains the number.
 */
function matrixTable(caption, content = null) {
  const statCell = (of, at, name) => make("td", { class: "stat", "data-of": of, "data-at": at, "data-stat": name });
  const statHead = (scope, name) => {
    const label = `${name} of the ${scope === "col" ? "row" : "column"}`;
    return make("th", { scope, class: "stat-head", "aria-label": label }, SHORT_NAMES[name]);
  };
  const cells = DATA.original.map((line, row) =>
    line.map((_, column) =>
      make("td", { class: "value", "data-row": row, "data-column": column }, content?.(row, column)),
    ),
  );
  const rowStats = cells.map((_, row) => STATISTICS.map((name) => statCell("row", row, name)));
  const columnStats = STATISTICS.map((name) => cells[0].map((_, column) => statCell("column", column, name)));
  const statHeads = STATISTICS.map((name) => statHead("col", name));
  const tokenRow = (line, row) =>
    make("tr", {}, make("th", { scope: "row" }, `token ${row + 1}`), ...line, ...rowStats[row]);
  const element = scrollBox(
    caption,
    { class: "matrix" },
    make("thead", {}, make("tr", {}, make("td", { class: "corner" }), ...channelHeads(), ...statHeads)),
    make("tbody", {}, ...cells.map(tokenRow)),
    make("tfoot", {}, ...columnStats.map((line, i) => make("tr", {}, statHead("row", STATISTICS[i]), ...line))),
  );
  const update = (values) => {
    const largest = Math.max(...values.flat().map((value) => (Number.isFinite(value) ? Math.abs(value) : 0)));
    const setStatistics = (cells, group) => {
      const computed = statistics(group);
      for (const cell of cells) setNumber(cell, computed[cell.dataset.stat]);
    };
    values.forEach((line, row) => {
      line.forEach((value, column) => {
        if (!content) setNumber(cells[row][column], value);
        setColour(cells[row][column], value, largest);
      });
      setStatistics(rowStats[row], line);
    });
    transposed(values).forEach((line, column) => setStatistics(columnStats.map((stats) => stats[column]), line));
  };
  return { element, update, outline: (inputs) => outline(cells, inputs) };
}

/** A map of the matrix that marks one value and fills its inputs, with a text. */
function dependencyMap(inputs, text) {
  const size = 15;
  const squares = inputs.map((_, i) => {
    const position = { x: 2 + size * (i % COLUMNS), y: 2 + size * Math.floor(i / COLUMNS) };
    const filled = inputs[MARKED].includes(i) ? "read" : "unread";
    const marked = i === MARKED ? " ring" : "";
    return makeSvg("rect", { ...position, width: size - 3, height: size - 3, rx: 2, class: filled + marked });
  });
  const [width, height] = [COLUMNS * size + 1, ROWS * size + 1];
  const label = `Token 3, channel 5 depends on ${inputs[MARKED].length} values; ${text}`;
  const attributes = { class: "map", viewBox: `0 0 ${width} ${height}`, width, height, role: "img" };
  return make(
    "div",
    { class: "over" },
    makeSvg("svg", { ...attributes, "aria-label": label }, ...squares),
    make("p", { class: "small" }, make("strong", {}, "Statistics over: "), `${text}.`),
  );
}

/** A list of terms and descriptions, without the empty ones. */
function facts(pairs) {
  const items = pairs.filter(([, text]) => text !== "" && text !== null && text !== undefined);
  const elements = items.flatMap(([term, text]) => [make("dt", {}, term), make("dd", {}, text)]);
  return make("dl", { class: "facts small" }, ...elements);
}
