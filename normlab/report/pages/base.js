"use strict";
// Functions of all pages: the data, DOM elements built from text (never from markup), the theme, and downloads.

let DATA = JSON.parse(document.getElementById("data").textContent);

/** Create an element. Attributes that are functions are event handlers; children that are strings become text. */
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

/** Create an SVG element. */
function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/**
 * Replace the content of an element. The keyboard's focus stays on the same control, and open details stay open; equal
 * content is not replaced, so that a list that the user has opened stays.
 */
function replaceContent(place, ...children) {
  const isSame = children.length === place.children.length && children.every((child, i) => child.isEqualNode(place.children[i]));
  if (isSame) return;
  const details = () => [...place.querySelectorAll("details[data-fold]")];
  const open = details().flatMap((element) => (element.open ? [element.dataset.fold] : []));
  const controls = () => [...place.querySelectorAll("button, select")];
  const focused = controls().indexOf(document.activeElement);
  place.replaceChildren(...children);
  for (const element of details()) element.open = open.includes(element.dataset.fold);
  if (focused >= 0) controls()[focused]?.focus();
}

const byId = (id) => document.getElementById(id);

/** A number of a record, which holds NaN and infinity as strings; null for any other value. */
function number(value) {
  if (typeof value === "number") return value;
  return { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? null;
}

/** Download a file. */
function save(name, type, content) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = make("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Rows as CSV (RFC 4180), numbers in full precision. */
function csvText(rows) {
  const quoted = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(quoted).join(",") + "\r\n").join("");
}

/** A labelled drop-down list; options are [value, text]. */
function dropDown(label, options, value, change, attributes = {}) {
  const items = options.map(([key, text]) => make("option", { value: key, selected: key === value }, text));
  const select = make("select", { ...attributes, change: () => change(select.value) }, ...items);
  return make("label", {}, label, select);
}

// The theme is the system's until the user chooses one; the choice lasts while the page is open. Paper is light.

const THEME_LISTENERS = [];
const PREFERS_DARK = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = "auto";
let isPrinting = false;

function applyTheme() {
  const dark = chosenTheme === "dark" || (chosenTheme === "auto" && PREFERS_DARK.matches);
  document.documentElement.dataset.theme = dark && !isPrinting ? "dark" : "light";
  for (const listen of THEME_LISTENERS) listen();
}

/** A colour of the theme, by its name in the styles. */
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function themeControl() {
  const themes = ["auto", "light", "dark"].map((theme) => [theme, theme]);
  const choose = (theme) => {
    chosenTheme = theme;
    applyTheme();
  };
  return dropDown("theme", themes, chosenTheme, choose, { id: "theme" });
}

for (const [event, begins] of [["beforeprint", true], ["afterprint", false]])
  addEventListener(event, () => {
    isPrinting = begins;
    applyTheme();
  });
PREFERS_DARK.addEventListener("change", applyTheme);
applyTheme();
