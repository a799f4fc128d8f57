// The points of the map: position, colour and shape, the camera, and which point is near.

const SHAPES = ["circle", "square", "triangle", "diamond"]; // in addition to colour
const MARGIN = 14;
const SCALES = {
  light: [[44, 116, 179], [122, 63, 160], [138, 15, 31]],
  dark: [[127, 184, 230], [211, 164, 240], [255, 179, 107]],
}; // from certain to uncertain; all of them contrast with the background
export const dark = matchMedia("(prefers-color-scheme: dark)");

/** The colour and shape of the i-th class; -1 is "no label". The golden angle gives neighbouring classes different colours. */
export function classLook(i) {
  if (i < 0) return { fill: dark.matches ? "#9aa3ad" : "#6b737c", shape: "circle" };
  return { fill: `hsl(${(i * 137.508) % 360} 65% ${dark.matches ? 68 : 33}%)`, shape: SHAPES[i % SHAPES.length] };
}

/** The colour of a share from 0, certain, to 1, uncertain. */
export function scaleColour(share) {
  const scale = SCALES[dark.matches ? "dark" : "light"];
  const place = share * (scale.length - 1);
  const i = Math.min(Math.floor(place), scale.length - 2);
  const mixed = scale[i].map((from, c) => Math.round(from + (place - i) * (scale[i + 1][c] - from)));
  return `rgb(${mixed.join(" ")})`;
}

/** For each point, the share of points with a lower level: ranks are robust to a few extreme levels. */
export function ranks(levels) {
  const sorted = [...levels].sort((a, b) => a - b);
  const last = Math.max(sorted.length - 1, 1);
  const place = new Map();
  sorted.forEach((level, i) => place.has(level) || place.set(level, i / last));
  return levels.map((level) => place.get(level));
}

/** Compute the position of every point on the canvas, with one scale for both directions; the camera zooms and moves. */
export function place(points, width, height, { zoom, dx, dy }) {
  const span = (key) => points.reduce(([a, b], p) => [Math.min(a, p[key]), Math.max(b, p[key])], [Infinity, -Infinity]);
  const [left, right] = span("x");
  const [low, high] = span("y");
  const scale = zoom * Math.min((width - 2 * MARGIN) / (right - left || 1), (height - 2 * MARGIN) / (high - low || 1));
  for (const p of points) {
    p.left = width / 2 + dx + scale * (p.x - (left + right) / 2);
    p.top = height / 2 + dy - scale * (p.y - (low + high) / 2);
  }
}

/** The camera after zooming by a factor, with the given place of the canvas held still; from 1, everything, to 40. */
export function zoomed({ zoom, dx, dy }, factor, left, top, width, height) {
  const next = Math.min(Math.max(zoom * factor, 1), 40);
  const by = next / zoom;
  const [x, y] = [left - width / 2, top - height / 2];
  return bounded({ zoom: next, dx: x - (x - dx) * by, dy: y - (y - dy) * by }, width, height);
}

/** The camera, moved back where it would show nothing. */
export function bounded({ zoom, dx, dy }, width, height) {
  const limit = (value, side) => Math.min(Math.max(value, -(zoom - 1) * (side / 2)), (zoom - 1) * (side / 2));
  return { zoom, dx: limit(dx, width), dy: limit(dy, height) };
}

/** Draw one shape. */
export function drawShape(context, { fill, shape }, left, top, radius) {
  context.fillStyle = fill;
  context.beginPath();
  if (shape === "square") context.rect(left - radius, top - radius, 2 * radius, 2 * radius);
  else if (shape === "circle") context.arc(left, top, radius * 1.1, 0, 2 * Math.PI);
  else {
    const corners = shape === "triangle" ? [[0, -1.3], [1.2, 1], [-1.2, 1]] : [[0, -1.4], [1.4, 0], [0, 1.4], [-1.4, 0]];
    for (const [dx, dy] of corners) context.lineTo(left + dx * radius, top + dy * radius);
  }
  context.fill();
}

/** The nearest point within reach of a position. */
export function nearest(points, left, top, reach = Infinity) {
  let best = null;
  let least = reach;
  for (const p of points) {
    const far = Math.hypot(p.left - left, p.top - top);
    if (far < least) [best, least] = [p, far];
  }
  return best;
}

/** The nearest point within 45 degrees of a direction; the same point if there is none. */
export function next(points, from, [right, down]) {
  let best = from;
  let least = Infinity;
  for (const p of points) {
    const along = (p.left - from.left) * right + (p.top - from.top) * down;
    const across = Math.abs((p.left - from.left) * down - (p.top - from.top) * right);
    if (along > 0 && across <= along && along + across < least) [best, least] = [p, along + across];
  }
  return best;
}
