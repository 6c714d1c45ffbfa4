// Puts the page together.

/** A formula as it stands in the catalogue. */
const formulaOf = (text, end = "") => make("code", {}, text + end);

/** A norm as its module computed it, closed until it is asked for. */
function normCard(norm) {
  const table = matrixTable(ROWS, COLUMNS, `${norm.name} of the original matrix`);
  table.update(norm.result.map((row) => row.map(number)));
  table.outline(norm.reads);
  const live = DATA.live.filter((each) => each.norm === norm.name);
  return make("details", { class: "card", id: `norm-${norm.name}`, "data-norm": norm.name },
    make("summary", {}, make("span", { class: "name" }, norm.name), " ", formulaOf(norm.formula)),
    make("p", {}, norm.about),
    live.length ? make("p", { class: "small" }, "It follows your numbers above: ",
      ...live.flatMap((each, at) => [at ? ", " : "", make("a", { href: `#live-${each.key}` }, each.title)]), ".") : null,
    overWhat(norm.reads, norm.kind), table.element,
    norm.batch ? make("p", { class: "small" }, norm.batch) : null,
    facts([
      ["weights here", norm.weights.join("; ") || "none"], ["options here", norm.set.join(", ") || "the default ones"],
      ["learns", norm.learns], ["causal", norm.causal], ["unmoved by", norm.blind_to.map((word) => BLIND[word]).join("; ")],
      ["equals", norm.equals], ["source", norm.source],
    ]),
    norm.pitfalls.length ? make("div", { class: "small" }, make("strong", {}, "What others got wrong in it, or take it for"),
      make("ul", {}, ...norm.pitfalls.map((text) => make("li", {}, text)))) : null);
}

/** Open what a link leads to. */
function openTarget() {
  const target = byId(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) target.open = true;
}

byId("theme-here").append(themeControl());
byId("before").append(...editor());
byId("live").append(...DATA.live.map(liveCard));
follow();

const normList = byId("norm-list");
const everyNorm = () => [...normList.querySelectorAll("details")];
const openAll = (open) => () => { for (const each of everyNorm()) each.open = open; };
normList.append(
  make("div", { class: "controls" },
    make("button", { type: "button", click: openAll(true) }, "open all"), make("button", { type: "button", click: openAll(false) }, "close all")),
  ...DATA.norms.map(normCard));

byId("flow-legend").append(flowLegend());
byId("placement-links").append(...DATA.placements.map(({ name }) => make("a", { href: `#placement-${name}` }, name)));
byId("placement-list").append(...DATA.placements.map(placementCard));
byId("footer").append(`Written by normlab ${DATA.version}, explain. It asks nothing of any network.`);
addEventListener("hashchange", openTarget);
openTarget();
