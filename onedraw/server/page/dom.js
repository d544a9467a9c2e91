// Helpers for elements, numbers and visible white space.

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

export function percent(share) {
  const points = share * 100;
  if (points > 0 && points < 0.1) return "< 0.1 %";
  return `${points >= 99.95 || points === 0 ? points.toFixed(0) : points.toFixed(1)} %`;
}

// A token's text with visible white space.
export function spelled(text) {
  if (text === "") return "(no text)";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}
