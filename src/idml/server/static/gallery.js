// What the service says about the gallery, and the promise at the slider; whoever changes the gallery tells the page here.
import { at, count, percent, rate, sentence } from "./dom.js";
import { json } from "./api.js";

const USUAL = 0.05; // the error rate that the service assumes where none is wished
export const gallery = { calibrated: false, writable: false, promises: [] };

/** Read it again and show it in the head of the page and at the slider. */
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

/** What to know before an image is left without a label. */
export const bareWarning = () =>
  gallery.labelled === gallery.items ? " It would be the only image without one, and no answer could go by labels then." : "";

const promise = () => gallery.promises[Number(at("max-error").value)];

/** The wished error rate; null where nothing can be wished. */
export const maxError = () => (at("wish").hidden ? null : promise().max_error);

/** Where it was before, else at the usual rate, else at the first larger one that can be promised. */
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

/** Say what the slider's place means. */
export function showPromise() {
  const { max_error, confidence, possible, coverage, reason } = promise();
  const wish = `at most ${rate(max_error)}`;
  at("wished").textContent = wish;
  at("max-error").setAttribute("aria-valuetext", possible ? wish : `${wish}, cannot be promised`);
  at("promise").classList.toggle("refused", !possible);
  at("promise").textContent = possible
    ? `Promised, with ${percent(confidence)} confidence, ${condition()}. About ${percent(coverage)} of queries get a match; the others are told “unsure” or “not in the collection”.`
    : `Cannot promise that here: ${why(reason)} Nothing is called a match.`;
}

/** For which queries it is promised. */
const condition = () =>
  gallery.unknown_share >= 0.01
    ? `where no more than about ${percent(gallery.unknown_share)} of queries show what is not in the collection`
    : "where all queries show what is in the collection";

/** The service's reason without its first words, which were just said. */
const why = (reason) => sentence(reason?.replace(/^cannot promise at most [^:]*: /, ""), { capital: false });
