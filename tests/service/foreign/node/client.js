// Generates from a policy and trains it for one step, with nothing but the .proto files.
//
// node client.js SETTINGS.json, with {trainer, router, includes, tls: {ca, cert, key}, token, prompt};
// the last line printed is the outcome as JSON.
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const settings = JSON.parse(readFileSync(process.argv[2], "utf8"));
const files = [
  "google/longrunning/operations.proto",
  "google/rpc/error_details.proto",
  "google/rpc/status.proto",
  "sluice/api/rollout/v1/engine_service.proto",
  "sluice/api/router/v1/router_service.proto",
  "sluice/api/trainer/v1/trainer_service.proto",
];
const definitions = protoLoader.loadSync(files, {
  includeDirs: settings.includes,
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
});
const packages = grpc.loadPackageDefinition(definitions);
const { rollout, router, trainer } = packages.sluice.api;

function credentials() {
  const { ca, cert, key } = settings.tls;
  const files = [ca, key, cert].map((name) => readFileSync(name));
  const authorization = `Bearer ${readFileSync(settings.token, "utf8").trim()}`;
  const token = grpc.credentials.createFromMetadataGenerator((_, done) => {
    const metadata = new grpc.Metadata();
    metadata.set("authorization", authorization);
    done(null, metadata);
  });
  return grpc.credentials.combineChannelCredentials(grpc.credentials.createSsl(...files), token);
}

const options = () => ({ deadline: Date.now() + 60_000 });

const call = (client, method, request) =>
  new Promise((resolve, reject) => {
    client[method](request, options(), (error, response) => (error ? reject(error) : resolve(response)));
  });

const upload = (client, messages) =>
  new Promise((resolve, reject) => {
    const stream = client.UploadBatch(options(), (error, response) => (error ? reject(error) : resolve(response)));
    messages.forEach((message) => stream.write(message));
    stream.end();
  });

// The bytes of a google.protobuf.Any or of a trailer, as a message of the type named.
const decode = (type, bytes) => definitions[type].deserialize(bytes);

async function publish(clients) {
  let operation = await call(clients.trainer, "PublishWeights", { request_id: randomUUID() });
  while (!operation.done) {
    operation = await call(clients.operations, "WaitOperation", { name: operation.name });
  }
  if (operation.error) throw new Error(operation.error.message);
  return decode("sluice.api.trainer.v1.PublishWeightsResponse", operation.response.value).weights;
}

// What a refusal says for programs: the reason in its google.rpc.ErrorInfo.
async function reasonOf(promise) {
  const error = await promise.then(() => assertNever(), (refusal) => refusal);
  const [bytes] = error.metadata.get("grpc-status-details-bin");
  const [info] = decode("google.rpc.Status", bytes).details;
  return [grpc.status[error.code], decode("google.rpc.ErrorInfo", info.value).reason];
}

const assertNever = () => {
  throw new Error("this call must be refused");
};

async function main() {
  const secure = credentials();
  const clients = {
    router: new router.v1.RouterService(settings.router, secure),
    proxy: new rollout.v1.EngineService(settings.router, secure), // the router forwards
    trainer: new trainer.v1.TrainerService(settings.trainer, secure),
    operations: new packages.google.longrunning.Operations(settings.trainer, secure),
  };

  const weights = await publish(clients);
  const { engines } = await call(clients.router, "ListEngines", { role: "ROLE_ENGINE" });
  for (const engine of engines) {
    const client = new rollout.v1.EngineService(engine.address, secure);
    await call(client, "PrepareWeights", { weights });
    await call(client, "CommitWeights", { weights });
  }

  const request = {
    prompt_token_ids: settings.prompt,
    sampling: { max_new_tokens: 5, seeds: [1, 2, 3, 4] },
    sample_count: 4,
    versions: { exact_version: weights.version },
  };
  const generated = await call(clients.proxy, "Generate", { ...request, request_id: randomUUID() });
  const streamed = new Map();
  const generate = { ...request, request_id: randomUUID() };
  for await (const { delta } of clients.proxy.StreamGenerate({ generate }, options())) {
    streamed.set(delta.index, [...(streamed.get(delta.index) ?? []), ...delta.token_ids]);
  }

  const batchId = `node-${randomUUID()}`;
  const rows = generated.completions.map((completion, index) => ({
    sample: {
      sample_id: `${batchId}/${index}`,
      group_id: batchId,
      token_ids: [...settings.prompt, ...completion.token_ids],
      prompt_length: settings.prompt.length,
      finish_reason: completion.finish_reason,
      columns: { rollout_logprobs: { floats: { values: completion.logprobs } }, reward: { scalar: index % 2 } },
      spans: completion.spans,
    },
  }));
  const header = { batch_id: batchId, sample_count: rows.length };
  const { batch } = await upload(clients.trainer, [{ header }, ...rows]);
  await call(clients.trainer, "ComputeAdvantages", { batch, advantage: { name: "grpo" } });
  const { trainer: before } = await call(clients.trainer, "GetTrainer", {});
  const pass = { batch, loss: { name: "ppo_clip", clip_low: 0.2 }, expected_step: before.step, part_id: "whole" };
  const passed = await call(clients.trainer, "ForwardBackward", pass);
  const step = { part_ids: ["whole"], request_id: randomUUID() };
  const refused = await reasonOf(
    call(clients.trainer, "StepOptimizer", { ...step, expected_step: before.step + 7 }),
  );
  const stepped = await call(clients.trainer, "StepOptimizer", { ...step, expected_step: before.step });
  await call(clients.trainer, "DeleteBatch", { batch });

  return {
    steps: [before.step, stepped.step],
    outcome: stepped.outcome,
    grad_norm: stepped.grad_norm,
    mismatch: passed.metrics.rollout_mismatch,
    tokens: passed.token_count,
    generated: generated.completions.map((completion) => completion.token_ids),
    streamed: [...streamed.entries()].sort(([a], [b]) => a - b).map(([, tokens]) => tokens),
    refused,
  };
}

console.log(JSON.stringify(await main()));
process.exit(0); // channels would keep it alive
