"""One model on one rank: its layers, its providers, its chunks built, loaded and wrapped."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
)
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.trainer.backends.megatron.attention import (
    BandedPackAttention,
    EnginePackAttention,
    GatedSelfAttention,
    NormedSelfAttention,
    PackAttention,
)
from services.trainer.backends.megatron.config import MegatronConfig
from services.trainer.backends.megatron.delta_net import WIDE, DeltaNet, delta_net_spec
from services.trainer.backends.megatron.head import OutputHead, place_value_head
from services.trainer.backends.megatron.indexer import ChosenPackAttention, ChosenSelfAttention
from services.trainer.backends.megatron.kernels import ENGINE, core_options
from services.trainer.backends.megatron.latent import (
    LatentPackAttention,
    LatentRotary,
    LatentSelfAttention,
)
from services.trainer.backends.megatron.model_config import (
    ModelSource,
    transformer_config,
    uses_transformer_engine,
)
from services.trainer.backends.megatron.prediction import (
    Prediction,
    Predictor,
    prediction_spec,
    share_embedding,
)
from services.trainer.backends.megatron.upstream import current_device
from services.trainer.backends.megatron.vision import VisionLanguageModel
from services.trainer.backends.megatron.weights import LocalTensor, load_hf, local_tensors
from sluice.algo.collectives import Collectives
from sluice.fused_operations import rms_norm
from sluice.operations import most_logits
from sluice.vision import VisionTower


class RMSNorm(torch.nn.Module):
    """Normalises in float32 and multiplies by the weight in the input's dtype, as HF models do.

    Where the model's norms are stored around zero, one is added to the weight, all in float32.
    Under sequence parallelism each rank sees part of the tokens, so the weight is marked for
    Megatron to sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self._around_zero = eps, config.layernorm_zero_centered_gamma
        kind = config.operations["rms_norm"]  # of other layers, where it is Transformer Engine's
        self._kind = "torch_rms_norm" if kind == ENGINE else kind
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=current_device())
        self.weight = torch.nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._around_zero:
            weight = 1 + self.weight.float()
            return rms_norm(self._kind, hidden.float(), weight, self.eps).to(hidden.dtype)
        return rms_norm(self._kind, hidden, self.weight, self.eps)


SUPPORTED = ("default", "linear", "llama3", "yarn")  # others change with the sequence length


class RotaryScalingError(ValueError):
    """The model scales its rotary embedding in a way that is not supported."""


def plain_frequencies(hf_config: Any) -> tuple[torch.Tensor, float]:
    """Those of a rotary embedding without scaling, which transformers keeps with each model.

    Importing one of its models would cost a rank a fifth of its start, for this line.
    """
    size = getattr(hf_config, "head_dim", None) or (
        hf_config.hidden_size // hf_config.num_attention_heads
    )
    size = int(size * hf_config.rope_parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, size, 2, dtype=torch.float) / size
    return 1.0 / hf_config.rope_parameters["rope_theta"] ** exponents, 1.0


class PositionRotary(torch.nn.Module):
    """Angles for given positions, with the inverse frequencies that transformers computes.

    `attention_scaling` multiplies cosine and sine: of the rotated part of a head alone. pairs: a
    rotation turns neighbours, instead of an element and the one half of that part away from it.
    """

    def __init__(self, hf_config: Any, device: torch.device, *, pairs: bool = False) -> None:
        super().__init__()
        self._pairs = pairs
        rope_type = hf_config.rope_parameters["rope_type"]
        if rope_type not in SUPPORTED:
            raise RotaryScalingError(
                f"rope_type {rope_type!r} is not one of {', '.join(SUPPORTED)}"
            )
        start = plain_frequencies if rope_type == "default" else ROPE_INIT_FUNCTIONS[rope_type]
        frequencies, scaling = start(hf_config)
        self.attention_scaling = float(scaling)
        self._sections = hf_config.rope_parameters.get("mrope_section")
        self._interleaved = bool(hf_config.rope_parameters.get("mrope_interleaved"))
        # Not a buffer: a cast of the model to bfloat16 must leave it alone.
        self.frequencies = frequencies.to(device=device, dtype=torch.float32)

    def forward(
        self, position_ids: torch.Tensor, mrope_section: object = None, cp_group: object = None
    ) -> torch.Tensor:
        """int64[batch, tokens] -> float32[tokens, batch, 1, rotated dim], of this rank's tokens.

        With three positions a token, [3, batch, tokens], each has its share of the frequencies:
        in stretches (arXiv 2409.12191), or in turns (Qwen3-VL).
        """
        angles = position_ids[..., None].float() * self.frequencies
        if position_ids.ndim == 3:
            angles = self._mixed(angles)
        if self._pairs:
            both = angles.repeat_interleave(2, dim=-1)
        else:
            both = torch.cat((angles, angles), dim=-1)
        return both.transpose(0, 1).unsqueeze(2)

    def _mixed(self, angles: torch.Tensor) -> torch.Tensor:
        """float32[3, batch, tokens, frequencies] -> [batch, tokens, frequencies]."""
        if not self._interleaved:
            stretches = angles.split(self._sections, dim=-1)
            return torch.cat([part[axis] for axis, part in enumerate(stretches)], dim=-1)
        mixed = angles[0].clone()
        for axis in (1, 2):
            own = slice(axis, 3 * self._sections[axis], 3)
            mixed[..., own] = angles[axis][..., own]
        return mixed


