// Small plots: a label, a number as text, and a decorative line.

import { make, svg } from "./dom.js";

const WIDTH = 96;
const HEIGHT = 26;
const POINTS = 48;

// Averages neighbouring values down to at most `points`, so that plots of long and short replies look alike.
export function squeeze(values, points = POINTS) {
  if (values.length <= points) return values;
  return Array.from({ length: points }, (_, i) => {
    const from = Math.floor((i * values.length) / points);
    const part = values.slice(from, Math.max(Math.floor(((i + 1) * values.length) / points), from + 1));
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  });
}

export function path(values, { top = null } = {}) {
  const drawn = squeeze(values);
  if (!drawn.length) return "";
  const high = top ?? Math.max(...drawn, 1e-9);
  const step = drawn.length > 1 ? (WIDTH - 2) / (drawn.length - 1) : 0;
  const points = drawn.map((value, i) => `${(1 + i * step).toFixed(1)} ${(HEIGHT - 2 - Math.min(value / high, 1) * (HEIGHT - 4)).toFixed(1)}`);
  if (points.length === 1) points.push(`${WIDTH - 1} ${points[0].split(" ")[1]}`);
  return "M" + points.join("L");
}

export class Plot {
  constructor(name, { top = null, format } = {}) {
    this.top = top;
    this.format = format;
    this.value = make("strong", {}, "–");
    this.line = svg("path");
    this.element = make("div", { class: "plot" },
      make("span", { class: "muted" }, name), this.value,
      svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true", preserveAspectRatio: "none" }, this.line));
  }

  draw(values, now) {
    this.line.setAttribute("d", path(values, { top: this.top }));
    this.value.textContent = now === null ? "–" : this.format(now);
  }
}
