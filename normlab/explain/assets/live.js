// The editable matrix, and the norms that the page recomputes after each change.

const ORIGINAL = DATA.original;
const INDICES = Array.from({ length: ROWS * COLUMNS }, (_, i) => i);
const SAME_GROUP = {
  row: (i, j) => Math.floor(i / COLUMNS) === Math.floor(j / COLUMNS),
  column: (i, j) => i % COLUMNS === j % COLUMNS,
  value: (i, j) => i === j,
};
/** The inputs of each value, for a norm over rows, columns or single values. */
const inputsOver = (over) => INDICES.map((i) => INDICES.filter((j) => SAME_GROUP[over](i, j)));

let current = structuredClone(ORIGINAL);
let updates = DATA.updates;
const LISTENERS = [];

/** Notify the tables of a change of the matrix or of the number of updates. */
function changed() {
  for (const listen of LISTENERS) listen();
}

/** The number in an input, or null if it is not a number within the limit. */
function validNumber(input) {
  const value = input.value.trim() === "" ? NaN : Number(input.value);
  return Number.isFinite(value) && Math.abs(value) <= DATA.limit ? value : null;
}

const button = (text, click, attributes = {}) => make("button", { type: "button", click, ...attributes }, text);

/** The editable matrix with its buttons. */
function editor() {
  const status = make("p", { class: "small status", role: "status" });
  const name = (row, column) => `token ${row + 1}, channel ${column + 1}`;
  const limit = DATA.limit.toExponential(0).replace("+", "");
  /** The message for the first invalid input, with priority for a given one; empty if all are valid. */
  const invalidMessage = (first) => {
    const all = inputs.flat();
    const invalid = [first, ...all].find((input) => validNumber(input) === null);
    if (!invalid) return "";
    const [row, column] = [Math.floor(all.indexOf(invalid) / COLUMNS), all.indexOf(invalid) % COLUMNS];
    return `${name(row, column)}: enter a number of at most ${limit}; the tables still use ${current[row][column]}`;
  };
  const inputs = ORIGINAL.map((line, row) =>
    line.map((value, column) => {
      const edit = () => {
        const number = validNumber(input);
        input.setAttribute("aria-invalid", String(number === null));
        status.textContent = invalidMessage(input);
        if (number === null) return;
        current[row][column] = number;
        changed();
      };
      const bounds = { type: "number", step: "any", min: -DATA.limit, max: DATA.limit };
      const input = make("input", { ...bounds, value, "aria-label": name(row, column), input: edit });
      return input;
    }),
  );
  const setMatrix = (matrix, message) => {
    current = matrix;
    inputs.flat().forEach((input, i) => {
      input.value = String(current.flat()[i]);
      input.setAttribute("aria-invalid", "false");
    });
    status.textContent = message;
    changed();
  };
  const apply = ({ label, row, column, value, times = 1, add = 0 }) => {
    const applies = (i, j) => (row === undefined || row === i) && (column === undefined || column === j);
    const change = (old) => Number((value ?? old * times + add).toPrecision(12));
    const next = current.map((line, i) => line.map((old, j) => (applies(i, j) ? change(old) : old)));
    const tooLarge = next.flat().some((number) => Math.abs(number) > DATA.limit);
    if (!tooLarge) setMatrix(next, `done: ${label}`);
    else status.textContent = [`a value would exceed ${limit}`, invalidMessage(inputs[0][0])].filter(Boolean).join("; ");
  };
  const table = matrixTable("The matrix before normalisation", (row, column) => inputs[row][column]);
  LISTENERS.push(() => table.update(current));
  const reset = () => setMatrix(structuredClone(ORIGINAL), "original matrix restored");
  return [
    make("h3", {}, "Before: the matrix"),
    table.element,
    make(
      "div",
      { class: "controls" },
      button("reset", reset, { id: "reset" }),
      ...DATA.presets.map((preset) => button(preset.label, () => apply(preset))),
    ),
    status,
    make(
      "p",
      { class: "small muted" },
      "Edit any value. Each row and column is followed by its mean, variance (over n), root mean square, minimum and maximum. Colours: ",
      make("span", { class: "swatch cold" }, "\u2212"),
      " below 0, ",
      make("span", { class: "swatch warm" }, "+"),
      " above 0, stronger for larger values, on a scale per table. A cell's tooltip has all digits.",
    ),
  ];
}

