// Heatmaps of a statistic by layer and step; and residual stream and gradient over training, by placement.

const MAX_PANELS = 24;

function drawHeatmaps(width) {
  const { statistic, site } = inside;
  const all = unitGroups().filter(({ units }) =>
    units.some((unit) => measuredOf(unit, statistic, site)?.layers.length),
  );
  if (!all.length && !PROFILES.units.some(unitVisible)) return { empty: NOTHING_MEASURED };
  if (!all.length) return { empty: `${statistic} has one number per step, not per layer.` };
  const panels = all.slice(0, MAX_PANELS).map((group) => {
    const profiles = overSteps(group, statistic, site);
    const { layers, depth } = profiles.find(Boolean);
    const rows = layers.map((_, at) => profiles.map((profile) => (profile ? profile.mean[at] : NaN)));
    return { group, steps: longestUnit(group).steps, layers, depth, rows };
  });
  const finite = panels.flatMap((panel) => panel.rows.flat()).filter(Number.isFinite);
  if (!finite.length) return { empty: `${statistic} has no finite value.` };
  const logarithmic = inside.logarithmic && finite.every((value) => value > 0);
  const onScale = (value) => (Number.isFinite(value) ? (logarithmic ? Math.log10(value) : value) : null);
  const [least, largest] = [onScale(leastOf(finite)), onScale(largestOf(finite))];
  const columns = width < NARROW ? 1 : Math.min(panels.length, Math.max(2, Math.floor(width / 300)));
  const rows = Math.ceil(panels.length / columns);
  const addPanel = panelGrid(columns, rows, { x: 0.18, y: 0.42 });
  const ticks = logarithmic ? powerTicks(least, largest) : {};
  const colorbar = { thickness: 12, len: Math.min(1, 300 / (rows * 210)), y: 1, yanchor: "top", ...ticks };
  const layout = {
    annotations: [],
    height: rows * 210 + 40,
    margin: { r: 90 },
    coloraxis: { colorscale: COLOUR_SCALE, cmin: least, cmax: largest, colorbar },
  };
  const traces = panels.map(({ group, steps, layers, depth, rows }, index) => ({
    x: withEdges(steps),
    y: withEdges(layers),
    z: rows.map((row) => row.map(onScale)),
    type: "heatmap",
    coloraxis: "coloraxis",
    ...addPanel(
      layout,
      index,
      plain(`${short(group.label, width / columns / 8)} (n=${group.n})`),
      { title: axisTitle("step"), showgrid: false, nticks: 5 },
      { title: axisTitle("layer"), showgrid: false, nticks: 6, zeroline: false },
    ),
    name: plain(group.label),
    showlegend: false,
    meta: { label: group.label },
    text: rows.map((row, at) => row.map((value) => `${layerName(layers[at], depth)}: ${value.toPrecision(4)}`)),
    hovertemplate: "%{fullData.name}<br>step %{x}, %{text}<extra></extra>",
  }));
  const hidden = all.length - panels.length;
  return {
    traces,
    layout,
    rows: () => [
      ["panel", "layer", "step", statistic],
      ...panels.flatMap(({ group, steps, layers, rows }) =>
        layers.flatMap((layer, row) => steps.map((step, i) => [group.label, layer, step, rows[row][i]])),
      ),
    ],
    caption:
      `${describeStatistic(statistic, site)} ${LAYER_AXIS} All panels share one ${logarithmic ? "logarithmic " : ""}colour scale.` +
      (state.group === "cells" ? " Panel: mean over a cell's n runs at its best learning rate." : "") +
      (hidden ? ` ${hidden} more panels are not drawn; untick some runs to see them.` : ""),
  };
}

/** Both edges of a single row or column, because Plotly derives sizes from neighbours. */
const withEdges = (values) => (values.length === 1 ? [values[0] - 0.5, values[0] + 0.5] : values);

