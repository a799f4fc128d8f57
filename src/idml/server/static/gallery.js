// The state of the gallery, the slider for the error rate, and the event that announces changes.
import { at, count, percent, rate, sentence } from "./dom.js";
import { json } from "./api.js";

const USUAL = 0.05; // the default error rate of the service
export const gallery = { calibrated: false, writable: false, promises: [] };

/** Read the state again and show it in the header and at the slider. */
export async function readGallery() {
  const before = maxError();
  Object.assign(gallery, await json("api/gallery"));
  const parts = [
    count(gallery.items, "image"),
    gallery.labelled ? `${gallery.labelled.toLocaleString("en")} labelled` : "no labels",
    gallery.classes ? count(gallery.classes, "class", "classes") : "",
    gallery.calibrated ? "calibrated" : "not calibrated",
    gallery.writable ? "" : "read-only",
  ];
  at("gallery").textContent = parts.filter(Boolean).join(" · ");
  at("drift").textContent = sentence(gallery.drift);
  at("drift").hidden = !gallery.drift;
  at("wish").hidden = !gallery.calibrated || gallery.promises.length === 0;
  at("uncalibrated").hidden = gallery.calibrated;
  if (!at("wish").hidden) placeSlider(before);
}

/** An item was added, relabelled or removed: tell every view, and read the status again. */
export async function changed(detail) {
  document.dispatchEvent(new CustomEvent("gallery-changed", { detail }));
  await readGallery();
}

/** A warning before an image gets no label. */
export const bareWarning = () =>
  gallery.labelled === gallery.items ? " It would be the only image without a label, and answers could no longer use labels." : "";

const promise = () => gallery.promises[Number(at("max-error").value)];

/** The chosen error rate; null if none can be chosen. */
export const maxError = () => (at("wish").hidden ? null : promise().max_error);

/** Set the slider: where it was before, else the first rate from the default on that can be promised, else the default. */
function placeSlider(before) {
  const place = (fits) => gallery.promises.findIndex(fits);
  const wanted = [
    place(({ max_error }) => max_error === before),
    place(({ max_error, possible }) => max_error >= USUAL && possible),
    place(({ max_error }) => max_error === USUAL),
  ];
  at("max-error").max = gallery.promises.length - 1;
  at("max-error").value = wanted.find((i) => i >= 0) ?? 0;
  showPromise();
}

/** Describe the chosen error rate. */
export function showPromise() {
  const { max_error, confidence, possible, coverage, reason } = promise();
  const wish = `at most ${rate(max_error)}`;
  at("wished").textContent = wish;
  at("max-error").setAttribute("aria-valuetext", possible ? wish : `${wish}, cannot be promised`);
  at("promise").classList.toggle("refused", !possible);
  at("promise").textContent = possible
    ? `Promised, with ${percent(confidence)} confidence, ${condition()}. About ${percent(coverage)} of queries get a match; the others get “unsure” or “not in the collection”.`
    : `Cannot promise that here: ${why(reason)} Nothing is called a match.`;
}

/** The queries for which the promise holds. */
const condition = () =>
  gallery.unknown_share >= 0.01
    ? `where no more than about ${percent(gallery.unknown_share)} of queries show what is not in the collection`
    : "where all queries show what is in the collection";

/** The reason of the service without its first words, which the page has shown already. */
const why = (reason) => sentence(reason?.replace(/^cannot promise at most [^:]*: /, ""), { capital: false });
