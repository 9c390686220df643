"""Generates from a policy and trains it for one step, with nothing but server reflection.

python -I reflection_client.py SETTINGS.json, with {trainer, router, tls: {ca, cert, key}, token,
prompt}; the last line printed is the outcome as JSON. Knows neither the .proto files nor the
package.
"""

import json
import sys
import uuid
from collections import defaultdict
from pathlib import Path

import grpc
from grpc_requests import Client

TRAINER = "sluice.api.trainer.v1.TrainerService"
ROUTER = "sluice.api.router.v1.RouterService"
ENGINE = "sluice.api.rollout.v1.EngineService"
OPERATIONS = "google.longrunning.Operations"


class Token(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Sends the bearer token and a deadline with every call."""

    def __init__(self, token):
        self._metadata = (("authorization", f"Bearer {token}"),)

    def _call(self, continuation, details, request):
        details = details._replace(metadata=self._metadata, timeout=60)
        return continuation(details, request)

    intercept_unary_unary = intercept_unary_stream = _call
    intercept_stream_unary = intercept_stream_stream = _call


def connect(address, settings):
    tls = settings["tls"]
    credentials = {
        "root_certificates": Path(tls["ca"]).read_bytes(),
        "private_key": Path(tls["key"]).read_bytes(),
        "certificate_chain": Path(tls["cert"]).read_bytes(),
    }
    token = Token(Path(settings["token"]).read_text().strip())
    return Client(address, ssl=True, credentials=credentials, interceptors=[token])


def publish(trainer):
    operation = trainer.request(TRAINER, "PublishWeights", {"request_id": str(uuid.uuid4())})
    while not operation.get("done"):
        operation = trainer.request(OPERATIONS, "WaitOperation", {"name": operation["name"]})
    return operation["response"]["weights"]


def generate(router, settings, version):
    request = {
        "request_id": str(uuid.uuid4()),
        "prompt_token_ids": settings["prompt"],
        "sampling": {"max_new_tokens": 5, "seeds": [1, 2, 3, 4]},
        "sample_count": 4,
        "versions": {"exact_version": version},
    }
    answer = router.request(ENGINE, "Generate", request)
    streamed = defaultdict(list)
    again = {"generate": {**request, "request_id": str(uuid.uuid4())}}
    for message in router.request(ENGINE, "StreamGenerate", again):
        delta = message["delta"]
        streamed[delta.get("index", 0)] += delta.get("token_ids", [])
    return answer["completions"], [streamed[index] for index in sorted(streamed)]


def upload(trainer, settings, completions):
    batch_id = f"reflection-{uuid.uuid4()}"
    rows = [
        {
            "sample": {
                "sample_id": f"{batch_id}/{index}",
                "group_id": batch_id,
                "token_ids": settings["prompt"] + completion["token_ids"],
                "prompt_length": len(settings["prompt"]),
                "columns": {
                    "rollout_logprobs": {"floats": {"values": completion["logprobs"]}},
                    "reward": {"scalar": index % 2},
                },
                "spans": completion["spans"],
            }
        }
        for index, completion in enumerate(completions)
    ]
    header = {"header": {"batch_id": batch_id, "sample_count": len(rows)}}
    return trainer.request(TRAINER, "UploadBatch", [header, *rows])["batch"]


def step(trainer, batch):
    advantages = {"batch": batch, "advantage": {"name": "grpo"}}
    trainer.request(TRAINER, "ComputeAdvantages", advantages)
    before = int(trainer.request(TRAINER, "GetTrainer")["trainer"].get("step", 0))
    loss = {"name": "ppo_clip", "clip_low": 0.2}
    part = {"batch": batch, "loss": loss, "expected_step": before, "part_id": "whole"}
    passed = trainer.request(TRAINER, "ForwardBackward", part)
    request = {"part_ids": ["whole"], "request_id": str(uuid.uuid4())}
    try:
        trainer.request(TRAINER, "StepOptimizer", {**request, "expected_step": before + 7})
        refused = "OK"
    except grpc.RpcError as error:
        refused = error.code().name
    stepped = trainer.request(TRAINER, "StepOptimizer", {**request, "expected_step": before})
    trainer.request(TRAINER, "DeleteBatch", {"batch": batch})
    return {
        "steps": [before, int(stepped["step"])],
        "outcome": stepped["outcome"],
        "grad_norm": stepped["grad_norm"],
        "mismatch": passed["metrics"]["rollout_mismatch"],
        "tokens": int(passed["token_count"]),
        "refused": refused,
    }


def main():
    settings = json.loads(Path(sys.argv[1]).read_text())
    trainer, router = (connect(settings[name], settings) for name in ("trainer", "router"))
    weights = publish(trainer)
    engines = router.request(ROUTER, "ListEngines", {"role": "ROLE_ENGINE"})["engines"]
    for engine in engines:
        client = connect(engine["address"], settings)
        client.request(ENGINE, "PrepareWeights", {"weights": weights})
        client.request(ENGINE, "CommitWeights", {"weights": weights})
    completions, streamed = generate(router, settings, weights["version"])
    outcome = step(trainer, upload(trainer, settings, completions))
    generated = [completion["token_ids"] for completion in completions]
    knows = sorted(name for name in sys.modules if name.split(".")[0] in ("sluice", "services"))
    print(json.dumps({**outcome, "generated": generated, "streamed": streamed, "knows": knows}))


if __name__ == "__main__":
    main()
