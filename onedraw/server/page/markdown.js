// Markdown → a tree of plain objects, without the DOM. It knows what replies contain: headings, paragraphs, fenced code, lists,
// task lists, quotes, tables, rules, emphasis, code, links. HTML is text. Nesting and tables are bounded and every pass is linear,
// so that no text can stall the page; what is deeper than a bound stays text.
//
// Blocks: {kind: "heading", level, children} | {kind: "paragraph", children} | {kind: "code", language, text} | {kind: "rule"}
//   | {kind: "quote", blocks} | {kind: "list", ordered, start, items: [{checked, blocks}]} | {kind: "table", align, head, rows}
// Inline: a string | {kind: "strong" | "emphasis" | "deleted", children} | {kind: "code", text} | {kind: "link", href, children}
//   | {kind: "break"}

const DEEPEST_BLOCKS = 12;
const DEEPEST_INLINE = 12;
const MOST_CELLS = 4000; // the most cells of a table
const MOST_COLUMNS = 64;
const LONGEST_INLINE = 50_000; // a longer paragraph stays text

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:([ \t]+)|$)/;
const TASK = /^\[([ xX])\][ \t]+/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

// The blocks of a text. Each top-level block has its source in `raw`, so that an unchanged block can be recognized.
export function parse(source) {
  return blocks(source.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  const put = (block, end) => {
    found.push(depth ? block : { ...block, raw: lines.slice(at, end).join("\n") });
    at = end;
  };
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const fence = FENCE.exec(line);
    if (fence) {
      const [code, end] = fenced(lines, at, fence);
      put(code, end);
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      put({ kind: "heading", level: heading[1].length, children: inline(title(heading[2] || "")) }, at + 1);
      continue;
    }
    if (RULE.test(line)) {
      put({ kind: "rule" }, at + 1);
      continue;
    }
    if (depth < DEEPEST_BLOCKS && QUOTE.test(line)) {
      let end = at;
      while (end < lines.length && QUOTE.test(lines[end])) end += 1;
      put({ kind: "quote", blocks: blocks(lines.slice(at, end).map((quoted) => quoted.replace(QUOTE, "")), depth + 1) }, end);
      continue;
    }
    if (depth < DEEPEST_BLOCKS && ITEM.test(line)) {
      const [list, end] = listed(lines, at, depth);
      put(list, end);
      continue;
    }
    if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DIVIDER.test(lines[at + 1])) {
      const tabled = table(lines, at);
      if (tabled) {
        put(...tabled);
        continue;
      }
    }
    let end = at + 1;
    while (end < lines.length && lines[end].trim() && !interrupts(lines[end], depth)) end += 1;
    put({ kind: "paragraph", children: inline(lines.slice(at, end).map((text) => text.trimStart()).join("\n").trimEnd()) }, end);
  }
  return found;
}

// Whether a line ends the paragraph before it.
function interrupts(line, depth) {
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  return depth < DEEPEST_BLOCKS && (QUOTE.test(line) || ITEM.test(line));
}

// A heading's text, without the signs that may close it.
function title(text) {
  let end = text.trimEnd().length;
  while (text[end - 1] === "#") end -= 1;
  return end === 0 || text[end - 1] === " " ? text.slice(0, end).trim() : text.trim();
}

// A code block, which the end of the text closes as well: a reply that is still being written has open fences.
function fenced(lines, at, [, indent, fence, info]) {
  const close = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end += 1;
  const strip = new RegExp(`^ {0,${indent.length}}`);
  const text = lines.slice(at + 1, end).map((line) => line.replace(strip, "")).join("\n");
  return [{ kind: "code", language: info.trim().split(/\s/)[0].slice(0, 32), text }, Math.min(end + 1, lines.length)];
}

function listed(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  const sign = first[2].at(-1);
  const base = first[1].length;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[2].at(-1) !== sign || item[1].length < base || item[1].length > base + 3 || RULE.test(lines[end])) break;
    const width = item[1].length + item[2].length;
    const spaces = item[3]?.length || 1;
    const inner = width + (spaces > 4 ? 1 : spaces); // the column at which the item's text begins
    const content = [lines[end].slice(inner)];
    end += 1;
    for (let open = true; end < lines.length; end += 1) {
      const line = lines[end];
      if (!line.trim()) {
        if (!continued(lines, end, inner, item)) break;
        content.push("");
        open = false;
      } else if (indentation(line) >= Math.min(inner, item[1].length + 2)) {
        content.push(line.slice(Math.min(inner, indentation(line))));
        open = true;
      } else if (open && !interrupts(line, depth)) {
        content.push(line.trimStart()); // The line continues the item's paragraph, which needs no indentation.
      } else {
        break;
      }
    }
    const task = TASK.exec(content[0]);
    if (task) content[0] = content[0].slice(task[0].length);
    items.push({ checked: task ? task[1] !== " " : null, blocks: blocks(content, depth + 1) });
    while (end < lines.length && !lines[end].trim() && ITEM.test(lines[end + 1] ?? "")) end += 1;
  }
  return [{ kind: "list", ordered, start: ordered ? Number.parseInt(first[2], 10) : 1, items }, end];
}

