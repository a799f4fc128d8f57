// One image of the gallery: its tile in a grid, and the dialog that shows, relabels and deletes it.
import { at, complain, make, number, say, telling } from "./dom.js";
import { call, itemPath, json, show } from "./api.js";
import { bareWarning, changed, gallery, uncertaintyCounts } from "./gallery.js";
import { confirmed } from "./dialogs.js";

let current = null; // the item in the dialog
let opening = 0; // number of the last request for one, so that a slower older one is ignored

export const fileName = ({ id, path }) => path?.split("/").pop() || id.slice(0, 8);
const called = (label) => (label === null ? "no label" : `“${label}”`);

/** An item in words, for those who do not see it. */
export const spoken = (item) => (item.label ? `${item.label}, ${fileName(item)}` : fileName(item));

/** An img that shows an item; if that fails, its text is shown. */
export function picture(item, part, words) {
  const image = make("img", { alt: words });
  image.addEventListener("error", () => image.classList.add("missing"));
  show(image, itemPath(item.id, part));
  return image;
}

/** A link to the images that are like an item. */
export function similarLink(item, className, ...children) {
  const link = make("a", { className, href: `#similar/${encodeURIComponent(item.id)}` }, ...children);
  link.dataset.id = item.id;
  return link;
}

/** A button that opens an item, with its thumbnail, label and some facts; below it “more like this”. */
export function tile(item, ...facts) {
  const button = make("button", { type: "button", className: "tile" });
  button.append(picture(item, "/thumbnail", `Image ${fileName(item)}`), make("span", { dir: "auto" }));
  button.dataset.id = item.id;
  setLabel(button, item.label);
  for (const fact of facts) button.append(make("span", { className: "fact" }, fact));
  button.addEventListener("click", telling(() => openItem(item.id)));
  const more = similarLink(item, "more", "More like this");
  more.setAttribute("aria-label", `More like this: ${spoken(item)}`);
  return make("div", { className: "item" }, button, more);
}

/** Facts of an item for its tile. */
export const uncertainty = ({ level }) => (uncertaintyCounts() ? [`uncertainty ${number(level)}`] : []);

/** Write the label on a tile. */
export function setLabel(button, label) {
  const words = button.querySelector("img + span");
  words.className = label === null ? "label none" : "label";
  words.textContent = label ?? (gallery.labelled ? "no label" : "");
}

/** A small picture of an item of which only the id is known. */
export function smallTile(id, words) {
  const button = make("button", { type: "button", className: "tile small" }, picture({ id }, "/thumbnail", words));
  button.addEventListener("click", telling(() => openItem(id)));
  return button;
}

/** Open the dialog with the current state of an item. */
export async function openItem(id) {
  const mine = ++opening;
  const item = await json(itemPath(id));
  if (mine !== opening) return;
  current = item;
  fill();
  if (!at("item-dialog").open) at("item-dialog").showModal();
}

function fill() {
  at("item-title").textContent = current.label ?? "No label";
  const whole = picture(current, current.path ? "/image" : "/thumbnail", `Image ${fileName(current)}`);
  whole.addEventListener("error", () => whole.replaceWith(picture(current, "/thumbnail", whole.alt)), { once: true });
  at("item-picture").replaceChildren(whole);
  at("item-similar").href = `#similar/${encodeURIComponent(current.id)}`;
  at("item-label-link").href = `#browse/${encodeURIComponent(current.label ?? "")}`;
  at("item-label-link").hidden = current.label === null;
  const facts = { File: current.path || "not kept", ...(uncertaintyCounts() && { Uncertainty: number(current.level) }), Id: current.id };
  at("item-facts").replaceChildren(
    ...Object.entries(facts).map(([term, fact]) => make("div", {}, make("dt", {}, term), make("dd", { dir: "auto" }, fact))),
  );
  at("item-edit").hidden = !gallery.writable;
  at("item-label").value = current.label ?? "";
  at("item-error").textContent = "";
}

async function relabel(event) {
  event.preventDefault();
  const label = at("item-label").value.trim() || null;
  const { id, label: before } = current;
  if (label === before) return;
  const question = `Change the label from ${called(before)} to ${called(label)}?${label === null ? bareWarning() : ""}`;
  if (!(await confirmed(question, "Change"))) return;
  const headers = { "Content-Type": "application/json" };
  await call(itemPath(id), { method: "PATCH", headers, body: JSON.stringify({ label }) });
  say(`The label was ${called(before)} and is now ${called(label)}.`);
  await finish({ id, label });
}

async function remove() {
  const { id, label } = current;
  const question = `Delete this image (${called(label)}) from the gallery? This cannot be undone.`;
  if (!(await confirmed(question, "Delete", { danger: true }))) return;
  await call(itemPath(id), { method: "DELETE" });
  say("The image was deleted.");
  await finish({ id, deleted: true });
}

async function finish(change) {
  at("item-dialog").close(); // the focus goes back to the tile it was opened from
  const reading = changed(change);
  if (document.activeElement === document.body) document.querySelector("main > section:not([hidden]) > h2").focus();
  await reading.catch(complain);
}

/** Show errors inside the dialog while it covers the page. */
const inDialog = (action) => (event) =>
  action(event).catch((problem) => {
    at("item-error").textContent = problem.message;
  });

at("item-edit").addEventListener("submit", inDialog(relabel));
at("item-delete").addEventListener("click", inDialog(remove));
at("item-similar").addEventListener("click", () => at("item-dialog").close()); // also if the address stays the same
at("item-label-link").addEventListener("click", () => at("item-dialog").close());
