// The map of the gallery: points on a canvas for mouse, touch and keyboard, linked with a grid of the images.
import { at, count, make, number, telling } from "./dom.js";
import { call } from "./api.js";
import { uncertaintyCounts } from "./gallery.js";
import { openItem, tile, uncertainty } from "./items.js";
import { bounded, classLook, dark, drawShape, nearest, next, place, ranks, scaleColour, zoomed } from "./points.js";

const REACH = 16; // pixels around a point that select it
const STILL = 4; // pixels that a click may move
const NAMED = 16; // classes in the legend
const GRID = 36; // images in the grid
const RETRY = 2; // seconds between requests while the map is computed
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const ALL = { zoom: 1, dx: 0, dy: 0 };
const canvas = at("map");
const fingers = new Map(); // pointers that are down: where they are and where they began
let points = null; // null: not read yet
let classes = [];
let camera = ALL;
let chosen = null; // the selected points; null: no selection
let chosenClass = null; // the class that is selected, if one is
let area = null; // the rectangle that is being drawn
let kept = null; // the point that was clicked or reached with the keyboard
let seen = null; // the point whose item is shown
let hovering = 0; // timers
let filling = 0;
const inOrder = new Intl.Collator("en", { numeric: true }).compare;

// ---- reading ----

/** Read the map if necessary, and draw it. */
export async function showMap() {
  if (points === null) {
    at("map-area").hidden = true;
    at("map-state").textContent = "Drawing the map; the first time this can take a minute…";
    try {
      points = await readPoints();
    } finally {
      at("map-state").textContent = "";
    }
    if (points === null) return; // the user went elsewhere
    [kept, seen, chosen, chosenClass, camera] = [null, null, null, null, ALL];
  }
  prepare();
}

/** Ask for the map until it is ready (a 202 says that it is being computed); null if its view is left meanwhile. */
async function readPoints() {
  for (;;) {
    const response = await call("api/map");
    if (response.status !== 202) return (await response.json()).points.filter((p) => p.x !== null && p.y !== null);
    const seconds = Number(response.headers.get("Retry-After")) || RETRY;
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    if (at("view-map").hidden) return null;
  }
}

/** Compute classes, uncertainty ranks, legend and grid from the points. */
function prepare() {
  classes = [...new Set(points.map((p) => p.label))].filter((label) => label !== null).sort(inOrder);
  const numbers = new Map(classes.map((label, i) => [label, i]));
  const shares = ranks(points.map((p) => p.level));
  points.forEach((p, i) => Object.assign(p, { class: numbers.get(p.label) ?? -1, share: shares[i] }));
  at("map-area").hidden = points.length === 0;
  at("map-state").textContent = points.length ? "" : "There is no map yet: the gallery is too small.";
  at("map-colour").hidden = !uncertaintyCounts();
  if (chosen) chosen = chosen.filter((p) => points.includes(p));
  if (chosenClass !== null && !classes.includes(chosenClass)) clear();
  legend();
  see(seen);
  fill();
}

// ---- drawing ----

const byClass = () => at("map-colour").hidden || document.querySelector("[name=colour]:checked").value === "class";
const certainty = (share) => ({ fill: scaleColour(share), shape: "circle" });

function draw() {
  if (!points?.length || at("view-map").hidden) return;
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  place(points, width, height, camera);
  const radius = (points.length > 1000 ? 2.5 : points.length > 200 ? 3.5 : 5) * Math.min(Math.sqrt(camera.zoom), 2);
  const classed = byClass();
  const paint = (p, size) => drawShape(context, classed ? classLook(p.class) : certainty(p.share), p.left, p.top, size);
  const selected = chosen && new Set(chosen);
  for (const p of points) {
    context.globalAlpha = selected && !selected.has(p) ? 0.15 : 1;
    paint(p, classed ? radius : radius * (0.8 + 0.5 * p.share));
  }
  context.globalAlpha = 1;
  context.strokeStyle = getComputedStyle(canvas).color;
  for (const p of new Set([kept, seen])) {
    if (!p) continue;
    paint(p, radius + 2);
    context.lineWidth = p === kept ? 3 : 1.5;
    context.beginPath();
    context.arc(p.left, p.top, radius + 5, 0, 2 * Math.PI);
    context.stroke();
  }
  if (area) {
    context.setLineDash([6, 4]);
    context.lineWidth = 1.5;
    context.strokeRect(area.left, area.top, area.right - area.left, area.bottom - area.top);
  }
}

