// Shows the answer to a query and the images that were found.
import { at, count, icon, make, number, percent, sentence } from "./dom.js";
import { gallery } from "./gallery.js";
import { smallTile, tile } from "./items.js";

const STATES = {
  match: { words: "Match", look: "match" },
  unsure: { words: "Unsure", look: "unsure" },
  "not in the collection": { words: "Not in the collection", look: "novel" },
};

/** Show that a search is running; keep the old answer if it is for the same image. */
export function showWaiting(sameImage) {
  at("answer").setAttribute("aria-busy", "true");
  if (sameImage) return;
  at("answer").replaceChildren(make("p", { className: "waiting" }, "Looking…"));
  at("results").hidden = true;
}

/** Remove the answer after an error. */
export function showNothing() {
  at("answer").removeAttribute("aria-busy");
  at("answer").replaceChildren();
  at("results").hidden = true;
}

/** Show a reply of /api/search. */
export function showReply(reply) {
  const { words, look } = STATES[reply.state];
  const label = reply.state === "match" ? (reply.results[0]?.label ?? null) : null;
  const verdict = make("h3", { className: "verdict" }, words);
  if (label !== null) verdict.append(": ", make("bdi", {}, label));
  const body = make("div", {}, verdict, make("p", { className: "reason" }, sentence(reply.reason)), ...chances(reply));
  const notes = reply.notes.filter((note) => note !== gallery.drift); // shown next to the slider instead
  for (const note of notes) body.append(make("p", { className: "note" }, sentence(note)));
  body.append(numbers(reply));
  at("answer").removeAttribute("aria-busy");
  at("answer").replaceChildren(make("div", { className: `answer ${look}` }, icon(look), body));
  const reading = at("found").contains(document.activeElement);
  at("found").replaceChildren(...reply.results.map(found));
  at("results").hidden = reply.results.length === 0;
  if (reading && !at("results").hidden) at("results-title").focus(); // the focused element no longer exists
}

/** The numbers behind the answer, as sentences. For “not in the collection”, how unusual the query is comes first. */
function chances({ state, calibrated, probability, novelty }) {
  const line = (...words) => make("p", { className: "chance" }, ...words);
  if (!calibrated || probability === null) return [line("A guess: without a calibration there is no probability.")];
  const rejected = state === "not in the collection" && novelty !== null;
  const after = ` probability that the first result is right${rejected ? " anyway" : ""}`;
  const right = line(make("strong", {}, percent(probability)), after);
  if (!rejected) return [right];
  return [line(make("strong", {}, percent(novelty)), " of images that belong here are as unusual as yours"), right];
}

/** Further numbers, in a closed section. */
function numbers({ novelty, level, took_ms }) {
  const facts = {
    "Usual for the collection (p-value)": number(novelty),
    "Uncertainty of your image": number(level),
    "Answered in": `${Math.round(took_ms)} ms`,
  };
  const list = make("dl", {});
  for (const [term, fact] of Object.entries(facts)) list.append(make("dt", {}, term), make("dd", {}, fact));
  return make("details", {}, make("summary", {}, "In numbers"), list);
}

/** One result with its near duplicates. */
function found(result) {
  const facts = [`distance ${number(result.distance)}`];
  if (result.probability !== null) facts.unshift(`${percent(result.probability)} likely`);
  const button = tile(result, ...facts);
  if (result.probability !== null) {
    const bar = make("span", { className: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", result.probability);
    button.querySelector(".fact").after(bar);
  }
  return make("li", {}, button, result.duplicates.length ? duplicates(result.duplicates) : null);
}

function duplicates(ids) {
  const tiles = ids.map((id, i) => smallTile(id, `Near duplicate ${i + 1} of ${ids.length}`));
  const words = `+${count(ids.length, "near duplicate")}`;
  return make("details", {}, make("summary", {}, words), make("div", { className: "duplicates" }, ...tiles));
}