/** The ticks of a logarithmic colour bar. */
function powerTicks(least, largest) {
  const step = Math.max(1, Math.ceil((largest - least) / 6));
  const powers = [];
  for (let power = Math.ceil(least); power <= Math.floor(largest); power += step) powers.push(power);
  const tickvals = powers.length > 1 ? powers : [least, (least + largest) / 2, largest];
  const text = (power) => (Number.isInteger(power) ? `10<sup>${power}</sup>` : (10 ** power).toPrecision(2));
  return { tickvals, ticktext: tickvals.map(text) };
}

const SIGNATURES = [
  ["resid_rms", "stream, resid_rms"],
  ["dresid_rms", "gradient, dresid_rms"],
];

function drawSignatures(width) {
  const statistics = SIGNATURES.filter(([name]) => SITES.has(name));
  const groups = unitGroups();
  if (!statistics.length || !groups.length) return { empty: NOTHING_MEASURED };
  const placementOf = (group) => RUNS[group.units[0].runs[0]].placement ?? "-";
  const placements = [...new Set(groups.map(placementOf))];
  const columns = width < NARROW ? 1 : Math.min(placements.length, Math.max(1, Math.floor(width / 280)));
  const panels = [];
  for (let start = 0; start < placements.length; start += columns)
    for (const row of statistics)
      for (let at = start; at < start + columns; at += 1) panels.push([...row, placements[at]]);
  const rows = panels.length / columns;
  const addPanel = panelGrid(columns, rows, { x: 0.16, y: 0.3 });
  const traces = [];
  const layout = { annotations: [], height: rows * 250 + 40 };
  const values = new Map(statistics.map(([name]) => [name, []]));
  const named = new Set();
  panels.forEach(([name, title, placement], index) => {
    if (placement === undefined) return;
    const first = panels.findIndex((panel) => panel[0] === name); // panels of one statistic share its axis
    const yaxis = first === index ? {} : { matches: `y${axisSuffix(first)}` };
    const axes = addPanel(layout, index, `<b>${plain(placement)}</b>: ${title}`, { title: axisTitle("step") }, yaxis);
    const members = groups.filter((group) => placementOf(group) === placement);
    for (const trace of stepTraces(members, name, "", pickBlocks)) {
      const [group, block] = trace.meta.columns;
      values.get(name).push(...trace.y);
      traces.push({
        ...trace,
        ...axes,
        name: plain(group),
        showlegend: !named.has(group), // one entry per line; the caption explains the dashes
        hovertemplate: `%{fullData.name}, ${block} block<br>step %{x}: %{y:.4g}<extra></extra>`,
        meta: { columns: [title, placement, group, block] },
      });
      named.add(group);
    }
  });
  panels.forEach(([name], index) => {
    const axis = layout[`yaxis${axisSuffix(index)}`];
    if (axis) Object.assign(axis, scaled(true, values.get(name)));
  });
  return {
    traces,
    layout,
    rows: () => pointRows(["statistic", "placement", "line", "block", "step", "value"], traces),
    caption:
      "The residual stream that enters the first, middle and last block, and the gradient there, over training. Expected in deep models: the stream of pre-norm grows with depth; the stream of post-norm does not, and its gradient is largest in the last block at the start of training (Xiong et al. 2020, arXiv:2002.04745). " +
      statistics.map(([name]) => describeStatistic(name, "")).join(" ") +
      " Solid: first block; dashed: middle; dotted: last." +
      describeLines(""),
  };
}

/** The first, middle and last measured block, as [name, index]. */
function pickBlocks({ layers, depth }) {
  const blocks = [...layers.keys()].filter((i) => layers[i] >= 1 && layers[i] <= depth);
  const middle = blocks[Math.floor((blocks.length - 1) / 2)];
  if (blocks.length < 2) return blocks.map((block) => ["only", block]);
  return [["first", blocks[0]], ...(blocks.length > 2 ? [["middle", middle]] : []), ["last", blocks.at(-1)]];
}
