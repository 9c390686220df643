"""Configuration of a trainer: one policy, its optimizer and its ranks. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.trainer.backends.families import expert_count
from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.reference.config import ReferenceConfig
from sluice.address import plain_host, split_address
from sluice.algo.surrogate import LossHead
from sluice.config import PLAIN_NAME, Config, ProcessConfig, no_model_text
from sluice.model_types import check_chosen
from sluice.operations import OperationsConfig
from sluice.place import (
    Place,
    PlaceText,
    StoreCacheConfig,
    StorePlace,
    directory_of,
    is_bucket,
    within,
)
from sluice.profiler import DIRECTORY as PROFILES
from sluice.runtime.server import LAST_PORT, ServerConfig
from sluice.weights.adapter import DEFAULT_TARGETS, MAX_ALPHA, MAX_RANK, MIN_ALPHA, AdapterSpec
from sluice.weights.checkpoint import read_extents
from sluice.weights.classifier import label_count, reward_model_config
from sluice.weights.convert.quantized_layout import (
    Int4Groups,
    Quantization,
    QuantizedLayout,
    is_quantized,
    layout_named,
    stating,
)
from sluice.weights.errors import InvalidAdapterError, WeightStoreError
from sluice.weights.stored_experts import tensor_shapes

Head = Literal["policy", "value", "reward"]
_Beta = Annotated[float, Field(ge=0, lt=1)]
_Pattern = Annotated[str, Field(min_length=1, max_length=256)]  # no name is longer
MAX_LEARNING_RATE = 1e5  # far above, what AdamW makes of weights is no float32
MAX_WEIGHT_DECAY = 100.0
MAX_GRAD_NORM = 1e18  # AdamW keeps squares of gradients, in float32: one that is infinite stays so
MIN_GRAD_NORM = 1e-8
_LOSSES_OF_ROUTERS = ("aux_loss_coefficient", "z_loss_coefficient")
MAX_COEFFICIENT = 100.0
MIN_BIAS_RATE = 1e-6  # biases of routers are up to about 10, in float32
MAX_STEPS = 1 << 53
MAX_NEWTON_SCHULZ_STEPS = 50
MAX_RATE_FACTOR = 1e4
MAX_SEED = 2**63 - 1  # that every generator takes
MAX_THREADS = 4096
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# what log-probs, gradients and steps depend on, and what of it they do not: where it is written,
# what a layout says, and what only has other work done for the same numbers
_SHAPING = {
    "model",
    "reference_model",
    "seed",
    "optim",
    "trainable",
    "experts",
    "vision",
    "lora",
    "max_tokens_per_micro_batch",
    "oversize_policy",
    "publish_dtype",
    "publish",
    "autocast",
    "float32_head",
    "operations",
    "threads",
    "reference",
    "fsdp",
    "megatron",
}
_NOT_SHAPING = {
    "optim": {"max_consecutive_skips"},
    "lora": {"start", "max_adapters"},
    "publish": {"delta", "chain"},
    "fsdp": {
        "tensor",
        "context",
        "activation_checkpointing",
        "activation_offload",
        "replicas",
        "expert",
        "reshard_after_forward",
        "unproven",
    },
    "megatron": {
        "tensor",
        "pipeline",
        "virtual_pipeline",
        "context",
        "expert",
        "max_shard_bytes",
        "save_threads",
    },
}


class MuonConfig(Config):
    """Muon: a step adds the momentum of a matrix, made orthogonal (arXiv 2502.16982).

    momentum: how much of it stays from step to step; with nesterov the gradient is counted ahead.
    newton_schulz_steps: iterations that bring all singular values near 1, computed in
    newton_schulz_dtype. adjustment: what the rate of a matrix [out, in] is multiplied by:
    match_rms_adamw is 0.2 x sqrt(max(out, in)), which moves weights as far as AdamW does at that
    rate; original is sqrt(max(1, out / in)). rate_factor: multiplies what a step adds besides; what
    AdamW adds, and weight decay, it does not.
    """

    momentum: _Beta = 0.95
    nesterov: bool = True
    newton_schulz_steps: int = Field(5, ge=1, le=MAX_NEWTON_SCHULZ_STEPS)
    newton_schulz_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    adjustment: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    rate_factor: float = Field(1.0, gt=0, le=MAX_RATE_FACTOR)

    @model_validator(mode="after")
    def _check_nesterov(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov has no effect with momentum 0; set it to false")
        return self


class OptimConfig(Config):
    """The optimizer, gradient clipping and the learning-rate schedule.

    kind: adamw; or muon, which has the matrices of hidden layers go by Muon. Embeddings, the output
    layer or head, norms and biases go by AdamW then too. `betas` and `epsilon` are AdamW's, all
    else is of both. Weight decay leaves out biases and other tensors of one dimension (norms). The
    rate rises linearly over `warmup_steps`, then follows `schedule` down to `minimum_ratio` x
    `learning_rate` at step `decay_steps`.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    muon: MuonConfig = MuonConfig()
    learning_rate: float = Field(1e-6, gt=0, le=MAX_LEARNING_RATE)
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    epsilon: float = Field(1e-8, ge=1e-20, le=1e6)  # it divides, in float32
    weight_decay: float = Field(0.0, ge=0, le=MAX_WEIGHT_DECAY)
    max_grad_norm: float = Field(1.0, ge=0, le=MAX_GRAD_NORM, description="0 turns clipping off.")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, le=MAX_STEPS)
    decay_steps: int = Field(0, ge=0, le=MAX_STEPS, description="Needed by linear and cosine.")
    minimum_ratio: float = Field(0.0, ge=0, le=1)
    max_consecutive_skips: int = Field(
        10, ge=0, description="Then no more gradients are taken; 0 = no limit."
    )

    @property
    def highest_rate(self) -> float:
        """Above, a step takes more of a weight by decay than there is of it."""
        return min(MAX_LEARNING_RATE, 1 / self.weight_decay if self.weight_decay else math.inf)

    @model_validator(mode="after")
    def _check_decay(self) -> Self:
        if self.learning_rate > self.highest_rate:
            raise ValueError("learning_rate x weight_decay is above 1, all there is of a weight")
        if 0 < self.max_grad_norm < MIN_GRAD_NORM:
            raise ValueError(f"max_grad_norm is below {MIN_GRAD_NORM:g}: no weight would move")
        return self

    @model_validator(mode="after")
    def _check_muon(self) -> Self:
        if self.kind != "muon" and self.muon != MuonConfig():
            raise ValueError(f"muon has no effect with kind {self.kind}; leave it out")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule == "constant" and (self.decay_steps or self.minimum_ratio):
            raise ValueError("decay_steps and minimum_ratio have no effect with schedule constant")
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"schedule {self.schedule} needs decay_steps beyond warmup_steps")
        return self


