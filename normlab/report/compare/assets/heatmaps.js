// Layer by step: a statistic at every block over training, a panel a cell or run, one colour scale for all.

const MOST_PANELS = 24;

function drawHeatmaps(width) {
  const { statistic, site } = inside;
  const all = insideGroups().filter((group) =>
    group.units.some((unit) => measuredOf(unit, statistic, site)?.places.length),
  );
  if (!all.length)
    return {
      empty: PROFILES.units.some(unitVisible) ? `${statistic} is one number a step: it has no blocks.` : NOTHING_INSIDE,
    };
  const found = all.slice(0, MOST_PANELS);
  const panels = found.map((group) => {
    const longest = group.units.reduce((a, b) => (b.steps.at(-1) > a.steps.at(-1) ? b : a));
    const columns = longest.steps.map((step) => across(group, statistic, site, (unit) => indexAt(unit, step)));
    const { places, depth } = columns.find(Boolean);
    return {
      group,
      steps: longest.steps,
      places,
      depth,
      rows: places.map((_, at) => columns.map((seen) => (seen ? seen.mean[at] : NaN))),
    };
  });
  const values = panels.flatMap((panel) => panel.rows.flat()).filter(Number.isFinite);
  if (!values.length) return { empty: `${statistic} is nowhere a finite number.` };
  const logged = inside.logged && values.every((value) => value > 0);
  const told = (value) => (Number.isFinite(value) ? (logged ? Math.log10(value) : value) : null);
  const [least, most] = [told(values.reduce((a, b) => Math.min(a, b))), told(values.reduce((a, b) => Math.max(a, b)))];
  const cross = width < NARROW ? 1 : Math.min(panels.length, Math.max(2, Math.floor(width / 300)));
  const down = Math.ceil(panels.length / cross);
  const panel = panelsOf(cross, down, { x: 0.18, y: 0.42 });
  const traces = [],
    layout = { annotations: [], height: down * 210 + 40, margin: { r: 90 } };
  layout.coloraxis = {
    colorscale: SCALE,
    cmin: least,
    cmax: most,
    colorbar: {
      thickness: 12,
      len: Math.min(1, 300 / (down * 210)),
      y: 1,
      yanchor: "top",
      ...(logged ? powers(least, most) : {}),
    },
  };
  panels.forEach(({ group, steps, places, depth, rows }, place) => {
    const axes = panel(
      layout,
      place,
      plain(`${short(group.label, width / cross / 8)} (n=${group.n})`),
      { title: axisTitle("step"), showgrid: false, nticks: 5 },
      { title: axisTitle("place"), showgrid: false, nticks: 6, zeroline: false },
    );
    traces.push({
      x: edged(steps),
      y: edged(places),
      z: rows.map((row) => row.map(told)),
      type: "heatmap",
      coloraxis: "coloraxis",
      ...axes,
      name: plain(group.label),
      showlegend: false,
      meta: { label: group.label },
      text: rows.map((row, at) =>
        row.map((value) => `${placeName(places[at], depth)}: ${Number(value).toPrecision(4)}`),
      ),
      hovertemplate: "%{fullData.name}<br>step %{x}, %{text}<extra></extra>",
    });
  });
  const left = all.length - found.length;
  return {
    traces,
    layout,
    numbers: () => [
      ["panel", "place", "step", statistic],
      ...panels.flatMap(({ group, steps, places, rows }) =>
        places.flatMap((at, row) => steps.map((step, i) => [group.label, at, step, rows[row][i]])),
      ),
    ],
    caption:
      `${statisticText(statistic, site)} Places: 0 the embeddings, 1 to L the blocks, L + 1 the head. One colour scale for all panels${logged ? ", logarithmic" : ""}.` +
      (state.group === "cells" ? " A panel is the mean over a cell's n runs at its own best learning rate." : "") +
      (left ? ` ${left} more are not drawn: untick some of these to see them.` : ""),
  };
}

/** Of a single row or column the two edges, since its neighbours cannot tell how high or wide it is. */
const edged = (values) => (values.length === 1 ? [values[0] - 0.5, values[0] + 0.5] : values);

/** The ticks of a colour bar of powers of ten. */
function powers(least, most) {
  const whole = [];
  for (let power = Math.ceil(least); power <= Math.floor(most); power += Math.max(1, Math.ceil((most - least) / 6)))
    whole.push(power);
  const at = whole.length > 1 ? whole : [least, (least + most) / 2, most];
  return {
    tickvals: at,
    ticktext: at.map((power) => (Number.isInteger(power) ? `10<sup>${power}</sup>` : (10 ** power).toPrecision(2))),
  };
}
