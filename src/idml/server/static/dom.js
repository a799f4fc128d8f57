// Builds the page. Text is always inserted as text, so nothing from the service can become markup.

export const at = (id) => document.getElementById(id);

/** A new element with these properties (or attributes, where it has no such property) and children. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** One of the icons in index.html; the text beside it has the same meaning. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A share in per cent; never rounded to 0 or 100. */
export function percent(share) {
  if (share > 0.99 && share < 1) return "over 99\u00a0%";
  if (share > 0 && share < 0.01) return "under 1\u00a0%";
  return `${Math.round(100 * share)}\u00a0%`;
}

/** An error rate, which may have decimals. */
export const rate = (share) => `${Number((100 * share).toPrecision(3))}\u00a0%`;

export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

/** Show a message in the line for errors or in the line for results, and clear the other line. */
function tell(line, other, words) {
  at(other).textContent = "";
  at(line).textContent = words;
}
export const say = (words) => tell("said", "error", words);
export const complain = (problem) => {
  if (problem.name !== "AbortError") tell("error", "said", problem.message);
};

/** An event handler that shows its errors to the user. */
export const telling = (action) => (event) => action(event)?.catch(complain);

/** A text of the service as a sentence. */
export function sentence(words, { capital = true } = {}) {
  const text = words?.trim() ?? "";
  const first = capital ? text.charAt(0).toUpperCase() : text.charAt(0);
  return text && first + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** A number with few digits. */
export const number = (x) => (x === null || x === undefined ? "–" : x.toFixed(3));
