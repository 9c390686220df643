"""Stands in for the CPU build of sgl-kernel: every operator says that it is not there.

`torch.ops.sgl_kernel.convert_weight_packed` must stay undefined: where it is missing, SGLang
takes its plain torch paths. The operators below are read, not called, when some models load.
The CUDA runtime is called even on a CPU, to pin memory.
"""

import torch

__version__ = "0.0.0+stand-in"

READ_AT_IMPORT = (
    "apply_rotary_pos_emb_cpu",
    "causal_conv1d_fwd_cpu",
    "causal_conv1d_update_cpu",
    "chunk_gated_delta_rule_cpu",
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_rmsnorm_gated_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "l2norm_cpu",
)


def _absent(name):
    def operator(*_, **__):
        raise NotImplementedError(f"{name} needs the CPU build of sgl-kernel")

    operator.__name__ = name
    return operator


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)
    return _absent(name)


def _fused_sigmoid_mul_cpu(values, gate):
    values.mul_(torch.sigmoid(gate.float()).to(values.dtype))


for _name in READ_AT_IMPORT:
    if not hasattr(torch.ops.sgl_kernel, _name):
        setattr(torch.ops.sgl_kernel, _name, _absent(_name))
torch.ops.sgl_kernel.fused_sigmoid_mul_cpu = _fused_sigmoid_mul_cpu


class _HostMemory:
    """Of the CUDA runtime: memory is not pinned where nothing copies it to a device."""

    def cudaHostRegister(self, *_):
        return 0

    def cudaHostUnregister(self, *_):
        return 0


torch.cuda.cudart = _HostMemory  # noqa: TID251  (asked for by the cache of routed experts)