function legend() {
  const swatch = (each) => {
    const drawn = make("canvas", { width: 28, height: 28, className: "swatch", "aria-hidden": "true" });
    drawShape(drawn.getContext("2d"), each, 14, 14, 9);
    return drawn;
  };
  const entry = (words, each) => make("li", {}, swatch(each), make("span", { dir: "auto" }, words));
  const named = (label, i) => {
    const members = points.filter((p) => p.class === i);
    const button = make("button", { type: "button", className: "chip" }, swatch(classLook(i)), make("span", { dir: "auto" }, label ?? "no label"));
    button.append(make("span", { className: "count" }, `${members.length}`));
    button.setAttribute("aria-pressed", chosenClass === (label ?? ""));
    button.addEventListener("click", () => chooseClass(chosenClass === (label ?? "") ? null : (label ?? "")));
    return make("li", {}, button);
  };
  at("map-others").hidden = !byClass() || classes.length <= NAMED;
  if (byClass()) {
    const bare = points.some((p) => p.class < 0) && classes.length ? [named(null, -1)] : [];
    at("legend").replaceChildren(...classes.slice(0, NAMED).map(named), ...bare);
    const options = classes.slice(NAMED).map((label) => make("option", { value: label }, label));
    at("map-class").replaceChildren(make("option", { value: "" }, `${count(options.length, "more label")}…`), ...options);
    at("map-class").value = classes.indexOf(chosenClass) >= NAMED ? chosenClass : "";
    return;
  }
  const levels = points.map((p) => p.level).sort((a, b) => a - b);
  const scale = ["least", "", "median", "", "most"].map((words, i) => {
    const level = levels[Math.round((i / 4) * (levels.length - 1))];
    return entry(`${number(level)} ${words}`, certainty(i / 4));
  });
  at("legend").replaceChildren(...scale);
}

/** Show a point's item beside the map. */
function see(p) {
  seen = p;
  draw();
  at("map-item").replaceChildren(p ? tile(p, ...uncertainty(p)) : make("p", { className: "nothing" }, "No image chosen."));
}

// ---- the grid ----

const inView = (p) => p.left >= 0 && p.top >= 0 && p.left <= canvas.clientWidth && p.top <= canvas.clientHeight;

/** Show the selected images, or those in view, nearest to the middle of the map first. */
function fill() {
  if (!points?.length) return;
  draw();
  const members = (chosen ?? points.filter(inView)).slice();
  const far = (p) => Math.hypot(p.left - canvas.clientWidth / 2, p.top - canvas.clientHeight / 2);
  members.sort((a, b) => far(a) - far(b));
  const words = chosen ? "selected" : members.length === points.length ? "on the map" : "in view";
  const some = members.length > GRID ? `, ${GRID} shown` : "";
  at("map-count").textContent = `${members.length.toLocaleString("en")} ${words}${some}`;
  at("map-clear").hidden = chosen === null;
  const before = [...at("map-grid").querySelectorAll("button")].map((button) => `${button.dataset.id} ${button.textContent}`).join();
  const entries = members.slice(0, GRID).map((p) => {
    const entry = make("li", {}, tile(p, ...uncertainty(p)));
    entry.addEventListener("pointerenter", () => see(p));
    entry.addEventListener("focusin", () => seen === p || see(p));
    return entry;
  });
  const after = entries.map((entry) => entry.querySelector("button")).map((button) => `${button.dataset.id} ${button.textContent}`).join();
  if (before !== after) at("map-grid").replaceChildren(...entries);
}

function fillSoon() {
  clearTimeout(filling);
  filling = setTimeout(fill, 150);
}

function choose(members, label = null) {
  chosen = members;
  chosenClass = label;
  legend();
  fill();
}

const clear = () => choose(null);

function chooseClass(label) {
  if (label === null) return clear();
  const number = label === "" ? -1 : classes.indexOf(label);
  return choose(points.filter((p) => p.class === number), label);
}

// ---- camera ----

function look(next) {
  camera = next;
  canvas.classList.toggle("zoomed", camera.zoom > 1);
  draw();
  if (!chosen) fillSoon();
}

const zoom = (factor, left = canvas.clientWidth / 2, top = canvas.clientHeight / 2) =>
  look(zoomed(camera, factor, left, top, canvas.clientWidth, canvas.clientHeight));

const pan = (dx, dy) =>
  look(bounded({ ...camera, dx: camera.dx + dx, dy: camera.dy + dy }, canvas.clientWidth, canvas.clientHeight));

// ---- mouse, touch and keyboard ----

function keep(p) {
  if (!p) return;
  kept = p;
  see(p);
  if (!inView(p)) pan(canvas.clientWidth / 2 - p.left, canvas.clientHeight / 2 - p.top);
}

