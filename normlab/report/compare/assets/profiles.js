// Depth profiles: a statistic at every block, at the three moments that tell most, and at any sampled step.

const NOTHING_INSIDE = "No run that is shown has statistics on record (stats=off, or none was measured yet).";

/** The steps of the slider: those of the unit that has most of them. */
const sliderSteps = () =>
  PROFILES.units.reduce((most, unit) => (unit.steps.at(-1) > (most.at(-1) ?? -1) ? unit.steps : most), []);

function drawProfiles(width) {
  const { statistic, site } = inside;
  const found = insideGroups();
  if (!found.length || !statistic) return { empty: NOTHING_INSIDE };
  const placeless = PROFILES.layouts.every((layout) => !layout.at.get(`${statistic}\n${site}`)?.places.length);
  return placeless ? drawOverSteps(width, found) : drawMoments(width, found);
}

function drawMoments(width, found) {
  const { statistic, site } = inside;
  const step = inside.step ?? sliderSteps().at(-1);
  const panels = [...MOMENTS, [`at step ${step}`, (unit) => indexAt(unit, step)]];
  const narrow = width < NARROW,
    cross = narrow ? 1 : 2,
    down = Math.ceil(panels.length / cross);
  const panel = panelsOf(cross, down, { x: 0.12, y: 0.26 });
  const traces = [],
    layout = { annotations: [] },
    values = [],
    named = new Set();
  panels.forEach(([title, indexOf], place) => {
    const places = narrow ? "place" : "place: 0 embeddings, 1 to L blocks, L + 1 head";
    const axes = panel(
      layout,
      place,
      `<b>${title}</b>`,
      { title: axisTitle(inside.share ? "share of depth" : places) },
      place ? { matches: "y" } : {},
    );
    for (const group of found) {
      const seen = across(group, statistic, site, indexOf);
      if (!seen) continue;
      const { colour, dash, symbol } = styleOf(group.cell);
      const x = seen.places.map((at) => (inside.share ? at / (seen.depth + 1) : at));
      values.push(...seen.low);
      if (seen.n > 1) traces.push({ ...band(x, seen.low, seen.high, colour, 0.18), ...axes });
      traces.push({
        x,
        y: seen.mean,
        type: "scatter",
        mode: "lines+markers",
        ...axes,
        name: plain(`${group.label} (n=${group.n})`),
        legendgroup: group.label,
        showlegend: !named.has(group),
        line: { color: colour, dash, width: 2 },
        marker: { color: colour, symbol, size: 5 },
        meta: { columns: [title, group.label] },
        text: seen.places.map((at) => placeName(at, seen.depth)),
        hovertemplate: "%{fullData.name}<br>%{text}: %{y:.4g}<extra></extra>",
      });
      named.add(group);
    }
  });
  if (!traces.length) return { empty: `No run that is shown has measured ${statistic}${site ? ` of ${site}` : ""}.` };
  const scale = scaled(inside.logged, values);
  panels.forEach((_, place) => Object.assign(layout[`yaxis${place ? place + 1 : ""}`], scale));
  return {
    traces,
    layout: { ...layout, height: down * 270 + 40, uirevision: JSON.stringify(inside) },
    numbers: () => pointRows(["moment", "line", inside.share ? "share of depth" : "place", statistic], traces),
    caption:
      statisticText(statistic, site) +
      unitsText() +
      (inside.logged && scale.type !== "log" ? " Drawn on a linear axis: not all of it is above zero." : "") +
      " The moments: the first measured step, the first after the warm-up, the last, and the one chosen. Places: 0 the embeddings, 1 to L the blocks, L + 1 the head.",
  };
}

/** A statistic that is one number a step: over the sampled steps. */
function drawOverSteps(width, found) {
  const { statistic, site } = inside;
  const traces = overSteps(found, statistic, site, () => [["", 0]]);
  if (!traces.length) return { empty: `No run that is shown has measured ${statistic}.` };
  return {
    traces,
    layout: {
      height: 360,
      xaxis: { title: { text: "step" } },
      yaxis: {
        ...scaled(
          inside.logged,
          traces.flatMap((trace) => trace.y),
        ),
        title: { text: statistic },
      },
      uirevision: JSON.stringify(inside),
    },
    numbers: () => pointRows(["line", "at", "step", statistic], traces),
    caption: statisticText(statistic, site) + unitsText(),
  };
}

