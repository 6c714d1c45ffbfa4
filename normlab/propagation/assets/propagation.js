// The page of `normlab propagation`: each profile over the relative depth.

function drawProfiles() {
  const colours = DATA[document.documentElement.dataset.theme];
  const lines = DATA.lines.map((line) => ({
    ...line,
    colour: colours[line.color % colours.length],
    dash: DASHES[line.style % DASHES.length],
  }));
  byId("profiles").replaceChildren(
    make("div", { class: "legend" }, ...legendEntries(lines)),
    ...Object.entries(DATA.profiles).map(([name, title]) => {
      const place = make("div", { class: "panels" });
      const chart = make(
        "div",
        { class: "chart", "data-figure": name },
        make("p", { class: "axis-name" }, `↑ ${title}`),
        place,
      );
      requestAnimationFrame(() => {
        const drawn = lines.map((line) => ({ ...line, points: pointsOf(line[name]) }));
        drawLines(place, {
          title,
          panels: [{ title: "", lines: drawn }],
          x: { isSparse: true },
          isConnected: true,
          mayBeLog: true,
        });
        chart.append(make("p", { class: "axis-name x" }, "layer / depth →"));
      });
      return chart;
    }),
  );
}

const pointsOf = (values) =>
  values.map((y, index) => ({ x: (index + 1) / values.length, y, n: 1, text: y === null ? "" : shortNumber(y) }));

byId("title").textContent = DATA.title;
byId("theme-place").append(themeControl());
drawProfiles();
THEME_LISTENERS.push(drawProfiles);
whenResized(drawProfiles);
