// The state of the gallery, the slider for the error rate, and the event that announces changes.
import { at, count, make, percent, rate, sentence } from "./dom.js";
import { json } from "./api.js";

const USUAL = 0.05; // the default error rate of the service; the page never chooses a higher one by itself
export const gallery = { calibrated: false, writable: false, promises: [] };

let asked = 0; // how often the state was asked for
let shown = 0; // which of these requests is shown

/** Read the state again and show it in the header and at the slider, unless the answer to a later request is there. */
export async function readGallery() {
  const mine = ++asked;
  const state = await json("api/gallery");
  if (mine < shown) return;
  shown = mine;
  const before = maxError();
  Object.assign(gallery, state);
  const parts = [
    count(gallery.items, "image"),
    gallery.labelled === 0 ? "no labels" : gallery.labelled < gallery.items ? `${gallery.labelled.toLocaleString("en")} labelled` : "",
    gallery.classes ? count(gallery.classes, "class", "classes") : "",
    gallery.calibrated ? "calibrated" : "not calibrated",
    gallery.writable ? "" : "read-only",
  ];
  at("gallery").textContent = parts.filter(Boolean).join(" · ");
  at("name").textContent = gallery.name;
  document.title = `${gallery.name} · image search`;
  at("wish").hidden = !gallery.calibrated || gallery.promises.length === 0;
  at("uncalibrated").hidden = gallery.calibrated;
  at("rerank-choice").hidden = !gallery.rerankers?.length;
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

/** Whether uncertainty may be shown: only where the calibration found that it says something about this gallery. */
export const uncertaintyCounts = () => gallery.level_speaks === true;

/** A line of the service about what no longer holds, without the word for what does. */
export const withoutPromise = (words) => words.replace(/(:|, so)? nothing is promised.*$/, "");

/** Take over from a reply in the usual order, asked with an error rate, whether promises hold: it is the latest news. */
export function followReply({ promised, notes }, wished) {
  if (!gallery.promises.find(({ max_error }) => max_error === wished)?.possible) return; // it says nothing about others
  const why = notes.find((note) => withoutPromise(note) !== note);
  gallery.drift = promised ? "" : why || gallery.drift || "the latest answer came without one";
  showPromise();
}

/** The chosen re-ranker; null if there is none, or if the results keep their order. */
export const reranker = () => (!at("rerank-choice").hidden && at("rerank").checked ? gallery.rerankers[0] : null);

const promise = () => gallery.promises[Number(at("max-error").value)];

/** The chosen error rate; null if none can be chosen. */
export const maxError = () => (at("wish").hidden ? null : promise().max_error);

/** Set the slider: where it was before, else to the default, else to the highest rate below it. */
function placeSlider(before) {
  const rates = gallery.promises.map(({ max_error }) => max_error);
  const wanted = rates.includes(before) ? before : Math.max(...rates.filter((each) => each <= USUAL));
  at("max-error").max = rates.length - 1;
  at("max-error").value = Math.max(rates.indexOf(wanted), 0);
  showPromise();
}

/** Describe the chosen error rate. */
export function showPromise() {
  const { max_error, possible } = promise();
  const wish = `at most ${rate(max_error)}`;
  const reranked = reranker() !== null;
  const holds = possible && !gallery.drift && !reranked;
  at("wished").textContent = wish;
  at("max-error").setAttribute("aria-valuetext", holds ? wish : `${wish}, without a guarantee here`);
  at("promise").classList.toggle("refused", !holds);
  at("promise").textContent = reranked ? RERANKED : gallery.drift ? voided() : possible ? promised(promise()) : refused(promise());
  showOpenSet();
}

const RERANKED = "No error rate holds for images that are compared part by part: the calibration is that of the usual order.";

/** Why nothing holds, and the command that the service names for it. */
function voided() {
  const command = gallery.drift.match(/idml calibrate --unknown/)?.[0] ?? "idml calibrate again";
  return `No error rate holds here now: ${sentence(withoutPromise(gallery.drift), { capital: false })} To mend this, run ${command}.`;
}

/** What holds. Promises that rest on few classes are approximate; a small growth of the gallery is covered. */
function promised({ confidence, coverage, approximate }) {
  const counted = gallery.labelled === gallery.items ? "classes" : "pictures";
  const about = approximate ? ` approximately (few ${counted} were counted)` : "";
  const words = [
    `Promised${about}, with ${percent(confidence)} confidence, ${condition()}.`,
    `About ${percent(coverage)} of queries get a match; the others get “unsure” or “not in the collection”.`,
    gallery.growth ? sentence(gallery.growth) : "",
  ];
  return words.filter(Boolean).join(" ");
}

/** The queries for which the promise holds. */
const condition = () =>
  gallery.unknown_share >= 0.01
    ? `where no more than about ${percent(gallery.unknown_share)} of queries show what is not in the collection`
    : "where all queries show what is in the collection";

/** Why a rate cannot be promised, in the words of the service, and the smallest that can. */
function refused({ reason }) {
  const least = gallery.promises.find(({ possible }) => possible);
  const hint = least ? ` On the slider, ${rate(least.max_error)} is the smallest rate that can be promised.` : "";
  return `${sentence(reason)} Nothing is called a match.${hint}`;
}

/** The two figures of “not in the collection”. */
function showOpenSet() {
  const facts = { "unknown images recognised": gallery.recognised, "known images wrongly rejected": gallery.rejected };
  const shown = Object.entries(facts).filter(([, share]) => typeof share === "number");
  at("open-set").hidden = shown.length === 0 || Boolean(gallery.drift) || reranker() !== null;
  at("open-set").replaceChildren(
    ...shown.map(([words, share]) => make("div", {}, make("dt", {}, words), make("dd", {}, percent(share)))),
  );
}