class ExpertsConfig(Config):
    """How evenly the experts of a mixture are kept in use.

    aux_loss_coefficient, z_loss_coefficient: of losses of routers that are added to that of a call:
    that of even use, 1 a layer where it is (arXiv 2101.03961), over all tokens of the call at once,
    for which a pass counts ahead; and the mean square of the log of the summed exponentials of
    logits (2202.08906).
    bias_update_rate: what a step adds to the bias that an expert is chosen by, where fewer tokens
    than the mean of its layer went to it, and takes off where more did (2408.15664): of families
    whose routers have such a bias. 0 leaves biases as they were loaded.
    """

    aux_loss_coefficient: float = Field(0.0, ge=0, le=MAX_COEFFICIENT)
    z_loss_coefficient: float = Field(0.0, ge=0, le=MAX_COEFFICIENT)
    bias_update_rate: float = Field(0.0, ge=0, le=1)

    @property
    def losses(self) -> dict[str, float]:
        """Coefficients of losses of routers, by setting, of those that are not 0."""
        found = {name: getattr(self, name) for name in _LOSSES_OF_ROUTERS}
        return {name: value for name, value in found.items() if value}

    @model_validator(mode="after")
    def _check_rate(self) -> Self:
        if 0 < self.bias_update_rate < MIN_BIAS_RATE:
            raise ValueError(f"bias_update_rate is below {MIN_BIAS_RATE:g}: no bias would move")
        return self


