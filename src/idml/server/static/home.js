// The first screen: sample queries and a wall of thumbnails. Each of them searches for images like it.
import { at, make } from "./dom.js";
import { json } from "./api.js";
import { gallery } from "./gallery.js";
import { picture, similarLink, spoken } from "./items.js";

const SAMPLES = 8;
const WALL = 60;
let fresh = false;

/** Show a sample of the collection, unless it is there already. */
export async function showHome() {
  if (fresh) return;
  fresh = true;
  try {
    fill((await json(`api/items?order=mixed&limit=${WALL + SAMPLES}`)).items);
  } catch (problem) {
    fresh = false;
    throw problem;
  }
}

function fill(items) {
  const samples = choose(items);
  at("sample-list").replaceChildren(...samples.map((item) => make("li", {}, sample(item))));
  const others = items.filter((item) => !samples.includes(item));
  at("wall").replaceChildren(...others.map((item) => make("li", {}, similarLink(item, "", thumbnail(item)))));
  at("samples").hidden = samples.length === 0;
  at("home").hidden = others.length === 0;
}

/** The first item of each label, then others, as many as there is space for. */
function choose(items) {
  const labels = new Set();
  const first = items.filter(({ label }) => label !== null && !labels.has(label) && labels.add(label));
  return [...first, ...items.filter((item) => !first.includes(item))].slice(0, SAMPLES);
}

const thumbnail = (item) => picture(item, "/thumbnail", `Find images like ${spoken(item)}`);

function sample(item) {
  const words = make("span", { className: "label", dir: "auto" }, item.label ?? "");
  return similarLink(item, "tile", thumbnail(item), gallery.labelled ? words : null);
}

document.addEventListener("gallery-changed", ({ detail: { id, deleted, added } }) => {
  if (added || deleted || at("sample-list").querySelector(`[data-id="${CSS.escape(id)}"]`)) fresh = false;
});
