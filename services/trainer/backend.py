"""What a training backend does on one rank; `reference`, `fsdp`, `megatron` implement it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from services.trainer.config import MAX_GRAD_NORM
from services.trainer.mesh import LayoutError as LayoutError
from services.trainer.mesh import Mesh as Mesh
from services.trainer.parking import HeldTensors
from services.trainer.staging import StagedCheckpoint
from sluice.algo.logprobs import TopLogprobs
from sluice.algo.spec import LossSpec
from sluice.imports import import_named
from sluice.samples.sample import MediaSpan
from sluice.weights.manifest import FileEntry, ShardFile
from sluice.weights.shards import ShardWrite

if TYPE_CHECKING:
    from services.trainer.config import LoraConfig, OptimConfig, TrainerConfig

NON_FINITE = "non-finite gradient norm"
ModelName = Literal["policy", "reference"]

BACKENDS = {  # nothing heavy is imported until chosen
    "reference": "services.trainer.backends.reference.backend:ReferenceBackend",
    "fsdp": "services.trainer.backends.fsdp.backend:FsdpBackend",
    "megatron": "services.trainer.backends.megatron.backend:MegatronBackend",
}


class Row(NamedTuple):
    """One sample as a backend sees it; per-token columns cover the response only.

    `columns` holds float32[response] tensors by column name; wide ones are [response, n], those of
    token ids int32. `loss_weight` is the factor
    of this row's summed token losses, so that a global normaliser gives the aggregation.
    `routed_experts` are those the engine chose, for a backend that replays them.
    """

    sample_id: str
    group_id: str
    token_ids: torch.Tensor  # int64[length], prompt then response
    prompt_length: int
    loss_mask: torch.Tensor  # bool[response]
    columns: Mapping[str, torch.Tensor] = {}
    loss_weight: float = 1.0
    # integer[length or length - 1, mixture layers, chosen]; the last token may be left out
    routed_experts: torch.Tensor | None = None
    media: Sequence[MediaSpan] = ()
    images: Mapping[str, bytes] = {}  # PNG by digest, of media at least

    @property
    def response_length(self) -> int:
        return self.token_ids.shape[0] - self.prompt_length  # `len` of a tensor is Python


MicroBatch = Sequence[Row]  # may be empty: a dummy of zero weight, run for its collectives


@dataclass(frozen=True, kw_only=True)
class PassSums:
    """Sums over this data-parallel rank's rows; never divided, so that ranks add up.

    `metrics[name]` is (sum, weight); the mean over all ranks is the sum of sums by the sum
    of weights. outputs: those of the rows, float32[response] on the CPU by sample_id, where they
    are kept.
    """

    loss: float
    token_count: int
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What became of an optimizer step; `skipped_reason` is empty when it was applied.

    metrics: what else there is to tell of it, such as how evenly experts are used.
    """

    grad_norm: float  # before clipping; may be nan or inf when skipped
    learning_rate: float
    skipped_reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


def refuse_norm(norm: float, *, clips: bool) -> str:
    """Return why gradients of this norm are not applied; empty where they are."""
    if not math.isfinite(norm):
        return NON_FINITE
    if not clips and norm > MAX_GRAD_NORM:
        return f"gradient norm above {MAX_GRAD_NORM:g}, and optim.max_grad_norm is off"
    return ""


def decays(name: str, dimensions: int) -> bool:
    """Tell whether weight decay is of a parameter; those of experts are stacked, biases too.

    Nor is it of the rates that states of recurrent layers go by, whatever shape a family gives
    them: a rate of its own for each channel and state in Jamba's, of its own axes in Kimi Linear's.
    """
    return dimensions > 1 and not name.endswith(("bias", ".A_log"))


