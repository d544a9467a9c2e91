// The parameter panel → fields of a request. The browser stores the values; the API key only while the tab is open.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const KEPT = [...NUMBERS.filter((name) => name !== "seed"), "system", "alternatives", "speculation", "tools", "tool_choice", "effort", "more"];
const JSON_FIELDS = {
  tools: { title: "Tools", kind: "list", empty: [] },
  more: { title: "More fields", kind: "object", empty: {} },
};
const STORE = "onedraw.params";

function stored(area, name) {
  try {
    return window[area].getItem(name);
  } catch {
    return null; // The browser may have storage switched off.
  }
}

function store(area, name, value) {
  try {
    window[area].setItem(name, value);
  } catch {
    // The browser does not store values for this page, so the parameter is lost when the page closes.
  }
}

export class Params {
  constructor(form, onchange) {
    this.form = form;
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

  set seed(value) {
    this.field("seed").value = value;
  }

  // Shows the defaults (neutral values, overridden by those of the model's card) as placeholders of the fields.
  defaults(card) {
    const neutral = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, max_tokens: "to the end" };
    for (const [name, value] of Object.entries({ ...neutral, ...card.defaults })) {
      const field = this.field(name);
      if (field && "placeholder" in field) field.placeholder = String(value);
    }
  }

  // The fields of a request, without messages. Throws if a field has no valid number or JSON, or if the JSON sets `n`.
  fields() {
    const asked = { return_token_details: true };
    for (const name of NUMBERS) {
      const field = this.field(name);
      if (field.validity.badInput) throw new Error(`${name}: not a number`);
      if (field.value.trim()) asked[name] = Number(field.value);
    }
    const alternatives = Number(this.field("alternatives").value || 0);
    if (alternatives > 0) Object.assign(asked, { logprobs: true, top_logprobs: alternatives });
    if (!this.field("speculation").checked) asked.speculation = false;
    if (this.field("effort").value) asked.reasoning_effort = this.field("effort").value;
    const tools = this.json("tools");
    if (tools.length) Object.assign(asked, { tools, tool_choice: this.field("tool_choice").value });
    const more = this.json("more");
    if ("n" in more) throw new Error("More fields: the page shows one reply, so n cannot be set here");
    return { ...asked, ...more };
  }

  get system() {
    return this.field("system").value.trim();
  }

  // The value of a field that the user writes as JSON. Throws if the text is not JSON, or not the list or object that is needed.
  json(name) {
    const { title, kind, empty } = JSON_FIELDS[name];
    const text = this.field(name).value.trim();
    if (!text) return empty;
    let value;
    try {
      value = JSON.parse(text);
    } catch (error) {
      throw new Error(`${title}: not JSON (${error.message})`);
    }
    if (value === null || typeof value !== "object" || Array.isArray(value) !== Array.isArray(empty)) throw new Error(`${title}: must be a JSON ${kind}`);
    return value;
  }

  judge() {
    for (const name of Object.keys(JSON_FIELDS)) {
      const wrong = document.getElementById(`${name}-wrong`);
      try {
        this.json(name);
        wrong.textContent = "";
      } catch (error) {
        wrong.textContent = error.message;
      }
      this.field(name).setAttribute("aria-invalid", String(Boolean(wrong.textContent)));
    }
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
      values = Object(JSON.parse(stored("localStorage", STORE) || "{}"));
    } catch {
      // The stored text is not JSON, so this page did not write it.
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
