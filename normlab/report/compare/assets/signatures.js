// The signatures: how the stream grows with depth, and where the gradient goes, over training, placement by placement.

const SIGNATURES = [
  ["resid_rms", "stream, resid_rms"],
  ["dresid_rms", "gradient, dresid_rms"],
];

function drawSignatures(width) {
  const rows = SIGNATURES.filter(([name]) => MEASURED.has(name));
  const found = insideGroups();
  if (!rows.length || !found.length) return { empty: NOTHING_INSIDE };
  const placementOf = (group) => RUNS[group.units[0].runs[0]].placement ?? "-";
  const placements = [...new Set(found.map(placementOf))];
  const cross = width < NARROW ? 1 : Math.min(placements.length, Math.max(1, Math.floor(width / 280)));
  const panels = [];
  for (let start = 0; start < placements.length; start += cross)
    for (const row of rows) for (let at = start; at < start + cross; at += 1) panels.push([row, placements[at]]);
  const down = panels.length / cross;
  const panel = panelsOf(cross, down, { x: 0.16, y: 0.3 });
  const traces = [],
    layout = { annotations: [], height: down * 250 + 40 },
    values = new Map(rows.map(([name]) => [name, []])),
    named = new Set();
  panels.forEach(([[name, title], placement], place) => {
    if (placement === undefined) return;
    const same = panels.findIndex(([row]) => row[0] === name); // panels of one statistic share its axis
    const axes = panel(
      layout,
      place,
      `<b>${plain(placement)}</b>: ${title}`,
      { title: axisTitle("step") },
      same === place ? {} : { matches: `y${same ? same + 1 : ""}` },
    );
    for (const trace of overSteps(
      found.filter((group) => placementOf(group) === placement),
      name,
      "",
      ends,
    )) {
      const [group, block] = trace.meta.columns;
      values.get(name).push(...trace.y);
      traces.push({
        ...trace,
        ...axes,
        name: plain(group),
        showlegend: !named.has(group), // once a line: the dashes say which block, and the caption what they mean
        hovertemplate: `%{fullData.name}, ${block} block<br>step %{x}: %{y:.4g}<extra></extra>`,
        meta: { columns: [title, placement, group, block] },
      });
      named.add(group);
    }
  });
  panels.forEach(([[name]], place) => {
    const axis = layout[`yaxis${place ? place + 1 : ""}`];
    if (axis) Object.assign(axis, scaled(true, values.get(name)));
  });
  return {
    traces,
    layout,
    numbers: () => pointRows(["statistic", "placement", "line", "block", "step", "value"], traces),
    caption:
      "The stream that enters the first, the middle and the last block, and the gradient that arrives there, over training. Expected of deep models: pre-norm's stream grows with every block; post-norm's stays as it is, and its gradient is largest at the top when training begins (Xiong et al. 2020, arXiv:2002.04745). " +
      rows.map(([name]) => statisticText(name, "")).join(" ") +
      " Solid: the first block; dashed: the middle one; dotted: the last." +
      unitsText().replace(", its band from the least to the largest", ""),
  };
}

/** The first, the middle and the last block of what was measured there. */
function ends({ places, depth }) {
  const blocks = [...places.keys()].filter((i) => places[i] >= 1 && places[i] <= depth);
  const picked = new Map([
    ["first", blocks[0]],
    ["middle", blocks[Math.floor((blocks.length - 1) / 2)]],
    ["last", blocks.at(-1)],
  ]);
  return blocks.length > 2
    ? [...picked]
    : blocks.length === 2
      ? [
          ["first", blocks[0]],
          ["last", blocks[1]],
        ]
      : blocks.map((at) => ["only", at]);
}
