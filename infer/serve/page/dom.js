// Elements from plain calls; text is always text, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

let made = 0;

// An id that no other element of the page has.
export function unique(prefix) {
  made += 1;
  return `${prefix}-${made}`;
}

// A label above the control that it names; `hint` is read with it.
export function field(label, control, hint) {
  const id = control.id || unique("field");
  control.id = id;
  const below = hint ? h("span", { class: "hint", id: `${id}-hint` }, hint) : null;
  if (below) control.setAttribute("aria-describedby", below.id);
  return h("div", { class: "field" }, h("label", { for: id }, label), control, below);
}

export function card(title, ...children) {
  const id = unique("title");
  return h("section", { class: "card", "aria-labelledby": id }, h("h2", { id }, title), ...children);
}
