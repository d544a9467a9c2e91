// The open conversation: sends requests, runs replies, branches, replays. Every change of the conversation is stored.

import { withFiles } from "./attachments.js";
import { Conversation } from "./conversations.js";
import { compared, replayOf } from "./replay.js";
import { Reply } from "./reply.js";
import { Painter, stream } from "./streaming.js";
import { ReplyView, ResultsView, UserView } from "./view.js";

const SAVED_EVERY = 1000; // milliseconds between saves of a reply that is being written

export class Chat {
  // `page`: the elements, objects and functions of the page that a conversation uses: {log, ask, inspector, params, connection,
  // store, say, notify, onchange, onrunning, oncompose, onstored, race, share}
  constructor(page) {
    this.page = page;
    this.views = new Map(); // entry id → the view that shows the entry
    this.running = null; // {controller, conversation} of the reply that is being generated
    this.open(new Conversation());
  }

  // ---------------------------------------------------------------------------------------------- what is shown

  open(conversation) {
    this.conversation = conversation;
    this.page.inspector.hide();
    this.show();
    this.page.log.scrollTop = this.page.log.scrollHeight;
  }

  // Shows the path to the leaf. Elements that stay on the path are not replaced, so that an edit or the focus is not lost.
  show() {
    const { conversation } = this;
    const elements = conversation.path().map((entry) => {
      const view = this.view(entry);
      const versions = conversation.siblings(entry);
      view.update({ number: versions.indexOf(entry) + 1, count: versions.length });
      return view.element;
    });
    const { log } = this.page;
    const focused = log.contains(document.activeElement);
    const shown = new Set(elements);
    for (const element of [...log.querySelectorAll(":scope > .message")]) if (!shown.has(element)) element.remove();
    elements.forEach((element, i) => {
      const now = log.querySelectorAll(":scope > .message")[i];
      if (now !== element) log.insertBefore(element, now ?? null);
    });
    if (focused && !log.contains(document.activeElement)) this.page.ask.focus(); // The element that had the focus is no longer shown.
    this.askForResults();
    this.page.onchange(this);
  }

  view(entry) {
    if (!this.views.has(entry.id)) this.views.set(entry.id, this.made(entry));
    return this.views.get(entry.id);
  }

  made(entry) {
    const { conversation } = this;
    const shared = {
      onremove: () => this.remove(entry),
      onversion: (step) => this.turn(entry, step),
    };
    if (entry.role === "user") return new UserView(entry, { ...shared, onedit: (text) => this.edit(entry, text) });
    if (entry.role === "tool") return new ResultsView(entry, { ...shared, onedit: () => this.editResults(entry) });
    return new ReplyView(entry.reply, {
      ...shared,
      inspector: this.page.inspector,
      say: this.page.say,
      onagain: () => this.again(entry),
      onreplay: () => this.replay(entry),
      onrace: () => this.race(entry),
      onpicture: () => this.page.share({ reply: entry.reply, prompt: this.prompt(entry) }),
      onpin: () => {
        this.page.params.seed = entry.reply.seed;
        this.page.notify(`Seed ${entry.reply.seed} is kept for the next messages.`);
      },
      oncontinue: () => this.resume(entry),
      onedit: () => this.view(conversation.get(entry.parent)).open?.(),
      onresults: (texts) => this.giveResults(entry, texts),
    });
  }

  // If the last reply calls tools, the user is asked for their results.
  askForResults() {
    const last = this.conversation.path().at(-1);
    for (const [id, view] of this.views) {
      if (!view.answering) continue;
      const waits = id === last?.id && last.reply.done && !last.reply.error && last.reply.finish === "tool_calls";
      if (waits && view.answering.hidden) view.askResults();
      else if (!waits) view.answering.hidden = true;
    }
  }

