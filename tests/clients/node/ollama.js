// The ollama package: node ollama.js PART → what it saw, as JSON.
import { Ollama } from "ollama";

const { BASE, KEY, MODEL } = process.env;
const client = new Ollama({ host: BASE.replace(/\/v1$/, ""), headers: { Authorization: `Bearer ${KEY}` } });
const asked = { model: MODEL, messages: [{ role: "user", content: "Hello." }], options: { seed: 7, num_predict: 12 } };
const weather = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};

async function failed(work) {
  try {
    await work();
    return { status: 200, message: "" };
  } catch (error) {
    return { status: error.status_code, message: error.message };
  }
}

const parts = {
  async chat() {
    return { text: (await client.chat(asked)).message.content };
  },
  async stream() {
    let text = "";
    for await (const part of await client.chat({ ...asked, stream: true })) text += part.message.content;
    return { text };
  },
  error: () => failed(() => client.chat({ ...asked, options: { temperature: -1 } })),
  "chat-error": () => failed(() => client.chat(asked)),
  async structured() {
    const reply = await client.chat({ ...asked, options: { seed: 7 }, format: weather });
    return JSON.parse(reply.message.content);
  },
  async generate() {
    let text = "";
    for await (const part of await client.generate({ model: MODEL, prompt: "Hello.", options: asked.options, stream: true })) text += part.response;
    return { text };
  },
  async models() {
    const { models } = await client.list();
    const shown = await client.show({ model: MODEL });
    const { version } = await client.version();
    return { names: models.map((model) => model.name), capabilities: shown.capabilities, version };
  },
};

console.log(JSON.stringify(await parts[process.argv[2]]()));
