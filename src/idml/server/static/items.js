// One image of the gallery: its tile in a grid, and the dialog that shows, relabels and deletes it.
import { at, complain, make, number, say, telling } from "./dom.js";
import { call, itemPath, json, show } from "./api.js";
import { bareWarning, changed, gallery } from "./gallery.js";
import { confirmed } from "./dialogs.js";

let current = null; // the item in the dialog

const name = ({ id, path }) => path?.split("/").pop() || id.slice(0, 8);
const called = (label) => (label === null ? "no label" : `“${label}”`);

/** An img that shows an item; if that fails, its text is shown. */
function picture(item, part, words) {
  const image = make("img", { alt: words });
  image.addEventListener("error", () => image.classList.add("missing"));
  show(image, itemPath(item.id, part));
  return image;
}

/** A button with the thumbnail, the label and some facts, that opens the item. */
export function tile(item, ...facts) {
  const button = make("button", { type: "button", className: "tile" });
  button.append(picture(item, "/thumbnail", `Image ${name(item)}`), make("span", { dir: "auto" }));
  button.dataset.id = item.id;
  setLabel(button, item.label);
  for (const fact of facts) button.append(make("span", { className: "fact" }, fact));
  button.addEventListener("click", telling(() => openItem(item.id)));
  return button;
}

/** Write the label on a tile. */
export function setLabel(button, label) {
  const words = button.querySelector("img + span");
  words.className = label === null ? "label none" : "label";
  words.textContent = label ?? "no label";
}

/** A small picture of an item of which only the id is known. */
export function smallTile(id, words) {
  const button = make("button", { type: "button", className: "tile small" }, picture({ id }, "/thumbnail", words));
  button.addEventListener("click", telling(() => openItem(id)));
  return button;
}

/** Open the dialog with the current state of an item. */
export async function openItem(id) {
  current = await json(itemPath(id));
  fill();
  if (!at("item-dialog").open) at("item-dialog").showModal();
}

function fill() {
  at("item-title").textContent = current.label ?? "No label";
  const whole = picture(current, current.path ? "/image" : "/thumbnail", `Image ${name(current)}`);
  whole.addEventListener("error", () => whole.replaceWith(picture(current, "/thumbnail", whole.alt)), { once: true });
  at("item-picture").replaceChildren(whole);
  const facts = { File: current.path || "not kept", Uncertainty: number(current.level), Id: current.id };
  at("item-facts").replaceChildren(
    ...Object.entries(facts).flatMap(([term, fact]) => [make("dt", {}, term), make("dd", { dir: "auto" }, fact)]),
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
