// A picture of a reply to share: tokens that were drafts in green, and the seed and fingerprint with which the reply can be
// replayed. The page draws it on a canvas.

import { copy, make, save } from "./dom.js";

const WIDTH = 880;
const SCALE = 2; // pixels of the picture per CSS pixel
const MARGIN = 40;
const LINE = 29;
const MOST_LINES = 34;
const PROMPT_LINES = 3;
const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const MONO = 'ui-monospace, "SF Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace';

// Breaks runs of text ({text, kind}) into at most `most` lines. A line is a list of {text, x, width, kind}.
function lines(context, runs, width, most) {
  const found = [[]];
  let x = 0;
  let cut = false;
  const next = () => {
    if (found.length >= most) cut = true;
    else found.push([]);
    x = 0;
  };
  for (const { text, kind } of runs) {
    for (const piece of text.match(/\n|[^\S\n]+|[^\s]+/g) ?? []) {
      if (piece === "\n") {
        next();
      } else {
        let parts = [piece];
        if (context.measureText(piece).width > width) parts = Array.from(piece);
        for (const part of parts) {
          const measured = context.measureText(part).width;
          if (x + measured > width && x > 0 && part.trim()) next();
          if (cut) break;
          found.at(-1).push({ text: part, x, width: measured, kind });
          x += measured;
        }
      }
      if (cut) {
        found.at(-1).push({ text: " …", x: found.at(-1).reduce((end, part) => Math.max(end, part.x + part.width), 0), width: 20, kind: null });
        return found;
      }
    }
  }
  while (found.length > 1 && !found.at(-1).length) found.pop();
  return found;
}

// The value of a colour variable of the style sheet, in the light or dark scheme that is in use.
function computed(name) {
  const probe = make("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

export function draw(canvas, { reply, prompt, headline = "" }) {
  const context = canvas.getContext("2d");
  const colour = (name) => resolved.get(name) ?? resolved.set(name, computed(name)).get(name);
  const resolved = new Map();
  const inner = WIDTH - 2 * MARGIN;
  const body = `18px ${SANS}`;
  context.font = body;
  const runs = reply.runs.filter((run) => run.channel === "text").map(({ text, token }) => ({ text, kind: token ? (token.kept ? "kept" : "sampled") : null }));
  const said = lines(context, runs, inner, MOST_LINES);
  const asked = lines(context, [{ text: prompt.trim(), kind: null }], inner - 28, PROMPT_LINES);
  const promptHeight = asked.length * 26 + 20;
  const height = MARGIN + 34 + (headline ? 46 : 0) + 18 + promptHeight + 22 + said.length * LINE + 24 + 88;
  canvas.width = WIDTH * SCALE;
  canvas.height = height * SCALE;
  context.scale(SCALE, SCALE);
  context.textBaseline = "middle";
  const box = (x, y, width, tall, radius, fill) => {
    context.fillStyle = fill;
    context.beginPath();
    context.roundRect(x, y, width, tall, radius);
    context.fill();
  };
  const write = (text, x, y, font, fill, align = "left") => {
    context.font = font;
    context.fillStyle = fill;
    context.textAlign = align;
    context.fillText(text, x, y);
  };
  context.fillStyle = colour("card");
  context.fillRect(0, 0, WIDTH, height);
  let y = MARGIN + 12;
  box(MARGIN, y - 13, 26, 26, 6, "#0b57d0");
  context.strokeStyle = "#ffffff";
  context.lineWidth = 2.4;
  context.beginPath();
  context.arc(MARGIN + 13, y, 7, 0, 7);
  context.stroke();
  write("Onedraw", MARGIN + 36, y, `650 19px ${SANS}`, colour("ink"));
  write(reply.model ?? "", WIDTH - MARGIN, y, `16px ${SANS}`, colour("muted"), "right");
  y += 22;
  if (headline) {
    y += 28;
    write(`✓ ${headline}`, MARGIN, y, `700 27px ${SANS}`, colour("good"));
    y += 18;
  }
  y += 18;
  box(MARGIN, y, inner, promptHeight, 12, colour("user"));
  asked.forEach((line, i) => {
    for (const part of line) write(part.text, MARGIN + 14 + part.x, y + 23 + i * 26, body, colour("ink"));
  });
  y += promptHeight + 22;
  said.forEach((line, i) => {
    const middle = y + i * LINE + LINE / 2;
    for (const part of line) {
      if (part.kind === "kept") {
        box(MARGIN + part.x - 0.5, middle - 12, part.width + 1, 25, 3, colour("kept"));
        context.fillStyle = colour("kept-line");
        context.fillRect(MARGIN + part.x - 0.5, middle + 11, part.width + 1, 2);
      }
      if (part.text.trim()) write(part.text, MARGIN + part.x, middle, body, colour("ink"));
    }
  });
  y += said.length * LINE + 24;
  context.fillStyle = colour("line");
  context.fillRect(MARGIN, y, inner, 1);
  y += 26;
  const { tokens, kept } = reply.totals();
  const words = `${kept} of ${tokens} tokens drafted`;
  box(MARGIN, y - 7, 14, 14, 3, colour("kept-line"));
  write(words, MARGIN + 22, y, `15px ${SANS}`, colour("ink"));
  write(`seed ${reply.seed}`, WIDTH - MARGIN, y, `600 15px ${MONO}`, colour("ink"), "right");
  y += 26;
  write("the same tokens with drafts or without", MARGIN + 22, y, `14px ${SANS}`, colour("muted"));
  write(reply.fingerprint ?? "", WIDTH - MARGIN, y, `13px ${MONO}`, colour("muted"), "right");
}

export class Picture {
  constructor(dialog, say) {
    const at = (id) => dialog.querySelector(id);
    this.dialog = dialog;
    this.canvas = at("canvas");
    this.words = at("#picture-said");
    at("#picture-close").addEventListener("click", () => dialog.close());
    at("#picture-save").addEventListener("click", async () => save(`onedraw-seed-${this.reply.seed}.png`, await this.blob()));
    at("#picture-copy").addEventListener("click", async () => {
      try {
        await navigator.clipboard.write([new ClipboardItem({ "image/png": this.blob() })]);
        this.words.textContent = "Copied.";
      } catch (error) {
        this.words.textContent = `Not copied: ${error.message}. Save the picture instead.`;
      }
      say(this.words.textContent);
    });
    at("#picture-seed").addEventListener("click", async () => {
      await copy(this.line);
      this.words.textContent = "Copied.";
    });
  }

  get line() {
    return `seed ${this.reply.seed}, ${this.reply.fingerprint}`;
  }

  blob() {
    return new Promise((resolve) => this.canvas.toBlob(resolve, "image/png"));
  }

  show(shown) {
    this.reply = shown.reply;
    this.words.textContent = "";
    draw(this.canvas, shown);
    const { tokens, kept } = shown.reply.totals();
    this.canvas.setAttribute("aria-label", `The reply with ${kept} of ${tokens} tokens marked as drafted, and ${this.line}`);
    this.dialog.showModal();
  }
}
