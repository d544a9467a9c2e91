// Conversations as trees of entries, their storage in this browser, and their export and import as files.
//
// An edit or a new reply never replaces an entry: it is added as a sibling of the old entry. The page shows one path, from an
// entry without a parent to a leaf. The ancestors of an entry therefore never change, so a stored reply can always be replayed.

import { restoreReply, serializeReply } from "./reply.js";

const FORMAT = "onedraw-conversations";
const VERSION = 1;
const LONGEST_TITLE = 80;
export const LARGEST_FILE = 64 * 1024 ** 2; // the most bytes of an imported file
const MOST_CONVERSATIONS = 10_000; // the most conversations in an imported file
const MOST_ENTRIES = 10_000; // the most entries in an imported conversation

// A random id. crypto.randomUUID does not exist on pages without https.
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

const shortTitle = (text) => {
  const line = text.trim().split("\n")[0].trim();
  return line.length > LONGEST_TITLE ? line.slice(0, LONGEST_TITLE - 1) + "…" : line || "Untitled";
};

// An entry: {id, parent, role, created} and, by its role, {text, files} of the user, {results} of tools, {reply} of the model.
export class Conversation {
  constructor({ id = newId(), title = "", created = Date.now(), updated = created, leaf = null } = {}, entries = []) {
    this.id = id;
    this.title = title;
    this.created = created;
    this.updated = updated;
    this.leaf = leaf;
    this.entries = new Map(entries.map((entry) => [entry.id, entry]));
  }

  get(id) {
    return this.entries.get(id) ?? null;
  }

  // The entries from the first to this one.
  path(entry = this.get(this.leaf)) {
    const found = [];
    for (let now = entry; now; now = this.get(now.parent)) found.unshift(now);
    return found;
  }

  children(id) {
    return [...this.entries.values()].filter((entry) => entry.parent === id);
  }

  siblings(entry) {
    return this.children(entry.parent);
  }

  // The newest leaf below an entry.
  tip(entry) {
    let now = entry;
    for (let below = this.children(now.id); below.length; below = this.children(now.id)) now = below.at(-1);
    return now;
  }

  add(parent, role, content) {
    const entry = { id: newId(), parent: parent?.id ?? null, role, created: Date.now(), ...content };
    this.entries.set(entry.id, entry);
    this.leaf = entry.id;
    if (!this.title && role === "user") this.title = shortTitle(entry.text || entry.files[0]?.name || "");
    return entry;
  }

  // Takes out an entry and everything after it. Returns the removed entries, and a function that puts them back.
  remove(entry) {
    const before = { leaf: this.leaf, entries: new Map(this.entries) };
    const removed = [entry];
    for (const gone of removed) removed.push(...this.children(gone.id));
    for (const gone of removed) this.entries.delete(gone.id);
    if (!this.entries.has(this.leaf)) {
      const beside = this.children(entry.parent).at(-1);
      this.leaf = beside ? this.tip(beside).id : entry.parent;
    }
    return {
      removed,
      restore: () => {
        this.leaf = before.leaf;
        this.entries = before.entries;
      },
    };
  }

  get card() {
    const { id, title, created, updated, leaf } = this;
    return { id, title, created, updated, leaf };
  }
}

// ---------------------------------------------------------------------------------------------- plain data

function serialize(entry) {
  const { id, parent, role, created, text, files, results } = entry;
  const data = { id, parent, role, created };
  if (role === "user") return { ...data, text, files };
  if (role === "tool") return { ...data, results };
  return { ...data, reply: serializeReply(entry.reply) };
}

const string = (value) => (typeof value === "string" ? value : "");
const time = (value) => (Number.isFinite(value) ? value : Date.now());
const objects = (value) => (Array.isArray(value) ? value.filter((item) => item && typeof item === "object") : []);

// Builds an entry from stored data or from a file: only known fields, each of its type. Throws if the data is not an entry.
function restore(data) {
  const entry = { id: string(data.id), parent: data.parent === null ? null : string(data.parent), role: data.role, created: time(data.created) };
  switch (data.role) {
    case "user":
      return { ...entry, text: string(data.text), files: objects(data.files).map(({ name, text }) => ({ name: string(name), text: string(text) })) };
    case "tool":
      return { ...entry, results: objects(data.results).map(({ id, name, text }) => ({ id: string(id), name: string(name), text: string(text) })) };
    case "assistant":
      return { ...entry, reply: restoreReply(Object(data.reply)) };
    default:
      throw new Error(`an entry has the role ${JSON.stringify(data.role)?.slice(0, 40)}`);
  }
}

// The entries whose ancestors are all present, each after its parent. Siblings keep their order.
function connected(entries) {
  const below = new Map([[null, []]]);
  for (const entry of entries) below.set(entry.id, []);
  if (below.size !== entries.length + 1) throw new Error("two entries have one id");
  for (const entry of entries) below.get(entry.parent)?.push(entry);
  const found = [...below.get(null)];
  for (const entry of found) found.push(...below.get(entry.id));
  return found;
}

function restoreConversation(data, entries) {
  const leaf = entries.some((entry) => entry.id === data.leaf) ? data.leaf : (entries.at(-1)?.id ?? null);
  return new Conversation({ id: string(data.id) || newId(), title: string(data.title).slice(0, 200), created: time(data.created), updated: time(data.updated), leaf }, entries);
}

