"""Tiny models that see, rows with images, and what plain transformers says about them.

`record` gathers the largest differences, which the last line of `make test-vision` names.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from services.trainer.backend import Row
from sluice.algo.spec import LossSpec
from sluice.samples.images import ImageRules, PreparedImage
from sluice.samples.sample import MediaSpan
from tests.unit.weights_rules.models import exchanged, write_model

VOCABULARY, IMAGE, VIDEO, START, END, STOP = 64, 60, 61, 62, 63, 59
SERVED = ("qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe")  # by SGLang too, on a processor
DEEP = ("qwen3_vl", "qwen3_vl_moe")  # whose towers feed deepstack
FAMILIES = (*SERVED, "qwen3_5", "qwen3_5_moe")
PPO = LossSpec(name="ppo_clip", clip_low=0.2)
MAX_LOGPROB_DIFF = MAX_GRADIENT_DIFF = 1e-5

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": STOP,
    "pad_token_id": None,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.1,
}
_DEEP = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
_DEEPER = {**_DEEP, "deepstack_visual_indexes": [0, 1, 2]}  # SGLang counts on three of a mixture
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_SPARSE = {  # no tensor of experts is square: transformers takes it as it is then
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {  # of half of a head
        **_ROPE,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    },
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
CHAT = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
)
differences = {"logprob": 0.0, "gradient": 0.0}
layouts: set[str] = set()


def record(kind: str, difference: float, layout: str = "") -> float:
    """Note a difference, and under which layout it was met."""
    differences[kind] = max(differences[kind], difference)
    if layout:
        layouts.add(layout)
    return difference


@dataclass(frozen=True)
class Model:
    """A checkpoint directory."""

    directory: Path

    @cached_property
    def rules(self) -> ImageRules:
        return ImageRules.from_directory(self.directory)

    def load(self) -> Any:
        return AutoModelForImageTextToText.from_pretrained(
            self.directory, dtype=torch.float32
        ).eval()


def build_model(directory: Path, family: str, seed: int = 0, **settings: Any) -> Model:
    """Write a random model of 4 + 3 layers; of Qwen3-VL's tower two feed deepstack, or three.

    settings: of the text.
    """
    torch.manual_seed(seed)
    patch = 14 if family == "qwen2_5_vl" else 8  # SGLang has 14 in the code of that one (0.5.23)
    token = (2 * patch) ** 2  # pixels
    text, tower = _parts(family, patch)
    text |= settings
    config = AutoConfig.for_model(family, text_config=text, vision_config=tower, **_TOKENS)
    module: Any = AutoModelForImageTextToText.from_config(config)
    _condition(module)
    write_model(module, directory)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": token, "longest_edge": 64 * token},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return Model(directory)


def _parts(family: str, patch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the text and of the tower."""
    text, tower = {**_SHAPE, "head_dim": 16}, {**_TOWER, "patch_size": patch}
    if family == "qwen2_5_vl":
        windows = {"window_size": 4 * patch, "fullatt_block_indexes": [2]}
        return {**_SHAPE, "rope_parameters": _ROPE}, {**tower, **windows}
    if family not in DEEP:
        experts = _EXPERTS if family.endswith("_moe") else {}
        positions = {"num_position_embeddings": _DEEP["num_position_embeddings"]}
        return {**text, **_RECURRENT, **experts}, {**tower, **positions}
    text["rope_parameters"] = {**_ROPE, "mrope_interleaved": True}
    if family == "qwen3_vl_moe":
        return {**text, **_SPARSE}, {**tower, **_DEEPER}
    return text, {**tower, **_DEEP}


def _condition(module: torch.nn.Module) -> None:
    """Bring transformers in float32 near itself in float64, from 1.5e-5 in log-probs.

    Of gated delta nets: what they add is less, and states last, so that their decay matters.
    """
    for name, parameter in module.named_parameters():
        if "linear_attn.norm" in name:
            parameter.data.mul_(0.6)
        elif "A_log" in name:
            parameter.data.clamp_(max=0.0)


