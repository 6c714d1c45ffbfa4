// Layer profiles: a statistic at every layer, at four moments of training.

const NOTHING_MEASURED = "No selected run has statistics on record (stats=off, or none were measured yet).";

/** The steps of the slider: the sampled steps of the unit that was sampled last. */
const sliderSteps = () => (PROFILES.units.length ? longestUnit(PROFILES).steps : []);

function drawProfiles(width) {
  const { statistic, site } = inside;
  const groups = unitGroups();
  if (!groups.length || !statistic) return { empty: NOTHING_MEASURED };
  const perLayer = PROFILES.layouts.some((layout) => columnOf(layout, statistic, site)?.layers.length);
  return perLayer ? drawMoments(width, groups) : drawPerStep(groups);
}

function drawMoments(width, groups) {
  const { statistic, site, relative } = inside;
  const moments = [...MOMENTS, [`at step ${inside.step}`, (unit) => indexAt(unit, inside.step)]];
  const narrow = width < NARROW;
  const columns = narrow ? 1 : 2;
  const rows = Math.ceil(moments.length / columns);
  const addPanel = panelGrid(columns, rows, { x: 0.12, y: 0.26 });
  const traces = [];
  const layout = { annotations: [], height: rows * 270 + 40, uirevision: JSON.stringify(inside) };
  const values = [];
  const named = new Set();
  const layerTitle = narrow ? "layer" : "layer: 0 embeddings, 1 to L blocks, L + 1 head";
  const xTitle = relative ? "relative depth" : layerTitle;
  moments.forEach(([title, indexOf], panel) => {
    const axes = addPanel(layout, panel, `<b>${title}</b>`, { title: axisTitle(xTitle) }, panel ? { matches: "y" } : {});
    for (const group of groups) {
      const profile = overUnits(group, statistic, site, indexOf);
      if (!profile) continue;
      const { layers, depth, mean, low, high, n } = profile;
      const { colour, dash, symbol } = styleOf(group.cell);
      const x = layers.map((layer) => (relative ? layer / (depth + 1) : layer));
      values.push(...low);
      if (n > 1) traces.push({ ...bandTrace(x, (at) => at, low, high, colour, 0.18), ...axes });
      traces.push({
        x,
        y: mean,
        type: "scatter",
        mode: "lines+markers",
        ...axes,
        name: plain(`${group.label} (n=${group.n})`),
        legendgroup: group.label,
        showlegend: !named.has(group),
        line: { color: colour, dash, width: 2 },
        marker: { color: colour, symbol, size: 5 },
        meta: { columns: [title, group.label] },
        text: layers.map((layer) => layerName(layer, depth)),
        hovertemplate: "%{fullData.name}<br>%{text}: %{y:.4g}<extra></extra>",
      });
      named.add(group);
    }
  });
  if (!traces.length) return { empty: `No selected run has measured ${statisticName(statistic, site)}.` };
  const scale = scaled(inside.logarithmic, values);
  moments.forEach((_, panel) => Object.assign(layout[`yaxis${axisSuffix(panel)}`], scale));
  return {
    traces,
    layout,
    rows: () => pointRows(["moment", "line", relative ? "relative depth" : "layer", statistic], traces),
    caption:
      describeStatistic(statistic, site) +
      describeLines() +
      (inside.logarithmic && scale.type !== "log" ? " The axis is linear, because some values are 0 or negative." : "") +
      ` Moments: the first measured step, the first after warm-up, the last, and the selected one. ${LAYER_AXIS}`,
  };
}

/** A statistic with one number per step, over training. */
function drawPerStep(groups) {
  const { statistic, site } = inside;
  const traces = stepTraces(groups, statistic, site, () => [["", 0]]);
  if (!traces.length) return { empty: `No selected run has measured ${statistic}.` };
  const values = traces.flatMap((trace) => trace.y);
  return {
    traces,
    layout: {
      height: 360,
      xaxis: { title: { text: "step" } },
      yaxis: { ...scaled(inside.logarithmic, values), title: { text: statistic } },
      uirevision: JSON.stringify(inside),
    },
    rows: () => pointRows(["line", "at", "step", statistic], traces),
    caption: describeStatistic(statistic, site) + describeLines(),
  };
}