function pressed(event) {
  const direction = ARROWS[event.key];
  const others = chosen?.length ? chosen : points;
  if (direction) keep(kept && others.includes(kept) ? next(others, kept, direction) : nearest(others, canvas.clientWidth / 2, canvas.clientHeight / 2));
  else if (event.key === "+" || event.key === "=") zoom(1.5);
  else if (event.key === "-") zoom(1 / 1.5);
  else if (event.key === "0") look(ALL);
  else if (event.key === "Escape" && chosen) clear();
  else if (event.key !== "Enter" || !kept) return undefined;
  event.preventDefault();
  return event.key === "Enter" ? openItem(kept.id) : undefined;
}

const under = ({ offsetX, offsetY }) => nearest(points, offsetX, offsetY, REACH);
const selecting = ({ shiftKey }) => shiftKey || at("lasso").getAttribute("aria-pressed") === "true";

function down(event) {
  if (event.button !== 0) return;
  const { offsetX: left, offsetY: top } = event;
  fingers.set(event.pointerId, { left, top, moved: 0, selecting: fingers.size === 0 && selecting(event) });
  canvas.setPointerCapture(event.pointerId);
}

function moved(event) {
  const finger = fingers.get(event.pointerId);
  if (!finger) return hover(event);
  const { offsetX: left, offsetY: top } = event;
  const [dx, dy] = [left - finger.left, top - finger.top];
  const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
  if (other) {
    const before = Math.hypot(finger.left - other.left, finger.top - other.top);
    const after = Math.hypot(left - other.left, top - other.top);
    zoom(after / Math.max(before, 1), (left + other.left) / 2, (top + other.top) / 2);
  } else if (finger.selecting) {
    finger.from ??= { left: finger.left, top: finger.top };
    const { from } = finger;
    area = { left: Math.min(from.left, left), top: Math.min(from.top, top), right: Math.max(from.left, left), bottom: Math.max(from.top, top) };
    draw();
  } else if (camera.zoom > 1) pan(dx, dy);
  Object.assign(finger, { left, top, moved: finger.moved + Math.hypot(dx, dy) });
  return undefined;
}

function up(event) {
  const finger = fingers.get(event.pointerId);
  fingers.delete(event.pointerId);
  if (!finger) return;
  const drawn = area;
  area = null;
  if (event.type === "pointercancel") draw();
  else if (finger.moved <= STILL) keep(under(event));
  else if (drawn) {
    choose(points.filter((p) => p.left >= drawn.left && p.left <= drawn.right && p.top >= drawn.top && p.top <= drawn.bottom));
    at("lasso").setAttribute("aria-pressed", "false");
    canvas.classList.remove("selecting");
  }
}

/** Show the point under the mouse; a moving pointer does not load every image it crosses. */
function hover(event) {
  const p = under(event) ?? kept;
  clearTimeout(hovering);
  if (p !== seen) hovering = setTimeout(see, 60, p);
}

function wheel(event) {
  if (camera.zoom === 1 && event.deltaY > 0) return; // everything is shown: let the page scroll
  event.preventDefault();
  zoom(Math.exp(-event.deltaY / 400), event.offsetX, event.offsetY);
}

canvas.addEventListener("pointerdown", down);
canvas.addEventListener("pointermove", moved);
canvas.addEventListener("pointerup", up);
canvas.addEventListener("pointercancel", up);
canvas.addEventListener("pointerleave", () => {
  clearTimeout(hovering);
  if (seen !== kept && points) see(kept);
});
canvas.addEventListener("wheel", wheel, { passive: false });
canvas.addEventListener("keydown", telling(pressed));
at("zoom-in").addEventListener("click", () => zoom(1.5));
at("zoom-out").addEventListener("click", () => zoom(1 / 1.5));
at("zoom-all").addEventListener("click", () => look(ALL));
at("lasso").addEventListener("click", ({ currentTarget }) => {
  const on = currentTarget.getAttribute("aria-pressed") !== "true";
  currentTarget.setAttribute("aria-pressed", on);
  canvas.classList.toggle("selecting", on);
});
at("map-clear").addEventListener("click", () => {
  clear();
  canvas.focus();
});
at("map-class").addEventListener("change", ({ target }) => chooseClass(target.value || null));
for (const cause of [at("map-colour"), dark]) {
  cause.addEventListener("change", () => {
    if (!points) return;
    legend();
    draw();
  });
}
new ResizeObserver(() => {
  draw();
  if (points?.length && !at("view-map").hidden) fillSoon();
}).observe(canvas);
document.addEventListener("gallery-changed", ({ detail: { id, label, deleted, added } }) => {
  if (added) points = null;
  if (points === null) return;
  if (deleted) points = points.filter((p) => p.id !== id);
  for (const p of points) if (p.id === id) p.label = label;
  if (deleted && kept?.id === id) kept = null;
  if (deleted && seen?.id === id) seen = null;
  if (!at("view-map").hidden) prepare();
});
