// The race: one request with and without drafts, side by side.
//
// Each run has the server for itself: in one batch, two requests would share the cost of every step, and neither would show its
// own speed. So the run with drafts goes first. It is then played back at its recorded times beside the live run without drafts.
// Both clocks start at the first tokens of their run.

import { make } from "./dom.js";
import { compared, replayOf } from "./replay.js";
import { stream } from "./streaming.js";
import { Text } from "./view.js";

class Lane {
  constructor(title, kind) {
    this.name = make("h3", {}, title);
    this.state = make("p", { class: "lane-state" });
    this.bar = make("div", { class: "lane-done" });
    this.body = make("div", { class: "lane-text" });
    this.element = make("section", { class: `lane ${kind}`, "aria-label": title },
      make("div", { class: "lane-head" }, this.name, this.state), make("div", { class: "lane-bar", "aria-hidden": "true" }, this.bar), this.body);
  }

  // Starts to show a reply, which is expected to have `length` tokens: the bar is full then.
  begin(reply, length) {
    this.reply = reply;
    this.length = Math.max(length, 1);
    this.text = new Text(reply, "text", this.name.textContent, "tokens");
    this.reasoning = new Text(reply, "reasoning", `${this.name.textContent}, reasoning`, "tokens");
    this.body.replaceChildren(this.reasoning.element, this.text.element);
    this.element.classList.remove("waits", "won");
    this.show(0);
  }

  show(tokens, state = "") {
    this.reasoning.update(tokens);
    this.text.update(tokens);
    this.bar.style.width = `${Math.min(100, (tokens / this.length) * 100)}%`;
    this.state.textContent = state;
    this.body.scrollTop = this.body.scrollHeight;
  }
}

