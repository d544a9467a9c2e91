// The Vercel AI SDK: node ai.js PART → what it saw, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { BASE, KEY, MODEL } = process.env;
const provider = createOpenAICompatible({ name: "onedraw", baseURL: BASE, apiKey: KEY, supportsStructuredOutputs: true });
const asked = { model: provider(MODEL), prompt: "Hello.", seed: 7, maxOutputTokens: 12, maxRetries: 0 };
const weather = z.object({ city: z.string().max(12), days: z.number().int().min(1).max(9) });

// What was sent, to see in which way the provider tells of earlier steps. It knows no seed; the server does.
const sent = [];
const openai = createOpenAI({
  baseURL: BASE,
  apiKey: KEY,
  fetch: (url, init) => {
    const body = JSON.stringify({ ...JSON.parse(init.body), seed: 7 });
    sent.push(body);
    return fetch(url, { ...init, body });
  },
});
const brief = { prompt: "Hello.", maxOutputTokens: 16, maxRetries: 0 };
// The first step must call, the second may say what it likes.
const stepped = {
  prompt: "Hello.",
  maxOutputTokens: 1000,
  maxRetries: 0,
  tools: { weather: tool({ description: "the weather", inputSchema: weather, execute: async () => "sunny" }) },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};

async function failed(work) {
  try {
    await work();
    return { status: 200, message: "" };
  } catch (error) {
    return { status: error.statusCode, message: error.message };
  }
}

const parts = {
  async chat() {
    return { text: (await generateText(asked)).text };
  },
  async stream() {
    let text = "";
    for await (const piece of streamText(asked).textStream) text += piece;
    return { text };
  },
  error: () => failed(() => generateText({ ...asked, temperature: -1 })),
  "chat-error": () => failed(() => generateText(asked)),
  async tools() {
    const tools = { weather: tool({ description: "the weather", inputSchema: weather }) };
    const reply = await generateText({ ...asked, maxOutputTokens: 2000, tools, toolChoice: "required" });
    return reply.toolCalls[0].input;
  },
  async round() {
    const reply = await generateText({ ...stepped, seed: 7, model: provider(MODEL), providerOptions: { onedraw: { parallel_tool_calls: false } } });
    return { ...reply.steps[0].toolCalls[0].input, steps: reply.steps.length };
  },
  async responses() {
    return { text: (await generateText({ ...brief, model: openai(MODEL) })).text };
  },
  async "responses-stream"() {
    let text = "";
    for await (const piece of streamText({ ...brief, model: openai(MODEL) }).textStream) text += piece;
    return { text };
  },
  async "responses-round"() {
    const reply = await generateText({ ...stepped, model: openai(MODEL), providerOptions: { openai: { parallelToolCalls: false } } });
    return { ...reply.steps[0].toolCalls[0].input, steps: reply.steps.length };
  },
  async "responses-refer"() {
    const said = [{ role: "user", content: "Hello." }];
    const first = await generateText({ messages: said, maxOutputTokens: 16, maxRetries: 0, model: openai(MODEL) });
    said.push(...first.response.messages, { role: "user", content: "And now?" });
    const second = await generateText({ messages: said, maxOutputTokens: 16, maxRetries: 0, model: openai(MODEL) });
    return { text: second.text, referred: sent[1].includes("item_reference") };
  },
  async structured() {
    return (await generateObject({ ...asked, maxOutputTokens: 2000, schema: weather })).object;
  },
};
console.log(JSON.stringify(await parts[process.argv[2]]()));
