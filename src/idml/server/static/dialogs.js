// Questions that wait for an answer: a confirmation, the API key, the part of a picture.
import { at } from "./dom.js";

/** Show a dialog and wait; return the value of the button that closed it, "" for Escape. */
export function answered(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
    dialog.showModal();
  });
}

/** Ask for confirmation. Enter never confirms a dangerous action. */
export async function confirmed(question, action, { danger = false } = {}) {
  const yes = at("confirm-yes");
  at("confirm-words").textContent = question;
  yes.textContent = action;
  yes.classList.toggle("danger", danger);
  at("confirm-no").autofocus = danger;
  yes.autofocus = !danger;
  return (await answered(at("confirm-dialog"))) === "yes";
}

/** Ask for the key; "" means forget the present one, null means cancelled. */
export async function enteredKey(words, { known }) {
  at("key-words").textContent = words;
  at("key-forget").hidden = !known;
  at("key").value = "";
  const button = await answered(at("key-dialog"));
  const key = at("key").value;
  at("key").value = "";
  return button === "yes" ? key : button === "forget" ? "" : null;
}