const indentation = (line) => line.length - line.trimStart().length;

// Whether the list item continues after the blank line `at`.
function continued(lines, at, inner, item) {
  const next = lines[at + 1];
  return next !== undefined && next.trim() !== "" && indentation(next) >= Math.min(inner, item[1].length + 2);
}

function table(lines, at) {
  const head = cells(lines[at]);
  const align = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  if (head.length !== align.length || head.length > MOST_COLUMNS) return null;
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && (rows.length + 1) * head.length < MOST_CELLS) {
    const row = cells(lines[end]).slice(0, head.length);
    while (row.length < head.length) row.push("");
    rows.push(row.map(inline));
    end += 1;
  }
  return [{ kind: "table", align, head: head.map(inline), rows }, end];
}

// The cells of a table's line: a pipe in code or after a backslash is text.
function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/([^\\])\|$/, "$1");
  const found = [];
  let cell = "";
  let code = false;
  for (let i = 0; i < text.length; i += 1) {
    if (text[i] === "\\" && text[i + 1] === "|") {
      cell += "|";
      i += 1;
      continue;
    }
    if (text[i] === "`") code = !code && text.indexOf("`", i + 1) > i;
    if (text[i] === "|" && !code) {
      found.push(cell.trim());
      cell = "";
    } else {
      cell += text[i];
    }
  }
  found.push(cell.trim());
  return found;
}

// ---------------------------------------------------------------------------------------------- inline

const SPECIAL = /[\\`*_~[\]!<&h\n]/g;
const WORD = /[\p{L}\p{N}]/u;
const URL_TEXT = /https?:\/\/[^\s<>"'`]+/y;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const TARGET = /\(([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)?)(?:[ \n]+"([^"\n]*)")?\)/y;
const ENTITY = /&(?:(amp|lt|gt|quot|apos|nbsp)|#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6}));/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const NAMES = { "*": ["emphasis", "strong"], _: ["emphasis", "strong"], "~": [null, "deleted"] };

const sticky = (pattern, text, at) => {
  pattern.lastIndex = at;
  return pattern.exec(text);
};

// An address that may be opened, or null. Only these schemes: no script, no data.
export function address(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function inline(text) {
  if (text.length > LONGEST_INLINE) return [text];
  const out = []; // strings, nodes, and open delimiters {open, text} that become text if nothing closes them
  const openers = { "*": [], _: [], "~": [], "[": [] }; // by sign: positions of open delimiters in `out`
  const ticks = closers(text);
  const say = (piece) => {
    if (typeof out.at(-1) === "string") out[out.length - 1] += piece;
    else out.push(piece);
  };
  // Wraps everything from the opener on; openers inside are text from now on.
  const wrap = (from, node) => {
    const children = joined(out.splice(from));
    for (const stack of Object.values(openers)) while (stack.length && stack.at(-1) >= from) stack.pop();
    const depth = 1 + children.reduce((deepest, child) => Math.max(deepest, child.depth || 0), 0);
    if (depth > DEEPEST_INLINE) out.push(...children);
    else out.push({ ...node, children, depth });
  };
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    if (next > at) {
      say(text.slice(at, next));
      at = next;
      continue;
    }
    const sign = text[at];
    if (sign === "\n") {
      out.push({ kind: "break" });
      at += 1;
    } else if (sign === "\\") {
      const escaped = PUNCTUATION.test(text[at + 1] ?? "");
      if (text[at + 1] !== "\n") say(escaped ? text[at + 1] : "\\");
      at += escaped ? 2 : 1;
    } else if (sign === "`") {
      const length = run(text, at);
      const end = ticks(at, length);
      if (end < 0) {
        say(text.slice(at, at + length));
        at += length;
      } else {
        const code = text.slice(at + length, end).replaceAll("\n", " ");
        const padded = code.length > 2 && code.startsWith(" ") && code.endsWith(" ") && code.trim();
        out.push({ kind: "code", text: padded ? code.slice(1, -1) : code });
        at = end + length;
      }
    } else if (sign === "[" || (sign === "!" && text[at + 1] === "[")) {
      openers["["].push(out.length);
      out.push({ open: true, text: sign === "!" ? "![" : "[" });
      at += sign === "!" ? 2 : 1;
    } else if (sign === "]") {
      const from = openers["["].pop();
      const target = from === undefined ? null : sticky(TARGET, text, at + 1);
      const href = target && address(target[1]);
      if (href) {
        out[from] = ""; // removes the opening bracket
        wrap(from, { kind: "link", href });
        at += 1 + target[0].length;
      } else {
        say("]");
        at += 1;
      }
    } else if (sign === "<" || sign === "h" || sign === "&") {
      at += literal(text, at, sign, out, say);
    } else if (sign === "!") {
      say("!");
      at += 1;
    } else {
      at = delimiters(text, at, sign, { out, openers, wrap, say });
    }
  }
  return joined(out);
}

// Reads an address (URL) or an HTML entity, else plain text. Returns how many characters were read.
function literal(text, at, sign, out, say) {
  if (sign === "&") {
    const entity = sticky(ENTITY, text, at);
    if (entity) {
      const [whole, name, decimal, hex] = entity;
      const code = decimal ? Number(decimal) : Number.parseInt(hex, 16);
      const known = name ? ENTITIES[name] : code > 31 && code < 0x110000 && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : whole;
      say(known);
      return whole.length;
    }
  } else {
    const found = sign === "<" ? sticky(AUTOLINK, text, at) : at > 0 && WORD.test(text[at - 1]) ? null : sticky(URL_TEXT, text, at);
    const shown = found && (sign === "<" ? found[1] : found[0].replace(/[.,:;!?*_~)\]]+$/, (end) => (found[0].includes("(") && end.startsWith(")") ? ")" : "")));
    const href = shown && address(shown);
    if (href) {
      out.push({ kind: "link", href, children: [shown] });
      return sign === "<" ? found[0].length : shown.length;
    }
  }
  say(sign);
  return 1;
}

