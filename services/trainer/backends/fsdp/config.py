"""How a model is cut over ranks and computed. Imports no torch: the controller reads it too."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sluice.config import Config


class FsdpConfig(Config):
    """Options of the fsdp backend; weights, gradients and optimizer state are always float32.

    tensor: ranks over which every layer is cut, by the plan that its family ships; the others are
    data-parallel.
    dtype: of the products and activations; bfloat16 gathers weights in it too.
    activation_checkpointing: layers are run again in backward, in place of keeping what they made.
    activation_offload: what they are run again on waits in host memory until then.
    cpu_offload: weights and optimizer state stay in host memory; needs an accelerator.
    reshard_after_forward: layers are freed after forward and gathered again for backward.
    reduce: gradients are summed over ranks after every micro-batch, or once a call after the
    last, until when each rank holds those of the whole model.
    unproven: also a family that `families` does not list.
    replicas: copies of the model, each cut over neighbouring ranks, such as those of a node.
    Weights are gathered within a copy, and gradients summed over all of them.
    expert: ranks, neighbours, that have each a part of the experts of every layer, whole; tokens
    travel to them. What it leaves over of the data ranks cuts them further.
    context: ranks that share every row; what it leaves over of the world is data parallelism.
    cp_layout: zigzag gives rank r chunks r and 2*size-1-r of every row, which evens out causal
    attention; contiguous cuts the whole pack into equal runs.
    routing_replay: experts taken again in training: recorded in the pass of old log-probs (R2), or
    in the rollout (R3).
    """

    tensor: int = Field(1, ge=1)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    activation_checkpointing: bool = False
    activation_offload: bool = False
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    reduce: Literal["micro_batch", "call"] = "micro_batch"
    unproven: bool = False
    replicas: int = Field(1, ge=1)
    expert: int = Field(1, ge=1)
    context: int = Field(1, ge=1)
    cp_layout: Literal["zigzag", "contiguous"] = "zigzag"
    routing_replay: Literal["off", "recorded", "rollout"] = "off"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.cp_layout != "zigzag" and self.context == 1:
            raise ValueError("cp_layout has no effect with context 1; leave it out")
        if self.replicas > 1 and self.tensor > 1:
            raise ValueError("replicas is not for tensor above 1")
        if self.expert > 1 and self.tensor > 1:
            raise ValueError("expert is not for tensor above 1")
        if self.activation_offload and not self.activation_checkpointing:
            raise ValueError("activation_offload is of what activation_checkpointing keeps: set it")
        return self
