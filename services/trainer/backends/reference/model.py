"""A transformers model over packed rows: the pack, attention over it, log-probs and values.

Rows are packed into one sequence in which every distinct prompt of a group stands once, followed by
its longest response; the other responses stand apart, all without their last tokens, which predict
nothing. Attention, plugged into transformers by name, runs over buckets of like lengths, padded
where these are short, all else over the pack. No mask has more rows than LONG_TOKENS: long rows are
attended causally, their prompt included, or block by block where the prompt is longer still.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import linear, scaled_dot_product_attention

from services.trainer.backend import MicroBatch, Row
from services.trainer.backends.fsdp.families import check_lengths
from services.trainer.backends.recurrent import keep_rows_apart, recurrent_layers
from services.trainer.config import Head
from sluice import operations, vision
from sluice.algo.logprobs import (
    EntropyMode,
    TopLogprobs,
    linear_logprobs,
    token_logprobs,
    top_logprobs,
)
from sluice.algo.losses import LossColumns
from sluice.fused_layers import adapt, choose_for, heads_of
from sluice.fused_operations import Attention, PackRows, attention_kernel
from sluice.imports import uncompiled, unsymbolic
from sluice.operations import UNASKED, OperationsConfig, Usage
from sluice.samples.images import ImageRules
from sluice.vision import TEXT, Features, Patches, VisionTower, rotary_positions

with uncompiled():
    from transformers import (
        AttentionInterface,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForTokenClassification,
        PretrainedConfig,
    )
    from transformers.utils.logging import (
        disable_progress_bar,
        get_verbosity,
        set_verbosity,
        set_verbosity_error,
    )

IMPLEMENTATION = "sluice_shared_prompt"
LFS = b"version https://git-lfs"  # how a pointer begins that stands for a file
CLUSTER_TOKENS = 64  # siblings' tokens that share one attention call: fills a tile of the kernel
PASS_TOKENS = 4096  # more at once are no faster on a processor: larger tensors are mapped anew
AGAIN_FACTOR = 32  # a prompt is encoded again where a pass has so many times its tokens
LONG_TOKENS = 512  # longer runs are attended without padding, longer masks cut into blocks
# Their attention is the plain one, of queries, keys, values and a scale.
FAMILIES = ("deepseek_v3", "glm4", "llama", "qwen2", "qwen3", "qwen3_moe")
NOTHING = Features()
OWN_OPERATIONS = frozenset({"attention", "logprobs", "adamw"})  # beside those of layers


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    packed_layout: PackedLayout,
    kernel: Attention | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Maps query [1, heads, T, D], key and value [1, kv_heads, T, D] to [1, T, heads, D].

    kernel: of causal attention without sinks; masks are torch's. A window is honoured over rows
    that share no prompt, else by refusing it where it would matter; so are sinks, `s_aux` [heads].
    """
    del attention_mask  # the layout knows
    if softcap is not None:
        raise NotImplementedError("attention with capped scores")
    window = sliding_window
    if window is not None and packed_layout.longest <= window:
        window = None
    scores = Scores(scaling, window, s_aux)
    # not [0], whose gradient is a copy
    heads = query.squeeze(0), key.squeeze(0), value.squeeze(0)
    outputs = [_attend_bucket(*heads, bucket, scores, kernel) for bucket in packed_layout.buckets]
    return torch.cat(outputs)[None], None


@dataclass(frozen=True)
class Scores:
    """How queries and keys are compared; None is transformers' default, or nothing.

    window: tokens, the own one among them. sinks: float[heads], scores of a key without a value.
    """

    scaling: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.window is None and self.sinks is None


