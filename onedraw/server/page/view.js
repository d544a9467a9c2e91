// Views of messages and replies: one way to show a reply, whether it is being written, stored, or raced. Logic is in chat.js.

import { fileView } from "./attachments.js";
import { button, copyButton, make, percent } from "./dom.js";
import { described, kind } from "./inspector.js";
import { Plot, squeeze } from "./plots.js";
import { MarkdownView } from "./render.js";

const STRIP = 120; // the most parts of the coloured strip under a reply

// Whether replies show their tokens, or their Markdown.
const tokensShown = () => document.body.classList.contains("tokens");

// The text of one channel of a reply, in two views: as Markdown, and token by token. Only the view that is shown is updated.
export class Text {
  constructor(reply, channel, label, always = null) {
    this.reply = reply;
    this.channel = channel;
    this.always = always; // "tokens": this view shows tokens only, never Markdown
    this.spans = []; // the first span of each token, by its index
    this.read = 0; // number of runs that the token view has shown
    this.markdown = new MarkdownView();
    this.tokens = make("div", { class: "said", tabindex: "0", role: "group", "aria-label": `${label}; arrow keys go from token to token` });
    this.element = make("div", { class: "text" }, this.markdown.element, this.tokens);
  }

  // Shows the text: as Markdown all of it, in the token view at most the first `limit` tokens.
  update(limit = Infinity) {
    const tokens = this.always === "tokens" || tokensShown();
    this.markdown.element.hidden = tokens;
    this.tokens.hidden = !tokens;
    if (!tokens) {
      this.markdown.update(this.reply[this.channel]);
      return;
    }
    for (; this.read < this.reply.runs.length; this.read += 1) {
      const { channel, text, token } = this.reply.runs[this.read];
      if (token && token.index >= limit) break;
      if (channel !== this.channel) continue;
      if (!token) {
        this.tokens.append(text);
        continue;
      }
      const span = make("span", { class: "t " + kind(token), "data-i": String(token.index) }, text);
      this.spans[token.index] ??= span;
      this.tokens.append(span);
    }
  }
}

// Buttons that switch between earlier and later versions of a message: ‹ 2/3 ›
function versions({ number, count, onversion }) {
  if (count < 2) return [];
  const previous = button("left", "Previous version", () => onversion(-1), { disabled: number === 1 });
  const next = button("right", "Next version", () => onversion(1), { disabled: number === count });
  return [make("span", { class: "versions", role: "group", "aria-label": `Version ${number} of ${count}` }, previous, `${number}/${count}`, next)];
}

export class UserView {
  constructor(entry, { onedit, onremove, onversion }) {
    this.entry = entry;
    this.handlers = { onedit, onremove, onversion };
    this.element = make("article", { class: "message user", "aria-label": "You" });
    this.place = { number: 1, count: 1 };
    this.show();
  }

  // `place`: which version of the message this is.
  update(place) {
    const moved = place.number !== this.place.number || place.count !== this.place.count;
    this.place = place;
    if (moved && !this.element.querySelector("form")) this.show();
  }

  show() {
    const { text, files } = this.entry;
    const { onremove, onversion } = this.handlers;
    this.edit = button("rename", "Edit", () => this.open(), { "aria-label": "Edit" });
    this.element.replaceChildren(
      ...files.map(fileView),
      ...(text ? [make("p", { class: "said" }, text)] : []),
      make("div", { class: "actions" }, ...versions({ ...this.place, onversion }), this.edit, button("remove", "Remove from here on", onremove)));
  }

  open() {
    const area = make("textarea", { rows: String(Math.min(12, this.entry.text.split("\n").length + 2)), "aria-label": "Your message, to be sent again" });
    area.value = this.entry.text;
    const close = () => {
      this.show();
      this.edit.focus();
    };
    const form = make("form", {},
      ...this.entry.files.map(fileView),
      area,
      make("div", { class: "actions" },
        make("button", { type: "submit", class: "strong" }, "Send again"),
        make("button", { type: "button", class: "quiet", onclick: close }, "Cancel")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if ((area.value.trim() || this.entry.files.length) && this.handlers.onedit(area.value)) this.show();
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // Escape ends editing; it must not stop the reply as well.
        close();
      }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.element.replaceChildren(form);
    area.focus();
  }
}

// Tool results: a message that can be edited and sent again.
export class ResultsView {
  constructor(entry, { onedit, onremove, onversion }) {
    this.entry = entry;
    this.handlers = { onedit, onremove, onversion };
    this.element = make("article", { class: "message user", "aria-label": "Results of tools" });
    this.update({ number: 1, count: 1 });
  }

