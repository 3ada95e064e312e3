// Vercel's AI SDK: asks how much a lamp is, and goes on. Arguments: the provider's package, and whether to stream.
// Its packages are those of the working directory. Prints each answer as a line of JSON.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, stepCountIs, streamText, tool } = await load("ai");
const { z } = await load("zod");
const [provider, how] = process.argv.slice(2);
const name = process.env.MODEL;

const models = {
  "@ai-sdk/openai-compatible": ({ createOpenAICompatible }) =>
    createOpenAICompatible({ name: "jinfercept", baseURL: process.env.OPENAI_BASE_URL, includeUsage: true })(name),
  "@ai-sdk/openai": ({ openai }) => openai(name),
  "@ai-sdk/openai/chat": ({ openai }) => openai.chat(name),
  "@ai-sdk/anthropic": ({ anthropic }) => anthropic(name),
};
const model = models[provider](await load(provider.replace("/chat", "")));

const prices = { lamp: "23", pen: "4" };
const item = z.object({ item: z.string() });
const tools = {
  price: tool({ description: "The price of an item.", inputSchema: item, execute: ({ item }) => prices[item] }),
  stock: tool({
    description: "How many there are.",
    inputSchema: item,
    execute: () => {
      throw new Error("not for sale");
    },
  }),
};

const messages = [];
for (const content of ["How much is a lamp?", "And two?"]) {
  messages.push({ role: "user", content });
  const options = { model, tools, messages, system: "Be brief.", maxRetries: 0, stopWhen: stepCountIs(5) };
  let result;
  let pieces = null;
  if (how === "stream") {
    pieces = 0;
    const onError = ({ error }) => {
      throw error;
    };
    result = streamText({ ...options, onError });
    for await (const part of result.fullStream) pieces += part.type === "text-delta";
  } else result = await generateText(options);
  const [text, usage, all, response] = await Promise.all([
    result.text,
    result.totalUsage ?? result.usage,
    result.responseMessages, // since version 7
    result.response,
  ]);
  if (!(usage.outputTokens > 3)) throw new Error("the usage lacks the tokens");
  messages.push(...(all ?? response.messages));
  console.log(JSON.stringify({ text, pieces }));
}