class BiasedExpertLinear(RowParallelLinear):  # type: ignore[misc]
    """The second layer of an expert with biases, as Megatron's own are not.

    Tensor ranks have other experts each: what Megatron takes for copies of one bias, whose gradient
    is summed over them and counts once in the norm, are several. And it adds the bias in place to
    what is a view without expert parallelism, which autograd refuses.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False
        set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, bias = super().forward(hidden)
        return output if self.explicit_expert_comm else output.clone(), bias


class SandwichLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that also normalises what attention and MLP give, before it is added (GLM-4)."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.post_self_attn_layernorm = RMSNorm(config, size, eps)
        self.post_mlp_layernorm = RMSNorm(config, size, eps)
        self.self_attn_bda = _normed_add(self.post_self_attn_layernorm)
        self.mlp_bda = _normed_add(self.post_mlp_layernorm)


def _normed_add(norm: RMSNorm) -> Callable[..., Any]:
    """In place of Megatron's bias-dropout-add; there is no dropout here."""

    def add(
        output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        assert not dropout
        hidden, bias = output
        normed: torch.Tensor = norm(hidden if bias is None else hidden + bias)
        return residual + normed

    return lambda training, fused: add


def decoder_spec(
    config: TransformerConfig,
    *,
    transformer_engine: bool,
    vp_stage: int | None,
    sandwich: bool = False,
) -> TransformerBlockSubmodules:
    """Layers of one model chunk. Attention is over packs with either kind of layer.

    sandwich: they are SandwichLayers.
    """
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=transformer_engine,
        normalization="RMSNorm",
        vp_stage=vp_stage,
    )
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    # One spec stands for all layers of its kind.
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    for index, layer in enumerate(block.layer_specs, offset):
        if config.linear_attention_freq and config.linear_attention_freq[index]:
            layer.submodules.self_attention = delta_net_spec()
        if sandwich:
            layer.module = SandwichLayer
        _adapt_layer(layer.submodules, config, transformer_engine)
    if not transformer_engine:
        block.layer_norm = RMSNorm
    return block


def prediction_layer_spec(config: TransformerConfig, *, transformer_engine: bool) -> ModuleSpec:
    """The layer of multi-token prediction: softmax attention, and experts where there are any."""
    layers = get_gpt_decoder_layer_specs(config, transformer_engine, "RMSNorm")
    sparse = config.moe_layer_freq if config.num_moe_experts else [0]
    layer = copy.deepcopy(layers[sparse.index(max(sparse))])
    _adapt_layer(layer.submodules, config, transformer_engine)
    if config.indexed_layers:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = ModuleSpec(ChosenPackAttention, params={"predicts": True})
    return layer


