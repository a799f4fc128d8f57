// Requests to the service: the key, errors as one line, and images that may need the key.
import { at } from "./dom.js";
import { enteredKey } from "./dialogs.js";

const STORED = "idml-api-key";
const storedKey = () => sessionStorage.getItem(STORED) ?? "";
let question = null; // one dialog for the key, even if several requests wait for it

function keep(key) {
  if (key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}

/** Ask for the key; return whether it changed. */
async function askKey(words) {
  question ??= enteredKey(words, { known: storedKey() !== "" });
  const key = await question;
  question = null;
  at("key-button").hidden = false; // to enter a key later, or another one
  if (key !== null) keep(key);
  return key !== null;
}

/** Change or forget the key; return whether the page must be read again. */
export const changeKey = () => askKey("This service needs a key. A read key can search; changes need the full key.");

/** Send a request; a refused one is an Error with one clear line. */
export async function call(path, options = {}) {
  for (;;) {
    const key = storedKey();
    const response = await sent(path, options, key);
    if (response.ok) return response;
    const words = await reason(response);
    const another = response.status === 401 && (storedKey() !== key || (await askKey(words)));
    if (!another) throw new Error(words);
  }
}

async function sent(path, options, key) {
  at("key-button").hidden &&= !key;
  try {
    return await fetch(path, { ...options, headers: { ...options.headers, ...(key && { "X-API-Key": key }) } });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Error("The service does not respond. Is it still running?");
  }
}

async function reason(response) {
  const body = await response.json().catch(() => null);
  return typeof body?.error === "string" && body.error ? body.error : `The service answered with status ${response.status}.`;
}

export const json = async (path, options) => (await call(path, options)).json();

export const itemPath = (id, part = "") => `api/items/${encodeURIComponent(id)}${part}`;

const near = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      load(target);
    }
  },
  { rootMargin: "200px" },
);

/** Load an image of the service into an img shortly before it becomes visible. */
export function show(image, path) {
  image.dataset.path = path;
  near.observe(image);
}

/** An img cannot send the key, so fetch the bytes if there is one. */
async function load(image) {
  const { path } = image.dataset;
  if (!storedKey()) {
    image.src = path;
    return;
  }
  try {
    const url = URL.createObjectURL(await (await call(path)).blob());
    for (const done of ["load", "error"]) image.addEventListener(done, () => URL.revokeObjectURL(url), { once: true });
    image.src = url;
  } catch {
    image.dispatchEvent(new Event("error")); // as for an img that loads by itself
  }
}
