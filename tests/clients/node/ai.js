// The Vercel AI SDK: node ai.js PART → what it saw, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const { BASE, KEY, MODEL } = process.env;
const provider = createOpenAICompatible({ name: "onedraw", baseURL: BASE, apiKey: KEY, supportsStructuredOutputs: true });
const asked = { model: provider(MODEL), prompt: "Hello.", seed: 7, maxOutputTokens: 12, maxRetries: 0 };
const weather = z.object({ city: z.string().max(12), days: z.number().int().min(1).max(9) });

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
  async structured() {
    return (await generateObject({ ...asked, maxOutputTokens: 2000, schema: weather })).object;
  },
};
console.log(JSON.stringify(await parts[process.argv[2]]()));
