"""How a policy is laid out over ranks. Imports no torch: the trainer's controller reads it too."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class MegatronConfig(BaseModel):
    """Options of the Megatron backend. Sizes of the five parallel dimensions are rank counts.

    tensor, pipeline, context: as in Megatron; what the product leaves over of the world is data
    parallelism. virtual_pipeline: model chunks per pipeline stage. expert: ranks over which the
    experts of a layer are spread, taken from the context and data ranks; expert_tensor: tensor
    parallelism inside an expert (0 = as `tensor`; 1 needs more than one expert rank).
    mtp_loss_scaling_factor: of the loss of the layer of multi-token prediction, which is trained
    with any above 0, apart from the policy; with 0 it is published as it was loaded.
    cp_layout: zigzag gives rank r chunks r and 2*size-1-r of every sequence, which evens out
    causal attention; contiguous cuts the whole pack into equal runs, as sparse attention needs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: int = Field(1, ge=1)
    sequence_parallel: bool = False
    pipeline: int = Field(1, ge=1)
    virtual_pipeline: int = Field(1, ge=1)
    first_stage_layers: int = Field(0, ge=0)  # layers of this pipeline stage; 0 = as the others
    last_stage_layers: int = Field(0, ge=0)
    context: int = Field(1, ge=1)
    cp_layout: Literal["zigzag", "contiguous"] = "zigzag"
    expert: int = Field(1, ge=1)
    expert_tensor: int = Field(0, ge=0)

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # main gradients are float32
    distributed_optimizer: bool = True  # spreads optimizer state over data ranks
    recompute: Literal["none", "selective", "full"] = "none"  # selective: core attention
    recompute_layers: int = Field(1, ge=1)  # layers per recomputed block, with full
    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    model_provider: str = ""  # registered name or "module:attribute"; empty = GPTModel
    mtp_loss_scaling_factor: float = Field(0.0, ge=0, le=1e6, allow_inf_nan=False)
    vocab_multiple: int = Field(128, ge=1)  # rows of the vocabulary per tensor rank
    # Experts taken again in training: recorded in the old-policy pass (R2) or in the rollout (R3)
    routing_replay: Literal["off", "recorded", "rollout"] = "off"
    max_shard_bytes: int = Field(256 << 20, gt=0)  # published files are cut near this size
    save_threads: int = Field(1, ge=1)  # files per rank of a checkpoint, written side by side

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor or self.tensor

    @property
    def micro_batch_multiple(self) -> int:
        """Interleaved pipelines take micro-batches in groups of this many."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel has no effect with tensor 1; leave it out")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError("virtual_pipeline has no effect with pipeline 1; leave it out")
        if (self.first_stage_layers or self.last_stage_layers) and self.pipeline == 1:
            raise ValueError("layers of a stage have no effect with pipeline 1; leave them out")
        if self.cp_layout != "zigzag" and self.context == 1:
            raise ValueError("cp_layout has no effect with context 1; leave it out")
        if self.recompute != "full" and self.recompute_layers != 1:
            raise ValueError("recompute_layers has no effect unless recompute is full")
        if self.mtp_loss_scaling_factor and self.model_provider:
            raise ValueError("mtp_loss_scaling_factor is not for models of a model_provider")
        if self.expert_tensor and self.expert_tensor not in (1, self.tensor):
            raise ValueError("expert_tensor must be 1 or as tensor")
        if self.expert == 1 and self.expert_tensor_size != self.tensor:
            # Megatron then reduces experts like dense weights: over data, not over tensor ranks,
            # though each of these has sent other tokens through its copy.
            raise ValueError("expert_tensor 1 with tensor > 1 needs expert > 1")
        return self