/** Lines over training; `picks(column)` returns [name, index of the layer] for each line of a group. */
function stepTraces(groups, statistic, site, picks) {
  const dashes = ["solid", "dash", "dot"];
  return groups.flatMap((group) => {
    const first = group.units.map((unit) => measuredOf(unit, statistic, site)).find(Boolean);
    if (!first) return [];
    const profiles = overSteps(group, statistic, site);
    const { colour, dash, symbol } = styleOf(group.cell);
    const picked = picks(first);
    return picked.map(([name, layer], number) => ({
      x: longestUnit(group).steps,
      y: profiles.map((profile) => (profile ? profile.mean[layer] : NaN)),
      type: "scatter",
      mode: "lines+markers",
      name: plain(group.label + (name ? `, ${name}` : "")),
      line: { color: colour, width: 2, dash: picked.length > 1 ? dashes[number] : dash },
      marker: { color: colour, symbol, size: 4 },
      meta: { columns: [group.label, name] },
      hovertemplate: "%{fullData.name}<br>step %{x}: %{y:.4g}<extra></extra>",
    }));
  });
}

/** Add the figures of layer statistics and their controls. */
function addProfiles() {
  byId("heatmaps").hidden = byId("signatures").hidden = !SITES.size;
  if (!SITES.size) {
    addFigure("profiles", "Layer profiles", () => ({ empty: NOTHING_MEASURED }));
    return;
  }
  inside.statistic = SITES.has("resid_rms") ? "resid_rms" : SITES.keys().next().value;
  const steps = sliderSteps();
  inside.step = steps.at(-1);
  const redrawBoth = () => [profiles, heatmaps].forEach(redraw);
  const option = (value, selected) => make("option", { value, selected }, value);
  const groups = Object.groupBy(SITES.keys(), (name) => PROFILES.statistics[name].of);
  const statistic = make(
    "select",
    {
      id: "statistic",
      change: () => {
        inside.statistic = statistic.value;
        listSites();
        redrawBoth();
      },
    },
    ...Object.entries(groups).map(([label, names]) =>
      make("optgroup", { label }, ...names.map((name) => option(name, name === inside.statistic))),
    ),
  );
  const site = make("select", {
    id: "site",
    change: () => {
      inside.site = site.value;
      redrawBoth();
    },
  });
  const siteLabel = make("label", {}, "site", site);
  function listSites() {
    const sites = SITES.get(inside.statistic);
    if (!sites.includes(inside.site)) inside.site = sites[0];
    site.replaceChildren(...sites.map((name) => option(name, name === inside.site)));
    siteLabel.hidden = sites.length < 2;
  }
  const set = (key, redrawAfter) => (value) => {
    inside[key] = value;
    redrawAfter();
  };
  const redrawProfiles = () => redraw(profiles);
  byId("profiles").append(
    make(
      "div",
      { class: "controls" },
      make("label", {}, "statistic", statistic),
      siteLabel,
      checkBox("logarithmic", inside.logarithmic, set("logarithmic", redrawBoth)),
      checkBox("relative depth", inside.relative, set("relative", redrawProfiles)),
      slider("step", "step", steps, inside.step, String, set("step", redrawProfiles), "step of the last panel"),
    ),
  );
  const profiles = addFigure("profiles", "A statistic at every layer, at four moments", drawProfiles);
  const heatmaps = addFigure("heatmaps", "A statistic at every layer over training", drawHeatmaps);
  addFigure("signatures", "Residual stream and its gradient by placement", drawSignatures);
  listSites();
}
