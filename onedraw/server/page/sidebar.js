// The list of conversations: search, rename, delete, export and import.

import { button, make, save } from "./dom.js";
import { exported, imported, LARGEST_FILE } from "./conversations.js";

const DAY = 24 * 3600 * 1000;

function group(updated, now = Date.now()) {
  const days = Math.floor((new Date(now).setHours(24, 0, 0, 0) - updated) / DAY);
  return days < 1 ? "Today" : days < 2 ? "Yesterday" : days < 8 ? "This week" : "Earlier";
}

const day = (time) => new Date(time).toISOString().slice(0, 10);

export class Sidebar {
  // `page`: the elements, objects and functions of the page that the list uses:
  // {list, search, count, store, notify, say, current, onopen, ondelete, onrename}
  constructor(page) {
    this.page = page;
    this.renaming = null; // the id of the conversation whose title is being edited
    this.asked = 0;
    page.search.addEventListener("input", () => this.refresh());
    page.search.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && page.search.value) {
        event.stopPropagation();
        page.search.value = "";
        this.refresh();
      }
    });
  }

  async refresh() {
    const asked = (this.asked += 1);
    const { store, search, list, count } = this.page;
    const wanted = search.value.trim();
    const found = wanted ? await store.search(wanted) : null;
    const cards = (await store.list()).filter((card) => !found || found.has(card.id));
    if (asked !== this.asked || this.renaming) return; // A newer list has been requested, or a title is being edited.
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    const children = [];
    let last = null;
    for (const card of cards) {
      const name = group(card.updated);
      if (name !== last) {
        last = name;
        children.push(make("li", { class: "day muted" }, name));
      }
      children.push(this.row(card));
    }
    list.replaceChildren(...children);
    count.textContent = wanted ? `${cards.length} found` : "";
    if (!cards.length) list.append(make("li", { class: "none muted" }, wanted ? "Nothing found." : "Conversations are kept in this browser."));
    if (focused) list.querySelector(`li[data-id="${CSS.escape(focused)}"] .open`)?.focus();
  }

  row(card) {
    const current = card.id === this.page.current();
    const open = make("button", { type: "button", class: "open", title: card.title, "aria-current": current ? "page" : null, onclick: () => this.page.onopen(card.id) }, card.title);
    const element = make("li", { "data-id": card.id, class: current ? "row current" : "row" }, open,
      make("span", { class: "row-tools" },
        button("rename", `Rename ${card.title}`, () => this.rename(element, card)),
        button("save", `Export ${card.title}`, () => this.save([card])),
        button("remove", `Delete ${card.title}`, () => this.delete(card))));
    return element;
  }

  rename(element, card) {
    this.renaming = card.id;
    const field = make("input", { "aria-label": "Title", maxlength: "80" });
    field.value = card.title;
    const end = async (title) => {
      if (this.renaming !== card.id) return;
      this.renaming = null;
      if (title && title !== card.title) await this.page.onrename(card.id, title);
      await this.refresh();
      this.page.list.querySelector(`li[data-id="${CSS.escape(card.id)}"] .open`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(field.value.trim());
      if (event.key === "Escape") {
        event.stopPropagation();
        end("");
      }
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    element.replaceChildren(field);
    field.focus();
    field.select();
  }

  async delete(card) {
    const { store, notify } = this.page;
    const conversation = await store.load(card.id);
    await store.drop(card.id);
    this.page.ondelete(card.id);
    await this.refresh();
    this.page.search.focus();
    notify(`“${card.title}” was deleted.`, {
      undo: async () => {
        await store.put(conversation, [...conversation.entries.values()]);
        await this.refresh();
      },
    });
  }

  // Saves conversations as a file: those that the cards name, or all if no cards are given.
  async save(cards = null) {
    const { store, notify } = this.page;
    const chosen = cards ?? (await store.list());
    if (!chosen.length) {
      notify("There is nothing to export.");
      return;
    }
    const whole = (await Promise.all(chosen.map((card) => store.load(card.id)))).filter(Boolean);
    save(`onedraw-${cards ? "conversation" : "conversations"}-${day(Date.now())}.json`, new Blob([exported(whole)], { type: "application/json" }));
  }

  async load(file) {
    const { store, notify, onopen } = this.page;
    try {
      if (file.size > LARGEST_FILE) throw new Error(`the file is over ${LARGEST_FILE / 1024 ** 2} MiB`);
      const found = imported(await file.text());
      for (const conversation of found) await store.put(conversation, [...conversation.entries.values()]);
      await this.refresh();
      notify(`${found.length} ${found.length === 1 ? "conversation" : "conversations"} imported.`);
      if (found.length === 1) onopen(found[0].id);
    } catch (error) {
      notify(`Not imported: ${error.message}.`, { wrong: true });
    }
  }
}
