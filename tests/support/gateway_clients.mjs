// Requests of clients for Node, unchanged: `node gateway_clients.mjs ADDRESS KIND` prints what each
// returns as JSON. KIND is `texts` or `chat`; the packages are those of `gateway_clients_npm.json`.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import { CohereClient, CohereClientV2 } from "cohere-ai";
import OpenAI from "openai";

const [address, kind] = process.argv.slice(2);
const baseURL = `${address}/v1`;
const openai = new OpenAI({ baseURL, apiKey: "none" });
const vercel = createOpenAICompatible({ name: "triptych", baseURL, apiKey: "none", supportsStructuredOutputs: true });
const cohere = { token: "none", environment: address };
const texts = ["my delivery is late", "refunds take a week", "where is my parcel?"];
const ranks = { model: "ranks", query: "refund", documents: texts };
const messages = [{ role: "user", content: "Hello" }];
const asked = { model: "chat", messages, max_tokens: 8 };
const generated = { model: vercel("chat"), prompt: "Hello", maxOutputTokens: 8 };
const city = { name: { type: "string" }, country: { type: "string" } };
const schema = jsonSchema({ type: "object", properties: city, required: ["name", "country"] });
const called = { ...generated, prompt: "Paris is the capital of France.", maxOutputTokens: 60 };

async function joined(parts) {
  let text = "";
  for await (const part of parts) text += typeof part === "string" ? part : (part.choices[0]?.delta.content ?? "");
  return text;
}

const vectors = async () => (await openai.embeddings.create({ model: "minilm", input: texts })).data;
const calls = {
  texts: {
    openai: async () => (await vectors()).map((each) => each.embedding),
    vercel: async () =>
      (await embedMany({ model: vercel.textEmbeddingModel("minilm"), values: texts })).embeddings,
    cohere_v1: async () =>
      (await new CohereClient(cohere).rerank({ ...ranks, returnDocuments: true })).results,
    cohere_v2: async () => (await new CohereClientV2(cohere).rerank(ranks)).results,
  },
  chat: {
    openai: async () => (await openai.chat.completions.create(asked)).choices[0].message.content,
    openai_stream: async () => joined(await openai.chat.completions.create({ ...asked, stream: true })),
    vercel: async () => (await generateText(generated)).text,
    vercel_stream: async () => joined(streamText(generated).textStream),
    vercel_tools: async () =>
      (await generateText({ ...called, tools: { City: tool({ inputSchema: schema }) }, toolChoice: "required" }))
        .toolCalls.map((call) => call.input),
    vercel_object: async () => (await generateObject({ ...called, schema })).object,
  },
};
const found = {};
for (const [name, call] of Object.entries(calls[kind])) found[name] = await call();
console.log(JSON.stringify(found));