class VisionConfig(Config):
    """Training of the parts that see, of a model that sees.

    What is frozen stays as it was loaded, bit for bit. A learning rate of its own follows the
    schedule of `optim`, and what a step is given in place of it, in proportion to
    `optim.learning_rate`, which is that of all other parts.
    """

    frozen_tower: bool = Field(False, description="All that sees but the projector.")
    frozen_projector: bool = Field(
        False, description="What makes tokens of patches, for deeper layers too."
    )
    tower_learning_rate: float | None = Field(None, gt=0, le=MAX_LEARNING_RATE)
    projector_learning_rate: float | None = Field(None, gt=0, le=MAX_LEARNING_RATE)

    @model_validator(mode="after")
    def _check_frozen(self) -> Self:
        for part in ("tower", "projector"):
            if getattr(self, f"frozen_{part}") and getattr(self, f"{part}_learning_rate"):
                raise ValueError(f"{part}_learning_rate has no effect with frozen_{part}")
        return self

    def scales(self, learning_rate: float) -> dict[str, float]:
        """Return the learning rates of all parts by that of the text; 0 where one is frozen.

        Parts are named as by `sluice.vision.part_of`.
        """

        def scale(is_frozen: bool, own: float | None) -> float:
            return 0.0 if is_frozen else 1.0 if own is None else own / learning_rate

        return {
            "text": 1.0,
            "tower": scale(self.frozen_tower, self.tower_learning_rate),
            "projector": scale(self.frozen_projector, self.projector_learning_rate),
        }


class TrainableConfig(Config):
    """Which parameters are trained, by the names that a Hugging Face checkpoint has for them.

    Patterns are those of `fnmatch`, as of a conversion: `*` stands for any characters, dots too.
    What `allow` names and `deny` does not is trained. All else stays as it was loaded, bit for bit,
    without gradients or state of an optimizer. A tied tensor goes by either of its names.
    """

    allow: tuple[_Pattern, ...] = Field(("*",), min_length=1)
    deny: tuple[_Pattern, ...] = ()


class LoraConfig(Config):
    """Adapters that are trained in place of the model, whose own weights stay as they were loaded.

    rank: of each layer's update B A, which counts alpha / rank times; alpha is the rank where it is
    not given. targets: last names of the linear layers that have adapters. start: a folder of peft,
    or a published adapter, that is trained on; it must be of the same rank, alpha and targets.
    max_adapters: that CreateAdapter may begin beside the one described here.
    """

    rank: int = Field(ge=1, le=MAX_RANK)
    alpha: float | None = Field(None, ge=MIN_ALPHA, le=MAX_ALPHA)
    targets: tuple[str, ...] = DEFAULT_TARGETS
    start: str | None = Field(None, min_length=1, description="None begins adapters at zero.")
    max_adapters: int = Field(64, ge=0, description="By CreateAdapter; then ADAPTER_LIMIT.")

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        try:
            self.spec("0" * 32)
        except InvalidAdapterError as error:
            raise ValueError(str(error)) from error
        return self

    def spec(self, base_digest: str) -> AdapterSpec:
        """Return what the adapters of a base are."""
        return AdapterSpec(
            rank=self.rank,
            alpha=float(self.rank) if self.alpha is None else self.alpha,
            targets=self.targets,
            base_digest=base_digest,
        )


class RanksConfig(Config):
    """The processes that hold the model. `external`: started by torchrun or a cluster.

    An external rank runs `python -m services.trainer.rank --config FILE --controller HOST:PORT`
    with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set; `listen_port` is that port.
    """

    count: int = Field(1, ge=1)
    launch: Literal["local", "external"] = "local"
    listen_host: str = "127.0.0.1"
    listen_port: int = Field(0, ge=0, le=LAST_PORT)
    heartbeat_seconds: float = Field(2.0, gt=0)
    silent_seconds: float = Field(
        6.0, gt=0, description="ListWaits names a rank silent for longer."
    )
    lost_seconds: float = Field(120.0, gt=0, description="A rank silent for longer is lost.")
    start_timeout: float = Field(600.0, gt=0, description="Seconds, from launch to a loaded model.")
    command_timeout: float = Field(1800.0, gt=0, description="Seconds, of any one command.")
    stuck_seconds: float = Field(
        600.0, gt=0, description="Of any one command; longer, and the trainer is not ready."
    )
    max_restarts: int = Field(
        3, ge=0, description="In a row, without an optimizer step in between."
    )
    restart_backoff: float = Field(
        1.0, ge=0, description="Seconds, doubled with each restart in a row."
    )
    check_collectives: bool = Field(
        False,
        description="Compare what ranks exchange before they do, to find one that differs: slow.",
    )

    @model_validator(mode="after")
    def _check_silence(self) -> Self:
        if self.lost_seconds <= self.heartbeat_seconds:
            raise ValueError(
                f"lost_seconds {self.lost_seconds:g} is not above heartbeat_seconds "
                f"{self.heartbeat_seconds:g}: every rank would be lost between two heartbeats"
            )
        return self

    @property
    def check_timeout(self) -> timedelta | None:
        """How long ranks wait for each other before a checked collective; None checks none."""
        return timedelta(seconds=self.command_timeout / 2) if self.check_collectives else None


