"""The steps of the check: what each runs, how long it may take, what it cannot do without."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "tools.accelerator_check"
SERVICES = (  # started as processes, so that no import names them
    "services.router.__main__",
    "services.trainer.__main__",
    "services.trainer.rank.__main__",
    "services.trainer.rank.executor",
    "services.rollout.__main__",
    "services.rollout.environments.worker",
)
REFERENCE = ("services.trainer.backends.reference.backend",)
MEGATRON = ("services.trainer.backends.megatron.backend",)
FSDP = ("services.trainer.backends.fsdp.backend",)
ENGINE = ("services.rollout.engine.reference.engine",)
VISION = ("examples.demo_vision", "examples.models.tiny_qwen3_vl", *REFERENCE)
DEMO = ("examples.demo", "examples.models.tiny_qwen3", *SERVICES, *ENGINE)


@dataclass(frozen=True)
class CheckStep:
    """`module` is of this package and has `run(work, *arguments)`; seconds end the process.

    `entries`: modules of the project that it starts or imports by name. `small_seconds` is the
    limit of the small form, generous: it ends a hang, on a machine that may be busy.
    """

    name: str
    module: str
    seconds: float
    arguments: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    small_seconds: float = 600.0
    always: bool = False  # also where an earlier run has done it

    @property
    def roots(self) -> tuple[str, ...]:
        return (f"{PACKAGE}.{self.module}", *self.entries)


STEPS = (  # the most telling first
    CheckStep("environment", "environment", 60, always=True),
    CheckStep("parity-reference", "parity", 60, ("reference",), REFERENCE),
    CheckStep("parity-megatron", "parity", 75, ("megatron",), MEGATRON),
    CheckStep("demo-reference", "demo", 90, ("reference",), (*DEMO, *REFERENCE)),
    CheckStep("demo-megatron", "demo", 100, ("megatron",), (*DEMO, *MEGATRON)),
    CheckStep("training-1.5b", "training", 200, ("1.5b",), (*REFERENCE, *FSDP, *MEGATRON)),
    CheckStep("training-0.5b", "training", 150, ("0.5b",), (*REFERENCE, *FSDP, *MEGATRON)),
    CheckStep("sync", "sync", 110, (), ENGINE),
    CheckStep("engine", "engine", 110, (), ENGINE),
    CheckStep("faults", "faults", 120, (), (*DEMO, *REFERENCE)),
    CheckStep("checkpoint", "checkpoint", 75, (), (*REFERENCE, *MEGATRON)),
    *(
        CheckStep(f"operation-{name}", "operations", 45, (name,), REFERENCE)
        for name in ("attention", "rms_norm", "rotary", "swiglu", "experts", "logprobs", "adamw")
    ),
    CheckStep("parity-fsdp", "parity", 60, ("fsdp",), FSDP),
    CheckStep("parity-lora", "parity", 60, ("reference", "lora"), REFERENCE),
    CheckStep("fp8", "fp8", 60, (), MEGATRON),
    CheckStep("offload", "offload", 60, (), MEGATRON),
    CheckStep("streams", "streams", 150, (), REFERENCE),
    CheckStep("graphs", "graphs", 90, (), ENGINE),
    CheckStep("sleep", "sleep", 75, (), (*REFERENCE, *ENGINE)),
    CheckStep("handover", "handover", 75, (), ENGINE),
    CheckStep("faults-colocated", "faults", 150, ("colocated",), (*DEMO, *REFERENCE)),
    CheckStep("vision", "vision", 120, (), (*VISION, *SERVICES, *ENGINE)),
)
