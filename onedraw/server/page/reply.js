// A reply, built by adding its chunks in order: text by channel, tokens with their details, engine steps with their times.

// Assigns streamed text to tokens. A token may arrive before its text (half a character, a possible stop
// string), and some tokens have no text (markers, the end of the reply).
export class Aligner {
  constructor() {
    this.waiting = []; // tokens whose text has not arrived yet: {token, rest}
    this.begun = false;
  }

  add(tokens) {
    for (const token of tokens) this.waiting.push({ token, rest: token.text });
  }

  // Continues a stored reply: the text of its last tokens that is still missing is expected next.
  resume(tokens, runs) {
    const last = runs.findLast((run) => run.token)?.token;
    const shown = last ? runs.filter((run) => run.token === last).map((run) => run.text).join("") : "";
    this.begun = runs.length > 0;
    if (last && !last.text.endsWith(shown)) this.waiting.push({ token: last, rest: last.text.slice(shown.length) });
    this.add(tokens.slice(last ? last.index + 1 : 0));
  }

  // Splits new text into [{text, token}]; token is null where no token is known.
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
          this.waiting.splice(0, next); // The skipped tokens are markers, which the text omits.
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

// A reply and its request: `fields` are those of the request without its messages, `system` is the system message. Together with
// the earlier messages of the conversation they are the whole request.
export class Reply {
  constructor({ fields, system = "" }, now = () => performance.now()) {
    this.fields = fields;
    this.system = system;
    this.now = now;
    this.model = null;
    this.seed = null;
    this.fingerprint = null;
    this.text = "";
    this.reasoning = "";
    this.runs = []; // the text in order: {channel, text, token}, token null where none is known
    this.calls = []; // the reply's tool calls: {id, name, arguments}
    this.tokens = []; // {index, id, text, kept, rejected, logprob, top}
    this.turns = []; // engine steps: {at, tokens, kept, rejected}; `at` is in milliseconds since the reply began
    this.finish = null;
    this.error = null; // null or {message, lost}; lost: the connection broke
    this.stopped = false;
    this.done = false;
    this.spent = 0; // milliseconds that earlier streams of this reply took
    this.since = now();
    this.aligner = new Aligner();
  }

  get elapsed() {
    return this.spent + this.now() - this.since;
  }

