// Questions that wait for an answer: a confirmation, the API key.
import { at } from "./dom.js";

/** Show a dialog and wait; the value of the button that closed it, "" for Escape. */
function answered(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
    dialog.showModal();
  });
}

/** Whether the user says yes. A dangerous action is not what Enter does. */
export async function confirmed(question, action, { danger = false } = {}) {
  const yes = at("confirm-yes");
  at("confirm-words").textContent = question;
  yes.textContent = action;
  yes.classList.toggle("danger", danger);
  at("confirm-no").autofocus = danger;
  yes.autofocus = !danger;
  return (await answered(at("confirm-dialog"))) === "yes";
}

/** The key that the user enters; "" to forget the present one; null if the question was turned down. */
export async function enteredKey(words, { known }) {
  at("key-words").textContent = words;
  at("key-forget").hidden = !known;
  at("key").value = "";
  const button = await answered(at("key-dialog"));
  const key = at("key").value;
  at("key").value = "";
  return button === "yes" ? key : button === "forget" ? "" : null;
}
