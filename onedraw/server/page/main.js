// The conversation: sends requests, runs replies, compares replays.

import { chat, models } from "./api.js";
import { make, spelled } from "./dom.js";
import { Inspector } from "./inspector.js";
import { Params } from "./params.js";
import { Reply, firstDifference } from "./reply.js";
import { ReplyView, ResultsView, UserView } from "./view.js";

const at = (id) => document.getElementById(id);
const log = at("log");
const ask = at("ask");
const inspector = new Inspector(at("inspector"), at("inspected"), at("close-inspector"));
const params = new Params(at("params"), () => {
  colour();
  if (params.key !== triedKey) connect();
});

let conversation = []; // {role, view, text | reply | results}
let running = null; // AbortController of the running request
let triedKey = null;

const say = (text) => (at("status").textContent = text);

// ---------------------------------------------------------------------------------------------- sending

// While a request runs, or the parameters are invalid, nothing is sent and the conversation does not change.
const ready = () => !running && compose() !== null;

// Returns whether the message was sent.
function send(text) {
  if (!ready()) return false;
  const entry = { role: "user", text };
  entry.view = new UserView(text, { onedit: (edited) => resend(entry, edited) });
  put(entry);
  answer();
  return true;
}

function resend(entry, text) {
  if (!ready()) return false;
  entry.text = text;
  cut(conversation.indexOf(entry) + 1);
  answer();
  return true;
}

// The messages before entry number `length`.
function messages(length = conversation.length) {
  return [...params.system(), ...conversation.slice(0, length).flatMap(told)];
}

// An entry as request messages.
function told(entry) {
  switch (entry.role) {
    case "user":
      return [{ role: "user", content: entry.text }];
    case "tool":
      return entry.results.map(({ id, text }) => ({ role: "tool", tool_call_id: id, content: text }));
    default:
      return entry.reply.says() ? [entry.reply.message()] : [];
  }
}

// Results of a reply's tool calls. If they are edited, later entries are removed.
function giveResults(asked, texts) {
  if (!ready()) return;
  const { calls } = asked.reply;
  cut(conversation.indexOf(asked) + 1);
  asked.view.answering.hidden = true;
  const entry = { role: "tool", results: calls.map(({ id }, i) => ({ id, text: texts[i] })) };
  entry.view = new ResultsView(calls, texts, {
    onedit: () => {
      if (running) return;
      cut(conversation.indexOf(entry));
      asked.view.askResults(texts).focus();
    },
  });
  put(entry);
  answer();
}

// The request with the panel's parameters, or null if they are invalid.
function compose(length = conversation.length) {
  try {
    return { messages: messages(length), ...params.fields() };
  } catch (error) {
    open(true);
    say(error.message);
    return null;
  }
}

// A reply to the current conversation.
async function answer() {
  const request = compose();
  if (!request) return;
  const entry = { role: "assistant", reply: new Reply(request) };
  entry.view = new ReplyView(entry.reply, {
    inspector,
    say,
    onroll: () => reroll(entry),
    onsame: () => redraw(entry),
    onreplay: () => replay(entry),
    onpin: () => {
      params.seed = entry.reply.seed;
      say(`Seed ${entry.reply.seed} is kept for the next messages`);
    },
    onresults: (texts) => giveResults(entry, texts),
  });
  put(entry);
  await run(entry);
}

// New seed: the current parameters, and a seed that the server draws.
async function reroll(entry) {
  if (running) return;
  const index = conversation.indexOf(entry);
  const request = compose(index);
  if (!request) return;
  delete request.seed;
  cut(index + 1);
  entry.reply = new Reply(request);
  entry.view.reset(entry.reply);
  await run(entry);
}

// Same seed: the same request with the reported seed.
async function redraw(entry) {
  if (running) return;
  const before = entry.reply;
  cut(conversation.indexOf(entry) + 1);
  entry.reply = new Reply({ ...before.request, seed: before.seed });
  entry.view.reset(entry.reply);
  await run(entry);
  if (!entry.reply.error) verdict(entry, before, entry.reply, "with the same seed");
}

async function run(entry) {
  const { reply, view } = entry;
  inspector.hide();
  begin();
  const shown = new Painter(view);
  const failed = await stream(reply, (runs) => shown.add(runs));
  shown.now();
  view.finish();
  follow();
  end();
  say(failed ? `The reply failed: ${failed.message}` : `${reply.stopped ? "Stopped" : "Reply complete"}: ${reply.tokens.length} tokens`);
}

// Reads a reply to its end; returns its error, if any.
async function stream(reply, show) {
  try {
    for await (const chunk of chat(reply.request, { key: params.key, signal: running.signal })) show(reply.add(chunk));
    reply.end();
  } catch (error) {
    if (running.signal.aborted) {
      reply.end({ stopped: true });
    } else {
      reply.end({ error });
      if (error.status === 401) locked(true);
      return error;
    }
  }
  return null;
}