def speak(model: Model) -> Model:
    """Add a tokenizer of one letter a token, and files that SGLang reads. Returns the model."""
    specials = {STOP: "<|end|>", IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"}
    specials |= {START: "<|vision_start|>", END: "<|vision_end|>"}
    letters = [chr(code) for code in range(ord("!"), ord("!") + STOP)]
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([specials[index] for index in sorted(specials)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=specials[STOP], pad_token=specials[STOP]
    )
    tokenizer.chat_template = CHAT
    folder = model.directory
    tokenizer.save_pretrained(folder)
    family = json.loads((folder / "config.json").read_text())["model_type"]
    name = ("Qwen3VL" if family in DEEP else "Qwen2_5_VL") + "Processor"
    video = ("Qwen3VL" if family in DEEP else "Qwen2VL") + "VideoProcessor"
    rules = json.loads((folder / "preprocessor_config.json").read_text()) | {
        "processor_class": name
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(rules))
    rules = {key: rules[key] for key in rules if key != "image_processor_type"}
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps({**rules, "video_processor_type": video})
    )
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processor_class": name}))
    return model


def draw_image(rules: ImageRules, seed: int, tall: int, wide: int) -> PreparedImage:
    """Noise of tall x wide tokens."""
    size = tall * rules.factor, wide * rules.factor, 3
    pixels = np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return rules.prepare(file.getvalue())


def digest_of(image: PreparedImage) -> str:
    return xxhash.xxh3_128_hexdigest(image.png)


def make_row(
    sample_id: str,
    prompt: Sequence[Any],
    response: Sequence[Any],
    *,
    seed: int,
    framed: bool = False,
    **fields: Any,
) -> Row:
    """A row of token runs, of given lengths, and images; runs of the prompt are its group's.

    `framed`: images stand between the tokens that a chat template sets around them.
    """
    generator = torch.Generator().manual_seed(seed)
    group = torch.Generator().manual_seed(sum(sample_id.split("/")[0].encode()))
    tokens, media, mask, images = list[int](), list[MediaSpan](), list[bool](), {}
    for source, parts in ((group, prompt), (generator, response)):
        for part in parts:
            if isinstance(part, int):
                tokens += torch.randint(STOP, (part,), generator=source).tolist()
                mask += [True] * part
                continue
            images[digest_of(part)] = part.png
            tokens += [START] * framed
            media.append(
                MediaSpan(
                    digest=digest_of(part),
                    size=len(part.png),
                    kind="image",
                    first_token=len(tokens),
                    token_count=part.token_count,
                    grid_thw=part.grid_thw,
                    turn=int(source is generator),
                )
            )
            tokens += [IMAGE] * part.token_count + [END] * framed
            mask += [False] * (part.token_count + 2 * framed)
        if source is group:
            prompt_length = len(tokens)
    length = len(tokens) - prompt_length
    return Row(
        sample_id=sample_id,
        group_id=sample_id.split("/")[0],
        token_ids=torch.tensor(tokens),
        prompt_length=prompt_length,
        loss_mask=torch.tensor(mask[prompt_length:]),
        columns={
            "rollout_logprobs": torch.randn(length, generator=generator) * 0.3 - 4,
            "advantages": torch.randn(length, generator=generator),
            "returns": torch.randn(length, generator=generator),
            "values": torch.zeros(length),
        },
        media=tuple(media),
        images=images,
        **fields,
    )


def mixed_rows(rules: ImageRules, step: int = 0) -> list[Row]:
    """Text alone, one image, siblings of one image, two images, an image in a later turn, and two
    rows of one group whose prompts differ in nothing but what the image shows. Another step has
    other images and responses."""
    wide, tall, small, other = (
        draw_image(rules, seed + 10 * step, *size)
        for seed, size in enumerate(((2, 3), (3, 2), (1, 2), (2, 3)))
    )
    rows = [
        make_row("one/0", [3, wide, 4], [5], seed=1, loss_weight=1.5),
        make_row("one/1", [3, wide, 4], [9], seed=2, loss_weight=0.5),
        make_row("one/other", [3, other, 4], [6], seed=3),
        make_row("text/0", [7], [11], seed=4),
        make_row("text/1", [7], [2], seed=5),
        make_row("two/0", [2, tall, 1, small, 3], [6], seed=6),
        make_row("turn/0", [4], [5, tall, 6], seed=7),
        make_row("turn/1", [4], [2, small, 3, wide, 4], seed=8),
        make_row("first/0", [wide, 1], [3], seed=9),
    ]
    return rows if not step else [_answer_anew(row, step) for row in rows]


def _answer_anew(row: Row, step: int) -> Row:
    """The row with other tokens in its response, none of them an image's."""
    generator = torch.Generator().manual_seed(100 * step + row.response_length)
    drawn = torch.randint(STOP, (row.response_length,), generator=generator)
    tokens = row.token_ids.clone()
    tokens[row.prompt_length :][row.loss_mask] = drawn[row.loss_mask]
    return row._replace(token_ids=tokens)


class Oracle:
    """The same from one row at a time, by the whole model of transformers and its own positions."""

    def __init__(self, model: Model) -> None:
        self.model, self.rules = model.load(), model.rules

    def inputs(self, row: Row) -> dict[str, Any]:
        """What the model is called with; the last token of a row predicts nothing."""
        ids, options = row.token_ids[:-1], dict[str, Any]()
        types = torch.zeros_like(ids)
        for span in row.media:
            types[span.first_token : span.end] = 1
        if row.media:
            seen = [self.rules.patches(row.images[span.digest]) for span in row.media]
            options["pixel_values"] = torch.cat([torch.from_numpy(patches) for patches, _ in seen])
            options["image_grid_thw"] = torch.tensor([grid for _, grid in seen])
            options["mm_token_type_ids"] = types[None].int()
        self.model.model.rope_deltas = None  # what it saw last is not what it sees now
        return {"input_ids": ids[None], "use_cache": False, **options}

    def values(self, row: Row, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Of a head [1, H], [1] on the last hidden states at those tokens, float[R]."""
        hidden = self.model.model(**self.inputs(row)).last_hidden_state[0]
        return hidden[row.prompt_length - 1 :] @ weight[0] + bias

    def table(self, row: Row, temperature: float = 1.0) -> torch.Tensor:
        """Log-softmax at the tokens that predict the response, float[R, V]."""
        logits = self.model(**self.inputs(row)).logits[0]
        return (logits[row.prompt_length - 1 :] / temperature).log_softmax(-1)

    def logprobs(self, row: Row, temperature: float = 1.0) -> torch.Tensor:
        table = self.table(row, temperature)
        return table.gather(1, row.token_ids[row.prompt_length :, None])[:, 0]

    def ppo_loss(self, rows: Sequence[Row]) -> torch.Tensor:
        """sum_i w_i sum_t -min(r A, clip(r, 0.8, 1.2) A) over trained tokens."""
        total = torch.zeros(())
        for row in rows:
            ratio = (self.logprobs(row) - row.columns["rollout_logprobs"]).exp()
            advantages = row.columns["advantages"]
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            total = total + row.loss_weight * loss[row.loss_mask].sum()
        return total

    def gradients(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        self.model.zero_grad()
        self.ppo_loss(rows).backward()
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.model.named_parameters()
        }


def stored_tensors(module: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name and cut tensors of a model of transformers as its checkpoint has them."""
    made: dict[str, torch.Tensor] = revert_weight_conversion(module, tensors)
    return exchanged(made) if module.config.model_type == "qwen3_vl_moe" else made


def part_of(name: str) -> str:
    """Which part of the model a parameter belongs to."""
    if "visual" not in name:
        return "text"
    if "deepstack" in name:
        return "deepstack"
    return "merger" if "merger" in name else "tower"


def relative_distances(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Distance of the gradients of each part of the model, by the length of the expected ones."""
    assert found.keys() == expected.keys()
    sums: dict[str, list[float]] = {}
    for name, gradient in expected.items():
        pair = sums.setdefault(part_of(name), [0.0, 0.0])
        pair[0] += float((found[name].double() - gradient.double()).square().sum())
        pair[1] += float(gradient.double().square().sum())
    return {part: (off / whole) ** 0.5 for part, (off, whole) in sums.items()}
