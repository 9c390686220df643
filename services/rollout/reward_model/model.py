"""A transformers model with a value head, which scores texts in padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from services.rollout.engine.versions import describe_model
from services.rollout.errors import UnfitWeightsError
from sluice.config import ConfigError
from sluice.imports import uncompiled

with uncompiled():
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
        PretrainedConfig,
    )
    from transformers.utils import logging as transformers_logging

HEADS = {"ForSequenceClassification": "sequence", "ForTokenClassification": "token"}
PROBES = (3, 11, 6, 2, 9, 4, 8, 5)  # tokens of texts scored at the start, alone and together
LARGEST_GAP = {torch.float32: 1e-3, torch.bfloat16: 1e-1}  # of both, of the largest score


class ValueModel:
    """Scores sequences of tokens. `encode` is for any thread, `score` for one at a time."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: Literal["float32", "bfloat16"],
        device: torch.device,
        digest: str = "",
        max_length: int = 0,
    ) -> None:
        """Raises ConfigError for a directory that holds no such model, or another one."""
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self._device = device
        try:
            self.digest, tensors = describe_model(directory)
        except UnfitWeightsError as error:
            raise ConfigError(f"model: {error}") from None
        if digest and digest != self.digest:
            raise ConfigError(f"digest: {directory} has digest {self.digest}, not {digest}")
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            self._head = _head_of(directory, config, {*tensors})
            self._model = _load(directory, self._head, getattr(torch, dtype)).to(device).eval()
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ConfigError(f"model: {directory} cannot be loaded: {error}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"model: {directory} has no tokenizer.json")
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        places = _places(config, tokenizer.model_max_length)
        if max_length > places > 0:
            raise ConfigError(f"max_length: the model has {places} places")
        self.max_length = max_length or places
        if not self.max_length:
            raise ConfigError("max_length: the model does not say how many places it has")
        self.vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self._pad, self._every = self._padding()
        self._check_padding()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each, with those that the model expects around a text."""
        return [each.ids for each in self._tokenizer.encode_batch(list(texts))]

    def score(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Returns one value for each: what the model gives it alone, but for rounding."""
        lengths = [len(text) for text in texts]
        ids = torch.full((len(texts), max(lengths)), self._pad)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        self._every.clear()
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask).logits
        if self._every:
            logits = self._every.pop()
        if logits.dim() == 3:  # of every token
            last = torch.tensor(lengths, device=logits.device) - 1
            logits = logits[torch.arange(len(texts), device=logits.device), last]
        scores: list[float] = logits[:, 0].float().tolist()
        return scores

    def _padding(self) -> tuple[int, list[torch.Tensor]]:
        """The token that fills batches; and where the head of every token is noted, if it must be.

        transformers finds the end of a text by the pad token. A model that has none scores one
        text at a time there, by its last token; here its head is read at that token.
        """
        config, every = self._model.config.get_text_config(), list[torch.Tensor]()
        if config.pad_token_id is not None:
            return int(config.pad_token_id), every
        if self._head == "sequence":
            if not hasattr(self._model, "score"):
                raise ConfigError("model: its config.json names no pad_token_id")
            config.pad_token_id = 0
            self._model.score.register_forward_hook(lambda _, __, found: every.append(found))
        return 0, every

    def _check_padding(self) -> None:
        """Raises ConfigError where a text is scored otherwise among longer ones than alone."""
        draws = torch.Generator().manual_seed(0)
        top = max(2, self.vocabulary)
        lengths = [min(length, self.max_length) for length in PROBES]
        texts = [torch.randint(top, (n,), generator=draws).tolist() for n in lengths]
        texts = [[token if token != self._pad else 1 - (token == 1) for token in t] for t in texts]
        together = self.score(texts)
        alone = [self.score([text])[0] for text in texts]
        # A score near 0 is a sum of terms as large as those of others, and rounded as they are
        gap = LARGEST_GAP[self._model.dtype] * max(1.0, *map(abs, alone))
        for one, other in zip(together, alone, strict=True):
            if not abs(one - other) <= gap:  # NaN neither
                raise ConfigError(
                    f"model: a text has score {one:g} among longer ones and {other:g} alone"
                )


def _head_of(directory: Path, config: PretrainedConfig, tensors: set[str]) -> str:
    """Which classifier the directory holds. Raises ConfigError.

    A critic of a trainer keeps the config.json of the language model that it began as.
    """
    names = getattr(config, "architectures", None) or ["nothing"]
    if config.is_encoder_decoder:
        raise ConfigError(f"model: {names[0]} has an encoder and a decoder: not supported")
    if {"score.weight", "score.bias"} <= tensors:
        return "token"
    for end, head in HEADS.items():
        if names[0].endswith(end):
            return head
    raise ConfigError(f"model: {directory} is {names[0]}, which has no value head")


def _load(directory: Path, head: str, dtype: torch.dtype) -> Any:
    kind = (
        AutoModelForSequenceClassification
        if head == "sequence"
        else AutoModelForTokenClassification
    )
    options: dict[str, Any] = {"ignore_mismatched_sizes": True}  # they are told below
    if head == "token":
        options["num_labels"] = 1
    model, loading = kind.from_pretrained(
        directory, dtype=dtype, local_files_only=True, output_loading_info=True, **options
    )
    if model.config.num_labels != 1:
        raise ConfigError(f"model: it has {model.config.num_labels} labels, a reward model has one")
    unread = [name for name in loading["unexpected_keys"] if not name.startswith("lm_head.")]
    for names, what in ((loading["missing_keys"], "lacks"), (unread, "has no use for")):
        if names:
            shown = ", ".join(sorted(names)[:4])
            raise ConfigError(f"model: {type(model).__name__} {what} {shown} of {directory}")
    if mismatched := sorted(str(each) for each in loading["mismatched_keys"]):
        raise ConfigError(f"model: {directory} has tensors of other shapes: {mismatched[:4]}")
    model.config.use_cache = False
    return model


def _places(config: PretrainedConfig, of_tokenizer: int) -> int:
    """Tokens that a text may have; 0 where nothing says it.

    The tokenizer knows of places that are taken, as two of RoBERTa's are.
    """
    text = config.get_text_config()
    places = int(getattr(text, "max_position_embeddings", 0) or 0)
    return min(places, of_tokenizer) if places > 0 else 0
