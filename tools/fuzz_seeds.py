"""Honest requests for every RPC, for the fuzz to spoil: each gets further than one made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from google.longrunning import operations_pb2
from google.protobuf import message as pb_message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from sluice.api.common.v1 import store_service_pb2
from sluice.api.converter.v1 import converter_service_pb2 as converter_pb
from sluice.api.rollout.v1 import engine_service_pb2 as engine_pb
from sluice.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.api.trainer.v1 import loss_pb2
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as worker_pb

BATCH = "batches/fuzz"
_SAMPLES = [
    {
        "sample_id": f"s{index}",
        "group_id": f"g{index // 2}",
        "token_ids": [1, 2, 3, 4, 5],
        "prompt_length": 2,
        "columns": {
            "rollout_logprobs": {"floats": {"values": [-1.0, -1.0, -1.0]}},
            "reward": {"scalar": float(index % 2)},
        },
    }
    for index in range(4)
]
_ENGINE = {
    "engine_id": "engine",
    "address": "127.0.0.1:9",
    "role": router_pb.ROLE_ENGINE,
    "pool": "fuzz",
    "dp_size": 1,
    "max_running_count": 8,
    "weights": {"version": 1, "digest": "d"},
    "incarnation": "a",
}


@dataclass(frozen=True)
class Shown:
    """An image of the stack's store; by default one of no store, and its model sees nothing."""

    digest: str = "0" * 32
    size: int = 0
    placeholder: int = 1
    token_count: int = 1
    grid_thw: tuple[int, ...] = (1, 2, 2)
    processor: str = "p"

    @property
    def blob(self) -> dict[str, object]:
        return {"digest": self.digest, "size_bytes": self.size}

    @property
    def sample(self) -> dict[str, object]:
        """The first sample, with this in its prompt."""
        tokens = [1, *[self.placeholder] * self.token_count, 3, 4, 5]
        span = {
            "blob": self.blob,
            "kind": 1,
            "first_token": 1,
            "token_count": self.token_count,
            "grid_thw": self.grid_thw,
        }
        prompt = {"token_ids": tokens, "prompt_length": len(tokens) - 3}
        return {**_SAMPLES[0], **prompt, "media": [span]}


@dataclass(frozen=True)
class Places:
    """Where a stack lies: nothing outside of `directory` may be named, so that nothing is lost."""

    directory: Path
    model: Path
    shown: Shown = Shown()

    @property
    def names(self) -> tuple[str, ...]:
        """Texts that name something."""
        return (
            *(BATCH, "fuzz", "s0", "g0", "policy", "engine", "grpo", "ppo_clip", "prompts"),
            *("advantages", "checkpoints/fuzz", "operations/save-fuzz", "score/a"),
            *(
                self.shown.digest,
                str(self.model),
                str(self.directory / "target"),
                str(self.directory),
            ),
        )


def seeds(method: str, places: Places) -> list[pb_message.Message]:
    """Valid requests of a method, by its path; of a stream, what comes one after the other."""
    service, _, name = method.strip("/").rpartition("/")
    shown, package = places.shown, service.rpartition(".")[0]
    found = [*_router(name), *_engine(name, shown), *_trainer(name, shown), *_others(name, places)]
    # methods of several services have one name
    return [each for each in found if each.DESCRIPTOR.file.package == package]


