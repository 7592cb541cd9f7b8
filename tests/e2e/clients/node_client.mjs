// What OpenAI's client for Node.js is asked to do: node node_client.mjs URL MODEL CASE prints what came of it as JSON.

import OpenAI, { BadRequestError, toFile } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model, name] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "Name three colours." }];
const greedy = { model, messages, max_tokens: 24, temperature: 0 };
const weather = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const Person = z.object({ name: z.string().max(20), mood: z.enum(["good", "bad"]) });

const cases = {
  async models() {
    const listed = [];
    for await (const one of client.models.list()) listed.push(one.id);
    return { listed, retrieved: (await client.models.retrieve(model)).id };
  },

  async chat() {
    const whole = await client.chat.completions.create(greedy);
    const stream = await client.chat.completions.create({ ...greedy, stream: true, stream_options: { include_usage: true } });
    let text = "", usage = null, finish = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      finish = chunk.choices[0]?.finish_reason ?? finish;
      usage = chunk.usage ?? usage;
    }
    return { whole: whole.choices[0], usage: whole.usage, stream: { text, finish, usage } };
  },

  async helper() {
    const runner = client.chat.completions.stream(greedy);
    let text = "";
    runner.on("content", (delta) => (text += delta));
    return { text, final: await runner.finalContent(), text_at_the_end: text };
  },

  async tools() {
    const asked = [];
    const look_up = { name: "weather", description: "of a city", parameters: weather, parse: JSON.parse };
    const tools = [{ type: "function", function: { ...look_up, function: ({ city }) => (asked.push(city), `rain in ${city}`) } }];
    const options = { model, messages, tools, temperature: 0, max_tokens: 200, parallel_tool_calls: false };
    const seen = [];
    for (const stream of [false, true]) {
      const runner = client.chat.completions.runTools({ ...options, tool_choice: "required", stream }, { maxChatCompletions: 2 });
      await runner.done();
      seen.push(runner.messages.map((message) => message.role));
    }
    // The helper takes an answer that the limit has cut off for an error.
    const told = await client.chat.completions.runTools({ ...options, tool_choice: "none", stop: [",", ".", "\n"] }).finalContent();
    return { asked, seen, told };
  },

  async responses() {
    const options = { model, input: "Name three colours.", max_output_tokens: 200, temperature: 0 };
    const whole = await client.responses.create(options);
    const stream = client.responses.stream(options);
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    const final = await stream.finalResponse();
    const next = await client.responses.create({ ...options, input: "And three animals.", previous_response_id: final.id });
    const kept = await client.responses.retrieve(final.id);
    return { whole: whole.output_text, text, final: final.output_text, kept: kept.output_text, next: next.output_text };
  },

  async parsed() {
    const asked = [{ role: "user", content: "Make up a person." }];
    const chat = await client.chat.completions.parse({
      model, messages: asked, response_format: zodResponseFormat(Person, "person"), max_tokens: 200, temperature: 0,
    });
    const response = await client.responses.parse({
      model, input: "Make up a person.", text: { format: zodTextFormat(Person, "person") }, max_output_tokens: 200, temperature: 0,
    });
    return { chat: chat.choices[0].message.parsed, response: response.output_parsed };
  },

  async aborted() {
    const endless = { ...greedy, max_tokens: 4000, ignore_eos: true, stream: true };
    const left = await client.chat.completions.create(endless);
    let chunks = 0;
    for await (const _ of left) if (++chunks === 3) break;
    const controller = new AbortController();
    const aborted = await client.chat.completions.create(endless, { signal: controller.signal });
    let more = 0;
    for await (const _ of aborted) if (++more === 3) controller.abort();
    return { chunks, more };
  },

  async batches() {
    const line = (number) => ({
      custom_id: `line-${number}`, method: "POST", url: "/v1/chat/completions", body: { ...greedy, max_tokens: 4 },
    });
    const lines = [0, 1, 2].map((number) => JSON.stringify(line(number))).join("\n");
    const file = await client.files.create({ file: await toFile(Buffer.from(lines), "lines.jsonl"), purpose: "batch" });
    let batch = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" });
    while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) batch = await client.batches.retrieve(batch.id);
    const output = await (await client.files.content(batch.output_file_id)).text();
    const listed = [];
    for await (const one of client.files.list()) listed.push(one.id);
    const deleted = await client.files.delete(file.id);
    return { file, batch, answers: output.trim().split("\n").map((one) => JSON.parse(one)), listed, deleted: deleted.deleted };
  },

  async refused() {
    try {
      await client.chat.completions.create({ ...greedy, colour: "red" });
    } catch (error) {
      return { bad: error instanceof BadRequestError, status: error.status, param: error.param, id: error.requestID, said: error.message };
    }
  },
};

console.log(JSON.stringify(await cases[name]()));
