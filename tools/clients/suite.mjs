// The openai and @ai-sdk/openai-compatible packages, unchanged, against a server: suite.mjs BASE_URL MODEL
import assert from "node:assert/strict";
import OpenAI from "openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, tool, jsonSchema } from "ai";

const [base, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: base + "/v1", apiKey: "none", maxRetries: 0 });
const provider = createOpenAICompatible({ name: "forebay", baseURL: base + "/v1", includeUsage: true });
const messages = [{ role: "user", content: "Tell me a story about a brave fox." }];
const tide = {
  type: "object",
  properties: { port: { type: "string", enum: ["Oban", "Lerwick"] } },
  required: ["port"],
  additionalProperties: false,
};

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
    for (let i = 0; ; i++) {
      const text = await (await fetch(base + "/metrics")).text();
      if (/^forebay_requests_running 0$/m.test(text)) break;
      assert.ok(i < 200, "the answer runs on");
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
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
  async aiErrors() {
    await assert.rejects(generateText({ model: provider("other"), prompt: "x", maxRetries: 0 }), /not served here/);
  },
};

let failed = 0;
for (const [name, test] of Object.entries(tests)) {
  const began = Date.now();
  try {
    await test();
    console.log(`ok   ${name} (${((Date.now() - began) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL ${name}: ${error.stack}`);
  }
}
console.log(`${Object.keys(tests).length - failed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
