// Lines over time, drawn as SVG: colours are the style sheet's, by class.

import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 150, LEFT = 40, RIGHT = 6, TOP = 8, BOTTOM = 20;
const LEAST_SPAN = 60; // seconds

export class Chart {
  // `top`: the least of the axis' upper ends; `format`: how its values are written.
  constructor(parent, title, { bottom = 0, top, format, note }) {
    this.bottom = bottom;
    this.top = top;
    this.format = format;
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("aria-label", title);
    this.legend = element("div", { className: "legend" });
    this.card = element("section", { className: "card chart" }, element("h2", { text: title }), this.svg, this.legend);
    if (note) this.card.append(element("p", { className: "note", text: note }));
    parent.append(this.card);
  }

  // `series`: name, slot (of its colour) and points [seconds, value or null], in the order of time.
  draw(series) {
    const times = series.flatMap(({ points }) => (points.length ? [points[0][0], points.at(-1)[0]] : []));
    const end = times.length ? Math.max(...times) : 0;
    const start = times.length ? Math.min(Math.min(...times), end - LEAST_SPAN) : -LEAST_SPAN;
    const width = Math.max(this.svg.clientWidth, 200);
    const values = series.flatMap(({ points }) => points.map(([, value]) => value ?? this.bottom));
    const top = niceTop(values.reduce((most, value) => Math.max(most, value), this.top), this.top);
    const x = (at) => LEFT + ((at - start) / (end - start)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - this.bottom) / (top - this.bottom)) * (HEIGHT - TOP - BOTTOM);

    const drawn = [];
    for (const share of [0, 0.5, 1]) {
      const value = this.bottom + share * (top - this.bottom);
      drawn.push(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      drawn.push(label(this.format(value), LEFT - 5, y(value) + 4, "end"));
    }
    drawn.push(label(ago(end - start), LEFT, HEIGHT - 5, "start"), label("now", width - RIGHT, HEIGHT - 5, "end"));
    for (const { slot, points } of series) {
      for (const run of runs(points)) {
        // A moment alone would be no line.
        const path = run.length > 1 ? run : [[run[0][0] - 1, run[0][1]], run[0]];
        const at = path.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
        drawn.push(shape("polyline", { class: `series slot-${slot % 8}`, points: at.join(" ") }));
      }
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...drawn);
    this.legend.replaceChildren(
      ...series.map(({ name, slot }) => element("span", { className: `slot-${slot % 8}` }, element("i"), name)),
    );
  }
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  return made;
}

function label(text, x, y, anchor) {
  const made = shape("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}

const ago = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`);

// The least of 1, 2, 5 times a power of ten that is as much, where the usual end of the axis is not.
function niceTop(value, least) {
  if (value <= least) return least;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((digit) => digit * power).find((nice) => nice >= value);
}

function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point[1] !== null && point[1] !== undefined) found.at(-1).push(point);
    else if (found.at(-1).length) found.push([]);
  }
  return found.filter((run) => run.length);
}
