// The card of one token: whether it was drafted, its probability, and the alternatives.

import { make, percent, spelled } from "./dom.js";

export class Inspector {
  constructor(card, content, close) {
    this.card = card;
    this.content = content;
    this.at = null;
    close.addEventListener("click", () => this.hide());
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || this.card.hidden) return;
      this.hide();
      event.stopImmediatePropagation(); // Escape closes the card; it must not stop the reply as well.
    });
  }

  show(token, count, span) {
    this.mark(span);
    this.content.replaceChildren(
      make("p", { class: "token-name" }, make("code", {}, spelled(token.text)), make("span", { class: "muted" }, ` token ${token.index + 1} of ${count}, id ${token.id}`)),
      make("p", {}, make("span", { class: "t " + kind(token) }, token.kept ? "drafted" : "sampled"), " ", how(token)),
      ...this.alternatives(token),
    );
    this.card.hidden = false;
    this.place(span);
  }

  hide() {
    this.mark(null);
    this.card.hidden = true;
  }

  mark(span) {
    this.at?.classList.remove("at");
    this.at = span;
    this.at?.classList.add("at");
  }

  alternatives(token) {
    if (token.logprob === null) return [make("p", { class: "muted small" }, "Ask for alternatives in the parameters to see probabilities.")];
    const rows = token.top.map((entry) => ({ text: entry.token, logprob: entry.logprob, said: entry.token === token.text && entry.logprob === token.logprob }));
    if (!rows.some((row) => row.said)) rows.push({ text: token.text, logprob: token.logprob, said: true });
    const body = make("tbody", {});
    for (const row of rows) {
      const bar = make("span", { class: "bar", "aria-hidden": "true" });
      bar.style.width = `${Math.round(Math.exp(row.logprob) * 100)}%`;
      body.append(
        make("tr", row.said ? { class: "said" } : {},
          make("td", {}, make("code", {}, spelled(row.text)), row.said ? make("span", { class: "hidden" }, " (said)") : ""),
          make("td", { class: "number" }, percent(Math.exp(row.logprob))),
          make("td", { class: "bars" }, bar)),
      );
    }
    const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "token"), make("th", { scope: "col", class: "number" }, "probability"), make("td", {})));
    return [make("table", {}, head, body)];
  }

  // Moves the card below or above the token; on a narrow screen the stylesheet puts it at the bottom.
  place(span) {
    const style = this.card.style;
    if (matchMedia("(max-width: 46rem)").matches || !span) {
      style.left = style.top = "";
      return;
    }
    const box = span.getBoundingClientRect();
    const card = this.card.getBoundingClientRect();
    const left = Math.max(8, Math.min(box.left, innerWidth - card.width - 8));
    const below = box.bottom + 6;
    const top = below + card.height < innerHeight - 8 ? below : Math.max(8, box.top - card.height - 6);
    style.left = `${left}px`;
    style.top = `${top}px`;
  }
}

export function kind(token) {
  return token.kept ? "kept" : "sampled";
}

export function how(token) {
  if (token.kept) return "a draft that was right";
  const drafts = token.rejected === 1 ? "1 draft was" : `${token.rejected} drafts were`;
  return token.rejected ? `by the model; ${drafts} rejected here` : "by the model; no draft here";
}

export function described(token, count) {
  const likely = token.logprob === null ? "" : `, ${percent(Math.exp(token.logprob))}`;
  const others = token.top.filter((entry) => entry.token !== token.text).slice(0, 3);
  const rest = others.map((entry) => `${spelled(entry.token)} ${percent(Math.exp(entry.logprob))}`).join(", ");
  return `${spelled(token.text)}, token ${token.index + 1} of ${count}, ${kind(token)}${likely}${rest ? "; instead: " + rest : ""}`;
}
