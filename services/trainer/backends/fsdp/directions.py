"""What steps of Muon add to matrices that ranks have parts of: each is whole on one meanwhile.

Which exchanges run depends on the model and the configuration alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from services.trainer.backends.fsdp.exchange import all_parts, gather_rows, own_part, scatter_rows
from services.trainer.backends.fsdp.tensor_parallel import DATA, TENSOR, tensor_cut
from services.trainer.backends.muon import Matrices
from services.trainer.config import MuonConfig


class ShardedDirections:
    """Makes parts of what is to be added to matrices parts of orthogonal ones; collective.

    Experts are whole on a data rank, which does its own. Of other matrices each data rank takes one
    a round, the largest first, so that none has more than one of them. Tensor ranks do the same on
    all that they have cut, and each replica on its own.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        matrices: Mapping[str, Matrices],
        settings: MuonConfig,
        mesh: DeviceMesh,
    ) -> None:
        self._parameters, self._matrices, self._settings = parameters, matrices, settings
        self._device = torch.device(mesh.device_type)
        self._data, self._tensor = mesh.get_group(DATA), mesh.get_group(TENSOR)
        self._stacks = [name for name in matrices if parameters[name].ndim == 3]
        alone = [name for name in matrices if parameters[name].ndim == 2]
        alone.sort(key=lambda name: (-parameters[name].numel(), name))
        size = self._data.size()
        self._rounds = [alone[i : i + size] for i in range(0, len(alone), size)]

    def __call__(self, updates: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._stacks:
            yield name, self._make(name, self._sent(updates[name])).to(updates[name].device)
        for names in self._rounds:
            parts = {name: self._sent(updates[name]) for name in names}
            own = self._data.rank()
            whole = None
            for owner, name in enumerate(names):  # all ahead of what each rank makes of its own
                gathered = gather_rows(parts[name], self._length(name), owner, self._data)
                whole = gathered if owner == own else whole
            made = None if whole is None else self._make(names[own], whole)
            whole = gathered = None
            for owner, name in enumerate(names):
                mine = made if owner == own else None
                part = scatter_rows(mine, parts[name], self._length(name), owner, self._data)
                yield name, part.to(updates[name].device)

    def _sent(self, update: torch.Tensor) -> torch.Tensor:
        """As iterations begin on it, on the device; with cpu_offload it is on the host."""
        return update.to(self._device, getattr(torch, self._settings.newton_schulz_dtype))

    def _make(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """What tensor ranks have of some rows."""
        cut = tensor_cut(self._parameters[name])
        whole = all_parts(rows, cut, self._tensor)
        return own_part(self._matrices[name].directions(whole, self._settings), cut, self._tensor)

    def _length(self, name: str) -> int:
        """Rows that data ranks have together, of one tensor rank's part."""
        cut = tensor_cut(self._parameters[name])
        length = self._parameters[name].shape[0]
        return length // (self._tensor.size() if cut is not None and cut.dim == 0 else 1)
