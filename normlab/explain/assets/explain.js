// Puts the page together.

/** A formula as it stands in the catalogue. */
const formulaOf = (text, end = "") => make("code", {}, text + end);

/** The same as mathematics, from its tree; nothing where it is made of words too. */
function mathOf(tree) {
  if (!tree) return null;
  const [name, ...children] = tree;
  const element = document.createElementNS("http://www.w3.org/1998/Math/MathML", name);
  if (name === "math") element.setAttribute("display", "block");
  element.append(...children.map((child) => (typeof child === "string" ? child : mathOf(child))));
  return element;
}

/** A norm as its module computed it, closed until it is asked for. */
function normCard(norm) {
  const table = matrixTable(ROWS, COLUMNS, `${norm.name} of the original matrix`);
  table.update(norm.result.map((row) => row.map(number)));
  table.outline(norm.reads);
  const live = DATA.live.filter((each) => each.norm === norm.name);
  return make(
    "details",
    { class: "card", id: `norm-${norm.name}`, "data-norm": norm.name },
    make("summary", {}, make("span", { class: "name" }, norm.name), " ", formulaOf(norm.formula)),
    make(
      "div",
      { class: "split" },
      make(
        "div",
        {},
        overWhat(norm.reads, DATA.groups[norm.kind]),
        table.element,
        norm.batch ? make("p", { class: "small" }, norm.batch) : null,
      ),
      make(
        "div",
        {},
        mathOf(norm.math),
        make("p", {}, norm.about),
        live.length
          ? make(
              "p",
              { class: "small" },
              "It follows your numbers above: ",
              ...live.flatMap((each, at) => [at ? ", " : "", make("a", { href: `#live-${each.key}` }, each.title)]),
              ".",
            )
          : null,
        facts([
          ["weights here", norm.weights.join("; ") || "none"],
          ["options here", norm.set.join(", ") || "the default ones"],
          ["learns", norm.learns],
          ["causal", norm.causal],
          ["unmoved by", unmovedBy(norm)],
          ["equals", norm.equals],
          ["source", norm.source],
        ]),
        norm.pitfalls.length
          ? make(
              "div",
              { class: "small" },
              make("p", {}, make("strong", {}, "What others got wrong in it, or take it for")),
              make("ul", {}, ...norm.pitfalls.map((text) => make("li", {}, text))),
            )
          : null,
      ),
    ),
  );
}

/** Open what a link leads to. */
function openTarget() {
  const name = location.hash.slice(1);
  let target = null;
  try {
    target = byId(decodeURIComponent(name));
  } catch {} // "#%" is no name
  if (target instanceof HTMLDetailsElement) target.open = true;
}

byId("theme-here").append(themeControl());
byId("before").append(...editor());
byId("live").append(...DATA.live.map(liveCard));
follow();

const normList = byId("norm-list");
const everyNorm = () => [...normList.querySelectorAll("details")];
const openAll = (open) => () => {
  for (const each of everyNorm()) each.open = open;
};
normList.append(
  make(
    "div",
    { class: "controls" },
    make("button", { type: "button", click: openAll(true) }, "open all"),
    make("button", { type: "button", click: openAll(false) }, "close all"),
  ),
  ...DATA.norms.map(normCard),
);

byId("flow-legend").append(flowLegend());
byId("placement-links").append(...DATA.placements.map(({ name }) => make("a", { href: `#placement-${name}` }, name)));
byId("placement-list").append(...DATA.placements.map(placementCard));
byId("footer").append(`Written by normlab ${DATA.version}, explain. It asks nothing of any network.`);
addEventListener("hashchange", openTarget);
openTarget();
