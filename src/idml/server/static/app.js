// Starts the page: reads the gallery and shows the view named in the address.
//
//   #search        the first screen           #query         the answer to the user's own picture
//   #similar/ID    images like an item        #browse/LABEL  all items, or those with a label
//   #map           the map
import { at, complain, telling } from "./dom.js";
import { changeKey } from "./api.js";
import { readGallery } from "./gallery.js";
import { showBrowse } from "./browse.js";
import { showHome } from "./home.js";
import { showMap } from "./map.js";
import { askFile, askItem, forget } from "./search.js";

const ROUTES = {
  search: { view: "search", show: () => (forget(), showHome()) },
  query: { view: "search", show: askFile },
  similar: { view: "search", show: askItem },
  browse: { view: "browse", show: showBrowse },
  map: { view: "map", show: showMap },
};
const VIEWS = ["search", "browse", "map"];
let shown = null;

/** The text after the slash of an address; a damaged one is empty. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

async function route() {
  const [, name, rest] = location.hash.match(/^#([a-z]*)\/?(.*)$/) ?? [null, "", ""];
  const { view, show } = ROUTES[name || "search"] ?? {};
  if (!show) return; // "#main" of the skip link
  const moved = shown !== null && location.hash !== shown;
  shown = location.hash;
  for (const each of VIEWS) at(`view-${each}`).hidden = each !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (moved) {
    at("error").textContent = "";
    at("item-dialog").close(); // a link in it leads here
    at(`${view}-title`).focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  await show(decoded(rest));
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
