"""How a policy is laid out over ranks. Imports no torch: the trainer's controller reads it too."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from sluice.config import Config

FP8_TOKENS = 16  # by which the sizes of fp8's products divide
_REFUSED = {  # options of Megatron that would do nothing here, or go wrong
    "overlap_grad_reduce": "gradients are summed over ranks once a step, behind any number of"
    " ForwardBackward calls: no backward pass is left then to overlap with",
    "overlap_param_gather": "weights that are gathered beside a pass have not proven equal to those"
    " gathered before it",
    "tp_comm_overlap": "Transformer Engine overlaps products with exchanges of one size, and"
    " packs differ in length",
    "use_precision_aware_optimizer": "its masters lie inside Transformer Engine's optimizer,"
    " where checkpoints of this backend do not reach",
    "optimizer_cpu_offload": "optimizer_offload says how much of its state waits on the host",
    "cpu_offloading": "fsdp.cpu_offload keeps weights and optimizer state on the host, and"
    " recompute saves activations",
}


class MegatronConfig(Config):
    """Options of the Megatron backend. Sizes of the five parallel dimensions are rank counts.

    tensor, pipeline, context: as in Megatron; what the product leaves over of the world is data
    parallelism. virtual_pipeline: model chunks per pipeline stage. expert: ranks over which the
    experts of a layer are spread, taken from the context and data ranks; expert_tensor: tensor
    parallelism inside an expert (0 = as `tensor`; 1 needs more than one expert rank).
    mtp_loss_scaling_factor: of the loss of the layer of multi-token prediction, which is trained
    with any above 0, apart from the policy; with 0 it is published as it was loaded.
    cp_layout: zigzag gives rank r chunks r and 2*size-1-r of every sequence, which evens out
    causal attention; contiguous cuts the whole pack into equal runs, as sparse attention needs.
    cp_comm_type: how Transformer Engine's attention exchanges keys and values over context ranks,
    beside its computation; all other attention gathers them first.
    fp8: products in 8 bits, of Transformer Engine's layers; e4m3, or hybrid with gradients in e5m2.
    optimizer_offload: share of the optimizer's state, float32 masters among it, that waits in
    pinned memory of the host and crosses to the device to be stepped: 0 to 1, of every rank's own.
    """

    tensor: int = Field(1, ge=1)
    sequence_parallel: bool = False
    pipeline: int = Field(1, ge=1)
    virtual_pipeline: int = Field(1, ge=1)
    first_stage_layers: int = Field(0, ge=0)  # layers of this pipeline stage; 0 = as the others
    last_stage_layers: int = Field(0, ge=0)
    context: int = Field(1, ge=1)
    cp_layout: Literal["zigzag", "contiguous"] = "zigzag"
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] | None = None  # None: p2p
    expert: int = Field(1, ge=1)
    expert_tensor: int = Field(0, ge=0)

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # main gradients are float32
    fp8: Literal["hybrid", "e4m3"] | None = None
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    distributed_optimizer: bool = True  # spreads optimizer state over data ranks
    optimizer_offload: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
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

    @property
    def pack_multiple(self) -> int:
        """Tokens of a rank divide by this."""
        return self.tensor * (1 if self.fp8 is None else FP8_TOKENS)

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, values: Any) -> Any:
        for name, reason in _REFUSED.items():
            if isinstance(values, dict) and name in values:
                raise ValueError(f"{name}: {reason}")
        return values

    @model_validator(mode="after")
    def _check_numerics(self) -> Self:
        if self.cp_comm_type is not None and self.context == 1:
            raise ValueError("cp_comm_type has no effect with context 1; leave it out")
        if self.fp8 is None and self.fp8_recipe != "delayed":
            raise ValueError("fp8_recipe has no effect without fp8; leave it out")
        if self.fp8 is not None and self.dtype != "bfloat16":
            raise ValueError("fp8 needs dtype bfloat16")
        if self.fp8 is not None and self.layer_spec == "local":
            raise ValueError("fp8 needs Transformer Engine's layers: layer_spec is local")
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel has no effect with tensor 1; leave it out")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError("virtual_pipeline has no effect with pipeline 1; leave it out")
        if (self.first_stage_layers or self.last_stage_layers) and self.pipeline == 1:
            raise ValueError("layers of a stage have no effect with pipeline 1; leave them out")
        if self.optimizer_offload and not self.distributed_optimizer:
            raise ValueError("optimizer_offload needs distributed_optimizer")
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