  update(place) {
    const { onedit, onremove, onversion } = this.handlers;
    const said = this.entry.results.flatMap(({ name, text }) => [make("strong", {}, name), make("pre", {}, text || "(nothing)")]);
    this.element.replaceChildren(
      make("div", { class: "said results" }, ...said),
      make("div", { class: "actions" }, ...versions({ ...place, onversion }), button("rename", "Edit", onedit, { "aria-label": "Edit" }), button("remove", "Remove from here on", onremove)));
  }
}

// Arguments as indented JSON, or unchanged if they are not JSON.
function tidy(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

let numbered = 0; // counts labels, to give each a unique id

export class ReplyView {
  // `handlers`: functions that are called when the user presses a button: onagain, onreplay, onrace, onpicture, onpin,
  // oncontinue, onedit, onremove, onresults, onversion
  constructor(reply, { inspector, say, ...handlers }) {
    this.inspector = inspector;
    this.say = say;
    this.handlers = handlers;
    this.reply = reply;
    this.place = { number: 1, count: 1 };
    this.active = -1;
    this.text = new Text(reply, "text", "Reply");
    this.reasoning = new Text(reply, "reasoning", "Reasoning");
    this.thought = make("details", { class: "fold", hidden: true }, make("summary", {}, "Reasoning"), this.reasoning.element);
    this.calls = make("div", { class: "calls" });
    this.answering = make("form", { class: "answering", hidden: true, "aria-label": "Results of the calls" });
    this.wrong = make("div", { class: "wrong", role: "alert" });
    this.strip = make("div", { class: "strip", "aria-hidden": "true" });
    this.plots = {
      speed: new Plot("tokens/s", { format: (value) => value.toFixed(1) }),
      perTurn: new Plot("tokens per step", { format: (value) => value.toFixed(2) }),
      acceptance: new Plot("drafts kept", { top: 1, format: percent }),
    };
    this.drawn = make("div", { class: "plots" }, ...Object.values(this.plots).map((plot) => plot.element));
    this.facts = make("p", { class: "facts muted" });
    this.actions = make("div", { class: "actions", hidden: true });
    this.verdict = make("p", { class: "verdict" });
    this.element = make("article", { class: "message assistant", "aria-label": "Reply" },
      this.thought, this.text.element, this.calls, this.answering, this.wrong, this.strip, this.drawn, this.facts, this.actions, this.verdict);
    for (const { tokens } of [this.text, this.reasoning]) {
      tokens.addEventListener("pointerover", (event) => this.point(event.target));
      tokens.addEventListener("click", (event) => this.point(event.target));
      tokens.addEventListener("keydown", (event) => this.move(event));
    }
    this.update();
  }

  // Brings the view up to date with the reply. `place`: which version of the reply this is.
  update(place = this.place) {
    this.place = place;
    const { reply } = this;
    this.thought.hidden = !reply.reasoning;
    this.text.update();
    this.reasoning.update();
    this.showCalls();
    this.draw();
    if (reply.done) this.element.removeAttribute("aria-busy");
    else this.element.setAttribute("aria-busy", "true");
    this.showError();
    this.showActions();
  }

  showCalls() {
    while (this.calls.children.length < this.reply.calls.length) {
      this.calls.append(make("section", { class: "call" }, make("p", { class: "call-name" }), make("pre", { tabindex: "0", role: "group" })));
    }
    this.reply.calls.forEach((call, i) => {
      const [name, body] = this.calls.children[i].children;
      name.textContent = `Tool call: ${call.name}`;
      body.setAttribute("aria-label", `Arguments of ${call.name}`);
      body.textContent = this.reply.done ? tidy(call.arguments) : call.arguments;
    });
  }

  // Shows a form for the results of the calls; `given`: the earlier results.
  askResults(given = []) {
    const areas = this.reply.calls.map((call, i) => {
      const area = make("textarea", { id: `result-${++numbered}`, rows: "2", spellcheck: "false" });
      area.value = given[i] ?? "";
      return area;
    });
    const fields = areas.map((area, i) =>
      make("div", { class: "field" }, make("label", { for: area.id }, `Result of ${this.reply.calls[i].name}`), area));
    const send = make("button", { type: "submit", class: "strong" }, areas.length > 1 ? "Send results" : "Send result");
    this.answering.replaceChildren(...fields, make("div", { class: "actions" }, send));
    this.answering.onsubmit = (event) => {
      event.preventDefault();
      this.handlers.onresults(areas.map((area) => area.value));
    };
    this.answering.hidden = false;
    return areas[0];
  }

  draw() {
    const { reply } = this;
    const totals = reply.totals();
    if (tokensShown()) {
      const series = reply.series();
      for (const [name, plot] of Object.entries(this.plots)) plot.draw(series[name], totals[name]);
    }
    this.drawn.hidden = !tokensShown() || !reply.turns.length;
    this.strip.hidden = !reply.tokens.length;
    const parts = squeeze(reply.tokens.map((token) => (token.kept ? 1 : 0)), STRIP);
    const colour = (share) => `color-mix(in srgb, var(--kept-line) ${Math.round(share * 100)}%, var(--sampled-line))`;
    const stops = parts.map((share, i) => `${colour(share)} ${((i / parts.length) * 100).toFixed(2)}% ${(((i + 1) / parts.length) * 100).toFixed(2)}%`);
    this.strip.style.background = parts.length ? `linear-gradient(to right, ${stops.join(", ")})` : "";
    this.facts.replaceChildren(...this.summary(totals));
  }

  summary(totals) {
    const { reply } = this;
    const facts = [];
    if (reply.tokens.length) {
      facts.push([`${totals.tokens} tokens: `, make("span", { class: "t kept" }, `${totals.kept} drafted`), " ", make("span", { class: "t sampled" }, `${totals.tokens - totals.kept} sampled`)]);
    }
    if (totals.speed) facts.push(`${totals.speed.toFixed(totals.speed < 10 ? 1 : 0)} tokens/s`);
    if (reply.stopped) facts.push("stopped by you");
    else if (reply.error && reply.tokens.length) facts.push("interrupted");
    else if (reply.finish && reply.finish !== "stop") facts.push(`ended by ${reply.finish}`);
    if (reply.seed !== null) facts.push(make("span", { class: "seed" }, `seed ${reply.seed}`));
    const line = facts.flatMap((fact, i) => (i ? [" · ", fact] : [fact]).flat());
    if (reply.fingerprint) line.push(" ", make("span", { class: "fingerprint", title: "The fingerprint of model and server: with the seed it replays this reply" }, reply.fingerprint));
    return line;
  }

  showError() {
    const { error } = this.reply;
    if (!this.reply.done || !error) {
      this.wrong.replaceChildren();
      return;
    }
    if (this.wrong.childElementCount) return; // The message is shown already, and screen readers have announced it.
    this.wrong.append(make("p", {}, error.message));
  }

  showActions() {
    const { reply, handlers } = this;
    this.actions.hidden = !reply.done;
    const state = `${reply.done} ${reply.tokens.length} ${this.place.number}/${this.place.count}`;
    if (!reply.done || this.actionsFor === state) return; // Nothing changed, and a replaced button would lose the focus.
    this.actionsFor = state;
    const words = (name, title, onclick, label) => button(name, title, onclick, { words: label });
    const made = [...versions({ ...this.place, onversion: handlers.onversion })];
    if (reply.text) made.push(copyButton("Copy the reply as Markdown", () => reply.text));
    if (reply.resumable) made.push(words("play", "Continue exactly where the reply broke off", handlers.oncontinue, "Continue"));
    made.push(words("again", "Another reply with another seed, beside this one", handlers.onagain, reply.error ? "Try again" : "New reply"));
    if (reply.seed !== null && reply.tokens.length) {
      made.push(
        words("replay", "Run the same request with the same seed without drafts, and compare the tokens", handlers.onreplay, "Replay without drafts"),
        words("race", "The same seed with and without drafts, side by side", handlers.onrace, "Race"),
        words("picture", "A picture of this reply to share", handlers.onpicture, "Picture"),
        button("pin", "Use this seed for the next messages too", handlers.onpin, { "aria-label": "Keep seed" }));
    }
    if (reply.error) made.push(words("rename", "Edit the message before this reply", handlers.onedit, "Edit message"));
    made.push(button("remove", "Remove from here on", handlers.onremove));
    this.actions.replaceChildren(...made);
  }

  judge(text, kind) {
    this.verdict.className = "verdict " + kind;
    this.verdict.textContent = text;
  }

  point(target) {
    const span = target.closest?.(".t[data-i]");
    if (span) this.inspect(Number(span.dataset.i), span);
  }

  inspect(index, span) {
    this.active = index;
    this.inspector.show(this.reply.tokens[index], this.reply.tokens.length, span);
  }

  // Arrow keys, Home and End move between tokens that have text; the token is announced to screen readers.
  move(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const { spans } = [this.text, this.reasoning].find(({ tokens }) => tokens === event.currentTarget);
    const shown = [...spans.keys()].filter((i) => spans[i]);
    if (!shown.length || (step === undefined && !["Home", "End"].includes(event.key))) return;
    event.preventDefault();
    const at = shown.indexOf(this.active);
    let next = at < 0 ? 0 : Math.max(0, Math.min(shown.length - 1, at + (step || 0)));
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = shown.length - 1;
    const index = shown[next];
    this.active = index;
    spans[index].scrollIntoView({ block: "nearest" });
    requestAnimationFrame(() => this.inspect(index, spans[index])); // Scrolling hides the card, so it is shown in the next frame.
    this.say(described(this.reply.tokens[index], this.reply.tokens.length));
  }
}
