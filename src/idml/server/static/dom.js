// Building the page: text always goes in as text, so nothing the service sends can become markup.

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

/** One of the icons drawn in index.html; the words beside it say the same. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A share in words; never rounded up to certainty or down to impossibility. */
export function percent(share) {
  if (share > 0.99 && share < 1) return "over 99\u00a0%";
  if (share > 0 && share < 0.01) return "under 1\u00a0%";
  return `${Math.round(100 * share)}\u00a0%`;
}

/** A wished error rate, which may have decimals. */
export const rate = (share) => `${Number((100 * share).toPrecision(3))}\u00a0%`;

export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

/** Tell the user, in the line for errors or the line for what was done; the other one is emptied. */
function tell(line, other, words) {
  at(other).textContent = "";
  at(line).textContent = words;
}
export const say = (words) => tell("said", "error", words);
export const complain = (problem) => {
  if (problem.name !== "AbortError") tell("error", "said", problem.message);
};

/** An event handler whose failure is told to the user. */
export const telling = (action) => (event) => action(event)?.catch(complain);

/** Words of the service as a sentence. */
export function sentence(words, { capital = true } = {}) {
  const text = words?.trim() ?? "";
  const first = capital ? text.charAt(0).toUpperCase() : text.charAt(0);
  return text && first + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** Short enough for a tile, long enough to be compared. */
export const number = (x) => (x === null || x === undefined ? "–" : x.toFixed(3));
