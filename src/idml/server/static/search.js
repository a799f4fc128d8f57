// Queries: an image is dropped, pasted, chosen or photographed, searched, and can be added to the gallery.
import { at, say, telling } from "./dom.js";
import { json } from "./api.js";
import { bareWarning, changed, gallery, maxError, readGallery, showPromise } from "./gallery.js";
import { confirmed } from "./dialogs.js";
import { showNothing, showReply, showWaiting } from "./answer.js";

const SHOWN = 12; // number of results
let query = null; // the last image file
let asking = new AbortController(); // cancels the running request when a newer one starts

/** Search for an image. */
async function ask(file) {
  const sameImage = file === query;
  query = file;
  if (!sameImage) preview(file);
  showWaiting(sameImage);
  asking.abort();
  asking = new AbortController();
  const { signal } = asking;
  try {
    if (gallery.items === undefined) await readGallery(); // it could not be read before
    const wished = maxError();
    const wish = wished === null ? "" : `&max_error=${wished}`;
    showReply(await json(`api/search?k=${SHOWN}${wish}`, { method: "POST", body: form(file), signal }));
    at("error").textContent = "";
    at("add").hidden = !gallery.writable;
    if (!sameImage) at("answer").scrollIntoView({ block: "nearest" });
  } catch (problem) {
    if (!signal.aborted) showNothing(); // otherwise the newer request shows its result
    throw problem;
  }
}

function form(file) {
  const body = new FormData();
  body.append("image", file, file.name || "image");
  return body;
}

function preview(file) {
  const image = at("query");
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  image.alt = `Your image ${file.name}`;
  image.hidden = false;
  at("ask").classList.add("asked");
  at("drop-words").textContent = "Another one? Drop it, paste it, or";
  at("add").hidden = true;
  at("add-label").value = "";
  say("");
}

const isImage = (file) => !file.type || file.type.startsWith("image/"); // no type: the service decides

/** Search for the first image among some files. */
async function take(files) {
  if (!files.length || document.querySelector("dialog[open]")) return;
  const file = [...files].find(isImage);
  if (!file) throw new Error(`“${files[0].name}” is not an image.`);
  const answer = ask(file);
  location.hash = "#search";
  if (files.length > 1) say(`Only one of ${files.length} files was searched: ${file.name}`);
  await answer;
}

async function add(event) {
  event.preventDefault();
  const label = at("add-label").value.trim();
  const file = query;
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
at("max-error").addEventListener("input", showPromise);
at("max-error").addEventListener("change", telling(again));
at("wish").addEventListener("submit", (event) => event.preventDefault());
at("add").addEventListener("submit", telling(add));
document.addEventListener("gallery-changed", telling(again));
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
