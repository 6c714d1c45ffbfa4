// Panels: several small pictures in one, beside and below each other.

/**
 * Where panels are, left to right and from the top down.
 *
 * @param {number} across - How many stand beside each other.
 * @param {number} down - How many below each other.
 * @param {{x: number, y: number}} gap - The room between two, as a share of a panel.
 * @returns {function(object, number, string, object, object): {xaxis: string, yaxis: string}} A function that puts
 *   the axes of the panel at a place, and its title, into a layout, and gives the axes' names for its traces.
 */
function panelsOf(across, down, gap) {
  const wide = 1 / (across + gap.x * (across - 1));
  const high = 1 / (down + gap.y * (down - 1));
  return (layout, place, title, xaxis, yaxis) => {
    const number = place ? String(place + 1) : "";
    const left = (place % across) * wide * (1 + gap.x);
    const top = 1 - Math.floor(place / across) * high * (1 + gap.y);
    layout[`xaxis${number}`] = { domain: [left, left + wide], anchor: `y${number}`, ...xaxis };
    layout[`yaxis${number}`] = { domain: [Math.max(0, top - high), top], anchor: `x${number}`, ...yaxis };
    layout.annotations.push({
      x: left,
      y: top,
      xref: "paper",
      yref: "paper",
      xanchor: "left",
      yanchor: "bottom",
      showarrow: false,
      text: title,
      font: { size: 12 },
    });
    return { xaxis: `x${number}`, yaxis: `y${number}` };
  };
}

/** A panel's small title of an axis. */
const axisTitle = (text) => ({ text, font: { size: 11 }, standoff: 4 });