// The text of a file with these conversations.
export function exported(conversations) {
  const told = conversations.map((one) => ({ ...one.card, entries: [...one.entries.values()].map(serialize) }));
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: told }, null, 1);
}

// The conversations of a file. Throws an error that says why if it is not such a file. They get new ids, so an import never replaces anything.
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`the file is not JSON (${error.message})`);
  }
  if (file?.format !== FORMAT) throw new Error(`the file is no export of this page: its "format" is not "${FORMAT}"`);
  if (file.version !== VERSION) throw new Error(`the file has version ${JSON.stringify(file.version)?.slice(0, 20)}, and this page reads version ${VERSION}`);
  const found = objects(file.conversations);
  if (found.length > MOST_CONVERSATIONS) throw new Error(`more than ${MOST_CONVERSATIONS} conversations`);
  return found.map((data, number) => {
    try {
      const entries = objects(data.entries);
      if (entries.length > MOST_ENTRIES) throw new Error(`it has more than ${MOST_ENTRIES} entries`);
      const tree = connected(entries.map(restore));
      if (tree.length !== entries.length) throw new Error("an entry names a parent that does not exist");
      return renamed(restoreConversation(data, tree));
    } catch (error) {
      throw new Error(`conversation ${number + 1}: ${error.message}`);
    }
  });
}

function renamed(conversation) {
  const ids = new Map([...conversation.entries.keys()].map((id) => [id, newId()]));
  const fresh = (id) => (id === null ? null : ids.get(id));
  const entries = [...conversation.entries.values()].map((entry) => ({ ...entry, id: fresh(entry.id), parent: fresh(entry.parent) }));
  return new Conversation({ ...conversation.card, id: newId(), leaf: fresh(conversation.leaf) }, entries);
}

// ---------------------------------------------------------------------------------------------- storage

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

// Conversations in IndexedDB: one record per conversation and one per entry, so that two tabs can add to a conversation.
export class Store {
  // Throws if this browser does not store anything for the page.
  static async open() {
    const request = indexedDB.open("onedraw", VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("entries", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    return new Store(await done(request));
  }

  constructor(database) {
    this.database = database;
  }

  // Runs `work` on both object stores, conversations and entries, in one transaction.
  async change(work) {
    const transaction = this.database.transaction(["conversations", "entries"], "readwrite");
    work(transaction.objectStore("conversations"), transaction.objectStore("entries"));
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
    });
  }

  put(conversation, entries = []) {
    return this.change((cards, all) => {
      cards.put(conversation.card);
      for (const entry of entries) all.put({ ...serialize(entry), conversation: conversation.id });
    });
  }

  dropEntries(conversation, entries) {
    return this.change((cards, all) => {
      cards.put(conversation.card);
      for (const entry of entries) all.delete(entry.id);
    });
  }

  async drop(id) {
    const keys = await done(this.entries().index("conversation").getAllKeys(id));
    return this.change((cards, all) => {
      cards.delete(id);
      for (const key of keys) all.delete(key);
    });
  }

  entries() {
    return this.database.transaction("entries").objectStore("entries");
  }

  // The cards (stored facts, without entries) of all conversations, the latest change first.
  async list() {
    const cards = await done(this.database.transaction("conversations").objectStore("conversations").getAll());
    return cards.sort((a, b) => b.updated - a.updated);
  }

  // A conversation with its entries, or null.
  async load(id) {
    const card = await done(this.database.transaction("conversations").objectStore("conversations").get(id));
    if (!card) return null;
    const entries = await done(this.entries().index("conversation").getAll(id));
    return restoreConversation(card, connected(entries.map(restore).sort((a, b) => a.created - b.created)));
  }

  // The ids of conversations whose title or messages contain the text, whatever its case.
  async search(text) {
    const wanted = text.toLowerCase();
    const found = new Set((await this.list()).filter((card) => card.title.toLowerCase().includes(wanted)).map((card) => card.id));
    await new Promise((resolve, reject) => {
      const request = this.entries().openCursor();
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) return resolve();
        if (!found.has(cursor.value.conversation) && words(cursor.value).toLowerCase().includes(wanted)) found.add(cursor.value.conversation);
        return cursor.continue();
      };
    });
    return found;
  }
}

// The text of a stored entry that a search looks through.
function words({ role, text, files, results, reply }) {
  if (role === "user") return [text, ...files.map((file) => file.name)].join("\n");
  if (role === "tool") return results.map((result) => result.text).join("\n");
  return reply.runs.map((run) => run[1]).join("");
}

// The same methods as Store, kept in memory while the page is open, for browsers that store nothing.
export class MemoryStore {
  constructor() {
    this.conversations = new Map();
  }

  async put(conversation) {
    this.conversations.set(conversation.id, conversation);
  }

  async dropEntries() {}

  async drop(id) {
    this.conversations.delete(id);
  }

  async list() {
    return [...this.conversations.values()].map((one) => one.card).sort((a, b) => b.updated - a.updated);
  }

  async load(id) {
    return this.conversations.get(id) ?? null;
  }

  async search(text) {
    const wanted = text.toLowerCase();
    const told = (one) => [one.title, ...[...one.entries.values()].map((entry) => words(serialize(entry)))].join("\n").toLowerCase();
    return new Set([...this.conversations.values()].filter((one) => told(one).includes(wanted)).map((one) => one.id));
  }
}
