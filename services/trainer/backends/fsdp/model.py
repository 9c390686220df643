"""A transformers model cut over ranks, under a root module of ours.

The loader of transformers fills what it finds: on a model whose parameters are already cut it
reads this rank's part of each tensor and nothing else. So the cut is made between construction
(without memory) and loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DistributedConfig,
    PretrainedConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from services.trainer.backends.families import (
    UnknownFamilyError,
    check_context,
    check_dropout,
    check_lengths,
    check_tensor,
    layout_of,
)
from services.trainer.backends.fsdp.config import FsdpConfig
from services.trainer.backends.fsdp.context import CONTEXT_IMPLEMENTATION, ContextLayout
from services.trainer.backends.fsdp.expert_parallel import ExpertRanks, cut_experts
from services.trainer.backends.fsdp.joined import check_joined, put_in_order
from services.trainer.backends.fsdp.tensor_parallel import (
    DATA,
    REPLICA,
    TENSOR,
    TensorRanks,
    check_rows,
    cut_layers,
    replica_of,
    tensor_cut,
    unsharded,
)
from services.trainer.backends.packing import PackedLayout
from services.trainer.backends.recurrent import keep_rows_apart, recurrent_layers
from services.trainer.backends.reference.attention import IMPLEMENTATION
from services.trainer.backends.reference.model import (
    OWN_OPERATIONS,
    check_loading,
    damage_named,
    errors_only,
    run_packed,
    with_named,
)
from services.trainer.backends.sparse import choose_by_rows
from services.trainer.config import Head
from sluice import operations, platform, vision
from sluice.algo.logprobs import (
    WHOLE_VOCAB,
    EntropyMode,
    TopLogprobs,
    VocabShard,
    chunks_of_logits,
    linear_logprobs,
    token_logprobs,
    top_logprobs,
)
from sluice.fused_layers import adapt, choose_for, heads_of
from sluice.imports import with_shards
from sluice.model_types import read_config
from sluice.operations import UNASKED, OperationsConfig, Usage
from sluice.routers import hold_biases
from sluice.samples.images import ImageRules
from sluice.vision import Patches, VisionTower
from sluice.weights.stored_experts import as_stored


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a pass is to give: log-probs and entropy, or (without a temperature) values.

    named: further tokens at each place, int64[R, K], as `ScoredModel.score` has them. top_count:
    likeliest tokens to name. is_trunk: nothing but what layers do on the way.
    """

    temperature: float | None = None
    entropy: EntropyMode = "off"
    named: torch.Tensor | None = None
    top_count: int = 0
    is_trunk: bool = False


