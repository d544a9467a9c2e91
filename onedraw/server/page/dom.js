// Helpers for elements, icons, the clipboard, files, numbers and visible white space.

export const at = (id) => document.getElementById(id);

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const ICONS = {
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  done: "M4 12.5l5 5L20 6.5",
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  rename: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  save: "M12 4v11M7.5 11l4.5 4.5 4.5-4.5M5 20h14",
  left: "M14.5 5l-7 7 7 7",
  right: "M9.5 5l7 7-7 7",
  close: "M6 6l12 12M18 6L6 18",
  race: "M5 21V4M5 5h13l-3 4 3 4H5",
  picture: "M4 5h16v14H4zM4 16l5-5 4 4 2-2 5 4M15.5 9.5v.01",
  replay: "M4 13a8 8 0 1 0 2.3-6.3M4 4v6h6M10.5 9.5v7l5-3.5z",
  pin: "M9 4h6l-1 6 3 3H7l3-3zM12 13v7",
  play: "M8 5l11 7-11 7z",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
};

export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

// A button with an icon. If `words` are given, they are shown beside the icon; else `title` is the button's accessible name.
export function button(name, title, onclick, { words = null, ...attributes } = {}) {
  const named = words === null ? { "aria-label": title } : {};
  return make("button", { type: "button", class: words === null ? "bare" : "quiet", title, onclick, ...named, ...attributes }, icon(name), ...(words === null ? [] : [words]));
}

// Copies a text. Browsers allow the clipboard API only on https pages and localhost; elsewhere a hidden selected text is copied.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { class: "hidden", "aria-hidden": "true" });
  const focused = document.activeElement;
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!copied) throw new Error("the browser does not allow it");
  return undefined;
}

// A button that copies the text that `text` returns, and confirms it.
export function copyButton(title, text, words = "Copy") {
  const label = make("span", { "aria-live": "polite" }, words);
  const element = make("button", { type: "button", class: "quiet", title }, icon("copy"), label);
  element.addEventListener("click", async () => {
    try {
      await copy(text());
      label.textContent = "Copied";
    } catch (error) {
      label.textContent = `Not copied: ${error.message}`;
    }
    setTimeout(() => (label.textContent = words), 1600);
  });
  return element;
}

// Offers a blob to the user as a file to save.
export function save(name, blob) {
  const url = URL.createObjectURL(blob);
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export function percent(share) {
  const points = share * 100;
  if (points > 0 && points < 0.1) return "< 0.1 %";
  return `${points >= 99.95 || points === 0 ? points.toFixed(0) : points.toFixed(1)} %`;
}

export function sized(bytes) {
  return bytes < 1024 ? `${bytes} B` : bytes < 1024 ** 2 ? `${(bytes / 1024).toFixed(0)} KiB` : `${(bytes / 1024 ** 2).toFixed(1)} MiB`;
}

// A token's text with visible white space.
export function spelled(text) {
  if (text === "") return "(no text)";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}
