// Questions that wait for an answer: a confirmation, the API key, the part of a picture.
import { at } from "./dom.js";

const questions = new WeakMap(); // the last question of each dialog

/**
 * Show a dialog and wait; return the value of the button that closed it, "" for Escape.
 *
 * A dialog asks one question after the other: the event of its closing comes a little later than the closing, and must
 * not answer the next question. `prepare` writes the question into the dialog when its turn has come.
 */
export function answered(dialog, prepare = () => {}) {
  const before = questions.get(dialog) ?? Promise.resolve();
  const answer = before.catch(() => {}).then(() => show(dialog, prepare));
  questions.set(dialog, answer);
  return answer;
}

function show(dialog, prepare) {
  return new Promise((resolve) => {
    prepare();
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
    dialog.showModal();
  });
}

/** Ask for confirmation. Enter never confirms a dangerous action. */
export async function confirmed(question, action, { danger = false } = {}) {
  const prepare = () => {
    const yes = at("confirm-yes");
    at("confirm-words").textContent = question;
    yes.textContent = action;
    yes.classList.toggle("danger", danger);
    at("confirm-no").autofocus = danger;
    yes.autofocus = !danger;
  };
  return (await answered(at("confirm-dialog"), prepare)) === "yes";
}

/** Ask for the key; "" means forget the present one, null means cancelled. */
export async function enteredKey(words, { known }) {
  const button = await answered(at("key-dialog"), () => {
    at("key-words").textContent = words;
    at("key-forget").hidden = !known;
    at("key").value = "";
  });
  const key = at("key").value;
  at("key").value = "";
  return button === "yes" ? key : button === "forget" ? "" : null;
}
