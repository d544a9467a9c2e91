// The panel of parameters: what it says, as fields of a request; kept in this browser, the key only while the tab is open.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const KEPT = [...NUMBERS.filter((name) => name !== "seed"), "system", "alternatives", "speculation", "colours", "more"];
const STORE = "onedraw.params";

function stored(area, name) {
  try {
    return window[area].getItem(name);
  } catch {
    return null; // storage may be switched off
  }
}

function store(area, name, value) {
  try {
    window[area].setItem(name, value);
  } catch {
    // then nothing is remembered
  }
}

export class Params {
  constructor(form, onchange) {
    this.form = form;
    this.wrong = document.getElementById("more-wrong");
    this.restore();
    form.addEventListener("input", () => {
      this.save();
      this.judge();
      onchange();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    this.judge();
  }

  field(name) {
    return this.form.elements.namedItem(name);
  }

  get key() {
    return this.field("key").value.trim();
  }

  get colours() {
    return this.field("colours").checked;
  }

  set seed(value) {
    this.field("seed").value = value;
  }

  // Placeholders say what holds where nothing is filled in.
  defaults(card) {
    const neutral = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, max_tokens: "to the end" };
    for (const [name, value] of Object.entries({ ...neutral, ...card.defaults })) {
      const field = this.field(name);
      if (field && "placeholder" in field) field.placeholder = String(value);
    }
  }

  // The fields of a request, without messages. Throws where the JSON is wrong.
  fields() {
    const asked = { return_token_details: true };
    for (const name of NUMBERS) {
      const text = this.field(name).value.trim();
      if (text) asked[name] = Number(text);
    }
    const alternatives = Number(this.field("alternatives").value || 0);
    if (alternatives > 0) Object.assign(asked, { logprobs: true, top_logprobs: alternatives });
    if (!this.field("speculation").checked) asked.speculation = false;
    return { ...asked, ...this.more() };
  }

  system() {
    const text = this.field("system").value.trim();
    return text ? [{ role: "system", content: text }] : [];
  }

  more() {
    const text = this.field("more").value.trim();
    if (!text) return {};
    let value;
    try {
      value = JSON.parse(text);
    } catch (error) {
      throw new Error(`More fields: not JSON (${error.message})`);
    }
    if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error("More fields: must be a JSON object");
    return value;
  }

  judge() {
    try {
      this.more();
      this.wrong.textContent = "";
    } catch (error) {
      this.wrong.textContent = error.message;
    }
    this.field("more").setAttribute("aria-invalid", String(Boolean(this.wrong.textContent)));
  }

  save() {
    const values = {};
    for (const name of KEPT) {
      const field = this.field(name);
      values[name] = field.type === "checkbox" ? field.checked : field.value;
    }
    store("localStorage", STORE, JSON.stringify(values));
    store("sessionStorage", STORE + ".key", this.key);
  }

  restore() {
    let values = {};
    try {
      values = JSON.parse(stored("localStorage", STORE) || "{}");
    } catch {
      // written by something else
    }
    for (const name of KEPT) {
      const field = this.field(name);
      if (!(name in values)) continue;
      if (field.type === "checkbox") field.checked = Boolean(values[name]);
      else field.value = String(values[name]);
    }
    this.field("key").value = stored("sessionStorage", STORE + ".key") || "";
  }
}