def _generate(**changes: object) -> engine_pb.GenerateRequest:
    values = {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "sampling": {"max_new_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 3},
        "sample_count": 2,
        **changes,
    }
    return engine_pb.GenerateRequest(**values)  # type: ignore[arg-type]


def _engine(name: str, shown: Shown) -> Sequence[pb_message.Message]:
    weights = {"version": 1, "digest": "d"}
    transfer = {
        "transfer_group": "t",
        "senders": [{"file_names": ["model.safetensors"]}],
        "bucket_bytes": 1024,
        "timeout": {"seconds": 1},
    }
    known: dict[str, Sequence[pb_message.Message]] = {
        "Generate": [
            _generate(),
            _generate(versions={"min_version": 0}),
            _generate(adapter="base"),
            _generate(adapter="policy@1"),
            _generate(
                prompt_token_ids=[1, shown.placeholder, 3],
                media=[{"kind": 1, "blob": shown.blob}],
                processor=shown.processor,
            ),
        ],
        "StreamGenerate": [engine_pb.StreamGenerateRequest(generate=_generate(request_id="s"))],
        "Score": [
            engine_pb.ScoreRequest(token_ids=[1, 2, 3], prompt_length=1, top_count=2),
            engine_pb.ScoreRequest(token_ids=[1, 2, 3], prompt_length=1, adapter="base"),
        ],
        "Abort": [engine_pb.AbortRequest(request_ids=["r", "q"])],
        "Pause": [engine_pb.PauseRequest(mode=engine_pb.PAUSE_MODE_ABORT)],
        "Profile": [
            engine_pb.ProfileRequest(pass_count=2, name="fuzz", request_id="p"),
            engine_pb.ProfileRequest(pass_count=1, options={"stacks": True, "memory": True}),  # type: ignore[arg-type]
        ],
        "PrepareWeights": [
            engine_pb.PrepareWeightsRequest(weights=weights),  # type: ignore[arg-type]
            engine_pb.PrepareWeightsRequest(weights=weights, transfer=transfer),  # type: ignore[arg-type]
        ],
        "CommitWeights": [
            engine_pb.CommitWeightsRequest(weights=weights, mode=engine_pb.PAUSE_MODE_IN_PLACE)  # type: ignore[arg-type]
        ],
        "JoinTransferGroup": [
            engine_pb.JoinTransferGroupRequest(
                transfer_group="t",
                senders=[{"address": "127.0.0.1:9", "group": "t"}],  # type: ignore[list-item]
                first_rank=1,
                world_size=2,
                backend="gloo",
                timeout={"seconds": 1},  # type: ignore[arg-type]
            )
        ],
    }
    return known.get(name, ())


def _rollout(**changes: object) -> rollout_pb.RolloutRequest:
    values = {
        "request_id": "r",
        "groups": [
            {"group_id": "g0", "row": {"prompt": "1 2", "target": "1", "answer": "1"}},
            {"group_id": "g1", "index": 1},
        ],
        "environment": {"name": "prompts", "settings": {"reward": "position_match"}},
        "sampling": {"max_new_tokens": 2},
        "sample_count": 2,
        "group_timeout": {"seconds": 1},
        **changes,
    }
    return rollout_pb.RolloutRequest(**values)  # type: ignore[arg-type]


def _router(name: str) -> Sequence[pb_message.Message]:
    lease = router_pb.AcquireLeasesRequest(
        client_id="c",
        pool="policy",
        count=2,
        request_id="r",
        group_ids=["a", "b"],
        group_sizes=[1, 1],
        expected_token_counts=[5.0, 6.0],
        session_ids=["x", "y"],
        cached_token_counts=[0, 1],
    )
    known: dict[str, Sequence[pb_message.Message]] = {
        "RegisterEngine": [router_pb.RegisterEngineRequest(engine=_ENGINE, known_epoch=1)],  # type: ignore[arg-type]
        "DrainEngine": [router_pb.DrainEngineRequest(engine_id="none")],
        "ListEngines": [router_pb.ListEnginesRequest(pool="policy")],
        "WatchEngines": [router_pb.WatchEnginesRequest(pool="policy", client_id="w")],
        "AcquireLeases": [
            lease,
            router_pb.AcquireLeasesRequest(
                client_id="c",
                released={"lease_ids": [1, 2], "outcomes": [1, 2], "token_counts": [3, 4]},  # type: ignore[arg-type]
                max_wait={"seconds": 1},  # type: ignore[arg-type]
            ),
        ],
        "StreamLeases": [
            router_pb.StreamLeasesRequest(
                requests=[{"number": 1, "acquire": lease}, {"number": 2, "acquire": lease}]  # type: ignore[list-item]
            )
        ],
        "RenewLeases": [
            router_pb.RenewLeasesRequest(
                client_id="c",
                lease_ids=[1, 2],
                engine_ids=["engine"],
                dp_ranks=[0, -1],
                engine_indices=[0, 0],
                pool="policy",
            )
        ],
        "EndSession": [router_pb.EndSessionRequest(session_ids=["x"], pool="policy")],
        "ReportLoad": [
            router_pb.ReportLoadRequest(
                engine_id="engine",
                rank_loads=[{"running_count": 1, "max_tokens": 10}],  # type: ignore[list-item]
                time_per_token={"nanos": 1000},  # type: ignore[arg-type]
            )
        ],
        "Rollout": [_rollout()],
        "Evaluate": [rollout_pb.EvaluateRequest(rollout=_rollout(), pass_at=[1, 2])],
        "CancelRollout": [
            rollout_pb.CancelRolloutRequest(rollout_request_id="r", group_ids=["g0"])
        ],
    }
    return known.get(name, ())


def _trainer(name: str, shown: Shown) -> Sequence[pb_message.Message]:
    loss = loss_pb2.LossSpec(name="ppo_clip", clip_low=0.2, kl_coefficient=0.1)
    staged = loss_pb2.LossSpec(name="sapo", old_logprobs="old")
    staged.settings.update({"tau_positive": 1.5})
    staged.corrections.add(name="reject").settings.update({"high": 0.5})
    known: dict[str, Sequence[pb_message.Message]] = {
        "UploadBatch": [
            trainer_pb.UploadBatchRequest(header={"batch_id": "fuzz", "sample_count": 4}),  # type: ignore[arg-type]
            *(trainer_pb.UploadBatchRequest(sample=sample) for sample in _SAMPLES),  # type: ignore[arg-type]
            trainer_pb.UploadBatchRequest(sample=shown.sample),  # type: ignore[arg-type]
            trainer_pb.UploadBatchRequest(blob={"digest": "a" * 32, "size_bytes": 5}),  # type: ignore[arg-type]
        ],
        "DeleteBatch": [trainer_pb.DeleteBatchRequest(batch="batches/none")],
        "ComputeLogprobs": [
            trainer_pb.ComputeLogprobsRequest(
                batch=BATCH,
                model=trainer_pb.ComputeLogprobsRequest.MODEL_POLICY,
                temperature=1.0,
                top_count=2,
            )
        ],
        "ComputeValues": [trainer_pb.ComputeValuesRequest(batch=BATCH)],
        "ComputeAdvantages": [
            trainer_pb.ComputeAdvantagesRequest(batch=BATCH, advantage={"name": "grpo"})  # type: ignore[arg-type]
        ],
        "DescribeAlgorithm": [
            trainer_pb.DescribeAlgorithmRequest(
                loss=staged,
                advantage={"name": "grpo", "overlong": {"max_length": 9, "buffer": 3}},  # type: ignore[arg-type]
            )
        ],
        "PutColumns": [
            trainer_pb.PutColumnsRequest(
                batch=BATCH,
                rows=[
                    {
                        "sample_id": "s0",
                        "columns": {"advantages": {"floats": {"values": [1.0, 2.0, 3.0]}}},
                    }
                ],  # type: ignore[list-item]
            ),
            trainer_pb.PutColumnsRequest(
                batch=BATCH,
                blobs=[shown.blob],  # type: ignore[list-item]
                columns={"old_logprobs": "teacher_logprobs"},
            ),
        ],
        "GetColumns": [
            trainer_pb.GetColumnsRequest(batch=BATCH, columns=["reward"]),
            trainer_pb.GetColumnsRequest(
                batch=BATCH, columns=["rollout_logprobs"], by_reference=True
            ),
        ],
        "PlanBatch": [
            trainer_pb.PlanBatchRequest(batch=BATCH, sample_ids=["s0"]),
            trainer_pb.PlanBatchRequest(
                bare_rows=[{"length": 9, "prompt_length": 3, "group": 1, "patches": [4]}] * 3,  # type: ignore[list-item]
                max_tokens_per_micro_batch=64,
                micro_batch_multiple=2,
                max_micro_batches=4,
            ),
        ],
        "ForwardBackward": [
            trainer_pb.ForwardBackwardRequest(
                batch=BATCH, loss=loss, expected_step=0, part_id="p", sample_ids=["s0", "s1"]
            ),
            trainer_pb.ForwardBackwardRequest(
                batch=BATCH, loss=staged, expected_step=0, part_id="p"
            ),
        ],
        "StepOptimizer": [
            trainer_pb.StepOptimizerRequest(expected_step=0, part_ids=["p"], learning_rate=0.1)
        ],
        "SaveCheckpoint": [trainer_pb.SaveCheckpointRequest(checkpoint_id="fuzz")],
        "LoadCheckpoint": [trainer_pb.LoadCheckpointRequest(checkpoint="checkpoints/fuzz")],
        "CreateAdapter": [
            trainer_pb.CreateAdapterRequest(
                adapter="fuzz", rank=2, alpha=4.0, targets=["q_proj"], learning_rate=0.1
            )
        ],
        "DeleteAdapter": [trainer_pb.DeleteAdapterRequest(adapter="fuzz")],
        "PublishWeights": [
            trainer_pb.PublishWeightsRequest(
                request_id="fuzz",
                engines=[{"engine_id": "engine", "address": "127.0.0.1:9"}],  # type: ignore[list-item]
            )
        ],
        "Follow": [
            worker_pb.FollowRequest(hello={"rank": 0, "world_size": 1, "generation": 1}),  # type: ignore[arg-type]
            worker_pb.FollowRequest(ready={"reports": True}),  # type: ignore[arg-type]
            worker_pb.FollowRequest(result={"sequence": 1}),  # type: ignore[arg-type]
        ],
    }
    return known.get(name, ())


def _others(name: str, places: Places) -> Sequence[pb_message.Message]:
    model, directory = str(places.model), places.directory
    operation = "operations/save-fuzz"
    known: dict[str, Sequence[pb_message.Message]] = {
        "ConvertCheckpoint": [
            converter_pb.ConvertCheckpointRequest(
                request_id="fuzz",
                source=model,
                target=str(directory / "target"),
                target_format=converter_pb.FORMAT_TORCH_DIST,
                layout={"tensor": 1, "pipeline": 1, "expert": 1},  # type: ignore[arg-type]
                vocab_multiple=1,
                max_file_bytes=1 << 20,
                validate_only=True,
            )
        ],
        "VerifyCheckpoint": [
            converter_pb.VerifyCheckpointRequest(request_id="fuzz", first=model, second=model)
        ],
        "GetOperation": [operations_pb2.GetOperationRequest(name=operation)],
        "ListOperations": [operations_pb2.ListOperationsRequest(name="operations", page_size=1)],
        "WaitOperation": [
            operations_pb2.WaitOperationRequest(name=operation, timeout={"nanos": 1})  # type: ignore[arg-type]
        ],
        "CancelOperation": [operations_pb2.CancelOperationRequest(name="operations/none")],
        "DeleteOperation": [operations_pb2.DeleteOperationRequest(name="operations/none")],
        "CheckStore": [store_service_pb2.CheckStoreRequest(nonce="0" * 32)],
        "Check": [health_pb2.HealthCheckRequest(service="")],
        "Watch": [health_pb2.HealthCheckRequest(service="")],
        "ServerReflectionInfo": [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
        ],
    }
    return known.get(name, ())