def _attend_bucket(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bucket: PromptBucket,
    scores: Scores,
    kernel: Attention | None,
) -> torch.Tensor:
    """The bucket's share of the pack, [tokens, heads, D]."""
    if kernel is not None and bucket.mask is None and scores.sinks is None:
        return _attend_kernel(query, key, value, bucket, scores, kernel)

    def gather(heads: torch.Tensor, index: torch.Tensor, length: int) -> torch.Tensor:
        picked = heads.index_select(1, index)
        return picked.view(len(heads), bucket.count, length, -1).transpose(0, 1)

    queries = gather(query, bucket.queries, bucket.query_length)
    keys = gather(key, bucket.keys, bucket.key_length)
    values = gather(value, bucket.keys, bucket.key_length)
    options: Any = {"scale": scores.scaling, "enable_gqa": len(query) != len(key)}
    if not scores.plain:
        if bucket.mask is not None:
            raise NotImplementedError("windows and sinks over rows that share their prompt")
        out = _attend_banded(queries, keys, values, scores)
    elif bucket.mask is not None:
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=bucket.mask, **options)
    elif bucket.query_length == bucket.key_length:
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, **options)
    else:
        out = _attend_tail(queries, keys, values, options)
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat if bucket.kept is None else flat.index_select(0, bucket.kept)


def _attend_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bucket: PromptBucket,
    scores: Scores,
    kernel: Attention,
) -> torch.Tensor:
    """By one call over the rows of a bucket, each of queries that end where its keys do."""
    scale = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    flat = kernel(
        query.index_select(1, bucket.queries).transpose(0, 1),
        key.index_select(1, bucket.keys).transpose(0, 1),
        value.index_select(1, bucket.keys).transpose(0, 1),
        bucket.rows,
        scale,
        scores.window,
    )
    return flat if bucket.kept is None else flat.index_select(0, bucket.kept)


def _attend_tail(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Any
) -> torch.Tensor:
    """Causal attention of [N, heads, R, D] that stand at the end of K > R keys and values.

    Its blocks of queries share one mask, of which each sees the end.
    """
    length, total = query.shape[2], key.shape[2]
    block = min(LONG_TOKENS, length)
    mask = query.new_zeros(block, total)
    mask[:, total - block :] = query.new_full((block, block), -torch.inf).triu_(1)
    outputs = []
    for left in range((length - 1) // block * block, -1, -block):  # queries behind the block
        stop = length - left
        start, seen = max(0, stop - block), total - left
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, :seen],
                value[:, :, :seen],
                attn_mask=mask[block - (stop - start) :, left:],
                **options,
            )
        )
    return torch.cat(outputs, dim=2)