class PolicyRoot(torch.nn.Module):
    """The root that is cut: whatever needs the output weight runs inside its forward."""

    def __init__(self, model: Any, tensor: TensorRanks | None, *, float32_head: bool) -> None:
        """`tensor`: the ranks that layers are cut over; None where they are not."""
        super().__init__()
        self.model = model  # transformers.PreTrainedModel, whose types mypy does not see
        self._tensor, self._float32_head = tensor, float32_head
        self.operations: Mapping[str, str] = {}  # which implementation each has; once it is loaded
        self.tower: VisionTower | None = None  # of a model that sees; once it is loaded
        text = model.config.get_text_config()
        self._divisor = _logit_divisor(text)
        self._cap: float | None = getattr(text, "final_logit_softcapping", None)

    def forward(
        self, layout: PackedLayout, asked: Asked, patches: Patches | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None] | TopLogprobs:
        """Log-probs and entropy, or values and None, of all response tokens, float32[R].

        Where likeliest tokens are asked for, those. All context ranks give the same. patches: for a
        model that sees; images that no row shows run through all that sees as others do, and have
        gradients of zero.
        """
        features = None
        if self.tower is not None:
            assert patches is not None
            features = self.tower.see(patches)
        hidden_TH = run_packed(self.model, layout, features, self.operations["attention"])
        if asked.is_trunk:
            return hidden_TH[:0], None
        picked_RH = hidden_TH.index_select(0, layout.predictors)
        if asked.temperature is None:
            return self._share(layout, self.model.score(picked_RH.float()))[:, 0], None
        if asked.top_count:
            found = self._name(picked_RH, layout.targets, asked)
            parts = found.logprobs, found.ids, found.top
            return TopLogprobs(*(self._share(layout, part) for part in parts))
        named = asked.named
        if named is not None and isinstance(layout, ContextLayout):
            named = named.to(layout.own.device)[layout.own]
        outputs, entropy_R = self._score(picked_RH, with_named(layout.targets, named), asked)
        return self._share(layout, outputs), self._share(layout, entropy_R)

    @staticmethod
    def _share(layout: PackedLayout, local: torch.Tensor) -> torch.Tensor:
        return layout.share(local) if isinstance(layout, ContextLayout) else local

    def _name(self, picked_RH: torch.Tensor, targets_R: torch.Tensor, asked: Asked) -> TopLogprobs:
        weight_VH, bias_V, vocab = self._output_layer()
        assert asked.temperature is not None
        return top_logprobs(
            picked_RH,
            weight_VH,
            targets_R,
            asked.top_count,
            bias_V=bias_V,
            temperature=asked.temperature * self._divisor,
            vocab=vocab,
            float32=self._float32_head and picked_RH.dtype != torch.float32,
            cap=self._cap,
        )

    @property
    def _most_logits(self) -> int:
        return operations.most_logits(self.operations["logprobs"])

    def _score(
        self, picked_RH: torch.Tensor, targets: torch.Tensor, asked: Asked
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight_VH, bias_V, vocab = self._output_layer()
        assert asked.temperature is not None
        options: Any = {
            "temperature": asked.temperature * self._divisor,
            "entropy": asked.entropy,
            "vocab": vocab,
            "cap": self._cap,
        }
        wider = self._float32_head and picked_RH.dtype != torch.float32
        most = self._most_logits
        chunks = chunks_of_logits(len(targets), len(weight_VH), most, float32=wider)
        if bias_V is None and chunks is not None:
            return linear_logprobs(picked_RH, weight_VH, targets, **options, **chunks)
        if wider:
            assert bias_V is not None
            picked_RH, weight_VH, bias_V = picked_RH.float(), weight_VH.float(), bias_V.float()
        if vocab is not WHOLE_VOCAB:
            assert self._tensor is not None
            picked_RH = self._tensor.spread(picked_RH)
        logits_RV = linear(picked_RH, weight_VH, bias_V)
        return token_logprobs(logits_RV, targets, reuse_logits=True, **options)

    def _output_layer(self) -> tuple[torch.Tensor, torch.Tensor | None, VocabShard]:
        """Its weight and bias, and which tokens this rank has the rows of."""
        head = self.model.get_output_embeddings()
        weight_VH, bias_V = unsharded(head.weight), unsharded(head.bias)
        if not isinstance(head.weight, DTensor):
            return weight_VH, bias_V, WHOLE_VOCAB
        assert self._tensor is not None
        ranks = self._tensor.collectives
        start, size = ranks.rank * len(weight_VH), len(head.weight)
        return weight_VH, bias_V, VocabShard(start=start, size=size, collectives=ranks)


def _logit_divisor(config: PretrainedConfig) -> float:
    """By what the family divides its logits."""
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    for multiplier in ("logit_scale", "lm_head_multiplier"):
        divisor /= float(getattr(config, multiplier, None) or 1.0)
    return divisor


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """A model of which this rank holds its part. `root` is called; all else only looks."""

    root: Any  # PolicyRoot and FSDPModule
    mesh: DeviceMesh  # of data and tensor ranks, and of replicas where there are several
    experts: ExpertRanks | None  # that have whole experts each, of a model that is cut so
    shares_prompts: bool

    @property
    def model(self) -> Any:
        return self.root.model

    @property
    def rules(self) -> ImageRules | None:
        """How images are made patches of; None for a model that reads text only."""
        tower: VisionTower | None = self.root.tower
        return None if tower is None else tower.rules

    @property
    def operations(self) -> Mapping[str, str]:
        """Which implementation each operation has."""
        chosen: Mapping[str, str] = self.root.operations
        return chosen

    def release(self) -> None:
        """Free what a forward keeps gathered for its backward, where none is to come."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def is_counted(self, tensor: torch.Tensor) -> bool:
        """Tell whether this is the one, of the ranks that hold the same part, that stands for it.

        Of what every rank holds whole all are, for what is alike.
        """
        if replica_of(self.mesh):
            return False
        return self.mesh.get_local_rank(TENSOR) == 0 or tensor_cut(tensor) is not None

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parts by the model's own names; tied ones once."""
        return dict(self.model.named_parameters())

    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers by name: whole on every rank, and alike."""
        names = self.model.state_dict().keys()
        return {name: value for name, value in self.model.named_buffers() if name in names}


def load_model(
    path: str,
    mesh: DeviceMesh,
    tensor: TensorRanks | None,
    experts: ExpertRanks | None,
    device: torch.device,
    settings: FsdpConfig,
    *,
    head: Head = "policy",
    float32_head: bool = True,
    asked: OperationsConfig = UNASKED,
    longest: int | None,
) -> ShardedModel:
    """Read this rank's part of a HF checkpoint directory; collective.

    mesh: of the dimensions data and tensor, and replica where there are several; `tensor`: over the
    second, where it has more than one. `experts`: over which ranks' groups those are spread.
    head value: one `score` a token, of the names in transformers' token classifiers; zero where
    the directory, a language model's, has none. longest: tokens that a row may have; None where
    nothing bounds them. All parameters take gradients, which may be changed until the first pass.
    Raises OSError or ValueError.
    """
    config = read_config(Path(path))
    layout = layout_of(config.to_dict(), unproven=settings.unproven)
    if settings.tensor > 1:
        check_tensor(config.model_type)
    if settings.context > 1:
        check_context(config.to_dict())
    check_lengths(config.to_dict(), longest)
    if settings.activation_checkpointing:
        check_dropout(config.to_dict())
    over: Any = {"mesh": mesh, "tensor": tensor, "experts": experts}
    cut = _Cut(**over, directory=Path(path), settings=settings, float32_head=float32_head)
    sees = config.model_type in vision.FAMILIES
    with_shards()
    kind = _distributed_class(config, head, cut, device)
    attention = CONTEXT_IMPLEMENTATION if settings.context > 1 else IMPLEMENTATION
    disable_progress_bar()
    # a new head and an unused one are what is asked for
    stored = as_stored(Path(path), config.model_type)
    with damage_named(Path(path)), errors_only(), stored:
        model, loading = kind.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            attn_implementation={"text_config": attention} if sees else attention,
            local_files_only=True,
            distributed_config=DistributedConfig(),
            output_loading_info=True,
        )
    check_loading(Path(path), head, loading)
    put_in_order(model, mesh[DATA])
    assert cut.root is not None
    if sees:
        rules = ImageRules.from_directory(Path(path))
        cut.root.tower = VisionTower(model.base_model.visual, rules)
    cut.root.operations = _choose(model, asked, device, settings, head)
    adapt(model, cut.root.operations)
    if settings.cpu_offload:
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
    for module in model.modules():  # Gemma 4 has more than one embedding
        if isinstance(module, torch.nn.Embedding):
            # transformers gives this token's embedding no gradient; here nothing is padded
            module.padding_idx = None
    keep_rows_apart(model)
    choose_by_rows(model)
    if settings.activation_checkpointing:
        _checkpoint_layers(model, offload=settings.activation_offload)
    return ShardedModel(
        root=cut.root, mesh=mesh, experts=experts, shares_prompts=layout == "shared"
    )


def _choose(
    model: Any, asked: OperationsConfig, device: torch.device, settings: FsdpConfig, head: Head
) -> dict[str, str]:
    """Raises OperationError. Parts that stay on the host are stepped there."""
    usage = Usage(
        device_type=device.type,
        dtype=settings.dtype,
        heads=heads_of(model.config),
        capability=operations.capability_of(device.type),
    )
    own = OWN_OPERATIONS if head == "policy" else OWN_OPERATIONS - {"logprobs"}
    chosen = choose_for(model, asked, usage, own=own)
    if settings.cpu_offload:
        own_adamw = OperationsConfig(adamw=asked.adamw)
        host = Usage(device_type=platform.CPU.device_type)
        chosen |= operations.choose(own_adamw, host, {"adamw"})
    return chosen


@dataclass(kw_only=True)
class _Cut:
    """Cuts a model that has no memory yet, and keeps its root."""

    mesh: DeviceMesh
    tensor: TensorRanks | None
    experts: ExpertRanks | None
    directory: Path  # which it is to be filled from
    settings: FsdpConfig
    float32_head: bool
    root: PolicyRoot | None = None

    def __call__(self, model: Any) -> None:
        hold_biases(model)
        if self.tensor is not None:
            cut_layers(model, self.tensor.mesh)
            check_rows(model, self.mesh[DATA].size())
        spread = [] if self.experts is None else cut_experts(model, self.experts)
        model.tie_weights()  # now, so that a tied tensor is cut once
        self.root = root = PolicyRoot(model, self.tensor, float32_head=self.float32_head)
        if self.settings.context > 1 and any(recurrent_layers(model)):
            raise UnknownFamilyError(
                f"fsdp.context above 1 for model_type {model.config.model_type}: the state of its "
                "recurrent layers goes from token to token of a row, of which a rank has a part"
            )
        layers = list(_layers(model))
        if not layers:
            raise ValueError(f"model_type {model.config.model_type} has no layers to cut it by")
        _check_experts(model, self.mesh[DATA].size() // self.settings.expert)
        check_joined(model, self.mesh[DATA].size(), self.directory)
        offload = CPUOffloadPolicy() if self.settings.cpu_offload else OffloadPolicy()
        narrow, wide = self._precision(), MixedPrecisionPolicy()
        options: Any = {
            "mesh": self.mesh[REPLICA, DATA] if self.settings.replicas > 1 else self.mesh[DATA],
            "offload_policy": offload,
            "reshard_after_forward": self.settings.reshard_after_forward,
        }
        if hasattr(model, "score"):
            fully_shard(model.score, mp_policy=wide, **options)
        tower = getattr(model.base_model, "visual", None)
        blocks = set() if tower is None else {*_layers(tower)}
        as_given = replace(narrow, cast_forward_inputs=False)
        for experts in spread:  # weights of the router, which they are given, may be wider
            assert self.experts is not None
            options_here = {**options, "mesh": self.experts.cut_over}
            fully_shard(experts, mp_policy=as_given, **options_here)
        for layer in layers:
            # angles of a tower's blocks stay float32, as its rotation is
            fully_shard(layer, mp_policy=as_given if layer in blocks else narrow, **options)
        if tower is not None:
            fully_shard(tower, mp_policy=narrow, **options)
        if not model.config.tie_word_embeddings:
            fully_shard(model.get_input_embeddings(), mp_policy=narrow, **options)
        # What is left is needed at the end of forward and at once in backward.
        fully_shard(root, mp_policy=narrow, **{**options, "reshard_after_forward": False})
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # Sums: a step divides them by its one normalizer.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _precision(self) -> MixedPrecisionPolicy:
        if self.settings.dtype == "float32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _check_experts(model: torch.nn.Module, size: int) -> None:
    """Raises ValueError where a rank would have no expert, which transformers cannot load.

    size: ranks that share those of a layer, or the part of them that expert ranks have.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim != 3 or ".experts." not in name:
            continue
        count = len(unsharded(parameter))
        if -(-count // size) * (size - 1) >= count:
            of = f", {count} on an expert rank" if count < len(parameter) else ""
            raise ValueError(
                f"{name} has {len(parameter)} experts{of}, of which one of {size} ranks would have "
                "none: take fewer ranks, or fsdp.replicas of as many"
            )


def _layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost layers, of a tower too: all of transformers' models mark them in one way."""
    if isinstance(model, GradientCheckpointingLayer):
        yield model
        return
    for child in model.children():
        yield from _layers(child)


def _distributed_class(
    config: PretrainedConfig, head: Head, cut: _Cut, device: torch.device
) -> Any:
    """The family's class, which the loader gives to `cut` before it reads a tensor."""
    sees = config.model_type in vision.FAMILIES
    kinds = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    try:
        base: Any = kinds._model_mapping[type(config)]
    except KeyError:
        raise ValueError(f"model_type {config.model_type} is no causal language model") from None

    class DistributedModel(base):  # type: ignore[misc]
        if head != "policy":
            _tied_weights_keys: Any = None

            def __init__(self, config: PretrainedConfig) -> None:
                super().__init__(config)
                del self.lm_head
                hidden = config.get_text_config().hidden_size
                self.score = torch.nn.Linear(hidden, 1, bias=head == "value")
                self.post_init()

            def get_output_embeddings(self) -> None:
                return None

        def _init_weights(self, module: torch.nn.Module) -> None:
            if module is getattr(self, "score", None):
                for parameter in module.parameters():
                    torch.nn.init.zeros_(parameter)
            else:
                super()._init_weights(module)

        @classmethod
        def prepare_distribute_model(
            cls, distributed_config: DistributedConfig, device_map: Any = None, **_: object
        ) -> tuple[DistributedConfig, Any, None]:  # 5.17 names a mesh of its own, too
            host = cut.settings.cpu_offload or device.type == "cpu"
            return distributed_config, None if host else device, None

        @classmethod
        def maybe_distribute_model(cls, model: Any, *_: object) -> Any:
            cut(model)
            return model

    # conversions of tensors go by them
    DistributedModel.__name__, DistributedModel.__module__ = base.__name__, base.__module__
    return DistributedModel


def _checkpoint_layers(model: Any, *, offload: bool) -> None:
    """Layers alone are in training mode: only then does transformers run them again."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in _layers(model):
        layer.training = True
        if offload:
            own: Any = layer
            own._gradient_checkpointing_func = partial(
                _run_offloaded, own._gradient_checkpointing_func
            )


def _run_offloaded(run: Callable[..., Any], *arguments: Any) -> Any:
    """A checkpoint keeps what its block was run on, and nothing else: that goes to the host."""
    with save_on_cpu(pin_memory=True):
        return run(*arguments)