def _adapt_layer(layer: Any, config: TransformerConfig, transformer_engine: bool) -> None:
    attention = layer.self_attention.submodules
    latent, linear = config.multi_latent_attention, layer.self_attention.module is DeltaNet
    if not linear:
        fused = config.operations["attention"] == ENGINE
        over_latents = ChosenPackAttention if config.indexed_layers else LatentPackAttention
        over_heads = BandedPackAttention if config.windows else PackAttention
        plain = over_latents if latent else over_heads
        attention.core_attention = EnginePackAttention if fused else plain
    if config.wide_norms:
        layer.self_attention.module = NormedSelfAttention
    if transformer_engine:
        return
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if linear:
        renamed = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
        layer.sharded_state_dict_keys_map = {**layer.sharded_state_dict_keys_map, **renamed}
    elif latent:
        chooses = bool(config.indexed_layers)
        layer.self_attention.module = ChosenSelfAttention if chooses else LatentSelfAttention
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.attention_output_gate and not linear:
        layer.self_attention.module = GatedSelfAttention
    if layer.mlp.module is MoELayer:
        if config.add_bias_linear:
            layer.mlp.submodules.experts.submodules.linear_fc2 = BiasedExpertLinear
        # Checkpoints keep the names of TransformerEngine's layers. There the norm is fused into
        # the first linear layer, except before experts, where the stock table is wrong.
        layer.sharded_state_dict_keys_map = {
            name: key
            for name, key in layer.sharded_state_dict_keys_map.items()
            if name != "pre_mlp_layernorm."
        }


LAYER_SPECS = (ModuleSpec, TransformerBlockSubmodules)
MAX_CALLS = 3  # a callable that returns a callable that returns a spec


