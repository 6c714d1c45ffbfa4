// A table whose rows are sorted by a click on a heading, and ticked to show or hide runs.

/** A small line with a cell's colour, dash and symbol's place, to find it in the pictures. */
function swatch(index) {
  const { colour, dash } = styleOf(index);
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg");
  const line = document.createElementNS(namespace, "line");
  const dashes = { solid: "", dash: "6 4", dot: "2 3", dashdot: "6 3 2 3" }[dash];
  for (const [key, value] of Object.entries({ width: 26, height: 10, "aria-hidden": "true" }))
    svg.setAttribute(key, value);
  for (const [key, value] of Object.entries({
    x1: 1,
    x2: 25,
    y1: 5,
    y2: 5,
    stroke: colour,
    "stroke-width": 3,
    "stroke-dasharray": dashes,
  }))
    line.setAttribute(key, value);
  svg.append(line);
  return svg;
}

/** Values in order: numbers by size, then texts, what there is none of last. */
function before(a, b) {
  const none = (value) => value === null || value === undefined || value === "" || Number.isNaN(value);
  if (none(a) || none(b)) return none(a) - none(b);
  if (typeof a === "number" && typeof b === "number") return a === b ? 0 : a - b;
  return typeof a === typeof b
    ? String(a).localeCompare(String(b), "en", { numeric: true })
    : typeof a === "number"
      ? -1
      : 1;
}

/**
 * A table.
 *
 * @param {object} options - `id`, `caption`, `columns` (each `name`, `text(row)`, `value(row)` to sort by, `number`),
 *   `rows()`, what is listed now; `runsOf(row)`, the runs that its tick shows or hides; `style(row)`, its cell;
 *   `sorted(rows)`, called with the rows in their new order; `first`, the rows' order before any click.
 */
function addTable(section, { name, columns, rows, runsOf, cellOf, sorted, first }) {
  let by = null,
    falling = false;
  const body = make("tbody");
  const heads = columns.map((column, place) => {
    const button = make(
      "button",
      {
        type: "button",
        class: "sort",
        click: () => {
          falling = by === place && !falling;
          by = place;
          arrange();
        },
      },
      column.name,
    );
    return make("th", { scope: "col", class: column.number ? "number" : "" }, button);
  });
  const all = make("input", {
    type: "checkbox",
    "aria-label": `show all ${name} that are listed`,
    change: () => tick(rows().flatMap(runsOf), all.checked),
  });
  const table = make("table", {}, make("thead", {}, make("tr", {}, make("th", {}, all), ...heads)), body);
  const count = make("p", { class: "muted small", role: "status" });
  const numbers = make(
    "button",
    {
      type: "button",
      click: () =>
        save(
          `${fileName(DATA.title)}-${name}.csv`,
          "text/csv",
          csvText([
            columns.map((column) => column.name),
            ...inOrder().map((row) => columns.map((column) => column.text(row))),
          ]),
        ),
    },
    "CSV",
  );
  byId(section).append(
    count,
    make("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": `table of ${name}` }, table),
    make("div", { class: "buttons" }, numbers),
  );

  function tick(indices, on) {
    for (const index of indices) on ? state.ticked.add(index) : state.ticked.delete(index);
    changed();
  }

  function inOrder() {
    const listed = first(rows());
    if (by === null) return listed;
    const { value } = columns[by];
    const none = (row) => {
      const of = value(row);
      return of === null || of === undefined || of === "";
    };
    return [...listed].sort((a, b) =>
      none(a) || none(b) ? none(a) - none(b) : (falling ? -1 : 1) * before(value(a), value(b)),
    );
  }

  /** Put the rows in order, and tell who follows it. */
  function arrange() {
    heads.forEach((head, place) =>
      head.setAttribute("aria-sort", place === by ? (falling ? "descending" : "ascending") : "none"),
    );
    sorted?.(inOrder());
    changed();
  }

  function show() {
    const listed = inOrder();
    const ticked = (row) => runsOf(row).filter((index) => state.ticked.has(index)).length;
    body.replaceChildren(
      ...listed.map((row) => {
        const of = runsOf(row),
          on = ticked(row);
        const box = make("input", {
          type: "checkbox",
          checked: on > 0 && on === of.length,
          "aria-label": `show ${columns[0].text(row)}`,
          change: () => tick(of, box.checked),
        });
        box.indeterminate = on > 0 && on < of.length;
        return make(
          "tr",
          { class: on ? "" : "hidden-row" },
          make("td", { class: "tick" }, box, swatch(cellOf(row))),
          ...columns.map((column) =>
            make(
              "td",
              {
                class: column.number ? "number" : column.long ? "long" : "",
                title: column.text(row).length > 40 ? column.text(row) : null,
              },
              column.text(row),
            ),
          ),
        );
      }),
    );
    const indices = listed.flatMap(runsOf),
      on = indices.filter((index) => state.ticked.has(index)).length;
    all.checked = on > 0 && on === indices.length;
    all.indeterminate = on > 0 && on < indices.length;
    count.textContent = `${listed.length} ${name}; ticked: ${listed.filter(ticked).length}`;
  }

  LISTENERS.push(show);
  THEME_LISTENERS.push(show);
  show();
}
