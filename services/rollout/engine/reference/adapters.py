"""Low-rank adapters beside the weights that serve: several at a time, each for rows of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from services.rollout.engine.interface import ServedWeights
from services.rollout.engine.versions import surplus
from services.rollout.errors import UnfitAdapterError
from sluice.weights.adapter import AdapterSpec, split_name, tensor_names
from sluice.weights.manifest import Manifest

Rows = tuple[ServedWeights | None, int]  # whose a run of rows is, None for nobody; how many


class AdapterShape(Protocol):
    """A tensor, or what a manifest says of one."""

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Factors:
    """A layer's part of an adapter: a [rank, in], b [out, rank]."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, eq=False)
class ServingAdapter:
    """An adapter on the device; factors by the layer they are of."""

    version: int
    digest: str
    spec: AdapterSpec
    factors: Mapping[str, Factors]
    line: str = ""  # its name, where a trainer has several

    @property
    def weights(self) -> ServedWeights:
        return ServedWeights(self.version, self.digest, self.spec.base_digest)


@dataclass(frozen=True)
class _Share:
    """Rows int64[n] of a pass that an adapter applies to; `mask` bool[T, 1] says the same."""

    adapter: ServingAdapter
    rows: torch.Tensor
    mask: torch.Tensor | None


class AdapterLayers:
    """The linear layers of a model, which add what adapters give to the rows of each."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self.held: dict[int, ServingAdapter] = {}  # by version, in the order of their commits
        self._device = device
        self._layers = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, torch.nn.Linear) and not _is_out_of_reach(name, module)
        }
        self._hooked: set[str] = set()
        self._shares: list[_Share] = []
        self._width = 0

    def check(self, version: int, tensors: Mapping[str, AdapterShape]) -> None:
        """Raises UnfitAdapterError naming a tensor whose layer this model has not, or not so."""
        for layer in sorted({split_name(name)[0] for name in tensors}):
            found = self._layers.get(layer)
            a, b = tensor_names(layer)
            if found is None:
                raise UnfitAdapterError(
                    f"the model has no linear layer {layer!r} that takes adapters",
                    version=version,
                    tensor=a,
                )
            for name, axis, size in ((a, 1, found.in_features), (b, 0, found.out_features)):
                if tensors[name].shape[axis] != size:
                    raise UnfitAdapterError(
                        f"tensor {name!r} has shape {[*tensors[name].shape]}; {size} of the "
                        "layer's should stand in it",
                        version=version,
                        tensor=name,
                    )

    def fit(
        self, manifest: Manifest, spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]
    ) -> ServingAdapter:
        """Puts an adapter on the device, in its own dtype. Raises UnfitAdapterError."""
        self.check(manifest.version, tensors)
        factors = {}
        for layer in {split_name(name)[0] for name in tensors}:
            a, b = (tensors[name].to(self._device, copy=True) for name in tensor_names(layer))
            factors[layer] = Factors(a, b)
        return ServingAdapter(manifest.version, manifest.digest, spec, factors, manifest.line)

    def add(self, adapter: ServingAdapter) -> None:
        """Holds an adapter, for rows that name its version."""
        self.held[adapter.version] = adapter
        for name in adapter.factors.keys() - self._hooked:
            self._layers[name].register_forward_hook(partial(self._apply, name))
            self._hooked.add(name)

    def release(self, limit: int, used: Collection[int]) -> list[ServingAdapter]:
        """Lets go of those beyond `limit` that are not among those used; returns them."""
        lines = {version: adapter.line for version, adapter in self.held.items()}
        return [self.held.pop(version) for version in surplus(lines, limit, used)]

    def share(self, rows: Iterable[Rows], *, whole: bool) -> None:
        """Says whose the rows of the next pass are, in packed order.

        whole: every adapter is computed for all rows and kept for its own, so that how a row is
        rounded does not depend on how many others are of its adapter.
        """
        places: dict[int, list[int]] = {}
        first = 0
        for weights, count in rows:
            if weights is not None and weights.version in self.held:
                places.setdefault(weights.version, []).extend(range(first, first + count))
            first += count
        self._width, self._shares = first, []
        for version in sorted(places):
            chosen = torch.tensor(places[version], dtype=torch.int64, device=self._device)
            mask = None
            if whole:
                mask = torch.zeros(first, 1, dtype=torch.bool, device=self._device)
                mask[chosen] = True
            self._shares.append(_Share(self.held[version], chosen, mask))

    def select(self, rows: torch.Tensor) -> tuple[list[_Share], int]:
        """Has the shares count for rows int64[n] of the pass in their stead; returns what was."""
        before = self._shares, self._width
        shares = []
        for share in before[0]:
            chosen = torch.isin(rows, share.rows)
            mask = None if share.mask is None else chosen[:, None]
            shares.append(_Share(share.adapter, chosen.nonzero()[:, 0], mask))
        self._shares = [share for share in shares if len(share.rows)]
        self._width = len(rows)
        return before

    def restore(self, before: tuple[list[_Share], int]) -> None:
        """Ends what `select` began."""
        self._shares, self._width = before

    def _apply(
        self, name: str, layer: torch.nn.Module, inputs: Any, output: torch.Tensor
    ) -> torch.Tensor:
        """Adds to a layer's output, in the dtype of the adapter, as peft does."""
        if not self._shares:
            return output
        states, out = inputs[0].flatten(0, -2), output.flatten(0, -2)
        assert len(states) == self._width, f"{name} saw {len(states)} of {self._width} rows"
        for share in self._shares:
            if (factors := share.adapter.factors.get(name)) is None:
                continue
            mine = states if share.mask is not None else states[share.rows]
            added = mine.to(factors.a.dtype) @ factors.a.T @ factors.b.T * share.adapter.spec.scale
            if share.mask is not None:
                out = torch.where(share.mask, (out + added).to(out.dtype), out)
            else:
                out[share.rows] = (out[share.rows] + added).to(out.dtype)
        return out.unflatten(0, output.shape[:-1])


def _is_out_of_reach(name: str, module: torch.nn.Module) -> bool:
    """Whether a layer sees other rows than those of the pass: of experts, a tower, or the head."""
    parts = name.split(".")
    heads: Any = module.get_output_embeddings()  # type: ignore[operator]
    is_head = heads is not None and module.get_submodule(name) is heads
    return is_head or not {"experts", "visual", "vision_tower"}.isdisjoint(parts)