class TrainingBackend(ABC):
    """One policy's share on one rank. Every rank gets the same calls in the same order.

    Calls are made from one thread. The count of micro-batches is the same on every rank. With
    more than one rank the default process group exists before a backend is made.
    """

    mesh: Mesh
    operations: Mapping[str, str]  # which implementation it has of those of `sluice.operations`
    meets_in_passes = True  # whether a rank may wait for others there, of which one may have failed

    @abstractmethod
    def compute_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, model: ModelName, temperature: float
    ) -> dict[str, torch.Tensor]:
        """Log-probabilities of response tokens: sample_id -> float32[response] on the CPU."""

    @abstractmethod
    def use_reference(self, directory: str) -> None:
        """From here on the reference is the model in this directory; empty is the settings'.

        It is read on its first use; another one that was is dropped.
        """

    @abstractmethod
    def compute_top_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        model: ModelName,
        temperature: float,
        count: int,
    ) -> dict[str, TopLogprobs]:
        """`compute_logprobs`, and the `count` likeliest tokens at each place, by sample_id."""

    @abstractmethod
    def compute_values(self, micro_batches: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
        """Value of the text in front of each response token: sample_id -> float32[response], CPU.

        Needs the head `value`: one value a token, read where the token is predicted.
        """

    @abstractmethod
    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossSpec,
        *,
        keep_outputs: bool = False,
        normalizer: float = 1.0,
    ) -> PassSums:
        """Add the gradients of `sum_rows loss_weight * sum_tokens loss` to those gathered.

        `keep_outputs`: answer with those of the rows, the log-probs of a policy. `normalizer`: what
        a step divides these sums by, which losses that are means already are multiplied by.
        """

    @abstractmethod
    def step(
        self, *, normalizer: float, learning_rate: float | None, optim: OptimConfig | None = None
    ) -> StepOutcome:
        """Reduce gradients over ranks, divide by `normalizer`, clip, apply, and clear them.

        `optim` has other numbers of AdamW for this step of an adapter.
        A gradient norm that `refuse_norm` refuses skips the update on every rank alike.
        """

    @abstractmethod
    def discard_gradients(self) -> None:
        """Forget gathered gradients."""

    @abstractmethod
    def stage_checkpoint(self, directory: Path) -> StagedCheckpoint:
        """Take in model, optimizer and RNG state, to be written below `directory`.

        All ranks share the directory. Nothing is copied yet: what changes the state (`step`,
        `load_checkpoint`) must be preceded by the checkpoint's `keep`, unless it is written.
        """

    def save_checkpoint(self, directory: Path) -> dict[str, FileEntry]:
        """Write a checkpoint now."""
        return self.stage_checkpoint(directory).write()

    @abstractmethod
    def load_checkpoint(self, directory: Path, *, weights_only: bool = False) -> None:
        """Read what `save_checkpoint` wrote; others check the digests.

        `weights_only`: the parameters of an adapter, whose optimizer begins anew.
        Raises OSError or ValueError for what cannot be read; the state is then undefined.
        """

    @abstractmethod
    def write_shards(self, directory: Path, write: ShardWrite | None = None) -> list[ShardFile]:
        """Write the policy tensors this rank owns as HF safetensors files into `directory`.

        Every tensor is written by exactly one rank; returns names, dtypes, shapes, digests. The
        same tensors go into files of the same names each time. `write` makes the files; the
        default is `write_shard`.
        """

    def create_adapter(self, name: str, settings: LoraConfig, seed: int | None = None) -> None:
        """Begin another adapter of the base, with an optimizer of its own; collective.

        It replaces one of that name; `seed` draws it in place of the settings'. Raises
        InvalidAdapterError.
        """
        raise NotImplementedError(f"{type(self).__name__} has one adapter only")

    def delete_adapter(self, name: str) -> None:
        """Forget an adapter that `create_adapter` began, if there is one."""
        raise NotImplementedError(f"{type(self).__name__} has one adapter only")

    def use_adapter(self, name: str) -> None:
        """From here on all calls are about this adapter; empty is the policy of the settings."""
        assert not name, f"{type(self).__name__} has one adapter only"

    @abstractmethod
    def held_tensors(self) -> HeldTensors:
        """Return what of the policy, all adapters and their optimizers is on the device now.

        While it is elsewhere only `held_tensors`, `release_spare` and `close` are called.
        """

    @abstractmethod
    def release_spare(self) -> None:
        """Drop what is read from its directory again when it is needed, such as a reference."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and the process groups that the backend itself made."""


def create_backend(name: str, config: TrainerConfig, mesh: Mesh) -> TrainingBackend:
    """Import and build the backend `name` (a key of BACKENDS; the config checked it)."""
    backend: TrainingBackend = import_named(BACKENDS[name])(config, mesh)
    return backend
