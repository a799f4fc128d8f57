// Shows the answer to a query and the images that were found.
import { at, count, icon, make, number, percent, sentence } from "./dom.js";
import { gallery, uncertaintyCounts, withoutPromise } from "./gallery.js";
import { smallTile, tile } from "./items.js";

const STATES = {
  match: { words: "Match", look: "match" },
  unsure: { words: "Unsure", look: "unsure" },
  "not in the collection": { words: "Not in the collection", look: "novel" },
};
let shown = []; // the results: their label and list entry
let chosen; // the label that the list is limited to; undefined: all

/** Show that a search is running; keep the old answer if it is for the same image. */
export function showWaiting(sameImage) {
  at("answer").setAttribute("aria-busy", "true");
  if (sameImage) return;
  at("answer").replaceChildren(make("p", { className: "waiting card" }, "Looking…"));
  at("results").hidden = true;
  chosen = undefined;
}

/** Remove the answer after an error. */
export function showNothing() {
  at("answer").removeAttribute("aria-busy");
  at("answer").replaceChildren();
  at("results").hidden = true;
}

/** Show a reply of /api/search; re-ranked or in the usual order. */
export function showReply(reply, reranked) {
  const { words, look } = STATES[reply.state];
  const label = reply.state === "match" ? (reply.results[0]?.label ?? null) : null;
  const verdict = make("h3", { className: "verdict" }, words);
  if (label !== null) verdict.append(": ", make("bdi", {}, label));
  const body = make("div", {}, verdict, make("p", { className: "reason" }, sentence(reply.reason)), ...chances(reply, reranked));
  for (const note of reply.notes.filter(isNews)) body.append(make("p", { className: "note" }, sentence(withoutPromise(note))));
  body.append(numbers(reply));
  at("answer").removeAttribute("aria-busy");
  at("answer").replaceChildren(make("div", { className: `answer ${look}` }, icon(look), body));
  const reading = at("found").contains(document.activeElement);
  shown = reply.results.map((result) => ({ label: result.label, entry: found(result) }));
  at("found").replaceChildren(...shown.map(({ entry }) => entry));
  at("results").hidden = reply.results.length === 0;
  showLabels();
  if (reading && !at("results").hidden) at("results-title").focus(); // the focused element no longer exists
}

/** Whether a note says more than the page shows next to the slider anyway. */
const isNews = (note) => ![gallery.drift, gallery.growth].includes(note) && !note.startsWith("not calibrated");

/** The numbers behind the answer, as sentences. For “not in the collection”, how unusual the query is comes first. */
function chances({ state, calibrated, probability, novelty }, reranked) {
  const line = (...words) => make("p", { className: "chance" }, ...words);
  if (reranked) return [line("A guess: images that are compared part by part have no probability.")];
  if (!calibrated || probability === null) return [line("A guess: without a calibration there is no probability.")];
  const rejected = state === "not in the collection" && novelty !== null;
  const after = ` probability that the first result is right${rejected ? " anyway" : ""}`;
  const right = line(make("strong", {}, percent(probability)), after);
  if (!rejected) return [right];
  return [line(make("strong", {}, percent(novelty)), " of images that belong here are as unusual as yours"), right];
}

/** Further numbers, in a closed section. */
function numbers({ novelty, level, took_ms, results }) {
  const facts = {
    "Images that belong here and are as unusual": novelty === null ? "–" : percent(novelty),
    "Distance to the first result": number(results[0]?.distance),
    ...(uncertaintyCounts() && { "Uncertainty of your image": number(level) }),
    "Answered in": `${Math.round(took_ms)} ms`,
  };
  const list = make("dl", { className: "numbers" });
  for (const [term, fact] of Object.entries(facts)) list.append(make("div", {}, make("dt", {}, term), make("dd", {}, fact)));
  return make("details", {}, make("summary", {}, "In numbers"), list);
}

/** Buttons that limit the list to the results with one label. */
function showLabels() {
  const counts = new Map();
  for (const { label } of shown) counts.set(label, (counts.get(label) ?? 0) + 1);
  if (!counts.has(chosen)) chosen = undefined;
  const group = at("found-labels");
  group.hidden = counts.size < 2;
  group.replaceChildren(chip("All", shown.length), ...[...counts].map(([label, n]) => chip(label ?? "no label", n, label)));
  filter(chosen);
}

function chip(words, n, label) {
  const button = make("button", { type: "button", className: "chip" }, make("bdi", {}, words));
  button.append(make("span", { className: "count" }, ` ${n}`));
  button.addEventListener("click", () => filter(label));
  button.showsLabel = label;
  return button;
}

function filter(label) {
  chosen = label;
  for (const each of shown) each.entry.hidden = label !== undefined && each.label !== label;
  for (const button of at("found-labels").children) button.setAttribute("aria-pressed", button.showsLabel === label);
}

/** One result with its near duplicates. */
function found(result) {
  const facts = [`distance ${number(result.distance)}`];
  if (result.probability !== null) facts.unshift(`${percent(result.probability)} likely`);
  const item = tile(result, ...facts);
  if (result.probability !== null) {
    const bar = make("span", { className: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", result.probability);
    item.querySelector(".fact").after(bar);
  }
  return make("li", {}, item, result.duplicates.length ? duplicates(result.duplicates) : null);
}

function duplicates(ids) {
  const tiles = ids.map((id, i) => smallTile(id, `Near duplicate ${i + 1} of ${ids.length}`));
  const words = `+${count(ids.length, "near duplicate")}`;
  return make("details", {}, make("summary", {}, words), make("div", { className: "duplicates" }, ...tiles));
}
