// The map of the gallery: points on a canvas for mouse and keyboard, and the same as a list.
import { at, count, make, number, telling } from "./dom.js";
import { json } from "./api.js";
import { openItem, tile } from "./items.js";
import { classLook, dark, drawShape, nearest, next, place, ranks, scaleColour } from "./points.js";

const REACH = 16; // pixels around a point that select it
const NAMED = 16; // classes in the legend
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const canvas = at("map");
let points = null; // null: not read yet
let classes = [];
let kept = null; // the point that was clicked or reached with the keyboard
let seen = null; // the point whose item is shown
let waiting = 0; // the timer of a hover
const inOrder = new Intl.Collator("en", { numeric: true }).compare;

/** Read the map if necessary, and draw it. */
export async function showMap() {
  if (points === null) {
    at("map-state").textContent = "Computing the map; the first time this can take a minute…";
    try {
      ({ points } = await json("api/map"));
    } finally {
      at("map-state").textContent = "";
    }
    kept = seen = null;
  }
  prepare();
}

/** Compute classes, uncertainty ranks, legend and list from the points. */
function prepare() {
  classes = [...new Set(points.map((p) => p.label))].filter((label) => label !== null).sort(inOrder);
  const numbers = new Map(classes.map((label, i) => [label, i]));
  const shares = ranks(points.map((p) => p.level));
  points.forEach((p, i) => Object.assign(p, { class: numbers.get(p.label) ?? -1, share: shares[i] }));
  at("map-area").hidden = at("map-list").hidden = points.length === 0;
  at("map-state").textContent = points.length ? "" : "There is no map yet: the gallery is too small.";
  list();
  legend();
  see(seen);
}

const byClass = () => document.querySelector("[name=colour]:checked").value === "class";
const certainty = (share) => ({ fill: scaleColour(share), shape: "circle" });

function draw() {
  if (!points?.length || at("view-map").hidden) return;
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  place(points, width, height);
  const radius = points.length > 1000 ? 2.5 : points.length > 200 ? 3.5 : 5;
  const classed = byClass();
  const paint = (p, size) => drawShape(context, classed ? classLook(p.class) : certainty(p.share), p.left, p.top, size);
  for (const p of points) paint(p, classed ? radius : radius * (0.8 + 0.5 * p.share));
  context.strokeStyle = getComputedStyle(canvas).color;
  for (const p of new Set([kept, seen])) {
    if (!p) continue;
    paint(p, radius + 2);
    context.lineWidth = p === kept ? 3 : 1.5;
    context.beginPath();
    context.arc(p.left, p.top, radius + 5, 0, 2 * Math.PI);
    context.stroke();
  }
}

function legend() {
  const entry = (words, each) => {
    const swatch = make("canvas", { width: 28, height: 28, className: "swatch", "aria-hidden": "true" });
    drawShape(swatch.getContext("2d"), each, 14, 14, 9);
    return make("li", {}, swatch, make("span", { dir: "auto" }, words));
  };
  const levels = points.map((p) => p.level).sort((a, b) => a - b);
  const scale = ["least", "", "median", "", "most"].map((words, i) => {
    const level = levels[Math.round((i / 4) * (levels.length - 1))];
    return entry(`${number(level)} ${words}`, certainty(i / 4));
  });
  const named = classes.slice(0, NAMED).map((label, i) => entry(label, classLook(i)));
  if (classes.length > NAMED) named.push(make("li", {}, `and ${count(classes.length - NAMED, "more class", "more classes")}`));
  if (points.some((p) => p.class < 0)) named.push(entry("no label", classLook(-1)));
  const silent = make("li", {}, "This model gives no uncertainty.");
  at("legend").replaceChildren(...(byClass() ? named : levels[0] === levels.at(-1) ? [silent] : scale));
}

/** Show a point's item beside the map. */
function see(p) {
  seen = p;
  draw();
  at("map-item").replaceChildren(p ? tile(p, `uncertainty ${number(p.level)}`) : "No image chosen.");
}

/** A list of classes; the images of a class are added when it is opened. */
function list() {
  const groups = new Map();
  for (const p of points) groups.set(p.class, groups.get(p.class) ?? []).get(p.class).push(p);
  const order = [...groups.keys()].sort((a, b) => (a < 0) - (b < 0) || a - b);
  at("map-list").lastElementChild.replaceChildren(...order.map((i) => group(i < 0 ? "no label" : classes[i], groups.get(i))));
}

function group(label, members) {
  const items = make("ul", { className: "grid" });
  const words = make("summary", {}, make("bdi", {}, label), ` (${count(members.length, "image")})`);
  const folded = make("details", {}, words, items);
  const fill = () => items.append(...members.map((p) => make("li", {}, tile(p, `uncertainty ${number(p.level)}`))));
  folded.addEventListener("toggle", fill, { once: true });
  return folded;
}

function keep(p) {
  if (!p) return;
  kept = p;
  see(p);
}

function pressed(event) {
  const direction = ARROWS[event.key];
  if (direction) keep(kept ? next(points, kept, direction) : nearest(points, canvas.clientWidth / 2, canvas.clientHeight / 2));
  else if (event.key !== "Enter" || !kept) return undefined;
  event.preventDefault();
  return direction ? undefined : openItem(kept.id);
}

const under = ({ offsetX, offsetY }) => nearest(points, offsetX, offsetY, REACH);

canvas.addEventListener("click", (event) => keep(under(event)));
canvas.addEventListener("pointermove", (event) => {
  const p = under(event) ?? kept;
  clearTimeout(waiting);
  if (p !== seen) waiting = setTimeout(see, 60, p); // a moving pointer does not load every image it crosses
});
canvas.addEventListener("pointerleave", () => {
  clearTimeout(waiting);
  if (seen !== kept) see(kept);
});
canvas.addEventListener("keydown", telling(pressed));
for (const cause of [at("map-colour"), dark]) {
  cause.addEventListener("change", () => {
    if (!points) return;
    legend();
    draw();
  });
}
new ResizeObserver(draw).observe(canvas);
document.addEventListener("gallery-changed", ({ detail: { id, label, deleted, added } }) => {
  if (added) points = null;
  if (points === null) return;
  if (deleted) points = points.filter((p) => p.id !== id);
  for (const p of points) if (p.id === id) p.label = label;
  if (deleted && kept?.id === id) kept = null;
  if (deleted && seen?.id === id) seen = null;
  if (!at("view-map").hidden) prepare();
});
