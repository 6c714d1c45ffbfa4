// What was measured inside: of each run (or cell) the statistics at its sampled steps, place by place.

const PROFILES = DATA.profiles;
const inside = { statistic: null, site: null, logged: true, share: false, step: null };

/** Statistics in the words of the record: [name, sites]. */
const MEASURED = new Map();
for (const layout of PROFILES.layouts) {
  let offset = 0;
  layout.at = new Map();
  for (const [statistic, site, all] of layout.columns) {
    const places = all.filter((place) => place !== null); // one that is a single number a step has none
    layout.at.set(`${statistic}\n${site}`, { offset, places });
    offset += Math.max(1, places.length);
    if (!MEASURED.has(statistic)) MEASURED.set(statistic, []);
    if (!MEASURED.get(statistic).includes(site)) MEASURED.get(statistic).push(site);
  }
  layout.size = offset;
}

/** A statistic of a unit at one site: its places, and a function of the sampled step's index; null where it is not. */
function measuredOf(unit, statistic, site) {
  const layout = PROFILES.layouts[unit.layout];
  const known = layout.at.get(`${statistic}\n${site}`);
  if (!known) return null;
  unit.decoded ??= floatsOf(unit.values);
  const many = Math.max(1, known.places.length);
  return {
    ...known,
    depth: layout.depth,
    at: (index) => unit.decoded.subarray(index * layout.size + known.offset, index * layout.size + known.offset + many),
  };
}

/** How many steps of a unit the page has. */
const SAMPLED = PROFILES.units.reduce((most, unit) => Math.max(most, unit.steps.length), 0);

const unitVisible = (unit) => unit.runs.some((index) => visible(RUNS[index]));

/**
 * What is drawn as one inside: a unit, or the units of a cell that are alike, those of its best learning rate.
 *
 * Each has `label`, `cell`, `units`, `n`.
 */
function insideGroups() {
  const units = PROFILES.units.filter(unitVisible);
  if (state.group === "runs")
    return units.map((unit) => ({ label: unit.label, cell: unit.cell, units: [unit], n: unit.n }));
  const found = new Map();
  const order = new Map(state.order.map((cell, place) => [cell, place]));
  for (const unit of [...units].sort((a, b) => (order.get(a.cell) ?? 1e9) - (order.get(b.cell) ?? 1e9))) {
    const best = unit.cell === null ? [] : CELLS[unit.cell].at_best;
    if (best.length && !unit.runs.some((index) => best.includes(index))) continue;
    const key = unit.cell === null ? `alone ${unit.label}` : `${unit.cell} ${unit.layout}`;
    const group = found.get(key) ?? {
      label: unit.cell === null || PROFILES.of === "cell" ? unit.label : CELLS[unit.cell].label,
      cell: unit.cell,
      units: [],
      n: 0,
    };
    group.units.push(unit);
    group.n += unit.n;
    found.set(key, group);
  }
  return [...found.values()];
}

/**
 * The index of the last sampled step that is not after a step; null before a unit's first, and where it had ended: what
 * came to its end, diverged or was killed earlier is not there any more. Between samples, and one beyond, it is.
 */
function indexAt(unit, step) {
  const { steps } = unit;
  const between = steps.reduce((most, at, i) => (i ? Math.max(most, at - steps[i - 1]) : most), 0);
  if (step < steps[0] || step > steps.at(-1) + between) return null;
  let index = 0;
  while (index < steps.length - 1 && steps[index + 1] <= step) index += 1;
  return index;
}

const MOMENTS = [
  ["at init", (unit) => unit.init],
  ["after warm-up", (unit) => unit.warmup],
  ["at the end", (unit) => unit.end],
];

/** Over a group's units, place by place: the mean, the least and the largest of what is finite. */
function across(group, statistic, site, indexOf) {
  const columns = [];
  let places = null,
    depth = 0;
  for (const unit of group.units) {
    const measured = measuredOf(unit, statistic, site),
      index = measured && indexOf(unit);
    if (!measured || index === null || index === undefined) continue;
    ({ places, depth } = measured);
    columns.push(measured.at(index));
  }
  if (!columns.length) return null;
  const fold = (of) =>
    Array.from(columns[0], (_, i) => {
      const known = columns.map((column) => column[i]).filter(Number.isFinite);
      return known.length ? of(known) : NaN;
    });
  return {
    places,
    depth,
    n: columns.length,
    mean: fold((known) => known.reduce((a, b) => a + b, 0) / known.length),
    low: fold((known) => Math.min(...known)),
    high: fold((known) => Math.max(...known)),
  };
}

/** What a statistic is, as a caption has it. */
function statisticText(name, site) {
  const one = PROFILES.statistics[name];
  return `${name}${site ? ` of ${site}` : ""} = ${one.formula}; unit ${one.unit}; of ${one.of}. ${one.question} Source: ${one.source}; measured in the step itself, here at ${SAMPLED} steps of each run at most.`;
}

const placeName = (place, depth) => (place === 0 ? "embed" : place > depth ? "head" : `block ${place}`);

/** What the units are, for captions. */
function unitsText() {
  if (PROFILES.of === "cell") return " A line is a cell: the mean over its runs at its own best learning rate.";
  return state.group === "cells"
    ? " A line is the mean over a cell's seeds at its own best learning rate, its band from the least to the largest."
    : "";
}
