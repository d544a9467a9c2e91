// Whether the server answers. A server that does not is asked again until it does, in growing intervals.

import { healthy, models } from "./api.js";

const PULSE = 20_000; // milliseconds between checks of a server that answers, while the page is visible
const FIRST_WAIT = 1000;
const LONGEST_WAIT = 10_000;

export class Connection {
  // `key`: a function that returns the API key. `onchange`: called with each new state.
  constructor(key, onchange) {
    this.key = key;
    this.onchange = onchange;
    this.state = "connecting"; // "connecting", "up", "down", or "locked" (the API key is missing or wrong)
    this.card = null; // the description of the served model
    this.message = "";
    this.tried = null; // the API key with which the last check was made
    this.wait = FIRST_WAIT;
    this.timer = 0;
    addEventListener("online", () => this.check());
    document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && this.pulse());
    this.schedule(PULSE);
  }

  schedule(milliseconds) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.pulse(), milliseconds);
  }

  async pulse() {
    if (this.state !== "up") {
      await this.check();
      return;
    }
    try {
      if (document.visibilityState === "visible") await healthy();
      this.schedule(PULSE);
    } catch (error) {
      this.lost(error);
    }
  }

  // Asks for the model list; returns whether requests can be sent.
  async check() {
    const tried = (this.tried = this.key());
    try {
      const [card] = await models(tried);
      if (tried !== this.tried) return false; // A check with a newer key is running, so this result is out of date.
      this.card = card;
      this.wait = FIRST_WAIT;
      this.become("up", "");
      this.schedule(PULSE);
    } catch (error) {
      if (tried !== this.tried) return false;
      if (error.status === 401) this.become("locked", error.message);
      else this.lost(error);
    }
    return this.state === "up";
  }

  // Called when a request failed because the server does not answer.
  lost(error) {
    this.become("down", error.message);
    this.schedule(this.wait);
    this.wait = Math.min(this.wait * 2, LONGEST_WAIT);
  }

  become(state, message) {
    this.state = state;
    this.message = message;
    this.onchange(this);
  }
}
