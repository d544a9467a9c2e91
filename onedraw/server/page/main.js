// The page: connects header, list of conversations, log, composer and parameters.

import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { Connection } from "./connection.js";
import { Conversation, MemoryStore, Store } from "./conversations.js";
import { at, make } from "./dom.js";
import { Inspector } from "./inspector.js";
import { Params } from "./params.js";
import { Picture } from "./picture.js";
import { Race } from "./race.js";
import { Sidebar } from "./sidebar.js";

const ask = at("ask");
const log = at("log");
const wanted = named(); // read now, because the empty conversation that Chat opens changes the address
const wide = matchMedia("(min-width: 62rem)");

// The id of the conversation that the address names.
function named() {
  return new URLSearchParams(location.hash.slice(1)).get("c");
}

// ---------------------------------------------------------------------------------------------- words to the user

const say = (text) => (at("status").textContent = text); // announced by screen readers and not visible

let noticed = 0;

// Shows a line above the composer for a while, with a button if there is an `undo`.
function notify(text, { undo = null, wrong = false } = {}) {
  const line = at("notice");
  clearTimeout(noticed);
  const parts = [make("span", {}, text)];
  const end = () => line.replaceChildren();
  if (undo) parts.push(make("button", { type: "button", class: "quiet", onclick: () => (end(), undo()) }, "Undo"));
  line.className = wrong ? "wrong" : "";
  line.replaceChildren(...parts);
  noticed = setTimeout(end, undo || wrong ? 12_000 : 5000);
}

// ---------------------------------------------------------------------------------------------- settings of the page

function remembered(name) {
  try {
    return localStorage.getItem(`onedraw.${name}`);
  } catch {
    return null;
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(`onedraw.${name}`, value);
  } catch {
    // The browser does not store values for this page, so the setting is lost when the page closes.
  }
}

const THEMES = [["auto", "as the system"], ["light", "light"], ["dark", "dark"]];

function theme(name) {
  const [chosen, words] = THEMES.find(([known]) => known === name) || THEMES[0];
  document.documentElement.dataset.theme = chosen;
  at("theme").setAttribute("aria-label", `Colours: ${words}`);
  remember("theme", chosen);
}

function showTokens(wanted) {
  document.body.classList.toggle("tokens", wanted);
  at("tokens").setAttribute("aria-checked", String(wanted));
  remember("tokens", String(wanted));
}

// The list of conversations and the parameters are beside the log on a wide screen, and over it on a narrow one, one at a time.
function open(name, wanted) {
  const [panel, opener] = { nav: [at("nav"), at("menu")], side: [at("side"), at("panel")] }[name];
  panel.hidden = !wanted;
  opener.setAttribute("aria-expanded", String(wanted));
  if (wanted && !wide.matches) open(name === "nav" ? "side" : "nav", false);
  if (name === "nav" && wide.matches) remember("nav", String(wanted));
}

// ---------------------------------------------------------------------------------------------- parts

// Open the store first, because opening waits. The parts below refer to each other, so no event may come before all are built.
const store = await Store.open().catch(() => {
  notify("This browser stores nothing for this page: conversations last until it is closed.", { wrong: true });
  return new MemoryStore();
});

const params = new Params(at("params"), () => {
  if (params.key !== connection.tried) connection.check();
});
const connection = new Connection(() => params.key, showConnection);
const inspector = new Inspector(at("inspector"), at("inspected"), at("close-inspector"));
const attachments = new Attachments(at("files"), (text, options) => (options?.wrong ? notify(text, options) : say(text)));
const picture = new Picture(at("picture"), say);

const tabs = new BroadcastChannel("onedraw");
tabs.onmessage = () => sidebar.refresh();

function stored() {
  sidebar.refresh();
  tabs.postMessage("changed");
}

const chat = new Chat({
  log,
  ask,
  inspector,
  params,
  connection,
  store,
  say,
  notify,
  share: (shown) => picture.show(shown),
  race: new Race(at("race"), { say, share: (shown) => picture.show(shown) }),
  onstored: stored,
  onchange: ({ conversation }) => {
    at("empty").hidden = conversation.entries.size > 0;
    document.title = [conversation.title, connection.card?.id, "Onedraw"].filter(Boolean).join(" · ");
    const hash = conversation.entries.size ? `#c=${conversation.id}` : "";
    if (location.hash !== hash) history.replaceState(null, "", hash || location.pathname + location.search);
  },
  onrunning,
  oncompose: (error) => {
    open("side", true);
    notify(error.message, { wrong: true });
  },
});

const sidebar = new Sidebar({
  list: at("conversations"),
  search: at("search"),
  count: at("search-count"),
  store,
  notify,
  current: () => chat.conversation.id,
  onopen: show,
  ondelete: (id) => {
    if (id !== chat.conversation.id) return;
    if (chat.running?.conversation === chat.conversation) chat.abort();
    chat.open(new Conversation());
  },
  onrename: async (id, title) => {
    const conversation = id === chat.conversation.id ? chat.conversation : await store.load(id);
    conversation.title = title;
    await store.put(conversation);
    tabs.postMessage("changed");
  },
});

