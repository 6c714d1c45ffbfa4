// The matrix that can be edited, and the normalisers that follow it at once.

const ORIGINAL = DATA.original;
const [ROWS, COLUMNS] = [ORIGINAL.length, ORIGINAL[0].length];
const copied = (matrix) => matrix.map((row) => [...row]);
const isOfRow = (at, other) => Math.floor(at / COLUMNS) === Math.floor(other / COLUMNS);
const isOfColumn = (at, other) => at % COLUMNS === other % COLUMNS;
const isSame = (at, other) => at === other;
const BELONGS = { row: isOfRow, column: isOfColumn, value: isSame };

let current = copied(ORIGINAL);
let updates = DATA.updates;
const FOLLOWERS = [];

/** Tell all that the matrix, or the number of updates, is another. */
const follow = () => {
  for (const each of FOLLOWERS) each();
};

/** What each value is made of, where groups are rows, columns or single values. */
function readsOver(over) {
  const all = Array.from({ length: ROWS * COLUMNS }, (_, at) => at);
  return all.map((at) => all.filter((other) => BELONGS[over](at, other)));
}

/** What is typed, as a number within the limit; nothing where it is none. */
function typed(input) {
  const value = input.value.trim() === "" ? NaN : Number(input.value);
  return Number.isFinite(value) && Math.abs(value) <= DATA.limit ? value : null;
}

/** The matrix as it is, to be edited. */
function editor() {
  const status = make("p", { class: "small status", role: "status" });
  /** What is said of a field without a number within the limit, the one given before others; nothing where all have one. */
  const wanting = (first) => {
    const all = inputs.flat();
    const wrong = [first, ...all].find((input) => typed(input) === null);
    if (!wrong) return "";
    const [row, column] = [Math.floor(all.indexOf(wrong) / COLUMNS), all.indexOf(wrong) % COLUMNS];
    return `token ${row + 1}, channel ${column + 1}: a number of at most ${DATA.limit.toExponential(0).replace("+", "")} is needed; the last one, ${current[row][column]}, is still shown elsewhere`;
  };
  const inputs = copied(ORIGINAL).map((line, row) =>
    line.map((value, column) => {
      const input = make("input", {
        type: "number",
        step: "any",
        min: -DATA.limit,
        max: DATA.limit,
        value,
        "aria-label": `token ${row + 1}, channel ${column + 1}`,
        input: () => {
          const number = typed(input);
          input.setAttribute("aria-invalid", String(number === null));
          status.textContent = wanting(input);
          if (number !== null) {
            current[row][column] = number;
            follow();
          }
        },
      });
      return input;
    }),
  );
  const table = matrixTable(ROWS, COLUMNS, "The matrix before normalisation", (row, column) => inputs[row][column]);

  const put = (matrix, words) => {
    current = matrix;
    inputs.forEach((line, row) =>
      line.forEach((input, column) => {
        input.value = String(current[row][column]);
        input.setAttribute("aria-invalid", "false");
      }),
    );
    status.textContent = words;
    follow();
  };
  const pressed = (preset) => {
    const isMeant = (row, column) =>
      (preset.row === undefined || preset.row === row) && (preset.column === undefined || preset.column === column);
    const of = (value) => Number((preset.value ?? value * (preset.times ?? 1) + (preset.add ?? 0)).toPrecision(12));
    const next = current.map((line, row) => line.map((value, column) => (isMeant(row, column) ? of(value) : value)));
    if (next.flat().some((value) => Math.abs(value) > DATA.limit))
      status.textContent = ["that would be more than the largest number here", wanting(inputs[0][0])]
        .filter(Boolean)
        .join("; ");
    else put(next, `done: ${preset.label}`);
  };
  FOLLOWERS.push(() => table.update(current));
  return [
    make("h3", {}, "Before: the matrix"),
    table.element,
    make(
      "div",
      { class: "controls" },
      make(
        "button",
        { type: "button", id: "reset", click: () => put(copied(ORIGINAL), "the matrix is the original one") },
        "reset",
      ),
      ...DATA.presets.map((preset) => make("button", { type: "button", click: () => pressed(preset) }, preset.label)),
    ),
    status,
    make(
      "p",
      { class: "small muted" },
      "Every value can be edited. Beside each row and under each column stand its mean, variance (over n), root mean square, minimum and maximum. ",
      make("span", { class: "swatch cold" }, "\u2212"),
      " below 0, ",
      make("span", { class: "swatch warm" }, "+"),
      " above 0, stronger the larger: each table has its own scale. A cell's tooltip has the whole number.",
    ),
  ];
}

