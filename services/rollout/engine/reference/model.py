"""The transformers model that serves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from services.rollout import metrics
from services.rollout.engine.images import ImageReader, ShownPrompt, reads_media
from services.rollout.engine.interface import Media
from services.rollout.engine.reference.adapters import AdapterLayers
from services.rollout.engine.reference.attention import (
    IMPLEMENTATION,
    CacheShape,
    ForwardPlan,
    PrefillPrompt,
    PromptBlock,
    Shown,
    Sight,
)
from services.rollout.engine.reference.fit import check_rope, read_model_config
from services.rollout.engine.reference.foreign import (
    WholeRows,
    foreign_attention,
    foreign_reason,
)
from services.rollout.engine.versions import check_processor
from services.rollout.errors import UnfitWeightsError, UnsupportedModelError
from sluice import vision
from sluice.algo.logprobs import float32_logits
from sluice.fused_layers import adapt, choose_for, heads_of
from sluice.fused_operations import attention_kernel
from sluice.imports import uncompiled, unsymbolic
from sluice.operations import UNASKED, OperationError, OperationsConfig, Usage, capability_of
from sluice.priority import lower_priority
from sluice.routers import Routers, UnknownRoutersError, biases_unrounded, hold_biases
from sluice.vision import VisionTower, rotary_positions
from sluice.weights.manifest import Manifest
from sluice.weights.stored_experts import TRANSPOSED_TYPES, as_stored

with uncompiled():
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        GenerationConfig,
        PretrainedConfig,
    )
    from transformers.utils import GENERATION_CONFIG_NAME
    from transformers.utils import logging as transformers_logging

FEATURE_TOKENS = 1 << 16  # of images seen last, whose features are kept


class Shaped(Protocol):
    """A tensor, or what a manifest says of one."""

    @property
    def shape(self) -> Sequence[int]: ...


class ServingModel:
    """The architecture, with parameters that `swap` replaces in microseconds per tensor."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        asked: OperationsConfig = UNASKED,
        numbers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Builds from an HF directory; raises UnsupportedModelError, UnfitWeightsError.

        asked: which operations are chosen ahead. numbers: what its tensors stand for, by the same
        names, where it has them quantized.
        """
        config = read_model_config(directory)
        check_rope(config.get_text_config())
        self._foreign = foreign_reason(config.get_text_config())
        transformers_logging.disable_progress_bar()  # a server's log is no terminal
        try:
            sees = config.model_type in vision.FAMILIES
            own = {"text_config": IMPLEMENTATION} if sees else IMPLEMENTATION
            # of layers that are not known here, some may count on the device that they are made on
            unsymbolically = nullcontext() if self._foreign else unsymbolic()
            stored = as_stored(directory, config.model_type)
            with unsymbolically, stored, biases_unrounded():
                auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
                load = partial(auto.from_pretrained, directory)
                if numbers is not None:  # which the class itself takes alone
                    kind = auto._model_mapping[type(config)]
                    load = partial(kind.from_pretrained, None, state_dict=numbers)
                model, report = load(
                    config=config,
                    dtype=dtype,
                    attn_implementation=foreign_attention(config) if self._foreign else own,
                    output_loading_info=True,
                )
        except (ValueError, OSError, KeyError, RuntimeError) as error:
            name, why = directory.name, str(error)
            if not sees and reads_media(config.to_dict()):
                why = f"models that see are {', '.join(vision.FAMILIES)}, not {config.model_type}"
            raise UnfitWeightsError(f"{name!r} is no usable model: {why}") from error
        if numbers is not None and (directory / GENERATION_CONFIG_NAME).is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory)
        for what in ("missing_keys", "mismatched_keys"):
            if report[what]:
                name = str(min(report[what]))
                raise UnfitWeightsError(f"{what} of the checkpoint: {name}", tensor=name)
        hold_biases(model)
        self.operations = self._choose(model, asked, dtype, device)
        adapt(model, self.operations)
        metrics.OPERATIONS.clear()
        for operation, name in self.operations.items():
            metrics.OPERATIONS.labels(operation, name).set(1)
        self._kernel = attention_kernel(self.operations.get("attention", ""))
        self.module = model.to(device).eval().requires_grad_(False)
        if dtype != torch.float32:
            _widen(self.module.get_output_embeddings())
        self.vocabulary_size: int = config.get_text_config().vocab_size
        self.max_length: int = config.get_text_config().max_position_embeddings
        self.images = ImageReader()
        if not sees and reads_media(config.to_dict()):
            known = ", ".join(vision.FAMILIES)
            self.images = ImageReader(
                refusal=f"images are shown to {known}, not to {config.model_type}: docs/vision.md"
            )
        self.tower: VisionTower | None = None
        if sees:
            self.images = ImageReader.of_model(directory, config.to_dict())
            if self.images.rules is not None:
                self.tower = VisionTower(model.model.visual, self.images.rules)
        # Nothing would be there to see where a placeholder was drawn.
        self.unsampled = frozenset(self.images.unsampled)
        self.stop_token_ids = self.unsampled | _stop_tokens(model.generation_config, config)
        self._features: OrderedDict[str, list[torch.Tensor]] = OrderedDict()
        self._rows = WholeRows(model, sees) if self._foreign else None
        self.cache_shape = (
            _cache_shape(config, dtype, device)
            if self._rows is None
            else self._rows.cache_shape(device)
        )
        self.adapters = AdapterLayers(self.module, device)
        self._places = _places(model)
        self._transposes = config.model_type in TRANSPOSED_TYPES
        held = {names: getattr(*owners[0]) for names, owners in self._places.items()}
        self._shapes = {names: tensor.shape for names, tensor in held.items()}
        # Biases of routers are wider than the rest, as transformers keeps them.
        self._wide = {
            name: tensor.dtype
            for (name, *_), tensor in held.items()
            if not isinstance(tensor, torch.nn.Parameter)
        }
        self._dtype, self._device = dtype, device
        self._routers: Routers | None = None  # that are watched

    def _choose(
        self, model: Any, asked: OperationsConfig, dtype: torch.dtype, device: torch.device
    ) -> dict[str, str]:
        """Raises UnsupportedModelError for what is asked for and cannot run."""
        usage = Usage(
            device_type=device.type,
            dtype=str(dtype).removeprefix("torch."),
            heads=heads_of(model.config),
            capability=capability_of(device.type),
            trains=False,
        )
        own = frozenset[str]() if self._foreign else frozenset({"attention"})
        try:
            return choose_for(model, asked, usage, own=own)
        except OperationError as error:
            raise UnsupportedModelError(str(error), key="operations") from error

    @property
    def capture_obstacle(self) -> str:
        """Why passes of this model cannot be captured; empty where they can."""
        if self._foreign:
            return f"a model with {self._foreign} runs whole rows"
        if self.tower is not None:
            return "a model that sees runs its tower between passes"
        if "experts" in self.operations:
            return "experts may ask the host how many tokens each has"
        return ""

    @torch.inference_mode()
    def watch_routers(self) -> None:
        """Records experts for `take_experts`; a pass over one token tells whether it can.

        Raises UnsupportedModelError where it cannot.
        """
        try:
            self._routers = Routers(self.module)
            self._routers.record(on=True)
            self._run_one_token()
            self._routers.check()
        except UnknownRoutersError as error:
            raise UnsupportedModelError(
                f"{error}; leave routed_experts off", key="routed_experts"
            ) from error

    def take_experts(self) -> torch.Tensor | None:
        """int16[T, mixture layers, chosen] of the last pass, where routers are watched."""
        if self._routers is None:
            return None
        return self._routers.take() if self._rows is None else self._rows.take_experts()

    def _run_one_token(self) -> None:
        device = self.cache_shape.device
        plan = ForwardPlan((PromptBlock(1, 1, 0, self.cache_shape.allocate(1, 1)),))
        zeros = torch.zeros(3, 1, dtype=torch.int64, device=device)
        self.forward(zeros[0], zeros, plan, zeros[0])

    def prompt(self, shown: ShownPrompt, media: Sequence[Media]) -> PrefillPrompt:
        """Makes a prompt ready for prefill."""
        if not shown.media:
            return PrefillPrompt.of(shown.token_ids)
        assert self.tower is not None
        length, merge = len(shown.token_ids), self.tower.rules.merge_size
        positions = torch.from_numpy(rotary_positions(length, shown.media, merge))
        images = {each.digest: bytes(each.data) for each in media}  # no file stays open
        return PrefillPrompt.of(shown.token_ids, Sight(shown.media, positions, images))

    def look(self, images: Mapping[str, bytes], *, apart: bool) -> None:
        """Runs the tower over images that it has not seen with these weights.

        apart: one by one, so that how features are rounded does not depend on what else is seen.
        """
        assert self.tower is not None
        unseen = {digest: png for digest, png in images.items() if digest not in self._features}
        for part in [{digest: unseen[digest]} for digest in unseen] if apart else [unseen]:
            self._features.update(self.tower.encode(part).by_image())
        for digest in images:
            self._features.move_to_end(digest)
        kept = sum(len(layers[0]) for layers in self._features.values())
        while kept > FEATURE_TOKENS and len(self._features) > len(images):
            _, layers = self._features.popitem(last=False)
            kept -= len(layers[0])

    def features(self, digest: str) -> list[torch.Tensor]:
        """float[tokens, hidden] of each layer of features of an image that `look` was shown."""
        return self._features[digest]

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        plan: ForwardPlan,
        keep: torch.Tensor,
        shown: Shown | None = None,
    ) -> torch.Tensor:
        """Computes logits float32[len(keep), V] of rows `keep`.

        tokens: int64[T]. positions: int64[3, T], all alike for text.
        """
        if self._rows is not None:
            given = tokens, positions, plan, keep, self.adapters, shown
            return self._rows.forward(*given, self._routers)
        if self.tower is None:
            logits = self.module(
                input_ids=tokens[None],
                position_ids=positions[:1],
                use_cache=False,
                logits_to_keep=keep,
                plan=plan,
                kernel=self._kernel,
            ).logits
            return logits[0].float()
        embeddings, deep = self.module.get_input_embeddings()(tokens), dict[str, Any]()
        if shown is not None:
            first, *more = shown.layers
            embeddings.index_copy_(0, shown.rows, first.to(embeddings.dtype))
            if more:
                mask = torch.zeros_like(tokens, dtype=torch.bool).index_fill_(0, shown.rows, True)
                deep = {"visual_pos_masks": mask[None], "deepstack_visual_embeds": more}
        hidden = self.module.model.language_model(
            inputs_embeds=embeddings[None],
            position_ids=positions[:, None],
            use_cache=False,
            plan=plan,
            kernel=self._kernel,
            **deep,
        ).last_hidden_state[0]
        answer: torch.Tensor = self.module.lm_head(hidden.index_select(0, keep)).float()
        return answer

    def names_match(self, tensors: Mapping[str, Shaped]) -> bool:
        """Whether `fit` finds every parameter by name, as it is; further tensors do not matter."""
        if self._transposes:
            return False
        return all(any(name in tensors for name in names) for names in self._places)

    def check_incoming(self, manifest: Manifest) -> None:
        """Raises UnfitWeightsError for a version that is not this model's, as far as that shows."""
        check_processor(manifest, self.images.processor)
        self.check_named(manifest.version, manifest.tensors)

    def check_named(self, version: int, tensors: Mapping[str, Shaped]) -> None:
        """Raises UnfitWeightsError for tensors that `fit` could not take as they are named."""
        if not self.names_match(tensors):
            raise UnfitWeightsError(
                "the checkpoint has tensors in another way than the model: it needs the store",
                version=version,
            )
        self._check_shapes(tensors)

    def _check_shapes(self, tensors: Mapping[str, Shaped]) -> None:
        for names, expected in self._shapes.items():
            tensor = next((tensors[name] for name in names if name in tensors), None)
            if tensor is None:
                raise UnfitWeightsError(f"tensor {names[0]!r} is missing", tensor=names[0])
            if tuple(tensor.shape) != tuple(expected):
                message = f"tensor {names[0]!r} has shape {[*tensor.shape]}, not {[*expected]}"
                raise UnfitWeightsError(message, tensor=names[0])

    def fit(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
        """Returns parameters for `swap`. A tied one may stand under any of its names.

        Raises UnfitWeightsError for a tensor that is missing or has another shape.
        """
        self._check_shapes(tensors)
        fitted: dict[str, torch.nn.Parameter] = {}
        for names in self._shapes:
            tensor = next(tensors[name] for name in names if name in tensors)
            # A copy always: aligned memory of its own, whatever becomes of the file.
            value = tensor.to(self._device, self.dtype_of(names[0]), copy=True)
            fitted[names[0]] = torch.nn.Parameter(value, requires_grad=False)
        return fitted

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns in which a tensor serves."""
        return self._wide.get(name, self._dtype)

    def parameter_names(self) -> frozenset[str]:
        """Returns all names of parameters; one that is tied has several."""
        return frozenset(name for same in self._places for name in same)

    def adopt(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
        """Returns parameters for `swap`, as `fit` does, that are these very tensors."""
        self._check_shapes(values)
        return {
            names[0]: torch.nn.Parameter(
                next(values[name] for name in names if name in values), requires_grad=False
            )
            for names in self._places
        }

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters that serve now, as `swap` takes them."""
        serving = {names[0]: getattr(*owners[0]) for names, owners in self._places.items()}
        return {
            name: t if isinstance(t, torch.nn.Parameter) else torch.nn.Parameter(t, False)
            for name, t in serving.items()
        }

    def swap(self, parameters: Mapping[str, torch.nn.Parameter]) -> list[torch.nn.Parameter | None]:
        """Serves `parameters` (from `fit`) from now on. Copies nothing.

        Returns those that served: to free them takes as long as they are large, so let another
        thread drop the list.
        """
        self._features.clear()  # of the tower that goes
        retired = []
        for names, owners in self._places.items():
            for owner, leaf in owners:
                if leaf in owner._buffers:
                    owner._buffers[leaf] = parameters[names[0]].detach()
                    continue
                retired.append(owner._parameters[leaf])
                owner._parameters[leaf] = parameters[names[0]]
        return retired

    def drop(self) -> list[torch.nn.Parameter | None]:
        """Holds no parameters until the next `swap`; returns those that served."""
        blank = {
            names[0]: torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
            for names, shape in self._shapes.items()
        }
        return self.swap(blank)


def _widen(head: torch.nn.Linear) -> None:
    """Have `head` make float32 logits: rounded as the model is, log-probs are off by about 1e-2."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits = float32_logits(hidden.flatten(0, -2), head.weight).unflatten(0, hidden.shape[:-1])
        return logits if head.bias is None else logits + head.bias

    head.forward = forward  # type: ignore[assignment,method-assign]


Owner = tuple[torch.nn.Module, str]


def _cache_shape(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> CacheShape:
    text = config.get_text_config()
    heads = text.num_attention_heads
    return CacheShape(
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        dtype=dtype,
        device=device,
    )


def _stop_tokens(*sources: object) -> frozenset[int]:
    stop_tokens: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        values: Iterable[int] = [value] if isinstance(value, int) else value or []
        stop_tokens.update(values)
    return frozenset(stop_tokens)


def _places(model: torch.nn.Module) -> dict[tuple[str, ...], list[Owner]]:
    """All names of each parameter (several when tied) -> the modules that hold it.

    Buffers that checkpoints have are with them: biases that routers choose by, which may move.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored:
            names[id(buffer)] = [name]
    modules = dict(model.named_modules())

    def owner(name: str) -> Owner:
        path, _, leaf = name.rpartition(".")
        return modules[path], leaf

    return {tuple(same): [owner(name) for name in same] for same in names.values()}


def yield_to_others() -> None:
    """Gives the calling thread a low priority and a single core."""
    torch.set_num_threads(1)
    lower_priority()
