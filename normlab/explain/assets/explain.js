// Builds the page.

/** A formula's MathML from its tree; null for a formula with prose. */
function mathOf(tree) {
  if (!tree) return null;
  const [name, ...children] = tree;
  const element = document.createElementNS("http://www.w3.org/1998/Math/MathML", name);
  if (name === "math") element.setAttribute("display", "block");
  element.append(...children.map((child) => (typeof child === "string" ? child : mathOf(child))));
  return element;
}

/** A norm with its module's output for the original matrix, initially closed. */
function normCard(norm) {
  const table = matrixTable(`${norm.name} of the original matrix`);
  table.update(norm.result.map((row) => row.map(number)));
  table.outline(norm.inputs);
  const live = DATA.live.filter((each) => each.norm === norm.name);
  const links = live.flatMap((each, i) => [i ? ", " : "", make("a", { href: `#live-${each.key}` }, each.title)]);
  const pitfalls = norm.pitfalls.map((text) => make("li", {}, text));
  const summary = make("summary", {}, make("span", { class: "name" }, norm.name), " ", make("code", {}, norm.formula));
  const output = make(
    "div",
    {},
    dependencyMap(norm.inputs, DATA.groups[norm.kind]),
    table.element,
    norm.batch ? make("p", { class: "small" }, norm.batch) : null,
  );
  const description = make(
    "div",
    {},
    mathOf(norm.math),
    make("p", {}, norm.about),
    live.length ? make("p", { class: "small" }, "With the editable matrix: ", ...links, ".") : null,
    facts([
      ["weights here", norm.weights.join("; ") || "none"],
      ["options here", norm.options.join(", ") || "the defaults"],
      ["parameters", norm.parameters],
      ["causal", norm.causal],
      ["unchanged by", invariances(norm)],
      ["equals", norm.equals],
      ["source", norm.source],
    ]),
    pitfalls.length
      ? make("div", { class: "small" }, make("p", {}, make("strong", {}, "Common mistakes")), make("ul", {}, ...pitfalls))
      : null,
  );
  return make(
    "details",
    { class: "card", id: `norm-${norm.name}`, "data-norm": norm.name },
    summary,
    make("div", { class: "split" }, output, description),
  );
}

/** Open the norm that the URL's fragment names. */
function openTarget() {
  let target = null;
  try {
    target = byId(decodeURIComponent(location.hash.slice(1)));
  } catch {} // a fragment such as "#%" cannot be decoded
  if (target instanceof HTMLDetailsElement) target.open = true;
}

byId("theme-here").append(themeControl());
byId("before").append(...editor());
byId("live").append(...DATA.live.map(liveCard));
changed();

const cards = DATA.norms.map(normCard);
const setAll = (open) => () => cards.forEach((card) => (card.open = open));
const buttons = make("div", { class: "controls" }, button("open all", setAll(true)), button("close all", setAll(false)));
byId("norm-list").append(buttons, ...cards);

byId("flow-legend").append(flowLegend());
byId("placement-links").append(...DATA.placements.map(({ name }) => make("a", { href: `#placement-${name}` }, name)));
byId("placement-list").append(...DATA.placements.map(placementCard));
byId("footer").append(`Written by normlab ${DATA.version} explain. The page makes no network requests.`);
addEventListener("hashchange", openTarget);
openTarget();
