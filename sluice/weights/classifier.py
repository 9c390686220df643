"""transformers' classifiers of one label on the body of a language model: critics, reward models.

A critic (`*ForTokenClassification`) has a value in front of every token, by a weight and a bias. A
reward model (`*ForSequenceClassification`) has that of a text's last token, by a weight alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from sluice.model_types import known_type

CRITIC, REWARD_MODEL = "ForTokenClassification", "ForSequenceClassification"
# What transformers has a sequence classifier of, among the families that are trained.
CLASSIFIED = ("DeepseekV3", "Glm4", "Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen3Next")
_BODIES = ("ForCausalLM", CRITIC, REWARD_MODEL)


class NoClassifierError(ValueError):
    """transformers has no sequence classifier on this body."""


def label_count(config: Mapping[str, object]) -> int:
    """How many labels the model of a `config.json` tells apart; 1 where it is no classifier."""
    architectures, labels = config.get("architectures"), config.get("id2label")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if not name.endswith((CRITIC, REWARD_MODEL)):
        return 1
    if isinstance(labels, Mapping):
        return len(labels)
    count = config.get("num_labels")
    return count if isinstance(count, int) else 2  # of which transformers write nothing


def reward_model_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the `config.json` of a reward model on the body that `config` is of.

    It is of a type that transformers have, and names no token of padding: they would take a text
    that ends in it for a shorter one.
    Raises NoClassifierError.
    """
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else "nothing"
    family = next((name.removesuffix(end) for end in _BODIES if name.endswith(end)), "")
    if family not in CLASSIFIED:
        raise NoClassifierError(
            f"transformers has no sequence classifier of {name} that is known here; known: "
            f"{', '.join(CLASSIFIED)}"
        )
    return {
        **{key: value for key, value in config.items() if key not in ("num_labels", "auto_map")},
        "architectures": [f"{family}{REWARD_MODEL}"],
        "model_type": known_type(str(config.get("model_type", ""))),
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": None,
    }
