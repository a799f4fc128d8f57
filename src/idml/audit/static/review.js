"use strict";
// Shows one image at a time. Text from the data set is set as textContent or attribute, never as HTML.
const KINDS = {
  all: "all",
  mislabelled: "likely mislabelled",
  duplicate: "duplicates",
  ambiguous: "ambiguous",
};
const TITLES = {mislabelled: "Likely mislabelled", duplicate: "Duplicate", ambiguous: "Ambiguous"};
const DONE = {keep: "Kept", relabel: "Relabelled", exclude: "Excluded", undo: "Undone"};
const at = (id) => document.getElementById(id);
const state = {item: null, busy: false, filtered: false, made: []};

async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body),
  };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The review no longer responds. Is the command still running?");
  }
  const reply = await answer.json().catch(() => ({error: `HTTP ${answer.status}`}));
  if (!answer.ok) throw new Error(reply.error);
  return reply;
}

// Runs one action at a time, so that a key held down decides only once. A filter chosen meanwhile is applied after the
// action.
async function act(action) {
  if (state.busy) return;
  state.busy = true;
  at("alert").textContent = "";
  const showError = (error) => { at("alert").textContent = error.message; };
  await action().catch(showError);
  while (state.filtered) {
    state.filtered = false;
    await next().catch(showError);
  }
  state.busy = false;
}

function filter() {
  state.filtered = true;
  return act(async () => {});
}

function showProgress(progress) {
  for (const [kind, words] of Object.entries(KINDS)) {
    const counts = progress[kind];
    at(`count-${kind}`).textContent = `${words} (${counts.open} of ${counts.total} open)`;
  }
  const {open, total} = progress[at("kind").value];
  at("bar").max = Math.max(total, 1);
  at("bar").value = total - open;
  at("progress").textContent = `${total - open} of ${total} decided`;
}

function verdict(item) {
  if (!item.decision) return "";
  const {decision, new_label: label, time} = item.decision;
  return `${DONE[decision]}${label ? ` to ${label}` : ""} on ${time.slice(0, 10)}.`;
}

// The split of an image, unless all images are in one.
const named = (split, before, after = "") => (split === "all" ? "" : `${before}${split}${after}`);

function partner(found) {
  const entry = document.createElement("li");
  const figure = document.createElement("figure");
  const image = document.createElement("img");
  const caption = document.createElement("figcaption");
  image.src = `/api/thumbnails/${found.number}`;
  image.alt = `${found.image}, ${found.label}`;
  caption.textContent = `${found.label}${named(found.split, " (", ")")}, distance ${found.distance.toFixed(3)}`;
  caption.title = found.image;
  figure.append(image, caption);
  entry.append(figure);
  return entry;
}

// The images that support the finding, under a heading for each group.
function partners(item) {
  const groups = item.kind !== "mislabelled"
    ? [[item.kind === "duplicate" ? "Its duplicates" : "Its nearest images", item.partners]]
    : [[`Nearest images of ${item.suggested} (suggested)`, item.partners.filter((found) => found.label === item.suggested)],
       [`Nearest images of ${item.label} (its label)`, item.partners.filter((found) => found.label !== item.suggested)]];
  return groups.map(([words, members]) => {
    const group = document.createElement("section");
    const title = document.createElement("h3");
    const list = document.createElement("ul");
    title.textContent = words;
    list.append(...members.map(partner));
    group.append(title, list);
    return group;
  });
}

function show(reply) {
  const item = state.item = reply.item;
  showProgress(reply.progress);
  at("item").hidden = !item;
  at("done").hidden = Boolean(item);
  if (!item) {
    at("done").focus({preventScroll: true});
    return;
  }
  at("title").textContent = `${TITLES[item.kind]}, number ${item.rank}: ${item.label}`;
  at("why").textContent = `${item.why.charAt(0).toUpperCase()}${item.why.slice(1)}.`;
  at("verdict").textContent = verdict(item);
  at("image").src = `/api/images/${item.number}`;
  at("image").alt = `${item.image}, labelled ${item.label}`;
  at("caption").textContent = `${item.image}: labelled ${item.label}${named(item.split, ", in ")}, score ${item.score.toFixed(3)}`;
  at("partners").replaceChildren(...partners(item));
  at("label").value = item.suggested;
  at("title").focus({preventScroll: true});
}

