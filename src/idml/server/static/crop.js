// Chooses a part of a picture with a frame that is dragged or moved with the keyboard. Only the part is sent.
import { at, say } from "./dom.js";
import { answered } from "./dialogs.js";

const LEAST = 0.05; // of the picture's width and height
const STEP = 0.02; // of a key press
const MOST = 16e6; // pixels of the part; more are scaled down
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const stage = at("crop-stage");
const box = at("crop-box");
let frame = null; // left, top, right, bottom as shares of the picture
let drag = null; // what is dragged (an edge, or "all"), and where it began

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/** Ask for a part; the part or the whole as a file, null if cancelled. */
export async function cropped(file) {
  const image = at("crop-image");
  const url = URL.createObjectURL(file);
  try {
    image.src = url;
    await image.decode();
  } catch {
    URL.revokeObjectURL(url);
    say("This browser cannot show this kind of file, so the whole picture is searched.");
    return file;
  }
  set([0.15, 0.15, 0.85, 0.85]);
  const button = await answered(at("crop-dialog"));
  const part = button === "part" ? await cut(image, file) : null;
  URL.revokeObjectURL(url);
  return button === "whole" ? file : part;
}

/** The framed pixels as a file of their own. */
function cut(image, { name, type }) {
  const [left, top, right, bottom] = frame;
  const { naturalWidth: width, naturalHeight: height } = image;
  const size = [Math.max(1, Math.round((right - left) * width)), Math.max(1, Math.round((bottom - top) * height))];
  const scale = Math.min(1, Math.sqrt(MOST / (size[0] * size[1])));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(scale * size[0]));
  canvas.height = Math.max(1, Math.round(scale * size[1]));
  const from = [Math.round(left * width), Math.round(top * height), ...size];
  canvas.getContext("2d").drawImage(image, ...from, 0, 0, canvas.width, canvas.height);
  const kind = type === "image/jpeg" ? type : "image/png";
  return new Promise((resolve) => canvas.toBlob((blob) => resolve(new File([blob], name, { type: kind })), kind, 0.95));
}

function set(next) {
  frame = next;
  ["left", "top", "right", "bottom"].forEach((side, i) => {
    box.style[side] = `${100 * (i < 2 ? frame[i] : 1 - frame[i])}%`;
  });
  const [left, top, right, bottom] = frame.map((share) => Math.round(100 * share));
  at("crop-size").textContent = `The part is ${right - left} % of the width and ${bottom - top} % of the height, from ${left} % left and ${top} % top.`;
}

/** Move the whole frame, within the picture. */
function move([left, top, right, bottom], dx, dy) {
  const [x, y] = [clamp(dx, -left, 1 - right), clamp(dy, -top, 1 - bottom)];
  set([left + x, top + y, right + x, bottom + y]);
}

/** Move one corner; the opposite one stays. */
function stretch([left, top, right, bottom], corner, dx, dy) {
  set([
    corner.includes("w") ? clamp(left + dx, 0, right - LEAST) : left,
    corner.includes("n") ? clamp(top + dy, 0, bottom - LEAST) : top,
    corner.includes("e") ? clamp(right + dx, left + LEAST, 1) : right,
    corner.includes("s") ? clamp(bottom + dy, top + LEAST, 1) : bottom,
  ]);
}

function place({ clientX, clientY }) {
  const { left, top, width, height } = stage.getBoundingClientRect();
  return [clamp((clientX - left) / width, 0, 1), clamp((clientY - top) / height, 0, 1)];
}

stage.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  event.preventDefault();
  const [x, y] = place(event);
  const [left, top] = [Math.min(x, 1 - LEAST), Math.min(y, 1 - LEAST)];
  drag = box.contains(event.target)
    ? { corner: event.target.dataset.edge ?? "all", x, y, from: frame }
    : { corner: "se", x, y, from: [left, top, left, top] }; // a new frame begins where the picture is touched
  stage.setPointerCapture(event.pointerId);
  box.focus();
});
stage.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const [x, y] = place(event);
  if (drag.corner === "all") move(drag.from, x - drag.x, y - drag.y);
  else stretch(drag.from, drag.corner, x - drag.x, y - drag.y);
});
for (const end of ["pointerup", "pointercancel"]) stage.addEventListener(end, () => (drag = null));
box.addEventListener("keydown", (event) => {
  if (event.key === "Enter") at("crop-dialog").close("part");
  const direction = MOVES[event.key];
  if (!direction) return;
  event.preventDefault();
  const [dx, dy] = direction.map((each) => each * STEP);
  if (event.shiftKey) stretch(frame, "se", dx, dy);
  else move(frame, dx, dy);
});
