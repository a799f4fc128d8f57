// The images of the gallery with the largest uncertainty, a page at a time.
import { at, make, number, telling } from "./dom.js";
import { json } from "./api.js";
import { setLabel, tile } from "./items.js";

const PAGE = 24;
let fresh = false;

/** Show the first page, unless it is there already. */
export async function showAmbiguous() {
  if (fresh) return;
  fresh = true;
  at("ambiguous").replaceChildren();
  await more().catch((problem) => {
    fresh = false;
    throw problem;
  });
}

async function more() {
  const list = at("ambiguous");
  const offset = list.children.length;
  const { total, items } = await json(`api/items?order=uncertain&offset=${offset}&limit=${PAGE}`);
  list.append(...items.map((item) => make("li", {}, tile(item, `uncertainty ${number(item.level)}`))));
  const shown = list.children.length;
  at("more").hidden = shown >= total || items.length === 0;
  // Sorted by falling uncertainty: if even the first has none, the model does not say.
  const silent = offset === 0 && items.length > 0 && items[0].level === 0;
  at("ambiguous-state").textContent =
    total === 0 ? "The gallery is empty." : silent ? "This model gives no uncertainty." : `${shown} of ${total}`;
  if (offset) list.children[offset]?.firstChild.focus();
}

at("more").addEventListener("click", telling(more));
document.addEventListener("gallery-changed", ({ detail: { id, label, deleted, added } }) => {
  const button = at("ambiguous").querySelector(`[data-id="${CSS.escape(id)}"]`);
  if (added) fresh = false;
  else if (button && deleted) button.closest("li").remove();
  else if (button) setLabel(button, label);
});
