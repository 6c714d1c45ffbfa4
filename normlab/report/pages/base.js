"use strict";
// Functions of all pages: the data, and DOM elements built from text (never from markup).

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
  const isSame = (child, index) => child.isEqualNode(place.children[index]);
  if (children.length === place.children.length && children.every(isSame)) return;
  const details = () => [...place.querySelectorAll("details[data-fold]")];
  const open = details().flatMap((element) => (element.open ? [element.dataset.fold] : []));
  const controls = () => [...place.querySelectorAll("button, select")];
  const focused = controls().indexOf(document.activeElement);
  place.replaceChildren(...children);
  for (const element of details()) element.open = open.includes(element.dataset.fold);
  if (focused >= 0) controls()[focused]?.focus();
}

const byId = (id) => document.getElementById(id);

/** A labelled drop-down list; options are [value, text]. */
function dropDown(label, options, value, change) {
  const items = options.map(([key, text]) => make("option", { value: key, selected: key === value }, text));
  const select = make("select", { change: () => change(select.value) }, ...items);
  return make("label", {}, label, select);
}
