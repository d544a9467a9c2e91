// A reply as the fold of its chunks: text by channel, tokens with their details, steps with their times.

// Assigns streamed text to tokens. Tokens may run ahead of text (half a character, a possible stop
// string), and some have none (markers, the end of the reply).
export class Aligner {
  constructor() {
    this.waiting = []; // {token, rest}
    this.begun = false;
  }

  add(tokens) {
    for (const token of tokens) this.waiting.push({ token, rest: token.text });
  }

  // → [{text, token}], token null where no token is known
  take(text) {
    const runs = [];
    while (text) {
      while (this.waiting.length && !this.waiting[0].rest) this.waiting.shift();
      const head = this.waiting[0];
      if (!head) {
        runs.push({ text, token: null });
        break;
      }
      if (!this.begun && head.rest.startsWith(" ") && !text.startsWith(" ")) head.rest = head.rest.slice(1);
      this.begun = true;
      if (!head.rest) continue;
      if (text.startsWith(head.rest)) {
        runs.push({ text: head.rest, token: head.token });
        text = text.slice(head.rest.length);
        this.waiting.shift();
      } else if (head.rest.startsWith(text)) {
        runs.push({ text, token: head.token });
        head.rest = head.rest.slice(text.length);
        text = "";
      } else {
        const next = this.waiting.findIndex(({ rest }, i) => i > 0 && rest && (text.startsWith(rest) || rest.startsWith(text)));
        if (next > 0) {
          this.waiting.splice(0, next); // tokens before it are markers, which the text omits
        } else {
          runs.push({ text, token: head.token });
          text = "";
          this.waiting.shift();
        }
      }
    }
    return runs;
  }
}

export class Reply {
  constructor(request, now = () => performance.now()) {
    this.request = request;
    this.now = now;
    this.seed = null;
    this.fingerprint = null;
    this.text = "";
    this.reasoning = "";
    this.calls = []; // {id, name, arguments}
    this.tokens = []; // {index, id, text, kept, rejected, logprob, top}
    this.turns = []; // {at, tokens, kept, rejected}
    this.finish = null;
    this.usage = null;
    this.error = null;
    this.stopped = false;
    this.begun = now();
    this.ended = null;
    this.aligner = new Aligner();
  }

  // Adds a chunk; returns the new parts to show: [{channel, text, token}]
  add(chunk) {
    this.fingerprint = chunk.system_fingerprint ?? this.fingerprint;
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return [];
    this.seed = choice.seed ?? this.seed;
    this.addTokens(choice);
    const shown = [];
    const delta = choice.delta || {};
    for (const [channel, text] of [["reasoning", delta.reasoning_content], ["text", delta.content]]) {
      if (!text) continue;
      this[channel] += text;
      for (const run of this.aligner.take(text)) shown.push({ channel, ...run });
    }
    for (const call of delta.tool_calls || []) this.addCall(call);
    if (choice.finish_reason) this.finish = choice.finish_reason;
    return shown;
  }

  addTokens(choice) {
    const scored = choice.logprobs?.content || [];
    const fresh = (choice.token_details || []).map((detail, i) => ({
      ...detail,
      index: this.tokens.length + i,
      logprob: scored[i]?.logprob ?? null,
      top: scored[i]?.top_logprobs || [],
    }));
    if (!fresh.length) return;
    this.tokens.push(...fresh);
    this.aligner.add(fresh);
    this.turns.push({
      at: this.now(),
      tokens: fresh.length,
      kept: fresh.filter((token) => token.kept).length,
      rejected: fresh.reduce((sum, token) => sum + token.rejected, 0),
    });
  }

  addCall(piece) {
    const call = (this.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= piece.id || "";
    call.name += piece.function?.name || "";
    call.arguments += piece.function?.arguments || "";
  }

  end({ error = null, stopped = false } = {}) {
    this.error = error;
    this.stopped = stopped;
    this.ended = this.now();
  }

  get done() {
    return this.ended !== null;
  }

  get ids() {
    return this.tokens.map((token) => token.id);
  }

  // The reply was stopped by the user or interrupted.
  get partial() {
    return Boolean(this.stopped || this.error);
  }

  // Whether the reply has any content.
  says() {
    return Boolean(this.text || this.reasoning || (this.calls.length && !this.partial));
  }

  // The message as the next request sends it. Calls that were cut off are omitted.
  message() {
    const said = { role: "assistant", content: this.text };
    if (this.reasoning) said.reasoning_content = this.reasoning;
    if (this.calls.length && !this.partial) {
      said.tool_calls = this.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    }
    return said;
  }

  // Values of the plots, step by step. Speed is averaged over a few steps.
  series() {
    const span = 8;
    const speed = [];
    for (let i = 1; i < this.turns.length; i++) {
      const from = Math.max(0, i - span);
      const tokens = this.turns.slice(from + 1, i + 1).reduce((sum, turn) => sum + turn.tokens, 0);
      const seconds = Math.max(this.turns[i].at - this.turns[from].at, 1) / 1000;
      speed.push(tokens / seconds);
    }
    let kept = 0;
    let drafted = 0;
    const acceptance = [];
    for (const turn of this.turns) {
      kept += turn.kept;
      drafted += turn.kept + turn.rejected;
      if (drafted) acceptance.push(kept / drafted);
    }
    return { speed, perTurn: this.turns.map((turn) => turn.tokens), acceptance };
  }

  // Over the whole reply: tokens per second after the first step, tokens per step, drafts kept of drafts made.
  totals() {
    const first = this.turns[0];
    const last = this.turns[this.turns.length - 1];
    const tokens = this.tokens.length;
    const seconds = first && last !== first ? (last.at - first.at) / 1000 : 0;
    const kept = this.tokens.filter((token) => token.kept).length;
    const drafted = kept + this.tokens.reduce((sum, token) => sum + token.rejected, 0);
    return {
      tokens,
      kept,
      drafted,
      speed: seconds > 0 ? (tokens - first.tokens) / seconds : null,
      perTurn: this.turns.length ? tokens / this.turns.length : null,
      acceptance: drafted ? kept / drafted : null,
    };
  }
}

// The first difference of two replies, or null. Tokens after the end of a stopped reply are not compared.
export function firstDifference(recorded, again, { partial = false } = {}) {
  const length = Math.min(recorded.tokens.length, again.tokens.length);
  for (let i = 0; i < length; i++) {
    if (recorded.tokens[i].id !== again.tokens[i].id) return { index: i, then: recorded.tokens[i], now: again.tokens[i] };
  }
  if (recorded.tokens.length !== again.tokens.length && !partial) {
    return { index: length, then: recorded.tokens[length] || null, now: again.tokens[length] || null };
  }
  return null;
}