class ModelProviderError(ValueError):
    """A model provider does not give what is needed; the message says what it gave."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """What a factory gets to know of the model chunk to build."""

    config: TransformerConfig
    hf_config: Any
    padded_vocab: int
    tied: bool
    value_head: bool
    value_bias: bool
    transformer_engine: bool
    rotary: PositionRotary
    pre_process: bool
    post_process: bool
    vp_stage: int | None
    tower: VisionTower | None = None  # of the first chunk of a model that sees
    sees: bool = False
    sandwich: bool = False  # layers with norms behind attention and MLP too
    predicts: bool = False  # the last chunk has a layer of multi-token prediction


ModelFactory = Callable[..., torch.nn.Module]
_FACTORIES: dict[str, ModelFactory] = {}


def register_factory(name: str, factory: ModelFactory) -> None:
    """Registers `factory` as `name`. Raises ModelProviderError when the name is taken."""
    if name in _FACTORIES and _FACTORIES[name] is not factory:
        raise ModelProviderError(f"model factory {name!r} is registered twice")
    _FACTORIES[name] = factory


def build_model(provider: str, request: ModelRequest) -> torch.nn.Module:
    """Builds one model chunk; with `request.value_head` the last one ends in a value per token.

    Raises ModelProviderError.
    """
    made: object = _lookup(provider) if provider else None
    for _ in range(MAX_CALLS):
        if isinstance(made, LAYER_SPECS) or not callable(made) or isinstance(made, torch.nn.Module):
            break
        made = _call(made, request)
    if isinstance(made, torch.nn.Module):
        model = made
    elif made is None or isinstance(made, LAYER_SPECS):
        model = gpt_model(made, request)
        if request.sees:
            model = VisionLanguageModel(request.config, model, request.tower)
    else:
        raise ModelProviderError(f"{provider!r} gave {type(made).__name__}, no model and no spec")
    if request.value_head and request.post_process:
        place_value_head(model, request.config, bias=request.value_bias)
    return model


def _lookup(provider: str) -> object:
    if provider in _FACTORIES:
        return _FACTORIES[provider]
    module, separator, attribute = provider.partition(":")
    if not separator:
        names = ", ".join(sorted(_FACTORIES)) or "none"
        raise ModelProviderError(
            f"{provider!r} is neither a registered factory ({names}) nor module:attribute"
        )
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelProviderError(f"{provider!r} cannot be imported: {error}") from error
    return found


def _call(provider: Callable[..., object], request: ModelRequest) -> object:
    given = {
        "request": request,
        "config": request.config,
        "hf_config": request.hf_config,
        "pre_process": request.pre_process,
        "post_process": request.post_process,
        "vp_stage": request.vp_stage,
    }
    parameters = inspect.signature(provider).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return provider(**given)
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind is not (
            parameter.VAR_POSITIONAL
        )
        if needed and parameter.name not in given:
            raise ModelProviderError(
                f"{getattr(provider, '__name__', provider)!r} asks for {parameter.name!r}; "
                f"it may ask for {', '.join(given)}"
            )
    names = [parameter.name for parameter in parameters if parameter.name in given]
    return provider(**{name: given[name] for name in names})


def gpt_model(spec: Any, request: ModelRequest) -> GPTModel:
    """Megatron's own model with the layers of `spec`; None builds this backend's layers."""
    if spec is None:
        spec = decoder_spec(
            request.config,
            transformer_engine=request.transformer_engine,
            vp_stage=request.vp_stage,
            sandwich=request.sandwich,
        )
    latent = request.config.multi_latent_attention
    model = GPTModel(
        config=request.config,
        transformer_layer_spec=spec,
        vocab_size=request.padded_vocab,
        max_sequence_length=request.hf_config.max_position_embeddings,
        pre_process=request.pre_process,
        post_process=request.post_process,
        share_embeddings_and_output_weights=request.tied,
        # "mrope" is the type that is handed position ids; latent attention finds them in the pack
        position_embedding_type="rope" if latent else "mrope",
        scatter_embedding_sequence_parallel=not request.sees,  # images come before
        vp_stage=request.vp_stage,
    )
    if not latent:
        model.rotary_pos_emb = request.rotary
    if request.predicts and request.post_process:
        layer = prediction_layer_spec(request.config, transformer_engine=request.transformer_engine)
        model.mtp = Predictor(
            request.config,
            prediction_spec(layer, RMSNorm),
            model=model,
            rows=request.padded_vocab,
            vp_stage=request.vp_stage,
        )
    if not latent:
        return model
    layers = [*model.decoder.layers]
    if hasattr(model, "mtp"):
        layers += [each.transformer_layer for each in model.mtp.layers]
    for layer in layers:
        layer.self_attention.rotary_pos_emb = LatentRotary(request.rotary)
        layer.self_attention.core_attention.scale = request.config.softmax_scale
    return model


@dataclass(frozen=True, kw_only=True)
class PolicyModel:
    """`chunks` are what the schedules run (wrapped); `tensors` all parameters with their rules."""

    source: ModelSource
    config: TransformerConfig
    chunks: Sequence[torch.nn.Module]
    models: Sequence[torch.nn.Module]  # the same, bare
    tensors: Sequence[LocalTensor]
    head: OutputHead | None
    padded_vocab: int
    bytes_read: int
    untrained: tuple[str, ...]  # tensors of the checkpoint that are published as they are
    repeated: Mapping[str, tuple[str, ...]]  # tensors that are published under more names
    prediction: Prediction | None  # on the last stage, where it is trained

    def share_embedding(self) -> None:
        """Give the last stage the embedding as it is now, where it reads it; collective."""
        apart = parallel_state.get_pipeline_model_parallel_world_size() > 1
        if self.source.predicts and apart and not self.source.tied:
            share_embedding(self.models)


def create_policy(
    source: ModelSource,
    config: MegatronConfig,
    operations: Mapping[str, str],
    *,
    device: torch.device,
    tensor: Collectives,
    trained: bool = True,
    frozen: Collection[str] = (),
    float32_head: bool = True,
) -> PolicyModel:
    """Builds this rank's chunks and loads the HF checkpoint of `source` into them.

    `operations`: which implementation each has. A critic of a language model's checkpoint has a
    head that starts at zero.
    `tensor`: over the tensor-parallel ranks. `trained`: wraps the chunks for gradients, which
    parameters take none that are made of tensors that are `frozen`, by names of the checkpoint.
    `float32_head`: logits are float32 whatever the model is. Collective over the model-parallel
    groups.
    """
    rotary = PositionRotary(source.hf_config, device, pairs=source.rotates_pairs)
    if source.latent and rotary.attention_scaling != 1.0:
        raise RotaryScalingError(
            "latent attention rotates a part of each head: mscale and mscale_all_dim must be equal"
        )
    options = core_options(operations, config)
    core = transformer_config(source, config, operations=options)
    core.operations = dict(operations)  # layers are built by it
    core.wide_norms = source.wide_norms
    core.windows = source.windows
    core.indexed_layers = source.shape.indexed_layers
    core.rotary_scaling = rotary.attention_scaling  # see upstream.py
    padded = source.padded_vocab(config)
    models = _build(source, core, config, rotary=rotary, padded_vocab=padded)
    tensors = tuple(local_tensors(models, source, core))
    loaded = load_hf(tensors, source, source.directory, padded_vocab=padded)
    last = models[-1] if parallel_state.is_pipeline_last_stage() else None
    output = None
    if last is not None:
        output = OutputHead(
            last,
            vocab=source.shape.vocab,
            tensor=tensor,
            float32=float32_head,
            most_logits=most_logits(operations.get("logprobs", "by_size")),
        )
    prediction = None
    if last is not None and source.predicts:
        predictor = last.get_submodule("mtp")
        assert isinstance(predictor, Predictor)
        prediction = Prediction(predictor, config.mtp_loss_scaling_factor)
    chunks: list[Any] = list(models)
    if core.bf16 or core.fp16:
        chunks = [_narrow(core, chunk) for chunk in chunks]
    if trained:
        _freeze(models, tensors, frozen, config)
        chunks = _wrap(chunks, core, config)
    policy = PolicyModel(
        source=source,
        config=core,
        chunks=chunks,
        models=models,
        tensors=tensors,
        head=output,
        padded_vocab=padded,
        bytes_read=loaded.bytes_read,
        untrained=loaded.untrained,
        repeated=loaded.repeated,
        prediction=prediction,
    )
    policy.share_embedding()
    return policy


def _narrow(core: TransformerConfig, chunk: torch.nn.Module) -> torch.nn.Module:
    """Float16Module, but biases of routers and some parameters stay as wide as they are."""
    biases = [
        (module, module.expert_bias)
        for module in chunk.modules()
        if getattr(module, "expert_bias", None) is not None
    ]
    wide = [(p, p.data) for name, p in chunk.named_parameters() if name.endswith(WIDE)]
    narrow: torch.nn.Module = Float16Module(core, chunk)
    for module, bias in biases:
        module.expert_bias = bias
    for parameter, values in wide:
        parameter.data = values
    return narrow


def _build(
    source: ModelSource,
    core: TransformerConfig,
    config: MegatronConfig,
    *,
    rotary: PositionRotary,
    padded_vocab: int,
) -> list[torch.nn.Module]:
    interleaved = config.virtual_pipeline > 1
    models = []
    for index in range(config.virtual_pipeline):
        stage = index if interleaved else None
        first = parallel_state.is_pipeline_first_stage(
            ignore_virtual=not interleaved, vp_stage=stage
        )
        tower = None
        if first and source.images is not None:
            tower = VisionTower.build(source.whole_config, source.images)
        request = ModelRequest(
            config=core,
            hf_config=source.hf_config,
            padded_vocab=padded_vocab,
            tied=source.tied,
            value_head=source.value_head,
            value_bias=source.value_bias,
            transformer_engine=uses_transformer_engine(config, source),
            rotary=rotary,
            pre_process=first,
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=not interleaved, vp_stage=stage
            ),
            vp_stage=stage,
            tower=tower,
            sees=source.images is not None,
            sandwich=source.sandwich,
            predicts=source.predicts,
        )
        # Megatron leaves some of its parameters (routers) on the host.
        models.append(build_model(config.model_provider, request).to(current_device()))
    return models


def _freeze(
    models: Sequence[torch.nn.Module],
    tensors: Sequence[LocalTensor],
    frozen: Collection[str],
    config: MegatronConfig,
) -> None:
    """Before they are wrapped: what is frozen has no place in the buffers of gradients."""
    for tensor in tensors:
        if tensor.binding.sources[0].name in frozen:
            tensor.parameter.requires_grad_(False)
    for model in models:
        keep_gradients(model, config)


def keep_gradients(model: Any, config: MegatronConfig) -> None:
    """Have a frozen embedding take gradients where layers are run again in backward.

    One is left out there if nothing before it takes any.
    """
    embedding = getattr(getattr(model, "language_model", model), "embedding", None)
    if (
        config.recompute == "full"
        and isinstance(embedding, torch.nn.Module)
        and not any(parameter.requires_grad for parameter in embedding.parameters())
    ):
        embedding.register_forward_hook(_require_gradient)


def _require_gradient(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _wrap(
    chunks: Sequence[torch.nn.Module], core: TransformerConfig, config: MegatronConfig
) -> list[torch.nn.Module]:
    """Megatron's DDP: gradients gather in float32 buffers, whatever the parameters' dtype."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.distributed_optimizer,
        overlap_grad_reduce=False,  # gradients are reduced once a step, not once a pass
    )
    return [
        DistributedDataParallel(core, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
