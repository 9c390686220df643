"""A tiny random Qwen3-VL with the few words that pictures of examples are asked about with.

`python -m examples.models.tiny_qwen3_vl DIRECTORY [SEED]`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sluice.imports import keep_loaded, uncollected

DIGITS, SIDES, QUESTIONS, EQUALS = "0123456789", ("AB", "BC", "CD", "DA"), "cp?", "="
END, PAD = "<end>", "<pad>"
START, STOP, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
WORDS = [*DIGITS, *SIDES, *QUESTIONS, EQUALS, END, PAD, START, STOP, IMAGE, VIDEO]
PATCH = 8  # pixels; a token of an image is 2 x 2 of them
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    f"{{% else %}}{START}{IMAGE}{STOP}{{% endif %}}{{% endfor %}}{{% endif %}}{{% endfor %}}"
)


def build_tiny_qwen3_vl(directory: Path, seed: int = 0) -> Path:
    """Write a random Qwen3-VL (291k parameters), its tokenizer and how it takes images.

    The same for a seed.
    """
    with uncollected():
        import torch
        from transformers import (
            PreTrainedTokenizerFast,
            Qwen3VLConfig,
            Qwen3VLForConditionalGeneration,
        )

    torch.manual_seed(seed)
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    text = {
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": WORDS.index(END),
        "pad_token_id": None,  # transformers would start its embedding at zero
        "rope_parameters": rope,
    }
    tower = {
        "depth": 2,
        "hidden_size": 48,
        "num_heads": 2,
        "intermediate_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=False,
        image_token_id=WORDS.index(IMAGE),
        video_token_id=WORDS.index(VIDEO),
        vision_start_token_id=WORDS.index(START),
        vision_end_token_id=WORDS.index(STOP),
    )
    directory.mkdir(parents=True, exist_ok=True)
    model = Qwen3VLForConditionalGeneration(config)
    # as others are drawn (0.02), a tower takes hundreds of steps to tell one place from another
    torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=0.2)
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(), eos_token=END, pad_token=PAD, chat_template=TEMPLATE
    ).save_pretrained(directory)
    _describe_processor(directory)
    return directory


def _describe_processor(directory: Path) -> None:
    """What AutoProcessor reads; of no backend by name, so that each library takes its own."""
    factor = 2 * PATCH
    common = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": factor**2, "longest_edge": 64 * factor**2},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (directory / name).write_text(json.dumps({**common, **kind}, indent=1))
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"processor_class": "Qwen3VLProcessor"}
    path.write_text(json.dumps(settings, indent=1))


def _tokenizer():  # type: ignore[no-untyped-def]  # tokenizers ships no usable types
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"<\|[a-z_]+\|>|<end>|<pad>|[A-D]{2}|."), "isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, PAD, START, STOP, IMAGE, VIDEO])
    return tokenizer


if __name__ == "__main__":
    build_tiny_qwen3_vl(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    keep_loaded()  # a quarter of the whole would be to let go of it