  // Scrolls the log to its end when it grows, unless the reader has scrolled up.
  follow() {
    const { log } = this.page;
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 140) log.scrollTop = log.scrollHeight;
  }

  // ---------------------------------------------------------------------------------------------- requests

  // Whether a request can be sent: no reply runs and the parameters are valid.
  ready() {
    return !this.running && this.fields() !== null;
  }

  // The fields of a request that the parameter panel sets, or null if a parameter is invalid.
  fields() {
    try {
      return this.page.params.fields();
    } catch (error) {
      this.page.oncompose(error);
      return null;
    }
  }

  // The messages that an entry answers: those of all entries before it.
  messages(entry, system) {
    const before = this.conversationOf(entry).path(entry).slice(0, -1);
    return [...(system ? [{ role: "system", content: system }] : []), ...before.flatMap(message)];
  }

  conversationOf(entry) {
    return this.running?.conversation.get(entry.id) ? this.running.conversation : this.conversation;
  }

  // The text of the user's last message up to an entry, else the names of its files.
  prompt(entry) {
    const asked = this.conversation.path(entry).findLast((one) => one.role === "user");
    return asked ? asked.text || asked.files.map((file) => file.name).join(", ") : "";
  }

  // Returns whether the message was sent.
  send(text, files = []) {
    if (!this.ready()) return false;
    const parent = this.conversation.path().at(-1) ?? null;
    this.put(this.conversation.add(parent, "user", { text, files }));
    this.answer();
    return true;
  }

  edit(entry, text) {
    if (!this.ready()) return false;
    this.put(this.conversation.add(this.conversation.get(entry.parent), "user", { text, files: entry.files }));
    this.answer();
    return true;
  }

  giveResults(entry, texts) {
    if (!this.ready()) return;
    const results = entry.reply.calls.map(({ id, name }, i) => ({ id, name, text: texts[i] }));
    this.put(this.conversation.add(entry, "tool", { results }));
    this.answer();
  }

  editResults(entry) {
    if (this.running) return;
    const asked = this.conversation.get(entry.parent);
    this.conversation.leaf = asked.id;
    this.show();
    this.view(asked).askResults(entry.results.map((result) => result.text)).focus();
  }

  // Requests a reply to the last entry.
  answer() {
    this.begin(this.conversation.path().at(-1), this.fields());
  }

  // Requests another reply to the same message, with the panel's parameters and a seed that the server draws.
  again(entry) {
    if (!this.ready()) return;
    const fields = this.fields();
    delete fields.seed;
    this.begin(this.conversation.get(entry.parent), fields);
  }

  begin(parent, fields) {
    const reply = new Reply({ fields, system: this.page.params.system });
    const entry = this.conversation.add(parent, "assistant", { reply });
    this.put(entry);
    this.page.log.scrollTop = this.page.log.scrollHeight;
    this.run(entry);
  }

  // Continues a reply that broke off: the server gets its tokens and its seed.
  resume(entry) {
    if (this.running) return;
    const { reply } = entry;
    const extra = { seed: reply.seed, continue_ids: reply.tokens.map((token) => token.id), system_fingerprint: reply.fingerprint };
    reply.resume();
    this.run(entry, extra);
  }

  async run(entry, extra = {}) {
    const { reply } = entry;
    const { conversation } = this;
    const view = this.view(entry);
    const painter = new Painter(() => {
      view.update();
      this.follow();
    });
    this.page.inspector.hide();
    this.start(conversation);
    view.update();
    let saved = performance.now();
    const failed = await stream(reply, this.messages(entry, reply.system), {
      ...this.asked,
      extra,
      onchunk: () => {
        painter.ask();
        if (performance.now() - saved < SAVED_EVERY) return;
        saved = performance.now();
        this.save(conversation, [entry]);
      },
    });
    painter.end();
    this.stop(failed);
    conversation.updated = Date.now();
    this.save(conversation, [entry]);
    view.update();
    if (conversation === this.conversation) this.show();
    this.follow();
    this.page.say(failed ? `The reply failed: ${failed.message}` : `${reply.stopped ? "Stopped" : "Reply complete"}: ${reply.tokens.length} tokens`);
  }

  get asked() {
    return { key: this.page.params.key, signal: this.running.controller.signal };
  }

  start(conversation) {
    this.running = { controller: new AbortController(), conversation };
    this.page.onrunning(true);
  }

  stop(failed = null) {
    this.running = null;
    this.page.onrunning(false);
    if (failed?.lost) this.page.connection.lost(failed);
    else if (failed?.status === 401) this.page.connection.become("locked", failed.message);
  }

  abort() {
    this.running?.controller.abort();
  }

  // Sends the request of a reply again, without drafts, and compares the tokens. The reply on the page stays as it is.
  async replay(entry) {
    if (this.running) return;
    const { reply } = entry;
    const view = this.view(entry);
    const now = replayOf(reply, { speculation: false });
    view.judge("Replaying without drafts …", "waiting");
    this.start(this.conversation);
    const failed = await stream(now, this.messages(entry, reply.system), {
      ...this.asked,
      onchunk: () => view.judge(`Replaying without drafts … ${now.tokens.length} tokens`, "waiting"),
    });
    this.stop(failed);
    if (failed || now.stopped) {
      view.judge(failed ? `The replay failed: ${failed.message}` : "The replay was stopped.", "unknown");
    } else {
      const { same, text } = compared(reply, now, "without drafts");
      view.judge(same ? `${text}.` : text, same ? "same" : "different");
    }
    this.page.say(view.verdict.textContent);
  }

  async race(entry) {
    if (this.running) return;
    const { reply } = entry;
    this.start(this.conversation);
    const { signal } = this.running.controller;
    const failed = await this.page.race.run({ reply, messages: this.messages(entry, reply.system), prompt: this.prompt(entry), key: this.page.params.key, signal });
    this.stop(failed);
  }

  // ---------------------------------------------------------------------------------------------- changes

  put(entry) {
    this.conversation.updated = Date.now();
    this.save(this.conversation, [entry]);
    this.show();
  }

  // Shows the next or previous version of an entry.
  turn(entry, step) {
    if (this.running) return;
    const versions = this.conversation.siblings(entry);
    const other = versions[versions.indexOf(entry) + step];
    if (!other) return;
    this.conversation.leaf = this.conversation.tip(other).id;
    this.save(this.conversation);
    this.show();
    const to = this.view(other).element;
    (to.querySelector(`[title="${step < 0 ? "Previous" : "Next"} version"]:enabled`) ?? to.querySelector(".versions button:enabled"))?.focus();
  }

  remove(entry) {
    if (this.running) return;
    const { conversation } = this;
    const { removed, restore } = conversation.remove(entry);
    this.store((store) => store.dropEntries(conversation, removed));
    this.show();
    this.page.notify(removed.length > 1 ? `${removed.length} messages removed.` : "Message removed.", {
      undo: () => {
        restore();
        this.save(conversation, removed);
        if (conversation === this.conversation) this.show();
      },
    });
  }

  save(conversation, entries = []) {
    this.store((store) => store.put(conversation, entries));
  }

  async store(work) {
    try {
      await work(this.page.store);
      this.page.onstored();
    } catch (error) {
      this.page.notify(`Not stored in this browser: ${error.message}`, { wrong: true });
    }
  }
}

// Converts an entry to the messages of a request.
function message(entry) {
  switch (entry.role) {
    case "user":
      return [{ role: "user", content: withFiles(entry.text, entry.files) }];
    case "tool":
      return entry.results.map(({ id, text }) => ({ role: "tool", tool_call_id: id, content: text }));
    default:
      return entry.reply.says() ? [entry.reply.message()] : [];
  }
}
