"""A transformers model over packed rows: log-probs and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import linear

from services.trainer.backend import MicroBatch
from services.trainer.backends.families import check_lengths, check_reference
from services.trainer.backends.packing import PackedLayout, images_of, pack
from services.trainer.backends.recurrent import keep_rows_apart, recurrent_layers, row_inputs
from services.trainer.backends.reference.attention import IMPLEMENTATION
from services.trainer.backends.sparse import choose_by_rows, mask_inputs
from services.trainer.config import Head
from sluice import operations, vision
from sluice.algo.logprobs import (
    EntropyMode,
    TopLogprobs,
    chunks_of_logits,
    linear_logprobs,
    token_logprobs,
    top_logprobs,
)
from sluice.fused_layers import adapt, choose_for, heads_of
from sluice.fused_operations import attention_kernel
from sluice.imports import uncompiled, unsymbolic
from sluice.model_types import read_config
from sluice.operations import UNASKED, OperationsConfig, Usage
from sluice.samples.images import ImageRules
from sluice.vision import TEXT, Features, VisionTower
from sluice.weights.stored_experts import as_stored

with uncompiled():
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        PretrainedConfig,
    )
    from transformers.utils.logging import (
        disable_progress_bar,
        get_verbosity,
        set_verbosity,
        set_verbosity_error,
    )

NEW_HEAD = {"score.weight", "score.bias"}  # zero where a checkpoint is a language model's
LFS = b"version https://git-lfs"  # how a pointer begins that stands for a file
ROWS_APART = {"gpt_oss"}  # see `attend`
OWN_OPERATIONS = frozenset({"attention", "logprobs", "adamw"})  # beside those of layers


@dataclass(frozen=True)
class ScoredModel:
    """A transformers model on a device."""

    model: Any  # transformers.PreTrainedModel, whose types mypy does not see
    device: torch.device
    operations: Mapping[str, str]  # which implementation each has
    float32_head: bool = (
        True  # logits, also where autocast makes what they are products of narrower
    )
    tower: VisionTower | None = None
    shares_prompts: bool = True  # where no layer carries a state from token to token, or has sinks

    @classmethod
    def load(
        cls,
        path: str,
        device: torch.device,
        head: Head = "policy",
        *,
        float32_head: bool = True,
        asked: OperationsConfig = UNASKED,
        dtype: str = "float32",
        longest: int | None,
    ) -> ScoredModel:
        """Loads a HF checkpoint directory in float32. Raises OSError or ValueError.

        dtype: in which autocast has products made. asked: which operations are chosen ahead.
        head value: transformers' token classifier of one label; head reward: the sequence
        classifier, which has no bias. Its `score` starts at zero where the directory, a language
        model's, has none, so that every rank starts alike.
        longest: tokens that a row may have; None where nothing bounds them.
        """
        config = read_config(Path(path))
        check_reference(config.model_type)
        check_lengths(config.to_dict(), longest)
        disable_progress_bar()
        model = _load(path, config, head)
        # transformers gives this token's embedding no gradient; here nothing is padded, so it is
        # part of a sample, or even the token that ends one
        model.get_input_embeddings().padding_idx = None
        tower = None
        if config.model_type in vision.FAMILIES:
            tower = VisionTower(model.base_model.visual, ImageRules.from_directory(Path(path)))
        chosen = choose_for(
            model,
            asked,
            Usage(
                device_type=device.type,
                dtype=dtype,
                heads=heads_of(config),
                capability=operations.capability_of(device.type),
            ),
            own=OWN_OPERATIONS if head == "policy" else OWN_OPERATIONS - {"logprobs"},
        )
        adapt(model, chosen)
        shares_prompts = not any(recurrent_layers(model)) and config.model_type not in ROWS_APART
        keep_rows_apart(model)
        choose_by_rows(model)
        return cls(model.to(device).eval(), device, chosen, float32_head, tower, shares_prompts)

    def see(self, rows: MicroBatch) -> Features:
        """Runs the tower once over the distinct images of the rows. Raises InvalidImageError."""
        return Features() if self.tower is None else self.tower.encode(images_of(rows))

    def pack(
        self,
        rows: MicroBatch,
        features: Features,
        experts: Sequence[torch.Tensor] | None = None,
    ) -> PackedLayout:
        """Returns the pack of rows, on the host; `features` are what `see` made of them.

        experts: that routers are to choose for the tokens of each row; None leaves them free.
        """
        merge_size = 0 if self.tower is None else self.tower.rules.merge_size
        options: Any = {"shares_prompts": self.shares_prompts, "experts": experts}
        return pack(rows, merge_size, features, **options)

    def value(self, layout: PackedLayout, features: Features) -> torch.Tensor:
        """Returns the values in front of all response tokens, float32[R], rows in order."""
        hidden_TH = self.run(layout, features)
        picked_RH = hidden_TH.index_select(0, layout.predictors).float()
        with torch.autocast(self.device.type, enabled=False):
            values_R1: torch.Tensor = self.model.score(picked_RH)
        return values_R1[:, 0]

    def score(
        self,
        layout: PackedLayout,
        features: Features,
        *,
        temperature: float,
        entropy: EntropyMode,
        named_RK: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (log-probs, entropy) of all response tokens, float32[R], rows in order.

        layout: of `pack`, on the device. features: what it was packed with. named_RK: further
        tokens at each place, int64[R, K], whose log-probs are to follow the response token's:
        float32[R, 1 + K].
        """
        picked_RH, weight_VH = self._factors(layout, features)
        options: Any = {"temperature": temperature, "entropy": entropy}
        targets = with_named(layout.targets, named_RK)
        wider = self._is_wider(picked_RH)
        with torch.autocast(self.device.type, enabled=False):
            limit = operations.most_logits(self.operations["logprobs"])
            chunks = chunks_of_logits(len(targets), len(weight_VH), limit, float32=wider)
            if chunks is not None:
                return linear_logprobs(picked_RH, weight_VH, targets, **options, **chunks)
            logits_RV = linear(picked_RH, weight_VH)
            return token_logprobs(logits_RV, targets, reuse_logits=True, **options)

    def name(
        self, layout: PackedLayout, features: Features, *, temperature: float, count: int
    ) -> TopLogprobs:
        """Returns log-probs of all response tokens, and the likeliest at their places."""
        picked_RH, weight_VH = self._factors(layout, features)
        with torch.autocast(self.device.type, enabled=False):
            return top_logprobs(
                picked_RH,
                weight_VH,
                layout.targets,
                count,
                temperature=temperature,
                float32=self._is_wider(picked_RH),
            )

    def _factors(
        self, layout: PackedLayout, features: Features
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What logits are products of: hidden states and the output weight."""
        hidden_TH = self.run(layout, features)
        weight_VH = self.model.get_output_embeddings().weight
        picked_RH = hidden_TH.index_select(0, layout.predictors)
        kind = self.device.type
        narrow = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if narrow else torch.float32
        return picked_RH.to(dtype), weight_VH.to(dtype)

    def _is_wider(self, factor: torch.Tensor) -> bool:
        """Whether logits are, than what they are products of."""
        return self.float32_head and factor.dtype != torch.float32

    def run(self, layout: PackedLayout, features: Features) -> torch.Tensor:
        """Returns the last hidden states of the tokens of a pack that is on the device."""
        shown = None if self.tower is None else features
        return run_packed(self.model, layout, shown, self.operations["attention"])


def run_packed(
    model: Any, layout: PackedLayout, features: Features | None, attention: str
) -> torch.Tensor:
    """Return the last hidden states [T, H] of a pack.

    features: of the images that its rows show, or more; None for a model that reads text only.
    attention: its implementation.
    """
    base, inputs = model.base_model, dict[str, Any]()
    if features is None:
        inputs["input_ids"] = layout.token_ids[None]
    else:
        embeddings_TH = model.get_input_embeddings()(layout.token_ids)
        base = base.language_model
        if features.layers:
            (at,) = torch.nonzero(layout.features != TEXT, as_tuple=True)
            first, *deep = (
                layer.index_select(0, layout.features[at]).to(embeddings_TH.dtype)
                for layer in features.layers
            )
            embeddings_TH = embeddings_TH.index_copy(0, at, first)
            if deep:
                inputs["visual_pos_masks"] = (layout.features != TEXT)[None]
                inputs["deepstack_visual_embeds"] = deep
        inputs["inputs_embeds"] = embeddings_TH[None]
    inputs |= row_inputs(model, layout) | mask_inputs(model, layout)
    output = base(
        position_ids=layout.position_ids[..., None, :],
        use_cache=False,
        packed_layout=layout,
        kernel=attention_kernel(attention),
        **inputs,
    )
    hidden_TH: torch.Tensor = output.last_hidden_state.squeeze(0)
    return hidden_TH


def with_named(targets_R: torch.Tensor, named_RK: torch.Tensor | None) -> torch.Tensor:
    """The response tokens, with those that a teacher named behind each, if any are."""
    if named_RK is None:
        return targets_R
    return torch.cat([targets_R[:, None], named_RK.to(targets_R.device)], dim=1)


def _load(path: str, config: PretrainedConfig, head: Head) -> Any:
    """The model of either head; a `score` that the directory has not starts at zero."""
    seeing = config.model_type in vision.FAMILIES
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": {"text_config": IMPLEMENTATION} if seeing else IMPLEMENTATION,
        "local_files_only": True,
        "config": config,
    }
    if head == "policy":
        kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    elif head == "reward":
        kind, config.num_labels = AutoModelForSequenceClassification, 1
    elif seeing:
        kind = _value_class(config)
    else:
        kind, config.num_labels = AutoModelForTokenClassification, 1
    # a new head and an unused one are what is asked for
    stored = as_stored(Path(path), config.model_type)
    with damage_named(Path(path)), errors_only(), unsymbolic(), stored:
        model, loading = kind.from_pretrained(path, output_loading_info=True, **options)
    check_loading(Path(path), head, loading)
    if "score.weight" in loading["missing_keys"]:
        for parameter in model.score.parameters():
            torch.nn.init.zeros_(parameter)
    return model


def check_loading(directory: Path, head: Head, loading: Any) -> None:
    """Raises ValueError for tensors that are missing, which transformers draws, or of other shapes.

    So too for a critic's bias in a reward model, without which its values would be others.
    """
    if missing := sorted(set(loading["missing_keys"]) - NEW_HEAD):
        raise ValueError(f"{directory.name} lacks tensors: {', '.join(missing[:8])}")
    if wrong := sorted(str(entry[0]) for entry in loading["mismatched_keys"]):
        raise ValueError(f"{directory.name} has tensors of other shapes: {', '.join(wrong[:8])}")
    if head == "reward" and "score.bias" in loading["unexpected_keys"]:
        raise ValueError(f"{directory.name} has a score.bias: it is a critic, no reward model")


def _value_class(config: PretrainedConfig) -> Any:
    """transformers has no token classifier of these: its model, with `score` as there."""
    base: Any = AutoModelForImageTextToText._model_mapping[type(config)]

    class VisionValueModel(base):  # type: ignore[misc]
        _tied_weights_keys: Any = None

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            del self.lm_head
            self.score = torch.nn.Linear(config.text_config.hidden_size, 1)
            self.post_init()

        def get_output_embeddings(self) -> None:
            return None

    # transformers finds by them how the tensors of a checkpoint are named
    VisionValueModel.__name__, VisionValueModel.__module__ = base.__name__, base.__module__
    return VisionValueModel


@contextmanager
def damage_named(directory: Path) -> Iterator[None]:
    """Raises ValueError that names the file of weights that cannot be read."""
    try:
        yield
    except SafetensorError as error:
        for path in sorted(directory.glob("*.safetensors")):
            try:
                safe_open(path, "pt")
            except SafetensorError as found:
                with path.open("rb") as file:
                    pointer = file.read(len(LFS)) == LFS
                why = "a pointer of Git LFS: `git lfs pull`" if pointer else f"damaged: {found}"
                raise ValueError(f"{path} is {why}") from None
        raise ValueError(f"{directory}: {error}") from error


@contextmanager
def errors_only() -> Iterator[None]:
    """transformers says nothing below errors meanwhile."""
    before = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(before)