/** The statistics that BatchNorm keeps, beside those of the matrix as it is, and how many updates they have seen. */
function keptStatistics(norm) {
  const rows = ["running mean", "mean now", "running variance", "variance now"];
  const cells = rows.map(() => Array.from({ length: COLUMNS }, () => make("td", { class: "stat" })));
  const input = make("input", {
    type: "number",
    id: "updates",
    min: 0,
    max: 1000,
    step: 1,
    value: updates,
    input: () => {
      const value = Number(input.value);
      const isCount = input.value.trim() !== "" && Number.isInteger(value) && value >= 0 && value <= 1000;
      input.setAttribute("aria-invalid", String(!isCount));
      if (isCount) {
        updates = value;
        follow();
      }
    },
  });
  FOLLOWERS.push(() => {
    const kept = running(ORIGINAL, updates, norm.momentum);
    transposed(current).forEach((column, at) => {
      const now = statistics(column);
      const unbiased = (now.variance * ROWS) / (ROWS - 1);
      [kept[at].mean, now.mean, kept[at].variance, unbiased].forEach((value, line) =>
        setNumber(cells[line][at], value),
      );
    });
  });
  return make(
    "div",
    {},
    make("div", { class: "controls" }, make("label", {}, "training updates so far (0 to 1000)", input)),
    make(
      "p",
      { class: "small" },
      `Each update was on the original matrix: kept = ${1 - norm.momentum} kept + ${norm.momentum} new, from mean 0 and variance 1; the variance is over n \u2212 1.`,
    ),
    make(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Running statistics: table" },
      make(
        "table",
        { class: "matrix kept" },
        make("caption", { class: "hidden" }, "Running statistics"),
        make(
          "thead",
          {},
          make(
            "tr",
            {},
            make("td", { class: "corner" }),
            ...cells[0].map((_, at) => make("th", { scope: "col", "aria-label": `channel ${at + 1}` }, `ch ${at + 1}`)),
          ),
        ),
        make(
          "tbody",
          {},
          ...rows.map((name, line) => make("tr", {}, make("th", { scope: "row" }, name), ...cells[line])),
        ),
      ),
    ),
  );
}

const BLIND = { scale: "a group times a positive number", shift: "a group plus one number" };

/** What changes nothing, in words. */
function unmovedBy(norm) {
  const words = norm.blind_to.map((word) => BLIND[word]);
  return words.length ? `${words.join("; ")} (but for eps)` : "";
}

/** A small number as people write it: 1e-6. */
const small = (value) => value.toExponential().replace("-", "\u2212");

/** A normaliser: what it does, over what, and what it makes of the matrix as it is. */
function liveCard(norm) {
  let over = norm.over;
  const table = matrixTable(ROWS, COLUMNS, `${norm.title} of the matrix`);
  const where = make("div");
  const moved = make("p", { class: "small moved" });
  const options = () => ({ ...norm, over, kept: norm.momentum && running(ORIGINAL, updates, norm.momentum) });
  const update = () => {
    const result = NORMALISERS[norm.key](current, options());
    const first = NORMALISERS[norm.key](ORIGINAL, options()).flat();
    table.update(result);
    table.outline(readsOver(over));
    where.replaceChildren(overWhat(readsOver(over), norm.said ?? DATA.groups[over]));
    const isOriginal = String(current) === String(ORIGINAL);
    const change = Math.max(...result.flat().map((value, at) => Math.abs(value - first[at])));
    moved.textContent = isOriginal ? "" : `Largest change from what it makes of the original matrix: ${shown(change)}`;
  };
  FOLLOWERS.push(update);
  const choice =
    ["zscore", "minmax"].includes(norm.key) &&
    make(
      "label",
      {},
      "over",
      make(
        "select",
        {
          "aria-label": `${norm.title}: over`,
          change: (event) => {
            over = event.target.value;
            update();
          },
        },
        make("option", { value: "column" }, "each column (the classical form)"),
        make("option", { value: "row" }, `each row (as norm=${norm.norm} does)`),
      ),
    );
  return make(
    "article",
    { class: "card", id: `live-${norm.key}`, "data-live": norm.key },
    make("h3", {}, norm.title),
    mathOf(norm.math),
    make("p", { class: "formula" }, formulaOf(norm.formula)),
    make("p", {}, norm.see),
    choice ? make("div", { class: "controls" }, choice) : null,
    norm.key === "batchnorm_eval" ? keptStatistics(norm) : null,
    where,
    table.element,
    moved,
    facts([
      ["eps", `${small(norm.eps)}, as norm=${norm.norm} has it`],
      [
        "weights here",
        ["gain", "bias"]
          .filter((word) => norm.formula.includes(word))
          .map((word) => `${word} ${word === "gain" ? 1 : 0}`)
          .join(", "),
      ],
      ["unmoved by", unmovedBy(norm)],
      ["learns", norm.learns],
      ["causal", norm.causal],
      ["source", norm.source],
    ]),
  );
}