/** Lines over the sampled steps: of each group one for each pick, which is [name, place's position]. */
function overSteps(found, statistic, site, picks) {
  const dashes = ["solid", "dash", "dot"];
  return found.flatMap((group) => {
    const first = group.units.map((unit) => measuredOf(unit, statistic, site)).find(Boolean);
    if (!first) return [];
    const longest = group.units.reduce((a, b) => (b.steps.at(-1) > a.steps.at(-1) ? b : a));
    const columns = longest.steps.map((step) => across(group, statistic, site, (unit) => indexAt(unit, step)));
    const { colour, symbol } = styleOf(group.cell);
    return picks(first).map(([name, position], number) => ({
      x: longest.steps,
      y: columns.map((seen) => (seen ? seen.mean[position] : NaN)),
      type: "scatter",
      mode: "lines+markers",
      name: plain(group.label + (name ? `, ${name}` : "")),
      line: { color: colour, width: 2, dash: picks(first).length > 1 ? dashes[number % 3] : styleOf(group.cell).dash },
      marker: { color: colour, symbol, size: 4 },
      meta: { columns: [group.label, name] },
      hovertemplate: "%{fullData.name}<br>step %{x}: %{y:.4g}<extra></extra>",
    }));
  });
}

/** The controls that profiles and heatmaps share, and those of the profiles. */
function addProfiles() {
  if (!MEASURED.size) {
    addPicture("profiles", "Depth profiles", () => ({ empty: NOTHING_INSIDE }));
    return;
  }
  inside.statistic = MEASURED.has("resid_rms") ? "resid_rms" : MEASURED.keys().next().value;
  const kinds = new Map();
  for (const name of MEASURED.keys()) {
    const of = PROFILES.statistics[name].of;
    kinds.set(of, [...(kinds.get(of) ?? []), name]);
  }
  const statistic = make(
    "select",
    {
      id: "statistic",
      change: () => {
        inside.statistic = statistic.value;
        sites();
        draw();
      },
    },
    ...[...kinds].map(([of, names]) =>
      make(
        "optgroup",
        { label: of },
        ...names.map((name) => make("option", { value: name, selected: name === inside.statistic }, name)),
      ),
    ),
  );
  const site = make("select", {
    id: "site",
    change: () => {
      inside.site = site.value;
      draw();
    },
  });
  const siteLabel = make("label", {}, "of", site);
  const steps = sliderSteps();
  const told = make("output", { id: "step-told" });
  const slider = make("input", {
    type: "range",
    id: "step",
    min: 0,
    max: steps.length - 1,
    step: 1,
    value: steps.length - 1,
    "aria-label": "step of the last panel",
    input: () => choose(Number(slider.value)),
  });

  function sites() {
    const known = MEASURED.get(inside.statistic);
    inside.site = known.includes(inside.site) ? inside.site : known[0];
    site.replaceChildren(...known.map((each) => make("option", { value: each, selected: each === inside.site }, each)));
    siteLabel.hidden = known.length < 2;
  }
  function choose(index) {
    inside.step = steps[index];
    told.textContent = `${inside.step}`;
    slider.setAttribute("aria-valuetext", `step ${inside.step}`);
    redraw(profiles);
  }
  function draw() {
    redraw(profiles);
    redraw(heatmaps);
  }

  byId("profiles").append(
    make(
      "div",
      { class: "controls" },
      make("label", {}, "statistic", statistic),
      siteLabel,
      tickBox("logarithmic", inside.logged, (on) => {
        inside.logged = on;
        draw();
      }),
      tickBox("depth as a share", inside.share, (on) => {
        inside.share = on;
        redraw(profiles);
      }),
      make("label", {}, "step", slider, told),
    ),
  );
  const profiles = addPicture("profiles", "A statistic at every block, at four moments", drawProfiles);
  const heatmaps = addPicture("heatmaps", "A statistic at every block over training", drawHeatmaps);
  sites();
  choose(steps.length - 1);
}
