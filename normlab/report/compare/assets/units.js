// The layer statistics of each unit at its sampled steps. A unit is a run, or a cell on a page of many runs.

const PROFILES = DATA.profiles;
const inside = { statistic: null, site: null, logarithmic: true, relative: false, step: null };
const LAYER_AXIS = "Layers: 0 the embeddings, 1 to L the blocks, L + 1 the head.";

/** The sites of each measured statistic. */
const SITES = new Map();
for (const layout of PROFILES.layouts) {
  let offset = 0;
  layout.columns = new Map(
    layout.columns.map(([statistic, site, all]) => {
      const layers = all.filter((layer) => layer !== null); // empty for one number per step
      const column = { offset, layers, size: all.length };
      offset += all.length;
      SITES.set(statistic, [...new Set([...(SITES.get(statistic) ?? []), site])]);
      return [`${statistic}\n${site}`, column];
    }),
  );
  layout.size = offset;
}

const columnOf = (layout, statistic, site) => layout.columns.get(`${statistic}\n${site}`);

/** A unit's values of a statistic at a site: its layers and a function of the index of a step; or null. */
function measuredOf(unit, statistic, site) {
  const layout = PROFILES.layouts[unit.layout];
  const column = columnOf(layout, statistic, site);
  if (!column) return null;
  unit.decoded ??= float32Of(unit.values);
  const values = (index) => {
    const start = index * layout.size + column.offset;
    return unit.decoded.subarray(start, start + column.size);
  };
  return { layers: column.layers, depth: layout.depth, values };
}

/** The largest number of sampled steps of a unit. */
const SAMPLED = Math.max(0, ...PROFILES.units.map((unit) => unit.steps.length));

const unitVisible = (unit) => unit.runs.some((index) => visible(RUNS[index]));

/** The lines to draw: units, or the units of a cell at its best learning rate that have the same columns. */
function unitGroups() {
  const units = inOrder(PROFILES.units.filter(unitVisible));
  const groupOf = (unit, units, label = unit.label) => ({ label, cell: unit.cell, units, n: unitRuns(units) });
  if (state.group === "runs") return PROFILES.units.filter(unitVisible).map((unit) => groupOf(unit, [unit]));
  const groups = new Map();
  for (const unit of units) {
    const best = unit.cell === null ? [] : CELLS[unit.cell].at_best;
    if (best.length && !unit.runs.some((index) => best.includes(index))) continue;
    const key = unit.cell === null ? unit.label : `${unit.cell}\n${unit.layout}`;
    groups.set(key, [...(groups.get(key) ?? []), unit]);
  }
  return [...groups.values()].map((units) => {
    const [unit] = units;
    return groupOf(unit, units, unit.cell === null || PROFILES.of === "cell" ? unit.label : CELLS[unit.cell].label);
  });
}

const unitRuns = (units) => units.reduce((total, unit) => total + unit.runs.length, 0);

/** The unit of a group with the last sampled step. */
const longestUnit = (group) => group.units.reduce((a, b) => (b.steps.at(-1) > a.steps.at(-1) ? b : a));

/** The index of the last sampled step up to `step`; null before the first, and a sampling interval after the last. */
function indexAt(unit, step) {
  const { steps } = unit;
  const interval = steps.reduce((most, at, i) => (i ? Math.max(most, at - steps[i - 1]) : most), 0);
  if (step < steps[0] || step > steps.at(-1) + interval) return null;
  return steps.findLastIndex((at) => at <= step);
}

const MOMENTS = [
  ["at init", () => 0],
  ["after warm-up", (unit) => unit.after_warmup],
  ["at the end", (unit) => unit.steps.length - 1],
];

/** A group's statistic by layer, at the step that `indexOf(unit)` selects: mean, minimum and maximum over its units. */
function overUnits(group, statistic, site, indexOf) {
  const units = group.units
    .map((unit) => ({ measured: measuredOf(unit, statistic, site), index: indexOf(unit) }))
    .filter(({ measured, index }) => measured && index !== null);
  if (!units.length) return null;
  const { layers, depth } = units.at(-1).measured;
  const columns = units.map(({ measured, index }) => measured.values(index));
  const reduced = (reduce) =>
    Array.from(columns[0], (_, i) => {
      const finite = columns.map((column) => column[i]).filter(Number.isFinite);
      return finite.length ? reduce(finite) : NaN;
    });
  return { layers, depth, n: units.length, mean: reduced(meanOf), low: reduced(leastOf), high: reduced(largestOf) };
}

/** A group's statistic at each step of its longest unit. */
const overSteps = (group, statistic, site) =>
  longestUnit(group).steps.map((step) => overUnits(group, statistic, site, (unit) => indexAt(unit, step)));

const statisticName = (statistic, site) => (site ? `${statistic} at ${site}` : statistic);

/** The description of a statistic, for captions. */
function describeStatistic(name, site) {
  const { formula, unit, of, question, source } = PROFILES.statistics[name];
  return `${statisticName(name, site)} = ${formula}; unit ${unit}; of ${of}. ${question} Source: ${source}. Computed inside the training step, shown at up to ${SAMPLED} steps per run.`;
}

const layerName = (layer, depth) => (layer === 0 ? "embed" : layer > depth ? "head" : `block ${layer}`);

/** The meaning of a line, for captions. */
function describeLines(band = "; band: minimum to maximum") {
  if (PROFILES.of === "cell") return " Line: mean over a cell's runs at its best learning rate.";
  return state.group === "cells" ? ` Line: mean over a cell's seeds at its best learning rate${band}.` : "";
}
