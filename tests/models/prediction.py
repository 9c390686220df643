"""Models with a layer of multi-token prediction, and what plain torch says of it in float64.

The layer is one more of the transformers model: it is built so, and read so by the oracle, which
runs it row by row on what the others give.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from services.trainer.backend import Row
from services.trainer.config import OptimConfig
from tests.contract.training_backend.cases import Model, Oracle
from tests.fsdp.jobs import NORMALIZER, OPTIM, rows_of
from tests.models.families import Case, build, rename_type

Tensors = dict[str, torch.Tensor]
EXTRA = ("enorm", "hnorm", "eh_proj", "norm")
BY_LAYER = {"layer_types", "mlp_layer_types", "indexer_types"}  # settings that have one of each
# the layer follows the last, with copies of the ends
NUMBERED_ON = ("deepseek_v3", "glm4_moe", "glm_moe_dsa")
PLAIN_NORMS = (*NUMBERED_ON, "mimo")  # others have them around zero
NAMES = {  # of those, and of the layer
    "following": (
        "model.layers.{n}.enorm.weight",
        "model.layers.{n}.hnorm.weight",
        "model.layers.{n}.eh_proj.weight",
        "model.layers.{n}.shared_head.norm.weight",
        "model.layers.{n}.",
    ),
    "apart": (
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.layers.0.",
    ),
    "mimo": (
        "model.mtp_layers.0.token_layernorm.weight",
        "model.mtp_layers.0.hidden_layernorm.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.mtp_layers.0.final_layernorm.weight",
        "model.mtp_layers.0.",
    ),
}
COPIES = {
    "model.layers.{n}.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.{n}.shared_head.head.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Predicting:
    """A checkpoint of `layers` layers and one that predicts, which is one more in `whole`."""

    case: Case
    model: Model
    whole: Path
    layers: int

    @property
    def names(self) -> tuple[str, ...]:
        kind = "following" if self.case.model_type in NUMBERED_ON else "apart"
        names = NAMES.get(self.case.model_type, NAMES[kind])
        return tuple(name.format(n=self.layers) for name in names)

    def stored(self, name: str) -> str:
        """The name in the checkpoint of a tensor of the whole model."""
        return name.replace(f"model.layers.{self.layers}.", self.names[-1], 1)

    def copies(self) -> dict[str, str]:
        if self.case.model_type not in NUMBERED_ON:
            return {}
        return {copied.format(n=self.layers): name for copied, name in COPIES.items()}


def build_predicting(case: Case, directory: Path) -> Predicting:
    """Write both; no two tensors are alike."""
    settings = dict(case.settings)
    layers = settings.get("num_hidden_layers", 2)
    settings["num_hidden_layers"] = layers + 1
    if kinds := settings.get("layer_types"):
        settings["layer_types"] = [*kinds, "full_attention"]
    if kinds := settings.get("indexer_types"):
        settings["indexer_types"] = [*kinds, "full"]
    plain = replace(case, settings=settings, model_type=case.known, runs=())
    whole = build(plain, directory / "whole").directory
    made = Predicting(case, Model(directory / "model"), whole, layers)
    shutil.copytree(whole, made.model.directory)
    config = json.loads((whole / "config.json").read_text())
    config["num_hidden_layers"] = layers
    for name in BY_LAYER & config.keys():
        config[name] = config[name][:layers]
    (made.model.directory / "config.json").write_text(json.dumps(config))
    if case.runs:
        rename_type(case, made.model.directory)
    tensors = {made.stored(n): t for n, t in load_file(whole / "model.safetensors").items()}
    size, generator = config["hidden_size"], torch.Generator().manual_seed(23)
    centre = 1.0 if case.model_type in PLAIN_NORMS else 0.0  # norms of others are around zero
    for kind, name in zip(EXTRA, made.names, strict=False):
        shape = (size, 2 * size) if kind == "eh_proj" else (size,)
        drawn = torch.randn(shape, generator=generator) * 0.2
        tensors[name] = drawn if kind == "eh_proj" else drawn + centre
    tensors |= {copied: tensors[name].clone() for copied, name in made.copies().items()}
    save_file(tensors, made.model.directory / "model.safetensors", metadata={"format": "pt"})
    return made


@dataclass
class PredictionOracle:
    """The policy of `Oracle` in float64, and beside it the layer that predicts."""

    predicting: Predicting
    checkpoint: Path
    policy: Oracle = field(init=False)
    layer: Any = field(init=False)
    extra: dict[str, torch.nn.Parameter] = field(init=False)
    adam: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        made, tensors = self.predicting, _read(self.checkpoint)
        config = AutoConfig.from_pretrained(made.whole)
        config._attn_implementation = config._experts_implementation = "eager"
        config.use_cache = False
        whole: Any = AutoModelForCausalLM.from_pretrained(
            _as_whole(made, self.checkpoint, tensors), config=config, dtype=torch.float64
        ).eval()
        whole.model.embed_tokens.padding_idx = None  # its token would get no gradient
        self.layer = copy.deepcopy(whole.model)
        self.layer.layers = self.layer.layers[made.layers :]
        self.layer.norm = torch.nn.Identity()
        self.layer.config = _of_layers(config, slice(made.layers, None))
        whole.model.layers = whole.model.layers[: made.layers]
        whole.model.config = whole.config = _of_layers(config, slice(made.layers))
        self.policy = Oracle(whole, OptimConfig(**OPTIM))  # type: ignore[arg-type]
        self.extra = {
            kind: torch.nn.Parameter(tensors[name].double())
            for kind, name in zip(EXTRA, made.names, strict=False)
        }
        every = [*self.layer.layers.parameters(), *self.extra.values()]
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in every if p.ndim > 1]},
                {"params": [p for p in every if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=OPTIM["learning_rate"],
            betas=self.policy.optim.betas,
            eps=OPTIM["epsilon"],
            weight_decay=OPTIM["weight_decay"],
        )

    def losses(self, rows: list[Row]) -> tuple[torch.Tensor, float, int]:
        """The loss with the weights of samples; the sum without them, and of how many tokens."""
        total, plain, count = torch.zeros((), dtype=torch.float64), 0.0, 0
        for row in rows:
            guesses = self._guess(row)
            for place in range(len(row.token_ids) - 2):
                aim = place + 2 - row.prompt_length
                if aim >= 0 and row.loss_mask[aim]:
                    loss = -guesses[place, row.token_ids[place + 2]]
                    total = total + row.loss_weight * loss
                    plain, count = plain + loss.item(), count + 1
        return total, plain, count

    def _guess(self, row: Row) -> torch.Tensor:
        """Log-probs [length - 1, vocabulary] of the token after the next."""
        model: Any = self.policy.model
        with torch.no_grad():
            hidden = model.model(row.token_ids[None]).last_hidden_state[:, :-1]
            embedded = model.model.embed_tokens(row.token_ids[None, 1:])
        both = [self._norm("enorm", embedded), self._norm("hnorm", hidden)]
        if self.predicting.case.model_type == "mimo":
            both.reverse()
        joined = linear(torch.cat(both, dim=-1), self.extra["eh_proj"])
        made = self.layer(inputs_embeds=joined).last_hidden_state
        logits = linear(self._norm("norm", made), model.lm_head.weight.detach())
        return logits[0].log_softmax(-1)

    def _norm(self, kind: str, hidden: torch.Tensor) -> torch.Tensor:
        config = self.policy.model.config
        weight = self.extra[kind] + (0.0 if self.predicting.case.model_type in PLAIN_NORMS else 1.0)
        scale = hidden.square().mean(-1, keepdim=True) + config.rms_norm_eps
        return weight * hidden / scale.sqrt()

    def gradients(self) -> Tensors:
        """Of the layer's tensors, by their names in the checkpoint."""
        return self._stored({n: p.grad for n, p in self._named().items() if p.grad is not None})

    def weights(self) -> Tensors:
        return self._stored({n: p.detach() for n, p in self._named().items()})

    def _named(self) -> Tensors:
        layers = self.layer.layers.named_parameters()
        found = {f"model.layers.{_shift(n, self.predicting.layers)}": p for n, p in layers}
        return found | dict(zip(self.predicting.names, self.extra.values(), strict=False))

    def _stored(self, tensors: Tensors) -> Tensors:
        made: Tensors = revert_weight_conversion(self.policy.model, dict(tensors))
        return {self.predicting.stored(name): tensor for name, tensor in made.items()}

    def step(self, rows: list[Row], scale: float) -> tuple[float, float]:
        """One of both, each clipped by its own norm; the policy's norm and the mean of the loss."""
        loss, plain, count = self.losses(rows)
        self.adam.zero_grad()
        (scale * loss / NORMALIZER).backward()
        every = [*self.layer.layers.parameters(), *self.extra.values()]
        torch.nn.utils.clip_grad_norm_(every, OPTIM["max_grad_norm"])
        norm = self.policy.step(self.policy.ppo_loss(rows), NORMALIZER)
        self.adam.step()
        return norm, plain / count