/** BatchNorm's running statistics beside those of the current matrix, and the number of updates. */
function runningTable(norm) {
  const names = ["running mean", "current mean", "running variance", "current variance"];
  const cells = names.map(() => ORIGINAL[0].map(() => make("td", { class: "stat" })));
  const edit = () => {
    const value = Number(input.value);
    const valid = input.value.trim() !== "" && Number.isInteger(value) && value >= 0 && value <= 1000;
    input.setAttribute("aria-invalid", String(!valid));
    if (!valid) return;
    updates = value;
    changed();
  };
  const bounds = { type: "number", min: 0, max: 1000, step: 1 };
  const input = make("input", { ...bounds, id: "updates", value: updates, input: edit });
  LISTENERS.push(() => {
    const running = runningStatistics(ORIGINAL, updates, norm.momentum);
    transposed(current).forEach((column, i) => {
      const { mean, variance } = statistics(column);
      const values = [running[i].mean, mean, running[i].variance, (variance * ROWS) / (ROWS - 1)];
      values.forEach((value, row) => setNumber(cells[row][i], value));
    });
  });
  const formula = `running = ${1 - norm.momentum} running + ${norm.momentum} batch`;
  const row = (name, i) => make("tr", {}, make("th", { scope: "row" }, name), ...cells[i]);
  return make(
    "div",
    {},
    make("div", { class: "controls" }, make("label", {}, "training updates so far (0 to 1000)", input)),
    make(
      "p",
      { class: "small" },
      `Each update uses the original matrix: ${formula}, from mean 0 and variance 1; the variance is over n \u2212 1.`,
    ),
    scrollBox(
      "Running statistics",
      { class: "matrix kept" },
      make("thead", {}, make("tr", {}, make("td", { class: "corner" }), ...channelHeads())),
      make("tbody", {}, ...names.map(row)),
    ),
  );
}

const INVARIANCES = { scale: "a group times a positive number", shift: "a group plus a number" };

/** The changes of the input that leave the output unchanged. */
const invariances = (norm) =>
  norm.invariant_to.length ? `${norm.invariant_to.map((key) => INVARIANCES[key]).join("; ")} (except for eps)` : "";

/** A norm with its formula, its groups and its output for the current matrix. */
function liveCard(norm) {
  let over = norm.over;
  const table = matrixTable(`${norm.title} of the matrix`);
  const map = make("div");
  const change = make("p", { class: "small moved" });
  const update = () => {
    const running = norm.momentum && runningStatistics(ORIGINAL, updates, norm.momentum);
    const apply = (matrix) => NORMS[norm.key](matrix, { over, eps: norm.eps, running });
    const result = apply(current);
    const original = apply(ORIGINAL).flat();
    const inputs = inputsOver(over);
    table.update(result);
    table.outline(inputs);
    map.replaceChildren(dependencyMap(inputs, norm.groups ?? DATA.groups[over]));
    const largest = Math.max(...result.flat().map((value, i) => Math.abs(value - original[i])));
    const edited = String(current) !== String(ORIGINAL);
    change.textContent = edited ? `Largest change from the output for the original matrix: ${shown(largest)}` : "";
  };
  LISTENERS.push(update);
  const choose = (value) => {
    over = value;
    update();
  };
  const groups = [
    ["column", "each column (as in statistics)"],
    ["row", `each row (as norm=${norm.norm})`],
  ];
  const select = () => dropDown("over", groups, over, choose, { "aria-label": `${norm.title}: over` });
  const eps = norm.eps.toExponential().replace("-", "\u2212");
  const weights = Object.entries({ gain: 1, bias: 0 }).filter(([name]) => norm.formula.includes(name));
  return make(
    "article",
    { class: "card", id: `live-${norm.key}`, "data-live": norm.key },
    make("h3", {}, norm.title),
    mathOf(norm.math),
    make("p", { class: "formula" }, make("code", {}, norm.formula)),
    make("p", {}, norm.see),
    ["zscore", "minmax"].includes(norm.key) ? make("div", { class: "controls" }, select()) : null,
    norm.key === "batchnorm_eval" ? runningTable(norm) : null,
    map,
    table.element,
    change,
    facts([
      ["eps", `${eps}, the default of norm=${norm.norm}`],
      ["weights here", weights.map((pair) => pair.join(" ")).join(", ")],
      ["unchanged by", invariances(norm)],
      ["parameters", norm.parameters],
      ["causal", norm.causal],
      ["source", norm.source],
    ]),
  );
}
