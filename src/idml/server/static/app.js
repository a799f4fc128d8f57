// Starts the page: reads the gallery and shows the view named in the address.
import { at, complain, telling } from "./dom.js";
import { changeKey } from "./api.js";
import { readGallery } from "./gallery.js";
import { showAmbiguous } from "./ambiguous.js";
import { showMap } from "./map.js";
import "./search.js";

const VIEWS = { search: async () => {}, map: showMap, ambiguous: showAmbiguous };
let shown = "search";

async function route() {
  const view = location.hash.slice(1) || "search";
  if (!(view in VIEWS)) return; // "#main" of the skip link
  const moved = view !== shown;
  shown = view;
  for (const name of Object.keys(VIEWS)) at(`view-${name}`).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (moved) {
    at("error").textContent = "";
    at(`${view}-title`).focus({ preventScroll: true });
  }
  await VIEWS[view]();
}

async function start() {
  await readGallery().catch((problem) => {
    at("gallery").textContent = "The gallery could not be read.";
    throw problem;
  });
  await route();
}

window.addEventListener("hashchange", telling(route));
at("key-button").addEventListener("click", telling(async () => {
  if (await changeKey()) location.reload();
}));
start().catch(complain);