class PublishConfig(Config):
    """How versions of weights are stored.

    delta: ranks keep the bytes they published (in host memory, once) and write what changed.
    chain: versions of deltas on a whole one, at most; then a whole one follows.
    quantization: weights of linear layers in FP8 (e4m3), a scale for every block of 128 x 128;
    fp8_ue8m0 rounds scales up to powers of two. int4_32 and int4_128: those of a mixture's experts
    in 4 bits, a scale for every 32 or 128 inputs.
    quantization_aware: passes of the policy compute with the numbers that a version's experts stand
    for; their gradients are those of the weights. Of int4_32 and int4_128.
    """

    delta: bool = False
    chain: int = Field(8, ge=1)
    quantization: Quantization = ""
    quantization_aware: bool = False

    @model_validator(mode="after")
    def _check_chain(self) -> Self:
        if not self.delta and self.chain != PublishConfig.model_fields["chain"].default:
            raise ValueError("chain has no effect without delta; leave it out")
        return self

    @model_validator(mode="after")
    def _check_aware(self) -> Self:
        if self.quantization_aware and not isinstance(self.layout, Int4Groups):
            raise ValueError(
                f"quantization_aware with quantization {self.quantization!r}: passes compute with "
                "what is published as int4_32 or int4_128; set one of them"
            )
        return self

    @property
    def layout(self) -> QuantizedLayout | None:
        """How weights are stored; None where nothing is quantised."""
        return layout_named(self.quantization)

    @property
    def simulated(self) -> Int4Groups | None:
        """What passes compute with in place of experts' weights; None where with those."""
        layout = self.layout
        return layout if self.quantization_aware and isinstance(layout, Int4Groups) else None


class TransferConfig(Config):
    """Weights that are sent to engines after they were published.

    enabled: ranks keep the bytes they published (in host memory, once) to send them.
    medium: collective broadcasts them; handles has engines of the same host, and device, take them
    out of the ranks' memory (CUDA IPC; on a CPU shared memory), also where a device is shared.
    host: where engines reach the ranks; empty is this host's loopback for local ranks, and the
    rank's own host name for others. What is sent there is neither encrypted nor authenticated.
    write_behind: what is sent is written to the store afterwards, beside other work; until it is
    there whole, a version is lost with a rank or the controller. Of whole models in a directory.
    timeout_seconds: of a whole transfer; attempts: with the engines that are left.
    answer_seconds: that an engine has to say whether it can take part; without an answer it is
    left out, and reads the version from the store.
    max_engines: that one publication may name.
    """

    enabled: bool = False
    medium: Literal["collective", "handles"] = "collective"
    write_behind: bool = False
    host: str = ""
    bucket_bytes: int = Field(256 << 20, ge=1)
    timeout_seconds: float = Field(60.0, gt=0)
    answer_seconds: float = Field(20.0, gt=0)
    attempts: int = Field(2, ge=1)
    max_engines: int = Field(4096, ge=1)

    @model_validator(mode="after")
    def _check_enabled(self) -> Self:
        if self.enabled:
            return self
        for name, field in type(self).model_fields.items():
            if getattr(self, name) != field.default:
                raise ValueError(f"{name} has no effect without enabled")
        return self


