// Everything in the gallery, a page at a time; all items, or those with one label.
import { at, count, make, telling } from "./dom.js";
import { json } from "./api.js";
import { gallery, uncertaintyCounts } from "./gallery.js";
import { setLabel, tile, uncertainty } from "./items.js";

const PAGE = 48;
const CHIPS = 12; // labels shown at a time
let shown = null; // the label and order of the items shown; null: they must be read
let label = "";
let reading = 0; // number of the last request, so that a slower older one is ignored

/** Show the items with a label, or all. */
export async function showBrowse(wanted) {
  label = wanted;
  const sortable = uncertaintyCounts();
  const option = at("order").querySelector("[value=uncertain]");
  option.hidden = option.disabled = !sortable;
  if (!sortable && at("order").value === "uncertain") at("order").value = "mixed";
  at("browse-title").replaceChildren(...(label ? ["Browse: ", make("bdi", {}, label)] : ["Browse"]));
  await Promise.all([showLabels(), showItems()]);
}

async function showItems() {
  const key = JSON.stringify([label, at("order").value]);
  if (key === shown) return;
  at("items").replaceChildren();
  at("browse-state").textContent = "";
  await more();
}

async function more() {
  const mine = ++reading;
  shown = null;
  const list = at("items");
  const offset = list.children.length;
  const query = new URLSearchParams({ order: at("order").value, label, offset, limit: PAGE });
  const { total, items } = await json(`api/items?${query}`);
  if (mine !== reading) return;
  list.append(...items.map((item) => make("li", {}, tile(item, ...uncertainty(item)))));
  at("more").hidden = list.children.length >= total || items.length === 0;
  state(total);
  shown = JSON.stringify([label, at("order").value]);
  if (offset) list.children[offset]?.querySelector("button").focus();
}

function state(total) {
  const n = at("items").children.length;
  at("browse-state").textContent = total === 0 ? "There is nothing here." : `${n.toLocaleString("en")} of ${count(total, "image")}`;
}

/** The labels that contain the text, as links. */
async function showLabels() {
  at("browse-controls").classList.toggle("unlabelled", !gallery.classes);
  const text = at("label-text").value.trim();
  const { total, labels } = await json(`api/labels?${new URLSearchParams({ text, limit: CHIPS })}`);
  if (text !== at("label-text").value.trim()) return; // a newer text is being searched
  const chips = labels.map((each) => chip(each.label, each.items));
  if (!text) chips.unshift(chip("", gallery.items));
  if (label && !labels.some((each) => each.label === label)) chips.splice(text ? 0 : 1, 0, chip(label));
  at("labels").replaceChildren(...chips);
  const left = total - labels.length;
  at("labels-left").textContent = total === 0 && text ? "No label contains this text." : left > 0 ? `${count(left, "more label")}: type to find them.` : "";
}

function chip(name, items) {
  const words = name ? make("bdi", {}, name) : "All";
  const link = make("a", { className: "chip", href: `#browse/${encodeURIComponent(name)}` }, words);
  if (items !== undefined) link.append(make("span", { className: "count" }, ` ${items.toLocaleString("en")}`));
  if (name === label) link.setAttribute("aria-current", "true");
  return link;
}

at("more").addEventListener("click", telling(more));
at("order").addEventListener("change", telling(showItems));
at("label-text").addEventListener("input", telling(showLabels));
document.addEventListener("gallery-changed", ({ detail: { id, label: now, deleted, added } }) => {
  const button = at("items").querySelector(`button[data-id="${CSS.escape(id)}"]`);
  if (added || (label && now === label)) shown = null; // the list lacks it
  else if (button && (deleted || label)) button.closest("li").remove();
  else if (button) setLabel(button, now);
});