async function next(after) {
  const query = new URLSearchParams({kind: at("kind").value, decided: at("decided").checked});
  if (after !== undefined) query.set("after", after);
  show(await ask(`/api/next?${query}`));
}

function decide(decision) {
  return act(async () => {
    const item = state.item;
    if (!item) return;
    const body = {item: item.id, decision};
    if (decision === "relabel") {
      body.label = at("label").value.trim();
      if (!body.label) {
        at("label").focus();
        at("status").textContent = "Type the new label, then press Enter.";
        return;
      }
    }
    const reply = await ask("/api/decisions", body);
    state.made.push(item.id);
    const to = decision === "relabel" ? ` to ${body.label}` : "";
    try {
      await next(item.id);
    } finally {
      at("status").textContent = `${DONE[decision]}: ${reply.item.image}${to}.`;
    }
  });
}

function undo() {
  return act(async () => {
    if (!state.made.length) {
      at("status").textContent = "There is nothing to undo in this tab.";
      return;
    }
    const reply = await ask("/api/decisions", {item: state.made.at(-1), decision: "undo"});
    state.made.pop();
    show(reply);
    at("status").textContent = `Undone: ${reply.item.image} is open again.`;
  });
}

function skip() {
  return act(async () => {
    if (!state.item) return;
    await next(state.item.id);
    at("status").textContent = "Skipped.";
  });
}

function clean() {
  return act(async () => {
    const reply = await ask("/api/cleaned", {});
    const counts = `${reply.images} images, ${reply.relabelled} relabelled, ${reply.excluded} excluded`;
    at("status").textContent = [`Written: ${reply.path} (${counts}).`, ...reply.notes].join(" ");
  });
}

let asked = 0;
async function complete() {
  const mine = ++asked;
  const found = await ask(`/api/labels?${new URLSearchParams({text: at("label").value})}`).catch(() => null);
  if (!found || mine !== asked) return;
  at("labels").replaceChildren(...found.labels.map((label) => {
    const option = document.createElement("option");
    option.value = label;
    return option;
  }));
}

function filters() {
  at("kind").replaceChildren(...Object.keys(KINDS).map((kind) => {
    const option = document.createElement("option");
    option.value = kind;
    option.id = `count-${kind}`;
    return option;
  }));
  at("kind").addEventListener("change", filter);
}

function key(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.repeat) return;
  if (event.target === at("label")) {
    if (event.key === "Escape") at("title").focus();
    return;
  }
  if (event.target === at("kind")) return;  // letters select an option there
  if (!at("keys").checked) return;  // for dictation and screen readers that use such keys
  const actions = {
    k: () => decide("keep"), r: () => decide("relabel"), d: () => decide("exclude"), s: skip, u: undo,
  };
  const action = actions[event.key.toLowerCase()];
  if (!action) return;
  event.preventDefault();
  action();
}

at("keep").addEventListener("click", () => decide("keep"));
at("exclude").addEventListener("click", () => decide("exclude"));
at("skip").addEventListener("click", skip);
at("undo").addEventListener("click", undo);
at("clean").addEventListener("click", clean);
at("decided").addEventListener("change", filter);
at("label").addEventListener("input", complete);
at("image").addEventListener("error", () => { at("status").textContent = "The image cannot be shown."; });
at("actions").addEventListener("submit", (event) => {
  event.preventDefault();
  decide("relabel");
});
document.addEventListener("keydown", key);
filters();
act(async () => {
  const about = await ask("/api/review");
  at("about").textContent = about.about;
  await next();
});