@dataclass(frozen=True)
class Predicted:
    """What the oracle says: mean losses of the first batch and of every step, and so on."""

    loss: float
    gradients: Tensors
    losses: list[float]
    norms: list[float]
    after: float  # the loss of the first batch behind the steps
    weights: Tensors


def expect_prediction(predicting: Predicting, scale: float, steps: int) -> Predicted:
    torch.set_num_threads(1)
    oracle = PredictionOracle(predicting, predicting.model.directory)
    loss, plain, count = oracle.losses(rows_of(0))
    (scale * loss).backward()
    gradients = {n: t.clone() for n, t in oracle.gradients().items()}
    pairs = [oracle.step(rows_of(step), scale) for step in range(steps)]
    _, after, _ = oracle.losses(rows_of(0))
    norms, losses = [p[0] for p in pairs], [p[1] for p in pairs]
    return Predicted(plain / count, gradients, losses, norms, after / count, oracle.weights())


def loss_of(predicting: Predicting, published: Path) -> float:
    """The mean loss of the first batch by published files."""
    _, plain, count = PredictionOracle(predicting, published).losses(rows_of(0))
    return plain / count


def _read(directory: Path) -> Tensors:
    return {n: t for f in directory.glob("*.safetensors") for n, t in load_file(f).items()}


def _as_whole(made: Predicting, checkpoint: Path, tensors: Tensors) -> Path:
    """The checkpoint, the layer as one of the model's; a folder beside it."""
    folder = checkpoint.parent / f"{checkpoint.name}-whole"
    folder.mkdir(exist_ok=True)
    shutil.copy(made.whole / "config.json", folder)
    left_out = {*made.names, *made.copies()}
    renamed = {
        name.replace(made.names[-1], f"model.layers.{made.layers}.", 1): tensor
        for name, tensor in tensors.items()
        if name not in left_out
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _of_layers(config: Any, which: slice) -> Any:
    made = copy.deepcopy(config)
    made.num_hidden_layers = len(range(config.num_hidden_layers)[which])
    for name in BY_LAYER:
        if getattr(config, name, None):
            setattr(made, name, getattr(config, name)[which])
    return made


def _shift(name: str, by: int) -> str:
    number, _, rest = name.partition(".")
    return f"{int(number) + by}.{rest}"
