"""`python build_vision_model.py DIR`: a tiny random Qwen2.5-VL, with its tokenizer and processor.

Runs under the interpreter of SGLang, which has torchvision.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

SPECIAL = ["<|pad|>", "<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIAL += ["<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, behind the special ones: text and tokens go over without loss."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *alphabet])}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|pad|>", eos_token="<|end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model() -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(0)
    number = {word: place for place, word in enumerate(SPECIAL)}
    text = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "initializer_range": 0.2,
        "rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3]},
        "rope_theta": 1e6,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "out_hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 128,
        "fullatt_block_indexes": [1],
        "window_size": 112,
        "patch_size": 14,
        "spatial_merge_size": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
    )
    model = Qwen2_5_VLForConditionalGeneration(config).to(torch.float32)
    model.config.architectures = [type(model).__name__]
    return model


def main() -> None:
    directory = sys.argv[1]
    tokenizer = build_tokenizer()
    build_model().save_pretrained(directory)
    images = Qwen2VLImageProcessor(patch_size=14, min_pixels=56 * 56, max_pixels=224 * 224)
    videos = Qwen2VLVideoProcessor(patch_size=14)
    processor = Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE)
    processor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main()
