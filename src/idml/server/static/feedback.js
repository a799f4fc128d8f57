// “Was this right?”: judgements about the first result, which the next calibration uses; listed and deletable.
// The service keeps them if /api/gallery has their number as "feedback".
import { at, count, make, say, telling } from "./dom.js";
import { call, json } from "./api.js";
import { gallery, readGallery } from "./gallery.js";

let judged = null; // the present answer: the file of its query and the id of its first result

/** Offer to judge the answer to a file, or to nothing. */
export function offerJudgement(file, results) {
  judged = { file, result: results[0]?.id };
  enable(true);
  at("judge").hidden = !file || !results.length || !gallery.writable || !gallery.labelled || typeof gallery.feedback !== "number";
  at("judge-wrong").hidden = true;
  at("judge-label").value = "";
  showCount();
}

function showCount() {
  at("judge-list").hidden = !gallery.feedback;
  at("judge-list").textContent = count(gallery.feedback ?? 0, "judgement") + " kept";
}

function enable(on) {
  for (const button of at("judge").querySelectorAll("button:not(#judge-list)")) button.disabled = !on;
}

async function judge(verdict) {
  const mine = judged;
  const body = new FormData();
  const label = at("judge-label").value.trim();
  body.append("image", mine.file, mine.file.name || "image");
  body.append("verdict", verdict);
  body.append("result", mine.result);
  if (verdict === "wrong" && label) body.append("label", label);
  enable(false);
  try {
    await call("api/feedback", { method: "POST", body });
    await readGallery();
    if (mine === judged) offerJudgement(null, []); // once for each answer
    else showCount();
    say(`Thank you. ${use(verdict, label)}`);
  } finally {
    if (mine === judged) enable(true); // it failed; a newer answer has its own buttons
  }
}

/** What becomes of a judgement: a calibration uses it if it knows the right label, and labels are all there. */
function use(verdict, label) {
  if (gallery.labelled < gallery.items) return "It is kept; idml calibrate uses it when every image has a label.";
  if (verdict === "wrong" && !label) return "It is kept, but idml calibrate cannot use it without the right label.";
  return "The next idml calibrate uses it.";
}

async function list() {
  const { feedback } = await json("api/feedback");
  at("feedback-list").replaceChildren(...feedback.map(entry));
  if (!at("feedback-dialog").open) at("feedback-dialog").showModal();
}

function entry({ id, query, right, found, label }) {
  const shows = right || label === null ? "" : `, it shows “${label}”`;
  const words = `${query}: ${found === null ? "the first result" : `“${found}”`} is ${right ? "right" : "wrong"}${shows}`;
  const button = make("button", { type: "button", className: "danger" }, "Delete");
  button.setAttribute("aria-label", `Delete: ${words}`);
  button.addEventListener("click", telling(async () => {
    await call(`api/feedback/${encodeURIComponent(id)}`, { method: "DELETE" });
    await readGallery();
    showCount();
    await list();
    at("feedback-title").focus();
  }));
  return make("li", {}, make("bdi", {}, words), button);
}

at("judge-yes").addEventListener("click", telling(() => judge("right")));
at("judge-no").addEventListener("click", () => {
  at("judge-wrong").hidden = false;
  at("judge-label").focus();
});
at("judge").addEventListener("submit", telling((event) => {
  event.preventDefault();
  return judge("wrong");
}));
at("judge-list").addEventListener("click", telling(list));