class TrainerConfig(ProcessConfig):
    """A trainer process.

    model, reference_model: directories with a HF checkpoint; the reference defaults to the model.
    store: root of `weights/`, `blobs/` and `checkpoints/`, shared by all services and ranks: a
    directory, or s3://bucket/prefix.
    weights: where versions of weights are in place of `<store>/weights`, e.g. s3://bucket/prefix.
    name: tells trainers apart that share a store. A critic, or a reward model, keeps weights and
    checkpoints below `critics/<name>/` of the store, so that no engine takes them for a policy's.
    """

    model: str
    store: StorePlace
    store_cache: StoreCacheConfig = StoreCacheConfig()
    weights: PlaceText = ""
    name: str = Field("trainer", pattern=f"^{PLAIN_NAME.pattern}$")
    reference_model: str | None = None
    backend: Literal["reference", "fsdp", "megatron"] = "reference"
    head: Head = Field(
        "policy",
        description="Logits; one value a token: a critic; that of the last: a reward model.",
    )
    seed: int = Field(0, ge=0, le=MAX_SEED)
    optim: OptimConfig = OptimConfig()
    trainable: TrainableConfig = TrainableConfig()
    experts: ExpertsConfig = ExpertsConfig()
    vision: VisionConfig = VisionConfig()
    lora: LoraConfig | None = Field(None, description="None trains the model itself.")
    ranks: RanksConfig = RanksConfig()
    max_batches: int = Field(256, ge=1, description="Held; then QUEUE_FULL.")
    max_rows: int = Field(131_072, ge=1, description="Of a batch, or of a plan without one.")
    max_micro_batch_multiple: int = Field(4096, ge=1, description="That a plan may ask for.")
    max_waiting_calls: int = Field(256, ge=1, description="For the ranks; then QUEUE_FULL.")
    max_tokens_per_micro_batch: int = Field(
        16384, ge=2, description="Of one context-parallel rank."
    )
    oversize_policy: Literal["error", "truncate", "alone"] = Field(
        "error", description="For rows above that."
    )
    keep_versions: int = Field(
        4, ge=0, description="Of weights, besides those pinned; 0 keeps all."
    )
    publish_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of the backends reference and fsdp."
    )
    publish: PublishConfig = PublishConfig()
    transfer: TransferConfig = TransferConfig()
    autocast: bool = Field(
        False, description="bfloat16 in the matrix products of the reference backend."
    )
    float32_head: bool = Field(
        True,
        description="Logits of a bfloat16 model in float32; else rounded, and log-probs with them.",
    )
    operations: OperationsConfig = OperationsConfig()
    threads: int = Field(1, ge=1, le=MAX_THREADS, description="Of a rank on a CPU.")
    durable: bool = Field(
        True, description="False: what a crash of the machine leaves in the store is undefined."
    )
    user_modules: tuple[str, ...] = Field(
        (),
        description="Modules and packages whose losses, estimators, KL forms and corrections "
        "requests may name; ranks import them.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    reference: ReferenceConfig = ReferenceConfig()
    fsdp: FsdpConfig = FsdpConfig()
    megatron: MegatronConfig = MegatronConfig()
    server: ServerConfig = ServerConfig()

    @property
    def loss_head(self) -> LossHead:
        """What losses are of."""
        return "policy" if self.head == "policy" else "value"

    @property
    def highest_rate(self) -> float:
        """Above, a step takes more of some part's weights by decay than there is of them."""
        scales = self.vision.scales(self.optim.learning_rate)
        return self.optim.highest_rate / max(scales.values())

    @property
    def fixed_reference(self) -> str:
        """Why no version of the weights can be the reference; empty where one can."""
        if self.head != "policy":
            return f"a trainer of head {self.head} has no reference"
        if self.lora is not None:
            return "lora: the reference is the model without adapters"
        if self.publish.delta:
            return "publish.delta: a version may hold only what changed"
        if self.publish.quantization:
            return "publish.quantization: a version is quantised"
        if is_bucket(self.weights_location):
            return "versions are in a bucket: set store, or weights, to a directory"
        return ""

    @property
    def passes_narrow(self) -> bool:
        """Whether passes see weights of experts in bfloat16 that are float32 to all else."""
        return self.backend == "fsdp" and self.fsdp.dtype == "bfloat16"

    @property
    def shaping(self) -> dict[str, str]:
        """What a run that goes on should have in common with its past, by name, as JSON."""
        dumped = self.model_dump(mode="json", include=_SHAPING, exclude=_NOT_SHAPING)
        return {name: json.dumps(value) for name, value in _leaves(dumped)}

    @property
    def longest_row(self) -> int | None:
        """Tokens that a row may have on ranks that hold it whole; None where nothing bounds it."""
        alone = self.oversize_policy == "alone"
        return None if alone else self.max_tokens_per_micro_batch

    @property
    def controller_name(self) -> str:
        """Return whom the controller's certificate names, for ranks that reach it over loopback."""
        host, _ = split_address(self.server.advertise)
        return host if is_loopback(self.ranks.listen_host) else ""

    @property
    def weights_location(self) -> str:
        """Directory or URL of the versions of weights."""
        if not self.weights:
            return str(within(self.store_root, "weights"))
        own = "" if self.head == "policy" else f"/critics/{self.name}"
        return self.weights.rstrip("/") + own

    @property
    def store_root(self) -> Place:
        """Return where `weights/` and `checkpoints/` are."""
        return self.store if self.head == "policy" else within(self.store, "critics", self.name)

    @property
    def parking(self) -> Path:
        """Return the directory where the state of ranks on the host waits while they sleep."""
        return self._local_root / "parking"

    @property
    def profiles(self) -> Path:
        """Return the directory of what ranks have recorded, on the host of each."""
        return self._local_root / PROFILES

    @property
    def _local_root(self) -> Path:
        root = directory_of(self.store_root)
        return root or self.store_cache.directory / self.name

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        if self.head == "policy":
            return self
        if self.reference_model is not None:
            raise ValueError(f"reference_model has no effect with head {self.head}; leave it out")
        document = json.loads((Path(self.model) / "config.json").read_bytes())
        if (count := label_count(document)) != 1:
            raise ValueError(f"model: {self.model} has {count} labels, one is for head {self.head}")
        if self.head == "reward":
            reward_model_config(document)
            if self.oversize_policy == "truncate":
                raise ValueError(
                    "oversize_policy truncate is not for head reward: the end of a text is scored"
                )
        return self

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        backend = self.backend
        if backend != "megatron" and self.megatron != MegatronConfig():
            raise ValueError(f"megatron has no effect with backend {backend}; leave it out")
        if backend != "fsdp" and self.fsdp != FsdpConfig():
            raise ValueError(f"fsdp has no effect with backend {backend}; leave it out")
        if backend != "reference" and self.reference != ReferenceConfig():
            raise ValueError(f"reference has no effect with backend {backend}; leave it out")
        if backend != "reference" and self.autocast:
            raise ValueError(f"autocast has no effect with backend {backend}; set {backend}.dtype")
        if backend == "megatron" and self.publish_dtype != "float32":
            raise ValueError("publish_dtype has no effect with backend megatron; leave it out")
        narrow = {
            "reference": self.autocast,
            "fsdp": self.fsdp.dtype != "float32",
            "megatron": self.megatron.dtype != "float32",
        }[backend]
        if not self.float32_head and (not narrow or self.head != "policy"):
            what = f"head {self.head}" if narrow else "a float32 model"
            raise ValueError(f"float32_head has no effect with {what}; leave it out")
        return self

    @model_validator(mode="after")
    def _check_muon(self) -> Self:
        if self.optim.kind != "muon":
            return self
        if self.backend == "megatron":
            raise ValueError(
                "optim.kind muon is not for backend megatron, whose Muon needs NVIDIA's "
                "emerging_optimizers, which no package index has: set backend fsdp, or optim.kind "
                "adamw"
            )
        if self.lora is not None:
            raise ValueError(
                "optim.kind muon is not for lora: what an adapter adds to a layer is a product of "
                "two factors, no nearer to orthogonal for steps of each that are; set optim.kind "
                "adamw"
            )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        size = self.fsdp.expert
        for model in (self.model, self.reference_model) if size > 1 else ():
            if model is None:
                continue
            count = expert_count(json.loads((Path(model) / "config.json").read_bytes()))
            if count == 0 and model == self.model:
                raise ValueError(f"fsdp.expert has no effect on {model}, which has no experts")
            if count and count % size:
                raise ValueError(
                    f"fsdp.expert {size} does not divide the {count} experts of a layer of {model}"
                )
        return self

    @model_validator(mode="after")
    def _check_use_of_experts(self) -> Self:
        changed = self.experts.model_dump(exclude_defaults=True)
        if not changed:
            return self
        document = json.loads((Path(self.model) / "config.json").read_bytes())
        if expert_count(document) == 0:
            raise ValueError(
                f"experts.{next(iter(changed))} has no effect on {self.model}, which has no experts"
            )
        if self.lora is not None:
            raise ValueError(
                f"experts.{next(iter(changed))} is not for lora, whose model stays as it was "
                "loaded; leave it out"
            )
        if not self.experts.bias_update_rate:
            return self
        if self.trainable != TrainableConfig():
            raise ValueError(
                "experts.bias_update_rate is not for trainable, of which biases that choose "
                "experts are no part: set one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_prediction(self) -> Self:
        if not self.megatron.mtp_loss_scaling_factor:
            return self
        for name, is_set in (
            (f"head {self.head}", self.head != "policy"),
            ("lora", self.lora is not None),
        ):
            if is_set:
                raise ValueError(
                    f"megatron.mtp_loss_scaling_factor has no effect with {name}; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _check_vision(self) -> Self:
        if self.vision == VisionConfig():
            return self
        document = json.loads((Path(self.model) / "config.json").read_bytes())
        if "vision_config" not in document:
            raise ValueError("vision has no effect on a model that reads text only; leave it out")
        return self

    @model_validator(mode="after")
    def _check_trainable(self) -> Self:
        layout = self.megatron
        if (
            self.trainable != TrainableConfig()
            and layout.dtype == "float16"
            and layout.pipeline > 1
        ):
            raise ValueError(
                "trainable is not for megatron.dtype float16 with megatron.pipeline above 1: a "
                "stage that trains nothing has no scale of losses"
            )
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora is None:
            return self
        if self.head != "policy":
            raise ValueError(f"lora is not for head {self.head}: a new head would not learn")
        if self.reference_model is not None:
            raise ValueError(
                "reference_model has no effect with lora, whose reference is the model without "
                "adapters; leave it out"
            )
        if self.trainable != TrainableConfig():
            raise ValueError(
                "trainable has no effect with lora, whose targets say what has adapters; leave it "
                "out"
            )
        if self.publish.delta:
            raise ValueError("publish.delta has no effect with lora; leave it out")
        if self.fsdp.reduce != "micro_batch":
            raise ValueError("fsdp.reduce has no effect with lora, which sums once a step")
        if self.megatron.dtype == "float16":
            raise ValueError("lora is not for megatron.dtype float16, whose losses are scaled")
        if self.megatron.distributed_optimizer != MegatronConfig().distributed_optimizer:
            raise ValueError("megatron.distributed_optimizer has no effect with lora; leave it out")
        if self.megatron.optimizer_offload:
            raise ValueError("megatron.optimizer_offload has no effect with lora; leave it out")
        document = json.loads((Path(self.model) / "config.json").read_bytes())
        if "vision_config" in document:
            raise ValueError("lora is not for a model that sees: its tower has layers of like name")
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        if not self.publish.quantization:
            return self
        if self.lora is not None:
            raise ValueError(
                "publish.quantization has no effect with lora, which publishes adapters alone; "
                "leave it out"
            )
        if self.head != "policy":
            raise ValueError(
                f"publish.quantization has no effect with head {self.head}, which no engine serves"
            )
        if self.transfer.enabled:
            raise ValueError(
                "publish.quantization is not for transfer.enabled: engines read what is quantised "
                "from the store"
            )
        self._check_layout(self.publish)
        return self

    def _check_layout(self, publish: PublishConfig) -> None:
        layout, where = publish.layout, f"publish.quantization {publish.quantization}: {self.model}"
        assert layout is not None
        try:
            shapes = tensor_shapes(Path(self.model))
        except WeightStoreError:
            return  # whoever loads them says what is wrong
        for name, shape in shapes.items():
            if refusal := layout.refusal(name, shape):
                raise ValueError(f"{where}: {refusal}")
        if not any(layout.quantizes(name, shape) for name, shape in shapes.items()):
            raise ValueError(f"{where} has no weights that are stored in {layout.label}")

    @model_validator(mode="after")
    def _check_quantization_aware(self) -> Self:
        if not self.publish.quantization_aware:
            return self
        if self.megatron.fp8 is not None:
            raise ValueError(
                "publish.quantization_aware is not for megatron.fp8, whose products round weights "
                "again; set one of them"
            )
        if self.megatron.model_provider:
            raise ValueError(
                "publish.quantization_aware is not for megatron.model_provider, whose layers may "
                "read weights otherwise"
            )
        if self.backend == "fsdp" and self.fsdp.dtype == "float32" != self.publish_dtype:
            raise ValueError(
                "publish.quantization_aware with fsdp.dtype float32: versions are made of numbers "
                f"rounded to publish_dtype {self.publish_dtype}, which passes do not see; leave "
                "publish_dtype out"
            )
        return self

    @model_validator(mode="after")
    def _check_plain(self) -> Self:
        """What is published has the model's config.json beside it, and is read by that."""
        document = json.loads((Path(self.model) / "config.json").read_bytes())
        quantized = any("quantization_config" in part for part in stating(document))
        if not quantized and is_quantized(_dtypes_of(Path(self.model))):
            raise ValueError(
                f"model {self.model} has quantised weights, and a config.json that knows of none: "
                "put back the one that it came with"
            )
        if quantized and (self.lora is None or self.backend == "megatron"):
            reads = "megatron reads plain weights alone"
            why = "trained weights are not" if self.lora is None else reads
            raise ValueError(
                f"model {self.model} is quantised, and {why}: make it plain "
                "first (of FP8, INT4 or MXFP4: `sluice convert SRC DST --to hf`)"
            )
        return self

    @model_validator(mode="after")
    def _check_vision_rates(self) -> Self:
        for part in ("tower", "projector"):
            if (getattr(self.vision, f"{part}_learning_rate") or 0) > self.optim.highest_rate:
                raise ValueError(
                    f"vision.{part}_learning_rate x optim.weight_decay is above 1, all there is of "
                    "a weight"
                )
        return self

    @model_validator(mode="after")
    def _check_medium(self) -> Self:
        if self.transfer.medium == "handles" and self.transfer.host:
            raise ValueError("transfer.host has no effect with medium handles: all are of one host")
        return self

    @model_validator(mode="after")
    def _check_write_behind(self) -> Self:
        if not self.transfer.write_behind:
            return self
        if self.publish.delta:
            raise ValueError(
                "transfer.write_behind is not for publish.delta: what a delta is against may be "
                "lost; set one of them"
            )
        if self.lora is not None:
            raise ValueError("transfer.write_behind is not for lora: adapters are written at once")
        return self

    @model_validator(mode="after")
    def _check_rank_port(self) -> Self:
        server, ranks = self.server, self.ranks
        if is_loopback(ranks.listen_host):
            return self
        if ranks.launch == "local":
            raise ValueError("ranks.listen_host must be loopback where ranks.launch is local")
        if server.security.tls is None and not server.allow_insecure:
            raise ValueError(
                f"ranks.listen_host {ranks.listen_host} is not loopback: set "
                "server.security.tls, or server.allow_insecure: true"
            )
        return self

    @field_validator("model", "reference_model")
    @classmethod
    def _is_checkpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        path = Path(value) / "config.json"
        try:
            if not path.is_file():
                raise ValueError(no_model_text(value))
        except OSError as error:  # too long a name, or no right to look
            raise ValueError(f"cannot be looked at: {error.strerror}") from None
        try:
            document = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise ValueError(f"{path} is no JSON object")
        check_chosen(document)
        return value


def is_loopback(host: str) -> bool:
    return plain_host(host) in LOOPBACK


def _leaves(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name, each with its value."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _dtypes_of(directory: Path) -> dict[str, str]:
    """Of the tensors of a model; none where its files cannot be read, which ranks tell of."""
    try:
        return {name: extent.dtype for name, extent in read_extents(directory).items()}
    except (OSError, WeightStoreError):
        return {}