const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(2)} s`;
const rate = (speed) => (speed ? `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s` : "");

// The result as text: how much faster the run with drafts was.
function faster([fast, slow]) {
  if (!fast || !slow) return "";
  const ratio = fast / slow;
  return ratio >= 1.05 ? `, ${ratio.toFixed(1)} × faster` : ratio > 0.95 ? ", as fast" : `, ${(slow / fast).toFixed(1)} × slower`;
}

// Milliseconds from a run's first tokens to its last.
const duration = ({ turns }) => (turns.length ? turns.at(-1).at - turns[0].at : 0);

// How many tokens a finished run had generated this many milliseconds after its first tokens.
function saidAt({ turns }, milliseconds) {
  let count = 0;
  for (const turn of turns) {
    if (turn.at - turns[0].at > milliseconds) break;
    count += turn.tokens;
  }
  return count;
}

export class Race {
  constructor(dialog, { say, share }) {
    this.dialog = dialog;
    this.say = say;
    this.lanes = dialog.querySelector("#lanes");
    this.verdict = dialog.querySelector("#race-verdict");
    this.note = dialog.querySelector("#race-note");
    this.picture = dialog.querySelector("#race-picture");
    this.close = dialog.querySelector("#race-close");
    this.close.addEventListener("click", () => dialog.close());
    this.picture.addEventListener("click", () => share(this.result));
  }

  // Runs the race to its end, or until the dialog is closed or the signal `stopped` aborts it.
  // Returns the error of a failed run, or null.
  async run({ reply, messages, prompt, key, signal: stopped }) {
    const closed = new AbortController();
    const abort = () => closed.abort();
    this.dialog.addEventListener("close", abort, { once: true });
    stopped.addEventListener("abort", abort, { once: true });
    const drafted = new Lane("With drafts", "drafted");
    const plain = new Lane("Without drafts", "plain");
    this.lanes.replaceChildren(drafted.element, plain.element);
    this.picture.hidden = true;
    this.tell("", "waiting");
    this.note.textContent = `Seed ${reply.seed}. Each run has the server for itself; the first one is played back beside the second.`;
    if (!this.dialog.open) this.dialog.showModal();
    const request = { key, signal: closed.signal };
    const length = reply.tokens.length;
    try {
      const fast = replayOf(reply, { speculation: true });
      const slow = replayOf(reply, { speculation: false });
      for (const { fields } of [fast, slow]) for (const name of ["logprobs", "top_logprobs"]) delete fields[name]; // The race shows no logprobs.
      plain.element.classList.add("waits");
      plain.state.textContent = "waits for its turn";
      this.tell("First run: with drafts …", "waiting");
      drafted.begin(fast, length);
      let failed = await stream(fast, messages, { ...request, onchunk: () => drafted.show(Infinity, `${fast.tokens.length} tokens`) });
      if (!failed && !fast.stopped) {
        this.tell("Second run: without drafts, beside the first at its own pace …", "waiting");
        drafted.begin(fast, length);
        plain.begin(slow, length);
        failed = await this.second(drafted, plain, messages, request);
      }
      if (failed) this.tell(`The race failed: ${failed.message}`, "different");
      else if (!fast.stopped && !slow.stopped) this.finish({ reply, fast, slow, drafted, plain, prompt });
      return failed;
    } finally {
      this.dialog.removeEventListener("close", abort);
    }
  }

  // The run without drafts, live, while the run with drafts is played back in the other lane at its recorded times.
  async second(drafted, plain, messages, request) {
    const fast = drafted.reply;
    const slow = plain.reply;
    let start = null;
    let frame = 0;
    let over = () => {};
    const playedBack = new Promise((resolve) => (over = resolve));
    const paint = () => {
      const passed = start === null ? -1 : performance.now() - start;
      const whole = duration(fast);
      const said = passed < 0 ? 0 : saidAt(fast, passed);
      drafted.show(said, passed >= whole ? `${seconds(whole)} · ${rate(fast.totals().speed)}` : `${said} tokens`);
      plain.show(Infinity, slow.done ? `${seconds(duration(slow))} · ${rate(slow.totals().speed)}` : `${slow.tokens.length} tokens`);
      if (passed >= whole && !slow.done) drafted.element.classList.add("won");
      else if (passed < whole && slow.done) plain.element.classList.add("won");
      if (request.signal.aborted || (slow.done && passed >= whole)) over();
      else frame = requestAnimationFrame(paint);
    };
    frame = requestAnimationFrame(paint);
    const failed = await stream(slow, messages, {
      ...request,
      onchunk: () => {
        if (slow.turns.length) start ??= performance.now();
      },
    });
    start ??= performance.now();
    if (!failed) await playedBack;
    cancelAnimationFrame(frame);
    return failed;
  }

  finish({ reply, fast, slow, drafted, plain, prompt }) {
    const speeds = [fast, slow].map((one) => one.totals().speed);
    const kept = fast.tokens.filter((token) => token.kept).length;
    drafted.show(Infinity, `${seconds(duration(fast))} · ${rate(speeds[0])}`);
    plain.show(Infinity, `${seconds(duration(slow))} · ${rate(speeds[1])}`);
    const comparisons = [compared(fast, slow, "without drafts"), compared(reply, fast, "in the recorded reply and in the race")];
    const wrong = comparisons.find(({ same }) => !same);
    if (wrong) {
      this.tell(wrong.text, "different");
      return;
    }
    const words = drafted.reply.totals().drafted ? faster(speeds) : "; the server used no drafts here";
    this.tell(`Same tokens${words}`, "same");
    this.note.textContent = `${fast.tokens.length} tokens, ${kept} of them drafted. Seed ${reply.seed}, ${fast.fingerprint}. `
      + "Speeds count from the first tokens on, each run alone on the server.";
    this.result = { reply: fast, prompt, headline: `Same tokens${words}` };
    this.picture.hidden = false;
    this.picture.focus();
    this.say(this.verdict.textContent);
  }

  tell(text, kind) {
    this.verdict.textContent = text;
    this.verdict.className = `verdict ${kind}`;
  }
}
