// Rates of llama.cpp by node-llama-cpp, whose package has it built: node FILE FOLDER MODEL PROMPT_TOKENS NEW_TOKENS THREADS
// FOLDER: where `npm install node-llama-cpp` was run.
import fs from "node:fs";
import path from "node:path";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, modelPath, ...numbers] = process.argv.slice(2);
const [promptTokens, newTokens, threads] = numbers.map(Number);
const entry = createRequire(path.join(folder, "x.js")).resolve.paths("node-llama-cpp")[0];
const home = path.join(entry, "node-llama-cpp");
const { getLlama } = await import(pathToFileURL(path.join(home, "dist", "index.js")).href);

const llama = await getLlama({ gpu: false, build: "never", maxThreads: threads, logLevel: "error" });
const model = await llama.loadModel({ modelPath, gpuLayers: 0 });
const contextSize = 2 * (promptTokens + newTokens);
const context = await model.createContext({ contextSize, batchSize: 512, threads, flashAttention: true });
const sequence = context.getSequence();
const prompt = () => Array.from({ length: promptTokens }, () => 200 + Math.floor(Math.random() * 9800));

async function seconds(tokens, prompt) {
  await sequence.clearHistory();
  const times = [performance.now()];
  for await (const _ of sequence.evaluate(prompt, { temperature: 0, yieldEogToken: true })) {
    times.push(performance.now());
    if (times.length > tokens) break;
  }
  return { first: (times[1] - times[0]) / 1e3, others: (times.at(-1) - times[1]) / 1e3, made: times.length - 1 };
}

await seconds(2, prompt());
let measured = await seconds(1 + newTokens, prompt());
while (measured.made <= newTokens) measured = await seconds(1 + newTokens, prompt()); // its text ended early
const { first, others } = measured;
const { version } = JSON.parse(fs.readFileSync(path.join(home, "package.json"), "utf8"));
console.log(JSON.stringify({
  version: `node-llama-cpp ${version}`, prompt: promptTokens / first, answer: newTokens / others,
}));
process.exit(0);