  add(chunk) {
    this.fingerprint = chunk.system_fingerprint ?? this.fingerprint;
    this.model = chunk.model ?? this.model;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.seed = choice.seed ?? this.seed;
    this.addTokens(choice);
    const delta = choice.delta || {};
    for (const [channel, text] of [["reasoning", delta.reasoning_content], ["text", delta.content]]) {
      if (!text) continue;
      this[channel] += text;
      for (const run of this.aligner.take(text)) this.runs.push({ channel, ...run });
    }
    for (const call of delta.tool_calls || []) this.addCall(call);
    if (choice.finish_reason) this.finish = choice.finish_reason;
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
      at: this.elapsed,
      tokens: fresh.length,
      kept: fresh.filter((token) => token.kept).length,
      rejected: fresh.reduce((sum, token) => sum + token.rejected, 0),
    });
  }

  addCall(piece) {
    const call = (this.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    if (piece.id) call.id = piece.id; // If a reply is continued inside a call, its id and name are sent again.
    if (piece.function?.name) call.name = piece.function.name;
    call.arguments += piece.function?.arguments || "";
  }

  end({ error = null, stopped = false } = {}) {
    this.spent = this.elapsed;
    this.error = error && { message: error.message, lost: Boolean(error.lost) };
    this.stopped = stopped;
    this.done = true;
  }

  // Continues a reply that broke off. The next chunks hold what follows the tokens that it has.
  resume() {
    this.since = this.now();
    this.error = null;
    this.stopped = false;
    this.done = false;
  }

  // The reply was stopped by the user or interrupted.
  get partial() {
    return Boolean(this.stopped || this.error);
  }

  // Whether the server can continue the reply exactly where it broke off.
  get resumable() {
    return this.partial && this.seed !== null && this.tokens.length > 0 && this.finish === null;
  }

  // Whether the reply has text, reasoning, or tool calls that were not cut off.
  says() {
    return Boolean(this.text || this.reasoning || (this.calls.length && !this.partial));
  }

  // The message as the next request sends it. If the reply was stopped or interrupted, its calls are omitted.
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

// ---------------------------------------------------------------------------------------------- stored replies

const MOST_TOKENS = 200_000;
const text = (value) => (typeof value === "string" ? value : "");
const number = (value, other = null) => (Number.isFinite(value) ? value : other);
const list = (value, most = MOST_TOKENS) => (Array.isArray(value) ? value.slice(0, most) : []);

// A reply as plain data for storage. Tokens and runs are stored as lists, which take a third of the space of objects.
export function serializeReply(reply) {
  return {
    fields: reply.fields,
    system: reply.system,
    model: reply.model,
    seed: reply.seed,
    fingerprint: reply.fingerprint,
    runs: reply.runs.map((run) => [run.channel === "reasoning" ? 1 : 0, run.text, run.token ? run.token.index : -1]),
    calls: reply.calls.map((call) => ({ ...call })),
    tokens: reply.tokens.map(({ id, text: said, kept, rejected, logprob, top }) => [id, said, kept ? 1 : 0, rejected, logprob, top.map((entry) => [entry.token, entry.logprob])]),
    turns: reply.turns.map((turn) => [Math.round(turn.at), turn.tokens, turn.kept, turn.rejected]),
    finish: reply.finish,
    error: reply.error,
    stopped: reply.stopped,
    done: reply.done,
    spent: Math.round(reply.done ? reply.spent : reply.elapsed),
  };
}

// Rebuilds a reply from stored data. The data may come from somebody else's file, so a value of the wrong type is replaced by a
// default, and unknown properties are dropped. Request fields are kept as they are: the server checks them.
export function restoreReply(data) {
  const fields = data.fields && typeof data.fields === "object" && !Array.isArray(data.fields) ? data.fields : {};
  const reply = new Reply({ fields, system: text(data.system) });
  reply.model = text(data.model) || null;
  reply.seed = Number.isSafeInteger(data.seed) ? data.seed : null;
  reply.fingerprint = text(data.fingerprint) || null;
  reply.tokens = list(data.tokens).filter(Array.isArray).map(([id, said, kept, rejected, logprob, top], index) => ({
    index,
    id: number(id, -1),
    text: text(said),
    kept: Boolean(kept),
    rejected: number(rejected, 0),
    logprob: number(logprob),
    top: list(top, 20).filter(Array.isArray).map(([token, likely]) => ({ token: text(token), logprob: number(likely, -100) })),
  }));
  for (const [reasoning, said, index] of list(data.runs).filter(Array.isArray)) {
    const channel = reasoning ? "reasoning" : "text";
    reply.runs.push({ channel, text: text(said), token: reply.tokens[index] ?? null });
    reply[channel] += text(said);
  }
  reply.calls = list(data.calls, 128).map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) }));
  reply.turns = list(data.turns).filter(Array.isArray).map(([at, tokens, kept, rejected]) => ({ at: number(at, 0), tokens: number(tokens, 0), kept: number(kept, 0), rejected: number(rejected, 0) }));
  reply.finish = text(data.finish) || null;
  reply.error = data.error ? { message: text(data.error.message), lost: Boolean(data.error.lost) } : null;
  reply.stopped = Boolean(data.stopped);
  reply.done = true;
  reply.spent = number(data.spent, 0);
  if (!data.done) reply.error = { message: "The page was closed before the reply ended.", lost: true };
  reply.aligner.resume(reply.tokens, reply.runs);
  return reply;
}

// The first difference of two replies, or null. `partial`: a reply was stopped or interrupted, so the lengths are not compared.
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
