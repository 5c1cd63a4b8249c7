// The openai, @anthropic-ai/sdk and @ai-sdk/openai-compatible packages, unchanged, against a server:
// suite.mjs BASE_URL MODEL
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText, tool, jsonSchema } from "ai";

const [base, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: base + "/v1", apiKey: "none", maxRetries: 0 });
const provider = createOpenAICompatible({ name: "forebay", baseURL: base + "/v1", includeUsage: true, supportsStructuredOutputs: true });
const claude = new Anthropic({ baseURL: base, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me a story about a brave fox." }];
const tide = {
  type: "object",
  properties: { port: { type: "string", enum: ["Oban", "Lerwick"] } },
  required: ["port"],
  additionalProperties: false,
};

const kinds = { type: "object", properties: { kind: { enum: ["fox", "owl"] } }, required: ["kind"], additionalProperties: false };

// Until nothing is computed any more.
async function idle() {
  for (let i = 0; ; i++) {
    const text = await (await fetch(base + "/metrics")).text();
    if (/^forebay_requests_running 0$/m.test(text)) return;
    assert.ok(i < 200, "the answer runs on");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

const tests = {
  async chat() {
    const whole = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 });
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0, stream: true });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    assert.equal(text, whole.choices[0].message.content);
  },
  async tools() {
    const tools = [{ type: "function", function: { name: "get_tide", parameters: tide } }];
    const whole = await client.chat.completions.create({
      model, messages, tools, tool_choice: { type: "function", function: { name: "get_tide" } }, max_tokens: 200,
    });
    const call = whole.choices[0].message.tool_calls[0];
    assert.ok(["Oban", "Lerwick"].includes(JSON.parse(call.function.arguments).port));
    const runner = client.chat.completions.stream({ model, messages, tools, tool_choice: "required", max_tokens: 200 });
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0].message.tool_calls[0].function.name, "get_tide");
  },
  async structured() {
    const schema = { type: "object", properties: { kind: { enum: ["fox", "owl"] } }, required: ["kind"], additionalProperties: false };
    const whole = await client.chat.completions.create({
      model, messages, max_tokens: 60, response_format: { type: "json_schema", json_schema: { name: "k", schema } },
    });
    assert.ok(["fox", "owl"].includes(JSON.parse(whole.choices[0].message.content).kind));
  },
  async logprobs() {
    const whole = await client.chat.completions.create({
      model, messages, max_tokens: 4, temperature: 0, logprobs: true, top_logprobs: 2,
    });
    for (const token of whole.choices[0].logprobs.content) assert.equal(token.top_logprobs.length, 2);
  },
  async responses() {
    const stream = await client.responses.create({ model, input: "A story.", max_output_tokens: 8, stream: true });
    let last;
    for await (const event of stream) last = event;
    assert.ok(["response.completed", "response.incomplete"].includes(last.type));
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
    await assert.rejects(client.chat.completions.create({ model, messages: [] }), OpenAI.BadRequestError);
    await assert.rejects(client.embeddings.create({ model, input: "x" }), OpenAI.NotFoundError);
  },
  async cancel() {
    const stream = await client.completions.create({ model, prompt: "Once", max_tokens: 3000, stream: true, temperature: 1 });
    for await (const _ of stream) break;
    await idle();
  },
  async aiText() {
    const whole = await generateText({ model: provider(model), prompt: "A story.", maxOutputTokens: 12, temperature: 0 });
    const stream = streamText({ model: provider(model), prompt: "A story.", maxOutputTokens: 12, temperature: 0 });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.ok((await stream.usage).outputTokens <= 12);
  },
  async aiTools() {
    const tools = { get_tide: tool({ description: "Tides", inputSchema: jsonSchema(tide) }) };
    const options = { model: provider(model), prompt: "The tide?", tools, maxOutputTokens: 200 };
    const whole = await generateText({ ...options, toolChoice: { type: "tool", toolName: "get_tide" } });
    assert.equal(whole.toolCalls[0].toolName, "get_tide");
    assert.ok(["Oban", "Lerwick"].includes(whole.toolCalls[0].input.port));
    const stream = streamText({ ...options, toolChoice: "required" });
    const calls = await stream.toolCalls;
    assert.equal(calls[0].toolName, "get_tide");
  },
  async aiStructured() {
    const options = { model: provider(model), prompt: "Which?", schema: jsonSchema(kinds), maxOutputTokens: 60 };
    const whole = await generateObject(options);
    assert.ok(["fox", "owl"].includes(whole.object.kind));
    const stream = streamObject(options);
    // Unlike those of streamText, its promises settle only while somebody takes the stream.
    let last;
    for await (const partial of stream.partialObjectStream) last = partial;
    assert.deepEqual(await stream.object, last);
    assert.ok(["fox", "owl"].includes(last.kind));
  },
  async aiLogprobs() {
    const providerOptions = { forebay: { logprobs: true, top_logprobs: 2 } };
    const ask = { model: provider(model), prompt: "A story.", maxOutputTokens: 6, temperature: 0, providerOptions };
    const whole = await generateText(ask);
    const logged = whole.response.body.choices[0].logprobs.content;
    assert.equal(logged.length, whole.usage.outputTokens);
    for (const token of logged) assert.equal(token.top_logprobs.length, 2);
    const streamed = [];
    for await (const part of streamText({ ...ask, includeRawChunks: true }).fullStream) {
      if (part.type === "raw") streamed.push(...(part.rawValue.choices[0]?.logprobs?.content ?? []));
    }
    assert.deepEqual(streamed, logged);
  },
  async aiErrors() {
    const ask = (settings) => generateText({ model: provider(model), prompt: "x", maxRetries: 0, maxOutputTokens: 4, ...settings });
    await assert.rejects(ask({ model: provider("other") }), (e) => /not served here/.test(e.message) && e.statusCode === 404);
    await assert.rejects(ask({ temperature: 1000 }), (e) => /temperature/.test(e.message) && e.statusCode === 400);
    const verbose = { openaiCompatible: { textVerbosity: "low" }, forebay: { verbosity: "low" } };
    await assert.rejects(ask({ providerOptions: verbose }), (e) => /verbosity/.test(e.message) && e.statusCode === 400);
    const image = { role: "user", content: [{ type: "image", image: new Uint8Array([137, 80, 78, 71]), mediaType: "image/png" }] };
    await assert.rejects(ask({ prompt: undefined, messages: [image] }), (e) => /image_url/.test(e.message) && e.statusCode === 400);
  },
  async aiCancel() {
    const leave = new AbortController();
    const stream = streamText({
      model: provider(model), prompt: "A story.", maxOutputTokens: 3000, temperature: 1, abortSignal: leave.signal, onError() {},
    });
    for await (const _ of stream.textStream) { leave.abort(); break; }
    await idle();
  },
  async anthropicText() {
    const ask = { model, messages, max_tokens: 16, temperature: 0 };
    const whole = await claude.messages.create(ask);
    assert.equal(whole.stop_reason, "max_tokens");
    const stream = claude.messages.stream(ask);
    let text = "";
    stream.on("text", (piece) => (text += piece));
    const final = await stream.finalMessage();
    assert.equal(text, whole.content[0].text);
    assert.deepEqual(final.content, whole.content);
    const input = final.usage.input_tokens + final.usage.cache_read_input_tokens;
    assert.equal((await claude.messages.countTokens({ model, messages })).input_tokens, input);
  },
  async anthropicTools() {
    const tools = [{ name: "get_tide", description: "Tides", input_schema: tide }];
    const ask = { model, messages, tools, max_tokens: 200 };
    const whole = await claude.messages.create({ ...ask, tool_choice: { type: "tool", name: "get_tide" } });
    const use = whole.content.find((block) => block.type === "tool_use");
    assert.equal(whole.stop_reason, "tool_use");
    assert.ok(["Oban", "Lerwick"].includes(use.input.port));
    const final = await claude.messages.stream({ ...ask, tool_choice: { type: "any" } }).finalMessage();
    assert.ok(["Oban", "Lerwick"].includes(final.content.find((block) => block.type === "tool_use").input.port));
    // The result goes back.
    const turn = [
      ...messages,
      { role: "assistant", content: whole.content },
      { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "High at noon." }] },
    ];
    const after = await claude.messages.create({ model, tools, messages: turn, max_tokens: 4 });
    assert.ok(after.usage.output_tokens <= 4);
  },
  async anthropicStructured() {
    const whole = await claude.messages.create({
      model, messages, max_tokens: 60, output_config: { format: { type: "json_schema", schema: kinds } },
    });
    const text = whole.content.find((block) => block.type === "text").text;
    assert.ok(["fox", "owl"].includes(JSON.parse(text).kind));
  },
  async anthropicErrors() {
    const ask = (more) => claude.messages.create({ model, messages, max_tokens: 4, ...more });
    await assert.rejects(ask({ model: "other" }), Anthropic.NotFoundError);
    await assert.rejects(ask({ messages: [] }), Anthropic.BadRequestError);
    await assert.rejects(ask({ temperature: 7 }), (e) => e instanceof Anthropic.BadRequestError && e.error.error.type === "invalid_request_error");
    const image = { type: "image", source: { type: "base64", media_type: "image/png", data: "iVBORw0KGgo=" } };
    await assert.rejects(ask({ messages: [{ role: "user", content: [image] }] }), /image/);
  },
  async anthropicCancel() {
    const stream = claude.messages.stream({ model, messages, max_tokens: 3000, temperature: 1 });
    for await (const event of stream) if (event.type === "content_block_delta") break;
    stream.abort();
    await idle();
  },
};

// An await that nothing will settle would otherwise end the program without a word, once it has nothing else to do.
async function bounded(test) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error("not over after 100 s")), 100_000);
  });
  await Promise.race([test(), late]).finally(() => clearTimeout(timer));
}

let failed = 0;
for (const [name, test] of Object.entries(tests)) {
  const began = Date.now();
  try {
    await bounded(test);
    console.log(`ok   ${name} (${((Date.now() - began) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL ${name}: ${error.stack}`);
  }
}
console.log(`${Object.keys(tests).length - failed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