// Reads a run of * _ or ~, which closes emphasis if one is open, and may open one. Returns the position after the run.
function delimiters(text, at, sign, { out, openers, wrap, say }) {
  const length = run(text, at);
  const before = text[at - 1] ?? " ";
  const after = text[at + length] ?? " ";
  let opens = !/\s/.test(after) && !(PUNCTUATION.test(after) && !/\s/.test(before) && !PUNCTUATION.test(before));
  let closes = !/\s/.test(before) && !(PUNCTUATION.test(before) && !/\s/.test(after) && !PUNCTUATION.test(after));
  if (sign === "_") [opens, closes] = [opens && !WORD.test(before), closes && !WORD.test(after)]; // An underscore inside a word, as in snake_case, is plain text.
  const [single, double] = NAMES[sign];
  let left = length;
  while (closes && left && openers[sign].length) {
    const from = openers[sign].at(-1);
    const opener = out[from];
    const used = Math.min(2, left, opener.text.length);
    if (used === 1 && !single) break;
    const rest = opener.text.slice(used);
    openers[sign].pop();
    out[from] = "";
    wrap(from, { kind: used === 2 ? double : single });
    if (rest) {
      const wrapped = out.splice(from);
      openers[sign].push(out.length);
      out.push({ open: true, text: rest }, ...wrapped);
    }
    left -= used;
  }
  if (left && opens) {
    openers[sign].push(out.length);
    out.push({ open: true, text: sign.repeat(left) });
  } else if (left) {
    say(sign.repeat(left));
  }
  return at + length;
}

function run(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

// Returns a function that finds the run of backticks that closes another: the next run of the same length. It is called with
// growing positions, so each list of runs is walked once.
function closers(text) {
  const runs = new Map();
  for (const { 0: ticks, index } of text.matchAll(/`+/g)) {
    if (!runs.has(ticks.length)) runs.set(ticks.length, { positions: [], next: 0 });
    runs.get(ticks.length).positions.push(index);
  }
  return (at, length) => {
    const known = runs.get(length);
    while (known && known.next < known.positions.length && known.positions[known.next] <= at) known.next += 1;
    return known?.positions[known.next] ?? -1;
  };
}

// Turns delimiters that were never closed into text, and joins neighbouring texts.
function joined(pieces) {
  const found = [];
  for (const piece of pieces) {
    const text = typeof piece === "string" ? piece : piece.open ? piece.text : null;
    if (text === "") continue;
    if (text !== null && typeof found.at(-1) === "string") found[found.length - 1] += text;
    else found.push(text ?? piece);
  }
  return found;
}
