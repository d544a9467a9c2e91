// Small plots: a label, a number as text, and a decorative line.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 96;
const HEIGHT = 26;
const POINTS = 48;

// Averages neighbours, so that long and short replies have equally many points.
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
    this.element = document.createElement("div");
    this.element.className = "plot";
    const label = document.createElement("span");
    label.className = "muted";
    label.textContent = name;
    this.value = document.createElement("strong");
    this.value.textContent = "–";
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("aria-hidden", "true");
    svg.setAttribute("preserveAspectRatio", "none");
    this.line = document.createElementNS(SVG, "path");
    svg.append(this.line);
    this.element.append(label, this.value, svg);
  }

  draw(values, now) {
    this.line.setAttribute("d", path(values, { top: this.top }));
    this.value.textContent = now === null ? "–" : this.format(now);
  }
}
