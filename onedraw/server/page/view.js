// Views of messages and replies. Logic is in main.js.

import { make, percent } from "./dom.js";
import { described, kind } from "./inspector.js";
import { Plot } from "./plots.js";

export class UserView {
  constructor(text, { onedit }) {
    this.text = text;
    this.onedit = onedit;
    this.element = make("article", { class: "message user", "aria-label": "You" });
    this.show();
  }

  show() {
    this.edit = make("button", { type: "button", class: "quiet edit", onclick: () => this.open() }, "Edit");
    this.element.replaceChildren(make("p", { class: "said" }, this.text), make("div", { class: "actions" }, this.edit));
  }

  open() {
    const area = make("textarea", { rows: "3", "aria-label": "Your message, to be sent again" });
    area.value = this.text;
    const close = () => {
      this.show();
      this.edit.focus();
    };
    const form = make("form", {},
      area,
      make("div", { class: "actions" },
        make("button", { type: "submit", class: "strong" }, "Send again"),
        make("button", { type: "button", class: "quiet", onclick: close }, "Cancel")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() && this.onedit(area.value)) {
        this.text = area.value;
        this.show();
      }
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // ends editing without stopping the reply
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
  constructor(calls, texts, { onedit }) {
    this.element = make("article", { class: "message user", "aria-label": "Results of tools" });
    const said = calls.flatMap((call, i) => [make("strong", {}, call.name), make("pre", {}, texts[i] || "(nothing)")]);
    const edit = make("button", { type: "button", class: "quiet edit", onclick: onedit }, "Edit");
    this.element.append(make("div", { class: "said results" }, ...said), make("div", { class: "actions" }, edit));
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

let numbered = 0; // for unique label ids

export class ReplyView {
  constructor(reply, { inspector, say, onroll, onsame, onreplay, onpin, onresults }) {
    this.inspector = inspector;
    this.say = say;
    this.handlers = { onroll, onsame, onreplay, onpin, onresults };
    this.element = make("article", { class: "message assistant", "aria-label": "Reply" });
    this.reset(reply);
  }

  // Replaces the reply by an empty one.
  reset(reply) {
    this.reply = reply;
    this.active = -1;
    this.spans = []; // the first span of each token, by its index
    this.reasoning = make("div", { class: "said", tabindex: "0", role: "group", "aria-label": "Reasoning, token by token" });
    this.thought = make("details", { class: "fold", hidden: true }, make("summary", {}, "Reasoning"), this.reasoning);
    this.text = make("div", { class: "said", tabindex: "0", role: "group", "aria-label": "Reply; arrow keys go from token to token" });
    this.calls = make("div", { class: "calls" });
    this.answering = make("form", { class: "answering", hidden: true, "aria-label": "Results of the calls" });
    this.wrong = make("p", { class: "wrong", role: "alert" });
    this.plots = {
      speed: new Plot("tokens/s", { format: (value) => value.toFixed(1) }),
      perTurn: new Plot("tokens per step", { format: (value) => value.toFixed(2) }),
      acceptance: new Plot("drafts kept", { top: 1, format: percent }),
    };
    const drawn = make("div", { class: "plots" }, ...Object.values(this.plots).map((plot) => plot.element));
    this.facts = make("p", { class: "facts muted" });
    this.actions = make("div", { class: "actions", hidden: true });
    this.verdict = make("p", { class: "verdict" });
    this.element.replaceChildren(
      this.thought, this.text, this.calls, this.answering, this.wrong, drawn, this.facts, this.actions, this.verdict);
    for (const group of [this.text, this.reasoning]) {
      group.addEventListener("pointerover", (event) => this.point(event.target));
      group.addEventListener("click", (event) => this.point(event.target));
      group.addEventListener("keydown", (event) => this.move(event));
    }
    this.element.setAttribute("aria-busy", "true");
  }

  append(runs) {
    for (const { channel, text, token } of runs) {
      const group = channel === "reasoning" ? this.reasoning : this.text;
      if (channel === "reasoning") this.thought.hidden = false;
      if (!token) {
        group.append(text);
        continue;
      }
      const span = make("span", { class: "t " + kind(token), "data-i": String(token.index) }, text);
      this.spans[token.index] ??= span;
      group.append(span);
    }
    this.showCalls();
    this.draw();
  }

  showCalls() {
    while (this.calls.children.length < this.reply.calls.length) {
      this.calls.append(make("details", { class: "fold call" }, make("summary", {}), make("pre", {})));
    }
    this.reply.calls.forEach((call, i) => {
      const [summary, body] = this.calls.children[i].children;
      summary.textContent = `Tool call: ${call.name}`;
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
    const series = this.reply.series();
    const totals = this.reply.totals();
    for (const [name, plot] of Object.entries(this.plots)) plot.draw(series[name], totals[name]);
    this.facts.replaceChildren(...this.summary(totals));
  }

  summary(totals) {
    const reply = this.reply;
    const facts = [`${reply.seed === null ? "" : `seed ${reply.seed} · `}${totals.tokens} tokens: `];
    facts.push(make("span", { class: "t kept" }, `${totals.kept} kept`), " ");
    facts.push(make("span", { class: "t sampled" }, `${totals.tokens - totals.kept} sampled`));
    if (reply.done) facts.push(" · " + (reply.stopped ? "stopped by you" : reply.error ? "failed" : `ended by ${reply.finish}`));
    return facts;
  }

  finish() {
    this.element.removeAttribute("aria-busy");
    if (this.reply.error) this.wrong.textContent = this.reply.error.message;
    else if (this.reply.finish === "tool_calls") this.askResults();
    this.showCalls();
    this.draw();
    const { onroll, onsame, onreplay, onpin } = this.handlers;
    const seeded = this.reply.seed !== null;
    const button = (name, title, onclick) => make("button", { type: "button", class: "quiet", title, onclick }, name);
    this.actions.replaceChildren(button("New seed", "Draw the reply anew, with another seed", onroll));
    if (seeded && this.reply.tokens.length) {
      this.actions.append(
        button("Same seed", "Draw the reply again with the same seed", onsame),
        button("Replay without drafts", "Run the same request with speculation off, and compare the tokens", onreplay),
        button("Keep seed", "Use this seed for the next messages too", onpin));
    }
    this.actions.hidden = false;
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

  // Arrow keys move between tokens that have text; the token is announced to screen readers.
  move(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const shown = this.spans.flatMap((span, i) => (span && event.currentTarget.contains(span) ? [i] : []));
    if (!shown.length || (step === undefined && !["Home", "End"].includes(event.key))) return;
    event.preventDefault();
    const at = shown.indexOf(this.active);
    let next = at < 0 ? 0 : Math.max(0, Math.min(shown.length - 1, at + (step || 0)));
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = shown.length - 1;
    const index = shown[next];
    this.active = index;
    this.spans[index].scrollIntoView({ block: "nearest" });
    requestAnimationFrame(() => this.inspect(index, this.spans[index])); // after scrolling, which hides the card
    this.say(described(this.reply.tokens[index], this.reply.tokens.length));
  }
}
