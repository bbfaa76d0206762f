"use strict";
// Starts the page: reads the data and builds both charts over one shared view.
// The root element gets data-error if anything fails, and data-ready once everything is drawn.

const root = document.documentElement;
addEventListener("error", (event) => { root.dataset.error = event.message; });
addEventListener("DOMContentLoaded", start);

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const view = new View(data);
  const tip = new Tip(document.getElementById("tip"));
  const gantt = new Gantt(document.getElementById("gantt"), data, view, tip);
  if (data.memory) new Memory(document.getElementById("curves"), data, view, tip);
  else document.getElementById("memory").hidden = true;
  new ResizeObserver(() => view.refresh()).observe(document.body);
  const restore = () => {
    view.readHash();
    view.draw();
    gantt.pinFromHash();
  };
  addEventListener("hashchange", restore);
  restore();
  root.dataset.ready = "true";
}

/** Makes an HTML element; children are elements or plain text, never markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Makes an SVG element; the HTML parser supplies SVG's namespace. */
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(draw.namespace, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
draw.namespace = (() => {
  const probe = document.createElement("template");
  probe.innerHTML = "<svg></svg>";
  return probe.content.firstChild.namespaceURI;
})();

function button(text, label, action) {
  const made = make("button", { type: "button", title: label, "aria-label": label }, text);
  made.addEventListener("click", action);
  return made;
}
