"""Plain transformers whose routers take the experts that they are given: formulas, no code of ours.

What each family makes of its choice is written out here, from what it publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from services.trainer.backend import Row
from tests.contract.training_backend.cases import Model, Oracle

Weights = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _logits(router: Any, hidden: torch.Tensor) -> torch.Tensor:
    inner = getattr(router, "gate", None) or getattr(router, "wg", None) or router
    return linear(hidden.reshape(-1, hidden.shape[-1]), inner.weight, inner.bias_of_router)


def _of_softmax(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    picked = logits.softmax(-1).gather(1, chosen)
    if getattr(router, "norm_topk_prob", router.normalises):
        picked = picked / picked.sum(-1, keepdim=True)
    scaled: torch.Tensor = picked * (getattr(router, "routed_scaling_factor", None) or 1.0)
    return scaled


def _of_sigmoids(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    if cap := getattr(router, "router_logit_softcapping", 0.0):
        logits = (logits / cap).tanh() * cap
    picked = logits.sigmoid().gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):
        picked = picked / picked.sum(-1, keepdim=True)
    scales = ("routed_scaling_factor", "route_scale", "router_scaling_factor")
    for name in scales:
        picked = picked * (getattr(router, name, None) or 1.0)
    return picked


def _of_chosen(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, chosen).softmax(-1)


SOFTMAX = (
    "DeepseekV2Topk Ernie4_5_MoeTopK FlexOlmoTopK MixtralTopK OlmoeTopK Qwen2MoeTopK Qwen3MoeTopK "
    "Qwen3NextTopK Qwen3VLMoeTextTopK Qwen3_5MoeTopK"
)
SIGMOIDS = (
    "AfmoeTokenChoice DeepseekV3Topk Dots1Topk ExaoneMoeTopk Glm4MoeTopk Glm4MoeLiteTopk HYV3TopK "
    "GlmMoeDsaTopk KimiLinearTopk LagunaTopK Lfm2MoeTopK MiMoV2FlashTopk MiniMaxM2TopK "
    "NemotronHTopk SolarOpenTopk"
)
CHOSEN = "GptOssTopK GraniteMoeTopK GraniteMoeHybridTopK GraniteMoeSharedTopK"
KINDS = {
    **{f"{name}Router": _of_softmax for name in SOFTMAX.split()},
    "HunYuanMoEV1Gate": _of_softmax,
    **{f"{name}Router": _of_sigmoids for name in SIGMOIDS.split()},
    **{f"{name}Router": _of_chosen for name in CHOSEN.split()},
}
NORMALISING = {
    "Ernie4_5_MoeTopKRouter",
    "HunYuanMoEV1Gate",
    "MixtralTopKRouter",
    "Qwen3VLMoeTextTopKRouter",
    "Qwen3_5MoeTopKRouter",
}


class ForcedRouters:
    """Routers of a model, which take what they are told for the tokens of a row."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._chosen = torch.empty(0)
        index = 0
        for module in model.modules():
            kind = type(module).__name__
            if kind in KINDS:
                self._force(module, kind, index)
            elif kind == "Gemma4TextRouter":
                module.forward = partial(self._of_gemma, module, index)
            elif kind == "JambaSparseMoeBlock":
                module.route_tokens_to_experts = partial(self._of_jamba, index)
            else:
                continue
            index += 1
        assert index, "no router is known here"

    def take(self, row: Row) -> None:
        """The last token, of whose experts nothing depends, has the first ones."""
        assert row.routed_experts is not None
        given = row.routed_experts.long()
        first = torch.arange(given.shape[2]).expand(len(row.token_ids), *given.shape[1:]).clone()
        first[: len(given)] = given
        self._chosen = first

    def _force(self, router: Any, kind: str, index: int) -> None:
        router.normalises = kind in NORMALISING
        inner = getattr(router, "gate", None) or getattr(router, "wg", None) or router
        inner.bias_of_router = getattr(router, "bias", None)
        router.forward = partial(self._answer, router, KINDS[kind], kind, index)

    def _answer(
        self, router: Any, weigh: Any, kind: str, index: int, hidden: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, ...]:
        logits = _logits(router, hidden)
        chosen = self._chosen[: len(logits), index]
        weights = weigh(router, logits, chosen)
        if kind.startswith("GraniteMoe"):
            return chosen, weights, logits
        return logits, weights, chosen

    def _of_gemma(self, router: Any, index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        root = (hidden.pow(2).mean(-1, keepdim=True) + router.eps).rsqrt()
        scaled = hidden * root * router.scale * router.hidden_size**-0.5
        probabilities = linear(scaled, router.proj.weight).softmax(-1)
        chosen = self._chosen[:, index]
        picked = probabilities.gather(1, chosen)
        weights = picked / picked.sum(-1, keepdim=True) * router.per_expert_scale[chosen]
        return probabilities, weights, chosen

    def _of_jamba(
        self, index: int, hidden: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self._chosen[:, index]
        return chosen, logits.softmax(-1).gather(1, chosen)


class ForcedOracle(Oracle):
    """What `Oracle` says of rows, each with the experts that it brings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._routers = ForcedRouters(self.model)

    def table(self, row: Row, temperature: float) -> torch.Tensor:
        self._routers.take(row)
        return super().table(row, temperature)


def with_experts(rows: Sequence[Row], shape: Sequence[int], *, seed: int = 3) -> list[Row]:
    """Rows with experts that no router chose: every token's are drawn, of siblings' prompts once.

    shape: of `shape_of`.
    """
    layers, experts, count = shape
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[tuple[str, bytes], torch.Tensor] = {}

    def draw(length: int) -> torch.Tensor:
        scores = torch.rand(length, layers, experts, generator=generator)
        return scores.argsort(-1)[..., :count].to(torch.int16)

    made = []
    for row in rows:
        prompt = row.token_ids[: row.prompt_length]
        key = row.group_id, prompt.numpy().tobytes()
        first = drawn.setdefault(key, draw(row.prompt_length))
        rest = draw(row.response_length - 1)
        made.append(row._replace(routed_experts=torch.cat((first, rest))))
    return made


def shape_of(model: Model) -> tuple[int, int, int]:
    """Mixture layers, experts of one, and how many a token goes to, in plain transformers."""
    plain, seen = model.load(), list[tuple[int, int]]()

    def note(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        count = next(t.shape[-1] for t in given if not t.is_floating_point())
        seen.append((module.num_experts, count))

    for module in plain.modules():
        if getattr(module, "num_experts", 0) and type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(note)
    plain(torch.arange(4)[None])
    (experts, count), *others = seen
    assert all(each == (experts, count) for each in others)
    return len(seen), experts, count


def chosen_by(model: Model, token_ids: torch.Tensor) -> torch.Tensor:
    """The experts of a row's tokens but the last, int16[tokens, layers, chosen], in transformers.

    They are what layers of experts are given.
    """
    plain, seen = model.load(), list[torch.Tensor]()

    def note(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        seen.append(next(t for t in given if not t.is_floating_point()))

    for module in plain.modules():
        if getattr(module, "num_experts", 0) and type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(note)
    with torch.no_grad():
        plain(token_ids[None])
    return torch.stack(seen, dim=1)[:-1].to(torch.int16)
