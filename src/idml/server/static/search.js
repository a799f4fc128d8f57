// Queries: a picture is dropped, pasted, chosen or photographed, or an item of the gallery; it is searched, cropped, added.
import { at, make, say, telling } from "./dom.js";
import { call, itemPath, json } from "./api.js";
import { bareWarning, changed, followReply, gallery, maxError, readGallery, reranker, showPromise } from "./gallery.js";
import { confirmed } from "./dialogs.js";
import { showNothing, showReply, showWaiting } from "./answer.js";
import { cropped } from "./crop.js";
import { offerJudgement } from "./feedback.js";
import { fileName, picture } from "./items.js";

const SHOWN = 24; // number of results
let upload = null; // the user's last picture: the file to search, and the whole file that it is a part of
let query = null; // what is searched now: {file, whole} or {item}
let asking = new AbortController(); // cancels the running request when a newer one starts

/** Search for the user's last picture; without one, go to the first screen. */
export async function askFile() {
  if (upload) await ask(upload);
  else location.replace("#search");
}

/** Search for images like an item. */
export const askItem = (item) => ask(query?.item === item ? query : { item });

/** Go back to the first screen. */
export function forget() {
  asking.abort();
  query = null;
  showNothing();
  at("ask").classList.remove("asked");
  at("view-search").classList.remove("asked");
  for (const id of ["query-picture", "crop", "judge", "add"]) at(id).hidden = true;
  at("drop-words").textContent = "Drop a picture here, paste one, or";
}

async function ask(next) {
  const same = next === query;
  query = next;
  showWaiting(same);
  asking.abort();
  asking = new AbortController();
  const { signal } = asking;
  try {
    if (!same) await preview(next, signal);
    if (gallery.items === undefined) await readGallery(); // it could not be read before
    const [order, wished] = [reranker(), maxError()];
    const reply = await requested(next, order, wished, signal);
    if (order === null) followReply(reply, wished);
    showReply(reply, order !== null);
    at("error").textContent = "";
    offerJudgement(order === null ? next.file : null, reply.results); // a calibration knows the usual order only
    at("add").hidden = !gallery.writable || !next.file;
    if (!same) at("answer").scrollIntoView({ block: "nearest" });
  } catch (problem) {
    if (!signal.aborted) showNothing(); // otherwise the newer request shows its result
    throw problem;
  }
}

function requested({ file, item }, order, wished, signal) {
  const options = `k=${SHOWN}${wished === null ? "" : `&max_error=${wished}`}${order === null ? "" : `&rerank=${order}`}`;
  if (item) return json(`${itemPath(item, "/similar")}?${options}`, { signal });
  return json(`api/search?${options}`, { method: "POST", body: form(file), signal });
}

function form(file) {
  const body = new FormData();
  body.append("image", file, file.name || "image");
  return body;
}

async function preview({ file, whole, item }, signal) {
  at("ask").classList.add("asked");
  at("view-search").classList.add("asked");
  at("query-picture").hidden = false;
  at("drop-words").textContent = "Another one? Drop it, paste it, or";
  at("add").hidden = at("judge").hidden = at("crop").hidden = true;
  at("add-label").value = "";
  if (file) {
    const image = make("img", { alt: `Your picture ${file.name}` });
    const url = URL.createObjectURL(file);
    image.addEventListener("load", () => (at("crop").hidden = false));
    image.addEventListener("error", () => {
      image.hidden = true; // a format that the browser does not know; the service may
      if (image.id === "query") at("query-name").textContent = `${file.name} (no preview)`;
    });
    image.src = url;
    place(image, whole === file ? file.name : `A part of ${whole.name}`);
  } else {
    const found = await json(itemPath(item), { signal });
    place(picture(found, found.path ? "/image" : "/thumbnail", `Image ${fileName(found)}`), "");
    const name = found.label === null ? fileName(found) : `${found.label} (${fileName(found)})`;
    at("query-name").replaceChildren(make("bdi", {}, name), ", itself left out of the search");
    at("crop").hidden = false;
  }
}

function place(image, words) {
  const before = at("query");
  if (before.src.startsWith("blob:")) URL.revokeObjectURL(before.src);
  image.id = "query";
  before.removeAttribute("id"); // what happens to it now is no news
  before.replaceWith(image);
  at("query-name").textContent = words;
}

const isImage = (file) => !file.type || file.type.startsWith("image/"); // no type: the service decides

/** Search for the first image among some files. */
async function take(files) {
  if (!files.length || document.querySelector("dialog[open]")) return;
  const file = [...files].find(isImage);
  if (!file) throw new Error(`“${files[0].name}” is not an image.`);
  say("");
  const part = at("crop-first").checked ? await cropped(file) : file;
  if (part === null) return;
  await search(part, file);
  if (files.length > 1) say(`Only one of ${files.length} files was searched: ${file.name}`);
}

async function search(file, whole) {
  upload = { file, whole };
  if (location.hash === "#query") await ask(upload);
  else location.hash = "#query"; // the route asks
}

/** Let the user choose a part of the present query, and search for it. */
async function crop() {
  const whole = query.whole ?? (await itemFile(query.item));
  const part = await cropped(whole);
  if (part !== null) await search(part, whole);
}

/** The picture of an item as a file; its thumbnail if there is no other. */
async function itemFile(id) {
  const item = await json(itemPath(id));
  const response = await call(itemPath(id, item.path ? "/image" : "/thumbnail")).catch(() => call(itemPath(id, "/thumbnail")));
  const blob = await response.blob();
  return new File([blob], fileName(item), { type: blob.type });
}

async function add(event) {
  event.preventDefault();
  const label = at("add-label").value.trim();
  const { file } = query;
  const question = label ? `Add this image as “${label}”?` : `Add this image without a label?${bareWarning()}`;
  if (!(await confirmed(question, "Add"))) return;
  const body = form(file);
  if (label) body.append("label", label);
  const { id, new: isNew } = await json("api/items", { method: "POST", body });
  at("add-label").value = "";
  say(isNew ? "The image is in the gallery now." : "The gallery already had this image.");
  await changed({ id, label: label || null, added: true });
}

const again = () => (query === null ? undefined : ask(query));

for (const id of ["file", "camera"]) {
  at(id).addEventListener("change", telling(async ({ target }) => {
    const files = [...target.files];
    target.value = ""; // choosing the same file again searches again
    await take(files);
  }));
}
at("crop").addEventListener("click", telling(crop));
at("max-error").addEventListener("input", showPromise);
at("max-error").addEventListener("change", telling(again));
at("rerank").addEventListener("change", telling(() => {
  if (!at("wish").hidden) showPromise();
  return again();
}));
at("wish").addEventListener("submit", (event) => event.preventDefault());
at("add").addEventListener("submit", telling(add));
document.addEventListener("gallery-changed", telling(({ detail: { id, deleted } }) => {
  if (!deleted || query?.item !== id) return again();
  if (location.hash.startsWith("#similar/")) location.hash = "#search";
  return undefined;
}));
document.addEventListener("paste", telling(({ clipboardData }) => take(clipboardData.files)));

// Dropping works anywhere on the page: a browser would otherwise leave it and open the image.
const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
const mark = (on) => at("drop").classList.toggle("over", on);
document.addEventListener("dragover", (event) => {
  if (!holdsFiles(event)) return;
  event.preventDefault();
  mark(true);
});
document.addEventListener("dragleave", ({ relatedTarget }) => relatedTarget ?? mark(false));
document.addEventListener("drop", telling(async (event) => {
  mark(false);
  if (!holdsFiles(event)) return;
  event.preventDefault();
  await take(event.dataTransfer.files);
}));
