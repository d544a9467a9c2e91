// The openai package: node openai.js PART → what it saw, as JSON.
import OpenAI from "openai";

const { BASE, KEY, MODEL } = process.env;
const client = new OpenAI({ baseURL: BASE, apiKey: KEY, maxRetries: 0 });
const asked = { model: MODEL, messages: [{ role: "user", content: "Hello." }], seed: 7, max_tokens: 12 };
const said = { model: MODEL, input: "Hello.", max_output_tokens: 16, seed: 7 };
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
    return { status: error.status, message: error.message };
  }
}

const parts = {
  async chat() {
    return { text: (await client.chat.completions.create(asked)).choices[0].message.content };
  },
  async stream() {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
    return { text };
  },
  error: () => failed(() => client.chat.completions.create({ ...asked, temperature: -1 })),
  "chat-error": () => failed(() => client.chat.completions.create(asked)),
  async tools() {
    const tools = [{ type: "function", function: { name: "weather", parameters: weather, strict: true } }];
    const reply = await client.chat.completions.create({ ...asked, max_tokens: 2000, tools, tool_choice: "required" });
    return JSON.parse(reply.choices[0].message.tool_calls[0].function.arguments);
  },
  async round() {
    const tools = [{ type: "function", function: { name: "weather", parameters: weather, strict: true } }];
    const must = { ...asked, max_tokens: 2000, tools, tool_choice: "required", parallel_tool_calls: false };
    const { message } = (await client.chat.completions.create(must)).choices[0];
    const [call] = message.tool_calls;
    const messages = [...asked.messages, message, { role: "tool", tool_call_id: call.id, content: "sunny" }];
    const second = await client.chat.completions.create({ ...asked, messages, tools });
    return { ...JSON.parse(call.function.arguments), steps: 1 + second.choices.length };
  },
  async responses() {
    const reply = await client.responses.create(said);
    return { text: reply.output_text };
  },
  async "responses-stream"() {
    let text = "";
    for await (const event of await client.responses.create({ ...said, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    return { text };
  },
  async structured() {
    const response_format = { type: "json_schema", json_schema: { name: "weather", schema: weather, strict: true } };
    const reply = await client.chat.completions.create({ ...asked, max_tokens: 2000, response_format });
    return JSON.parse(reply.choices[0].message.content);
  },
};
console.log(JSON.stringify(await parts[process.argv[2]]()));
