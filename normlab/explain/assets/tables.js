// A matrix as a table: values in colour, groups outlined, five statistics beside each row and under each column.

const SHORT = { mean: "mean", variance: "var", rms: "RMS", min: "min", max: "max" };
const RING = { row: 2, column: 4 };

/** A number for people, in six signs at most; the whole number is in its cell's title. */
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

/** Put a number into a cell: rounded as its text, whole as its data. */
function setNumber(cell, value) {
  cell.textContent = shown(value);
  cell.title = String(value);
  cell.dataset.value = String(value);
}

/** Colour a cell by its value: orange above 0, blue below, stronger the larger it is beside the table's largest. */
function setColour(cell, value, largest) {
  const share = largest > 0 && Number.isFinite(value) ? Math.sqrt(Math.abs(value) / largest) : 0;
  cell.classList.toggle("warm", value > 0);
  cell.classList.toggle("cold", value < 0);
  cell.style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
}

/** Which value belongs to which group, from what each is made of; nothing where there are no groups of several. */
function division(reads) {
  const divided = reads.every((group) => group.length > 1 && group.every((at) => String(reads[at]) === String(group)));
  return divided ? reads.map((group) => group[0]) : null;
}

/** Outline the groups: a thick edge wherever the neighbour belongs to another. */
function outline(cells, reads) {
  const group = reads && division(reads);
  const [rows, columns] = [cells.length, cells[0].length];
  const at = (row, column) =>
    row < 0 || column < 0 || row >= rows || column >= columns ? -1 : group[row * columns + column];
  cells.forEach((line, row) =>
    line.forEach((cell, column) => {
      const own = group ? at(row, column) : null;
      const unlike = (down, right) => Boolean(group) && at(row + down, column + right) !== own;
      cell.classList.toggle("edge-top", unlike(-1, 0));
      cell.classList.toggle("edge-bottom", unlike(1, 0));
      cell.classList.toggle("edge-left", unlike(0, -1));
      cell.classList.toggle("edge-right", unlike(0, 1));
    }),
  );
}

/**
 * A table of a matrix, and how to change it.
 *
 * `caption` names it; `cell(row, column)` makes what a value's cell holds, where it is not the number itself.
 */
function matrixTable(rows, columns, caption, cell = null) {
  const statCell = (of, at, name) => make("td", { class: "stat", "data-of": of, "data-at": at, "data-stat": name });
  const cells = Array.from({ length: rows }, (_, row) =>
    Array.from({ length: columns }, (_, column) =>
      make("td", { class: "value", "data-row": row, "data-column": column }, cell && cell(row, column)),
    ),
  );
  const ofRows = cells.map((_, row) => STATISTICS.map((name) => statCell("row", row, name)));
  const ofColumns = STATISTICS.map((name) => cells[0].map((_, column) => statCell("column", column, name)));
  const table = make(
    "table",
    { class: "matrix" },
    make("caption", { class: "hidden" }, caption),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        make("td", { class: "corner" }),
        ...cells[0].map((_, column) =>
          make("th", { scope: "col", "aria-label": `channel ${column + 1}` }, `ch ${column + 1}`),
        ),
        ...STATISTICS.map((name) =>
          make("th", { scope: "col", class: "stat-head", "aria-label": `${name} of the row` }, SHORT[name]),
        ),
      ),
    ),
    make(
      "tbody",
      {},
      ...cells.map((line, row) =>
        make("tr", {}, make("th", { scope: "row" }, `token ${row + 1}`), ...line, ...ofRows[row]),
      ),
    ),
    make(
      "tfoot",
      {},
      ...ofColumns.map((line, at) =>
        make(
          "tr",
          {},
          make(
            "th",
            { scope: "row", class: "stat-head", "aria-label": `${STATISTICS[at]} of the column` },
            SHORT[STATISTICS[at]],
          ),
          ...line,
        ),
      ),
    ),
  );

  const update = (values) => {
    const largest = Math.max(...values.flat().map((value) => (Number.isFinite(value) ? Math.abs(value) : 0)));
    values.forEach((line, row) =>
      line.forEach((value, column) => {
        const place = cells[row][column];
        if (!cell) setNumber(place, value);
        setColour(place, value, largest);
      }),
    );
    values.forEach((line, row) => {
      const of = statistics(line);
      ofRows[row].forEach((place) => setNumber(place, of[place.dataset.stat]));
    });
    transposed(values).forEach((line, column) => {
      const of = statistics(line);
      ofColumns.forEach((places) => setNumber(places[column], of[places[column].dataset.stat]));
    });
  };
  const box = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${caption}: table` }, table);
  return { element: box, cells, update, outline: (reads) => outline(cells, reads) };
}

const SVG = "http://www.w3.org/2000/svg";

/** An element of a drawing, as `make` is one of the page. */
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** A small map of the matrix: one value with a ring, and filled what it is made of. */
function readsMap(reads, rows, columns, words) {
  const size = 15;
  const chosen = RING.row * columns + RING.column;
  const squares = Array.from({ length: rows * columns }, (_, at) =>
    draw("rect", {
      x: 2 + size * (at % columns),
      y: 2 + size * Math.floor(at / columns),
      width: size - 3,
      height: size - 3,
      rx: 2,
      class: `${reads[chosen].includes(at) ? "read" : "unread"}${at === chosen ? " ring" : ""}`,
    }),
  );
  const label = `Token ${RING.row + 1}, channel ${RING.column + 1} is made of ${reads[chosen].length} values; ${words}`;
  return draw(
    "svg",
    {
      class: "map",
      viewBox: `0 0 ${columns * size + 1} ${rows * size + 1}`,
      width: columns * size + 1,
      height: rows * size + 1,
      role: "img",
      "aria-label": label,
    },
    ...squares,
  );
}

/** Over what a norm is taken: the map, and the same in words. */
function overWhat(reads, words) {
  const [rows, columns] = [DATA.original.length, DATA.original[0].length];
  return make(
    "div",
    { class: "over" },
    readsMap(reads, rows, columns, words),
    make("p", { class: "small" }, make("strong", {}, "Over what: "), `${words}.`),
  );
}

/** Facts as a list of terms; those without a text are left out. */
function facts(pairs) {
  const told = pairs.filter(([, text]) => text !== "" && text !== null && text !== undefined);
  return make(
    "dl",
    { class: "facts small" },
    ...told.flatMap(([term, text]) => [make("dt", {}, term), make("dd", {}, text)]),
  );
}
