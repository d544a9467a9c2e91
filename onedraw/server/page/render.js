// Blocks of Markdown → elements. Text becomes text nodes only: nothing that a model or a user writes is parsed as HTML.

import { copyButton, make } from "./dom.js";
import { highlight } from "./highlight.js";
import { parse } from "./markdown.js";

// An element that shows Markdown. Blocks whose source did not change keep their elements, so that a growing text is cheap and a
// selection in an earlier block survives.
export class MarkdownView {
  constructor(attributes = {}) {
    this.element = make("div", { class: "prose", ...attributes });
    this.shown = []; // the Markdown source of each block that is shown
  }

  update(source) {
    const found = parse(source);
    const { children } = this.element;
    found.forEach((block, i) => {
      if (this.shown[i] === block.raw) return;
      if (block.kind === "code" && children[i]?.matches(".code") && this.grow(children[i], block)) return;
      const element = rendered(block);
      if (children[i]) children[i].replaceWith(element);
      else this.element.append(element);
    });
    while (children.length > found.length) this.element.lastElementChild.remove();
    this.shown = found.map((block) => block.raw);
  }

  // Code that grows keeps its element, so that its copy button keeps the focus.
  grow(element, block) {
    if (element.dataset.language !== block.language) return false;
    element.querySelector("code").replaceChildren(...coloured(block));
    return true;
  }
}

function rendered(block) {
  switch (block.kind) {
    case "heading": // h1 and h2 belong to the page itself, so headings of a reply begin at level 3.
      return make("p", { class: `h${block.level}`, role: "heading", "aria-level": String(Math.min(block.level + 2, 6)) }, ...said(block.children));
    case "code":
      return code(block);
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", {}, ...block.blocks.map(rendered));
    case "list":
      return list(block);
    case "table":
      return table(block);
    default:
      return make("p", {}, ...said(block.children));
  }
}

function code(block) {
  const body = make("code", {}, ...coloured(block));
  const copy = copyButton("Copy code", () => body.textContent);
  const name = block.language || "text";
  const head = make("div", { class: "code-head" }, make("span", {}, name), copy);
  const text = make("pre", { tabindex: "0", role: "group", "aria-label": `Code, ${name}` }, body);
  return make("div", { class: "code", "data-language": block.language }, head, text);
}

const coloured = ({ text, language }) =>
  highlight(text, language).map(({ text: part, kind }) => (kind ? make("span", { class: `hl-${kind}` }, part) : part));

function list({ ordered, start, items }) {
  const entries = items.map(({ checked, blocks }) => {
    const [first, ...rest] = blocks;
    const lead = first?.kind === "paragraph" ? said(first.children) : first ? [rendered(first)] : [];
    const box = checked === null ? [] : [make("span", { class: "task", role: "img", "aria-label": checked ? "done" : "not done" }, checked ? "☑ " : "☐ ")];
    return make("li", checked === null ? {} : { class: "tasked" }, ...box, ...lead, ...rest.map(rendered));
  });
  return ordered ? make("ol", { start: String(start) }, ...entries) : make("ul", {}, ...entries);
}

function table({ align, head, rows }) {
  const cell = (name, children, i) => make(name, { class: `to-${align[i]}`, ...(name === "th" ? { scope: "col" } : {}) }, ...said(children));
  return make("div", { class: "scrolls", tabindex: "0", role: "group", "aria-label": "Table" },
    make("table", {},
      make("thead", {}, make("tr", {}, ...head.map((children, i) => cell("th", children, i)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((children, i) => cell("td", children, i)))))));
}

function said(children) {
  return children.map((child) => {
    if (typeof child === "string") return child;
    switch (child.kind) {
      case "break":
        return make("br");
      case "code":
        return make("code", {}, child.text);
      case "link":
        return make("a", { href: child.href, rel: "noopener noreferrer nofollow", target: "_blank", title: child.href }, ...said(child.children));
      default:
        return make({ strong: "strong", emphasis: "em", deleted: "del" }[child.kind], {}, ...said(child.children));
    }
  });
}