def _attend_banded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Causal attention of [N, heads, R, D] within the window, in blocks of queries.

    They stand at the end of K >= R keys and values.
    """
    total, groups = key.shape[2], query.shape[1] // key.shape[1]
    before = total - query.shape[2]
    places = torch.arange(total, device=query.device)
    if scores.sinks is not None and groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outputs = []
    for start in range(before, total, LONG_TOKENS):
        stop = min(start + LONG_TOKENS, total)
        first = 0 if scores.window is None else max(0, start - scores.window + 1)
        distance = places[start:stop, None] - places[None, first:stop]
        visible = distance >= 0
        if scores.window is not None:
            visible &= distance < scores.window
        queries = query[:, :, start - before : stop - before]
        block = queries, key[:, :, first:stop], value[:, :, first:stop]
        if scores.sinks is not None:
            outputs.append(_attend_with_sinks(*block, visible, scores.scaling, scores.sinks))
            continue
        gqa = block[0].shape[1] != block[1].shape[1]
        options: Any = {"scale": scores.scaling, "enable_gqa": gqa}
        outputs.append(scaled_dot_product_attention(*block, attn_mask=visible, **options))
    return torch.cat(outputs, dim=2)


def _attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scaling: float | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention whose softmax has one more entry a head, which adds nothing to the output."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~visible, -torch.inf)
    sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], dim=-1).float().softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value


AttentionInterface.register(IMPLEMENTATION, attend)


@dataclass(frozen=True)
class ScoredModel:
    """A transformers model on a device."""

    model: Any  # transformers.PreTrainedModel, whose types mypy does not see
    device: torch.device
    operations: Mapping[str, str]  # which implementation each has
    float32_head: bool = True  # also where autocast makes the products of the model narrower
    tower: VisionTower | None = None
    shares_prompts: bool = True  # where no layer carries a state from token to token

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
        head value: transformers' token classifier of one label; its `score` starts at zero
        where the directory, a language model's, has none, so that every rank starts alike.
        longest: tokens that a row may have; None where nothing bounds them.
        """
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        known = (*FAMILIES, *vision.FAMILIES)
        if config.model_type not in known:
            raise ValueError(
                f"model_type {config.model_type} is unknown here; known: {', '.join(known)}"
            )
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
        shares_prompts = not any(recurrent_layers(model))
        keep_rows_apart(model)
        return cls(model.to(device).eval(), device, chosen, float32_head, tower, shares_prompts)

    def see(self, rows: MicroBatch) -> Features:
        """Runs the tower once over the distinct images of the rows. Raises InvalidImageError."""
        return Features() if self.tower is None else self.tower.encode(images_of(rows))

    def pack(self, rows: MicroBatch, features: Features) -> PackedLayout:
        """Returns the pack of rows, on the host; `features` are what `see` made of them."""
        merge_size = 0 if self.tower is None else self.tower.rules.merge_size
        return pack(rows, merge_size, features, shares_prompts=self.shares_prompts)

    def value(self, layout: PackedLayout, features: Features) -> torch.Tensor:
        """Returns the values in front of all response tokens, float32[R], rows in order."""
        hidden_TH = self._run(layout, features)
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
        with torch.autocast(self.device.type, enabled=False):
            limit = operations.most_logits(self.operations["logprobs"])
            if len(targets) * len(weight_VH) > limit:
                return linear_logprobs(picked_RH, weight_VH, targets, **options)
            logits_RV = linear(picked_RH, weight_VH)
            return token_logprobs(logits_RV, targets, reuse_logits=True, **options)

    def name(
        self, layout: PackedLayout, features: Features, *, temperature: float, count: int
    ) -> TopLogprobs:
        """Returns log-probs of all response tokens, and the likeliest at their places."""
        picked_RH, weight_VH = self._factors(layout, features)
        with torch.autocast(self.device.type, enabled=False):
            return top_logprobs(
                picked_RH, weight_VH, layout.targets, count, temperature=temperature
            )

    def _factors(
        self, layout: PackedLayout, features: Features
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What logits are products of: hidden states and the output weight."""
        hidden_TH = self._run(layout, features)
        weight_VH = self.model.get_output_embeddings().weight
        picked_RH = hidden_TH.index_select(0, layout.predictors)
        kind = self.device.type
        narrow = torch.is_autocast_enabled(kind) and not self.float32_head
        dtype = torch.get_autocast_dtype(kind) if narrow else torch.float32
        return picked_RH.to(dtype), weight_VH.to(dtype)

    def _run(self, layout: PackedLayout, features: Features) -> torch.Tensor:
        """The last hidden states of the tokens of a pack that is on the device."""
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
    output = base(
        position_ids=layout.position_ids[..., None, :],
        use_cache=False,
        packed_layout=layout,
        kernel=attention_kernel(attention),
        **inputs,
    )
    hidden_TH: torch.Tensor = output.last_hidden_state.squeeze(0)
    return hidden_TH


def images_of(rows: MicroBatch) -> dict[str, bytes]:
    """Return the distinct images of the rows by digest."""
    return {span.digest: row.images[span.digest] for row in rows for span in row.media}


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
    }
    if head == "policy":
        kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
        with damage_named(Path(path)), unsymbolic():
            return kind.from_pretrained(path, **options)
    if seeing:
        kind = _value_class(config)
    else:
        kind, options["num_labels"] = AutoModelForTokenClassification, 1
    # a new head and an unused one are what is asked for
    with damage_named(Path(path)), errors_only(), unsymbolic():
        model, loading = kind.from_pretrained(path, output_loading_info=True, **options)
    if "score.weight" in loading["missing_keys"]:
        for parameter in model.score.parameters():
            torch.nn.init.zeros_(parameter)
    return model


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


@dataclass(frozen=True)
class PromptBucket:
    """Runs, or clusters of siblings, whose attention is one padded batch of N.

    queries: int64[N * R], keys: int64[N * K], positions in the pack (padding stands at 0 and
    is never seen). mask: bool[R, K] or [N, 1, R, K]; None where the queries are the last R keys
    and each sees those up to its own. kept: int64, those among the N * R outputs that are of the
    bucket, in the order of the pack; None for all.
    """

    count: int
    query_length: int
    key_length: int
    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None
    kept: torch.Tensor | None

    @property
    def whole_rows(self) -> bool:
        """Each of N stands there from its first token on, and sees what is before."""
        return self.mask is None and self.query_length == self.key_length

    @cached_property
    def rows(self) -> PackRows:
        """The N rows as a kernel takes them, padding behind them included."""
        lengths = [self.query_length] * self.count
        keys = lengths if self.whole_rows else [self.key_length] * self.count
        return PackRows(lengths, keys, self.queries.device)


@dataclass(frozen=True)
class PackedLayout:
    """A micro-batch as one sequence of T tokens, and where its R response tokens stand.

    token_ids: int64[T]. position_ids: int64[T], or [3, T] of a model that sees. predictors:
    int64[R], the packed token that predicts each response token, rows in order. targets: int64[R].
    features: int64[T], the row of the features that an image's token shows, TEXT elsewhere. The
    kept outputs of the buckets, one after another, are the pack. longest: tokens of the longest
    row.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    buckets: tuple[PromptBucket, ...]
    predictors: torch.Tensor
    targets: torch.Tensor
    longest: int
    features: torch.Tensor


@dataclass(frozen=True)
class PassInputs:
    """What a pass computes with: the pack, and what its loss reads.

    named: tokens that a teacher named at each place, int64[R, K]. patches: of the images, where the
    model sees them in the same pass.
    """

    layout: PackedLayout
    columns: LossColumns | None = None
    named: torch.Tensor | None = None
    patches: Patches | None = None


@dataclass(frozen=True)
class _Table:
    """Rows as columns; int64 each. tokens: all rows one behind the other, each from `offsets` on.

    prompt_of: which distinct prompt a row has. inner: response tokens that predict another.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    responses: np.ndarray
    prompt_of: np.ndarray

    @property
    def inner(self) -> np.ndarray:
        return np.maximum(self.responses - 1, 0)


@dataclass(frozen=True)
class _Spans:
    """Stretches of the pack that are attended together; int64[N] each.

    A run is a prompt and its longest response, and has nothing before it; a cluster is one or more
    responses that follow the prompt found in `before_*`.
    """

    starts: np.ndarray
    lengths: np.ndarray
    before_starts: np.ndarray
    before_lengths: np.ndarray

    @property
    def causal(self) -> np.ndarray:
        """bool[N], where queries of the prompt are made again: cheaper than what a mask hides."""
        long = (self.lengths > CLUSTER_TOKENS) & (self.before_lengths <= self.lengths)
        return long | (self.before_lengths == 0)

    def size_classes(self) -> np.ndarray:
        """Equal where one batch is made of them."""
        before = _size_class(self.before_lengths) << 32
        apart = _size_class(self.lengths) + before
        return np.where(self.causal, _size_class(self.before_lengths + self.lengths), apart)

    def pick(self, index: np.ndarray) -> _Spans:
        return _Spans(
            self.starts[index],
            self.lengths[index],
            self.before_starts[index],
            self.before_lengths[index],
        )


def _size_class(lengths: np.ndarray) -> np.ndarray:
    """The power of two, so that padding at most doubles them; of long ones the length itself."""
    return np.where(lengths > LONG_TOKENS, lengths, np.frexp(lengths)[1])


def pack(
    rows: Sequence[Row],
    merge_size: int = 0,
    features: Features = NOTHING,
    *,
    shares_prompts: bool = True,
) -> PackedLayout:
    """Lays out at least one row; rows of one group with equal prompts share them.

    merge_size: of the model's image rules; 0 where it takes one position a token. Without
    `shares_prompts` every row has its own, and all buckets are of whole rows.
    """
    table, leaders = _tabulate(rows, shares_prompts=shares_prompts)
    clusters = [*([leader] for leader in leaders.tolist()), *_clusters(table, leaders)]
    heads = np.array([cluster[0] for cluster in clusters], dtype=np.int64)
    prompts = table.prompt_lengths[heads]
    lengths = np.array([table.inner[cluster].sum() for cluster in clusters], dtype=np.int64)
    runs = np.arange(len(clusters)) < len(leaders)
    spans = _Spans(
        np.empty_like(prompts),
        lengths + np.where(runs, prompts, 0),
        np.empty_like(prompts),
        np.where(runs, 0, prompts),
    )
    order = np.argsort(spans.size_classes(), kind="stable")
    spans.starts[order] = _starts(spans.lengths[order])
    prompt_starts = spans.starts[: len(leaders)]
    spans.before_starts[:] = prompt_starts[table.prompt_of[heads]]

    row_order = np.array([row for place in order for row in clusters[place]], dtype=np.int64)
    skipped = table.prompt_lengths.copy()  # tokens of each row that stand elsewhere
    skipped[leaders] = 0
    sizes = (table.prompt_lengths + table.inner - skipped)[row_order]
    row_starts = np.zeros(len(rows), dtype=np.int64)
    row_starts[row_order] = _starts(sizes) + (table.prompt_lengths - skipped)[row_order]
    source = _ranges((table.offsets + skipped)[row_order], sizes)
    owners = np.repeat(row_order, sizes)
    positions, shown = _ranges(skipped[row_order], sizes), np.full(len(source), TEXT)
    if merge_size:
        places = [(len(row.token_ids), row.media) for row in rows]
        every = [rotary_positions(*place, merge_size) for place in places]
        positions = np.concatenate(every, axis=1)[:, source]
        shown = np.concatenate([features.index(*place) for place in places])[source]
    return PackedLayout(
        token_ids=torch.from_numpy(table.tokens[source]),
        position_ids=torch.from_numpy(positions),
        features=torch.from_numpy(shown),
        buckets=tuple(_buckets(spans.pick(order), owners)),
        predictors=torch.from_numpy(_predictors(table, prompt_starts, row_starts)),
        targets=torch.from_numpy(
            table.tokens[_ranges(table.offsets + table.prompt_lengths, table.responses)]
        ),
        longest=int((table.prompt_lengths + table.responses).max()),
    )


def split_rows(rows: MicroBatch) -> Iterator[list[Row]]:
    """Cuts rows into passes that end where they have PASS_TOKENS; siblings follow one another.

    Groups are cut only where their prompts, encoded again, are little beside a pass.
    """
    if sum(row.token_ids.shape[0] for row in rows) <= PASS_TOKENS:
        yield list(rows)
        return
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row)
    part: list[Row] = []
    tokens = 0
    for siblings in groups.values():
        for row in siblings:
            cheap = row is siblings[0] or row.prompt_length * AGAIN_FACTOR <= PASS_TOKENS
            if tokens >= PASS_TOKENS and cheap:
                yield part
                part, tokens = [], 0
            part.append(row)
            shared = len(part) > 1 and part[-2].group_id == row.group_id
            tokens += row.response_length if shared else row.token_ids.shape[0]
    yield part


def _tabulate(rows: Sequence[Row], *, shares_prompts: bool) -> tuple[_Table, np.ndarray]:
    """The rows as columns, and for each distinct prompt the longest row that has it."""
    tokens = torch.cat([row.token_ids for row in rows]).numpy()
    lengths = np.array([row.token_ids.shape[0] for row in rows], dtype=np.int64)
    prompts = np.array([row.prompt_length for row in rows], dtype=np.int64)
    offsets = _starts(lengths)
    seen: dict[tuple[object, ...], int] = {}
    leaders: list[int] = []
    prompt_of = np.empty(len(rows), dtype=np.int64)
    for index, (row, offset) in enumerate(zip(rows, offsets.tolist(), strict=True)):
        shown = tuple(s.digest for s in row.media if s.first_token < row.prompt_length)
        prompt = tokens[offset : offset + row.prompt_length].tobytes()
        key = (row.group_id, prompt, shown) if shares_prompts else (index,)
        if key not in seen:
            seen[key] = len(leaders)
            leaders.append(index)
        prompt_of[index] = place = seen[key]
        if lengths[index] > lengths[leaders[place]]:
            leaders[place] = index
    table = _Table(tokens, offsets, prompts, lengths - prompts, prompt_of)
    return table, np.array(leaders, dtype=np.int64)


def _clusters(table: _Table, leaders: np.ndarray) -> list[list[int]]:
    """The other siblings in runs of at most CLUSTER_TOKENS tokens, longer ones alone."""
    clusters: list[list[int]] = []
    sizes: list[int] = []
    open_clusters: dict[int, int] = {}
    inner = table.inner
    inner[leaders] = 0
    for row, (prompt, size) in enumerate(
        zip(table.prompt_of.tolist(), inner.tolist(), strict=True)
    ):
        if not size:
            continue
        place = open_clusters.get(prompt)
        if place is None or sizes[place] + size > CLUSTER_TOKENS:
            place = open_clusters[prompt] = len(clusters)
            clusters.append([])
            sizes.append(0)
        clusters[place].append(row)
        sizes[place] += size
    return clusters


def _predictors(table: _Table, prompt_starts: np.ndarray, row_starts: np.ndarray) -> np.ndarray:
    """A response's first token is predicted by the prompt's last, the others by their former."""
    first = prompt_starts[table.prompt_of] + table.prompt_lengths - 1
    index = _ranges(np.zeros_like(table.responses), table.responses)
    inside = np.repeat(row_starts, table.responses) + index - 1
    return np.where(index == 0, np.repeat(first, table.responses), inside)


def _buckets(spans: _Spans, owners: np.ndarray) -> Iterator[PromptBucket]:
    """Spans follow one another in the pack, sorted by size class."""
    edges = np.flatnonzero(np.diff(spans.size_classes())) + 1
    for index in np.split(np.arange(len(spans.starts)), edges):
        picked = spans.pick(index)
        yield _causal_bucket(picked) if picked.causal[0] else _prompt_bucket(picked, owners)


def _causal_bucket(spans: _Spans) -> PromptBucket:
    """Every span behind its prompt, if it has one apart, and attended from that on."""
    ends = spans.before_lengths + spans.lengths
    longest = int(ends.max())
    places = np.arange(longest)
    before = places < spans.before_lengths[:, None]
    own = ~before & (places < ends[:, None])
    shifted = spans.starts - spans.before_lengths
    positions = np.where(before, spans.before_starts[:, None], shifted[:, None]) + places
    # Padding stands behind the real tokens, where causal attention does not look.
    index = torch.from_numpy(np.where(before | own, positions, 0).reshape(-1))
    kept = None if own.all() else torch.from_numpy(np.flatnonzero(own))
    return PromptBucket(len(ends), longest, longest, index, index, None, kept)


def _prompt_bucket(spans: _Spans, owners: np.ndarray) -> PromptBucket:
    """Every span sees its whole prompt, and of itself each row its own."""
    count, longest = len(spans.starts), int(spans.lengths.max())
    longest_prompt = int(spans.before_lengths.max())
    own, own_real = _padded(spans.starts, spans.lengths, longest)
    prompt, prompt_real = _padded(spans.before_starts, spans.before_lengths, longest_prompt)
    mask: np.ndarray | None = None
    if longest <= LONG_TOKENS:  # else of equal length each, as are their prompts
        owner = np.where(own_real, owners[own], -1)
        seen_own = (owner[:, :, None] == owner[:, None, :]) & np.tri(longest, dtype=np.bool_)
        seen_prompt = np.broadcast_to(prompt_real[:, None], (count, longest, longest_prompt))
        mask = np.concatenate([seen_prompt, seen_own], axis=2)
        mask = mask[0] if (mask == mask[0]).all() else mask[:, None]
    return PromptBucket(
        count,
        longest,
        longest_prompt + longest,
        torch.from_numpy(own.reshape(-1)),
        torch.from_numpy(np.concatenate([prompt, own], axis=1).reshape(-1)),
        None if mask is None else torch.from_numpy(mask),
        None if own_real.all() else torch.from_numpy(np.flatnonzero(own_real)),
    )


def _padded(starts: np.ndarray, lengths: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions in the pack, whether real), both [N, longest]; padding stands at 0."""
    offsets = np.arange(longest)
    real = offsets < lengths[:, None]
    return np.where(real, starts[:, None] + offsets, 0), real


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1 ... of each run, one behind the other."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(int(lengths.sum()))