// The same request without drafts, compared token by token. The reply on the page stays as it is.
async function replay(entry) {
  if (running) return;
  const { reply, view } = entry;
  const request = { ...reply.request, seed: reply.seed, speculation: false };
  if (reply.partial) {
    delete request.max_completion_tokens;
    request.max_tokens = reply.tokens.length;
    if (request.min_tokens > request.max_tokens) request.min_tokens = request.max_tokens;
  }
  const again = new Reply(request);
  view.judge("Replaying without drafts …", "waiting");
  begin();
  const failed = await stream(again, () => view.judge(`Replaying without drafts … ${again.tokens.length} tokens`, "waiting"));
  end();
  if (failed || again.stopped) view.judge(failed ? `The replay failed: ${failed.message}` : "The replay was stopped.", "unknown");
  else verdict(entry, reply, again, "without drafts");
  say(view.verdict.textContent);
}

function verdict(entry, before, now, how) {
  const difference = firstDifference(before, now, { partial: before.partial || now.partial });
  if (difference) {
    const named = (token) => (token ? `“${spelled(token.text)}”` : "the end");
    const text = `Different ${how}, first at token ${difference.index + 1}: ${named(difference.then)} before, ${named(difference.now)} now.`;
    entry.view.judge(text + (before.fingerprint === now.fingerprint ? "" : " The server has changed meanwhile."), "different");
    return;
  }
  const speeds = [before.totals().speed, now.totals().speed];
  const speed = speeds.every(Boolean) ? ` (${speeds[1].toFixed(1)} tokens/s, before ${speeds[0].toFixed(1)})` : "";
  entry.view.judge(`Same tokens ${how}: ${Math.min(before.tokens.length, now.tokens.length)} of ${before.tokens.length}${speed}.`, "same");
}

// Updates views at most once per frame.
class Painter {
  constructor(view) {
    this.view = view;
    this.runs = [];
    this.frame = 0;
  }

  add(runs) {
    this.runs.push(...runs);
    this.frame ||= requestAnimationFrame(() => this.now());
  }

  now() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const runs = this.runs;
    this.runs = [];
    this.view.append(runs);
    follow();
  }
}

// ---------------------------------------------------------------------------------------------- the page

function put(entry) {
  conversation.push(entry);
  at("empty").hidden = true;
  log.append(entry.view.element);
  log.scrollTop = log.scrollHeight;
}

function cut(length) {
  for (const entry of conversation.splice(length)) entry.view.element.remove();
  inspector.hide();
}

// Keep scrolled to the end if the reader is there.
function follow() {
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function begin() {
  running = new AbortController();
  document.body.classList.add("running");
  at("send").hidden = true;
  at("stop").hidden = false;
}

function end() {
  const focused = document.activeElement === at("stop");
  running = null;
  document.body.classList.remove("running");
  at("stop").hidden = true;
  at("send").hidden = false;
  if (focused) ask.focus();
}

function submit() {
  const text = ask.value.trim();
  if (!text || running) return;
  if (send(text)) ask.value = "";
}

function colour() {
  document.body.classList.toggle("colours", params.colours);
}

function open(wanted) {
  at("side").hidden = !wanted;
  at("panel").setAttribute("aria-expanded", String(wanted));
}

function locked(now) {
  at("locked").hidden = !now;
  if (now) {
    open(true);
    at("p-key").focus();
  }
}

const THEMES = [["auto", "◐", "as the system"], ["light", "☀", "light"], ["dark", "☾", "dark"]];

function theme(name) {
  const [chosen, sign, words] = THEMES.find(([known]) => known === name) || THEMES[0];
  document.documentElement.dataset.theme = chosen;
  at("theme").textContent = sign;
  at("theme").setAttribute("aria-label", `Colours: ${words}`);
  try {
    localStorage.setItem("onedraw.theme", chosen);
  } catch {
    // not stored
  }
}

function remembered() {
  try {
    return localStorage.getItem("onedraw.theme");
  } catch {
    return null;
  }
}

async function connect() {
  const tried = (triedKey = params.key);
  try {
    const [card] = await models(tried);
    if (tried !== params.key) return; // a request with a newer key is running
    at("model").replaceChildren(make("strong", {}, card.id), ` ${card.dtype} on ${card.device}, context ${card.max_model_len}`);
    document.title = `${card.id} · Onedraw`;
    params.defaults(card);
    at("locked").hidden = true;
  } catch (error) {
    if (tried !== params.key) return;
    at("model").textContent = error.status === 401 ? "locked" : `not reachable: ${error.message}`;
    if (error.status === 401 && at("locked").hidden) locked(true);
  }
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
ask.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && at("inspector").hidden) running.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  running?.abort();
  cut(0);
  at("empty").hidden = false;
  ask.focus();
});
at("panel").addEventListener("click", () => open(at("side").hidden));
at("theme").addEventListener("click", () => {
  const now = THEMES.findIndex(([name]) => name === document.documentElement.dataset.theme);
  theme(THEMES[(now + 1) % THEMES.length][0]);
});
for (const opening of document.querySelectorAll(".opening")) {
  opening.addEventListener("click", () => {
    if (!running) send(opening.textContent);
  });
}
log.addEventListener("scroll", () => inspector.hide(), { passive: true });
document.addEventListener("pointerdown", (event) => {
  if (!event.target.closest?.(".t[data-i], #inspector")) inspector.hide();
});

theme(remembered());
colour();
open(matchMedia("(min-width: 62rem)").matches);
connect();
ask.focus();
