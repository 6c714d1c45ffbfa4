"use strict";
// What all pages share: the data, elements made of text and never of markup, the theme, and files to save.

const DATA = JSON.parse(document.getElementById("data").textContent);

/** An element with attributes and children; a child that is no element becomes text. Handlers are functions. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const byId = (id) => document.getElementById(id);

/** A number of the record: JSON has no NaN and no infinity, and says them in words; null where there is none. */
function number(value) {
  if (typeof value === "number") return value;
  return { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? null;
}

/** Hand a file to the browser to be saved. */
function save(name, type, content) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = make("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Rows of values as CSV: RFC 4180, numbers whole. */
function csvText(rows) {
  const quoted = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(quoted).join(",") + "\r\n").join("");
}

// The theme: what the system says, until a choice is made; a choice holds for this page while it is open.

const THEMES = ["auto", "light", "dark"];
const THEME_LISTENERS = [];
const DARK = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = "auto";

/** Have the page dark or light as chosen, and redraw what is drawn in its colours. */
function applyTheme() {
  const dark = chosenTheme === "dark" || (chosenTheme === "auto" && DARK.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  for (const listen of THEME_LISTENERS) listen();
}

/** A colour of the theme, by its name in the styles. */
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** The control that chooses the theme. */
function themeControl() {
  const options = THEMES.map((theme) => make("option", { value: theme }, theme));
  const select = make(
    "select",
    {
      id: "theme",
      change: () => {
        chosenTheme = select.value;
        applyTheme();
      },
    },
    ...options,
  );
  return make("label", {}, "theme", select);
}

DARK.addEventListener("change", applyTheme);
applyTheme();