// ---------------------------------------------------------------------------------------------- events

// Opens a conversation. While its reply is being written, the object in memory is used, not the stored copy.
async function show(id) {
  const running = chat.running?.conversation;
  const conversation = running?.id === id ? running : chat.conversation.id === id ? chat.conversation : await store.load(id);
  if (!conversation) {
    notify("This conversation is not in this browser any more.", { wrong: true });
    return;
  }
  chat.open(conversation);
  if (!wide.matches) open("nav", false);
  await sidebar.refresh();
  ask.focus();
}

function begin() {
  chat.open(new Conversation());
  if (!wide.matches) open("nav", false);
  sidebar.refresh();
  ask.focus();
}

function onrunning(now) {
  const focused = document.activeElement === at("stop") || (now && document.activeElement?.closest(".message")); // The focused element is about to be hidden.
  document.body.classList.toggle("running", now);
  at("send").hidden = now;
  at("stop").hidden = !now;
  if (focused) ask.focus();
}

let announced = false;

function showConnection({ state, card, message }) {
  document.body.dataset.connection = state;
  at("down").hidden = state !== "down";
  at("locked").hidden = state !== "locked";
  if (state === "up") {
    at("model-said").replaceChildren(make("strong", {}, card.id), ` ${card.dtype} on ${card.device}, context ${card.max_model_len.toLocaleString("en")}`);
    params.defaults(card);
    chat?.page.onchange(chat);
    if (announced) notify("The server answers again.");
    announced = false;
  } else if (state === "down") {
    at("down-said").textContent = `${message} Trying again until it does. Your conversations are safe in this browser.`;
    announced = true;
  } else if (state === "locked") {
    at("model-said").textContent = "locked";
    open("side", true);
    at("p-key").focus();
  }
}

// Sends the message in the composer, which is emptied only if it was sent. If the server seems down, it is checked first.
async function submit() {
  const text = ask.value.trim();
  if ((!text && !attachments.files.length) || chat.running) return;
  if (connection.state === "down" && !(await connection.check())) {
    notify("Not sent: the server does not answer.", { wrong: true });
    return;
  }
  if (!chat.send(text, [...attachments.files])) return;
  attachments.take();
  ask.value = "";
  grow();
}

function grow() {
  ask.style.height = "auto";
  ask.style.height = `${Math.min(ask.scrollHeight + 2, innerHeight * 0.4)}px`;
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
ask.addEventListener("input", grow);
ask.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
  if (event.key === "ArrowUp" && !ask.value) {
    const edits = log.querySelectorAll(".message.user button[aria-label=Edit]");
    if (!edits.length || chat.running) return;
    event.preventDefault();
    edits[edits.length - 1].click();
  }
});
ask.addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attachments.add(event.clipboardData.files);
});
at("attach").addEventListener("click", () => at("attach-file").click());
at("attach-file").addEventListener("change", async () => {
  await attachments.add([...at("attach-file").files]);
  at("attach-file").value = "";
  ask.focus();
});
document.addEventListener("dragover", (event) => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  document.body.classList.remove("dropping");
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attachments.add([...event.dataTransfer.files]);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.running && at("inspector").hidden && !document.querySelector("dialog[open]")) chat.abort();
});
at("stop").addEventListener("click", () => chat.abort());
at("new").addEventListener("click", begin);
at("menu").addEventListener("click", () => open("nav", at("nav").hidden));
at("panel").addEventListener("click", () => open("side", at("side").hidden));
at("retry").addEventListener("click", () => connection.check());
at("export").addEventListener("click", () => sidebar.save());
at("import").addEventListener("click", () => at("import-file").click());
at("import-file").addEventListener("change", async () => {
  for (const file of at("import-file").files) await sidebar.load(file);
  at("import-file").value = "";
});
at("theme").addEventListener("click", () => {
  const now = THEMES.findIndex(([name]) => name === document.documentElement.dataset.theme);
  theme(THEMES[(now + 1) % THEMES.length][0]);
});
at("tokens").addEventListener("click", () => {
  showTokens(at("tokens").getAttribute("aria-checked") !== "true");
  inspector.hide();
  chat.show();
});
for (const opening of document.querySelectorAll(".opening")) {
  opening.addEventListener("click", () => {
    ask.value = opening.textContent;
    submit();
  });
}
log.addEventListener("scroll", () => inspector.hide(), { passive: true });
document.addEventListener("pointerdown", (event) => {
  if (!event.target.closest?.(".t[data-i], #inspector")) inspector.hide();
});
addEventListener("hashchange", () => {
  const id = named();
  if (id && id !== chat.conversation.id) show(id);
});

theme(remembered("theme"));
showTokens(remembered("tokens") === "true");
open("nav", wide.matches && remembered("nav") !== "false");
const found = wanted ? await store.load(wanted).catch(() => null) : null;
if (found) chat.open(found);
await sidebar.refresh();
connection.check();
ask.focus();
