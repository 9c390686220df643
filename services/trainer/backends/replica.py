"""Parameters that a rank holds whole: their optimizer over one flat buffer, their checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.trainer.backend import Mesh, StepOutcome, decays, refuse_norm
from services.trainer.backends.muon import MOMENTUM, Matrices, Muon, other_kind
from services.trainer.backends.trainable import other_trained
from services.trainer.config import OptimConfig
from services.trainer.parking import HeldTensors
from services.trainer.staging import LiveTensors, StagedCheckpoint
from sluice import operations
from sluice.durable import write_new
from sluice.vision import part_of
from sluice.weights.manifest import FileEntry, digest_file
from sluice.weights.shards import write_shard

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
MODEL_FILE, OPTIMIZER_FILE = "policy.safetensors", "optimizer.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
ALIKE = {"text": 1.0, "tower": 1.0, "projector": 1.0}  # learning rates of all parts


def norm_of(gradients: torch.Tensor) -> float:
    """Return the norm of what this rank holds."""
    return float(torch.linalg.vector_norm(gradients, dtype=torch.float64))


class FlatOptimizer:
    """Parameters whose gradients are views of one float32 buffer.

    Backward passes add into the buffer; `step` is the only place that divides. Parameters that
    require no gradient are left out.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optim: OptimConfig,
        *,
        adamw: str,
        scales: Mapping[str, float] = ALIKE,
        matrices: Mapping[str, Matrices] = {},
    ) -> None:
        """`adamw`: its implementation. `scales`: learning rates by part.

        `matrices`: of the parameters that Muon steps, by name; AdamW steps the others.
        """
        self.parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        first = next(iter(self.parameters.values()))
        size = sum(p.numel() for p in self.parameters.values())
        self.gradients = torch.zeros(size, dtype=first.dtype, device=first.device)
        for name, view in self.views():
            self.parameters[name].grad = view
        groups: dict[tuple[bool, float], list[torch.nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            if name not in matrices:
                key = decays(name, parameter.ndim), scales[part_of(name)]
                groups.setdefault(key, []).append(parameter)
        self._optim = optim
        self.muon = Muon(
            {name: self.parameters[name] for name in matrices},
            matrices,
            optim,
            scales={name: scales[part_of(name)] for name in matrices},
        )
        self.adam = torch.optim.AdamW(
            [
                {"params": parameters, "decays": do, "scale": scale}
                for (do, scale), parameters in (groups or {(False, 1.0): []}).items()
            ],
            lr=optim.learning_rate,
            betas=optim.betas,
            eps=optim.epsilon,
            **operations.adamw_options(adamw),
        )

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients by name, each in its place of the buffer."""
        offset = 0
        for name, parameter in self.parameters.items():
            view = self.gradients[offset : offset + parameter.numel()]
            offset += parameter.numel()
            yield name, view.view_as(parameter)

    def step(
        self,
        normalizer: float,
        rate: float,
        reduce: Callable[[torch.Tensor], None],
        norm: Callable[[torch.Tensor], float] = norm_of,
        optim: OptimConfig | None = None,
    ) -> StepOutcome:
        """Sum gradients over ranks with `reduce`, divide, clip, apply, clear.

        `norm` is that of all parameters, where this rank holds some of them. `optim` has other
        numbers for this step.
        """
        used = self._optim if optim is None else optim
        reduce(self.gradients)
        measured = norm(self.gradients) / normalizer
        if refused := refuse_norm(measured, clips=bool(used.max_grad_norm)):
            self.clear()
            return StepOutcome(grad_norm=measured, learning_rate=rate, skipped_reason=refused)
        clip = 1.0
        if used.max_grad_norm:
            clip = min(1.0, used.max_grad_norm / (measured + CLIP_EPSILON))
        self.gradients.mul_(clip / normalizer)
        for group in self.adam.param_groups:
            group["lr"] = rate * group["scale"]
            group["betas"], group["eps"] = used.betas, used.epsilon
            group["weight_decay"] = used.weight_decay if group["decays"] else 0.0
        self.adam.step()
        self.muon.step(rate)
        self.clear()
        return StepOutcome(grad_norm=measured, learning_rate=rate)

    def clear(self) -> None:
        self.gradients.zero_()

    def held(self, others: Iterable[torch.Tensor]) -> HeldTensors:
        """Return the parameters, the gradients and the moments, and others beside them."""
        moments = [kept for state in self.adam.state.values() for kept in state.values()]
        moments += self.muon.momenta.values()
        return HeldTensors([*others, *self.parameters.values(), *moments], [self.gradients])

    def state(self) -> dict[str, torch.Tensor]:
        """Return what was kept of earlier steps, as `<parameter>/<moment>`."""
        momenta = {f"{name}/{MOMENTUM}": kept for name, kept in self.muon.momenta.items()}
        return momenta | {
            f"{name}/{kind}": self.adam.state[parameter][kind]
            for name, parameter in self.parameters.items()
            if parameter in self.adam.state
            for kind in MOMENTS
        }

    def forget(self) -> None:
        """Begin anew."""
        self.adam.state.clear()
        self.muon.momenta = {}
        self.clear()


class StagedFiles(StagedCheckpoint):
    """Files of tensors, and `small` ones beside them; ranks need nothing of each other."""

    def __init__(
        self,
        directory: Path,
        files: Mapping[str, Mapping[str, torch.Tensor]],
        small: Mapping[str, bytes],
        *,
        sync: bool,
    ) -> None:
        self._directory, self._small, self._sync = directory, small, sync
        self._files = {name: LiveTensors(tensors) for name, tensors in files.items()}

    def write(self) -> dict[str, FileEntry]:
        entries = {}
        for name, tensors in self._files.items():
            shard = write_shard(self._directory, name, tensors, sync=self._sync)
            entries[name] = FileEntry(shard.size, shard.digest)
        for name, content in self._small.items():
            write_new(self._directory / name, content, sync=self._sync)
            entries[name] = FileEntry(*digest_file(self._directory / name))
        return entries

    def keep(self) -> None:
        for tensors in self._files.values():
            tensors.keep()


def stage(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    mesh: Mesh,
    *,
    sync: bool,
) -> StagedFiles:
    """Take in tensors, the state of an optimizer and the random state, to be written.

    The first and the last rank share the writing.
    """
    files: dict[str, Mapping[str, torch.Tensor]] = random_file(mesh)
    if mesh.data_rank == 0:
        files[MODEL_FILE] = tensors
    if mesh.data_rank == mesh.data_size - 1:
        files[OPTIMIZER_FILE] = optimizer
    return StagedFiles(directory, files, {}, sync=sync)


def random_file(mesh: Mesh) -> dict[str, Mapping[str, torch.Tensor]]:
    """The random state of this rank in a file of its own."""
    return {_random_name(mesh): {"torch": torch.get_rng_state()}}


Part = Callable[[str, torch.Tensor], torch.Tensor]


def _whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    del name
    return tensor


def load(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    optimizer: FlatOptimizer,
    mesh: Mesh,
    *,
    part: Part = _whole,
    holds_all: bool = True,
    weights_only: bool = False,
) -> None:
    """Read what was staged, under any count of ranks.

    `part` cuts what this rank holds out of a tensor of that name. Unless it `holds_all`, there may
    be more in the checkpoint. With `weights_only` the optimizer begins anew. Raises ValueError for
    another model's or a damaged one; the state is then undefined.
    """
    with _open(directory / MODEL_FILE) as saved, torch.no_grad():
        names = set(saved.keys())
        different = names ^ tensors.keys() if holds_all else tensors.keys() - names
        if different:
            named = ", ".join(sorted(different)[:8])
            raise ValueError(f"the checkpoint is of another model, they differ in: {named}")
        if holds_all:
            _check_trained(directory, optimizer)
        for name, tensor in tensors.items():
            _fill(name, tensor, part(name, saved.get_tensor(name)))
    if weights_only:
        optimizer.forget()
        return
    with _open(directory / OPTIMIZER_FILE) as moments:
        stepped = set(moments.keys())
        _read_momenta(optimizer.muon, moments, stepped)
        for name, parameter in optimizer.parameters.items():
            if f"{name}/step" not in stepped:
                optimizer.adam.state.pop(parameter, None)
                continue
            state = optimizer.adam.state[parameter]
            for kind in MOMENTS:  # in place: a second copy would be twice the model
                read = moments.get_tensor(f"{name}/{kind}")
                if kind != "step":
                    read = part(name, read)
                if kind in state:
                    _fill(f"{name}/{kind}", state[kind], read)
                else:
                    state[kind] = read.to(parameter.device, copy=True)
    optimizer.clear()
    random = directory / _random_name(mesh)
    if random.exists():
        with _open(random) as states:
            torch.set_rng_state(states.get_tensor("torch"))


def _read_momenta(muon: Muon, saved: Any, names: Set[str]) -> None:
    """Of all matrices, or of none: they have all been stepped, or none was."""
    if not any(f"{name}/{MOMENTUM}" in names for name in muon.parameters):
        muon.momenta = {}
        return
    if not muon.momenta:
        muon.start()
    for name, momentum in muon.momenta.items():
        _fill(name, momentum, saved.get_tensor(f"{name}/{MOMENTUM}"))


def _check_trained(directory: Path, optimizer: FlatOptimizer) -> None:
    with _open(directory / OPTIMIZER_FILE) as moments:
        kinds: dict[str, set[str]] = {}
        for key in moments.keys():  # noqa: SIM118
            name, _, kind = key.rpartition("/")
            kinds.setdefault(kind, set()).add(name)
    momenta, adams = kinds.get(MOMENTUM, set()), kinds.get(MOMENTS[0], set())
    other = other_kind(optimizer.muon.matrices.keys(), momenta, adams)
    if other := other or other_trained(optimizer.parameters.keys(), momenta | adams):
        raise ValueError(f"the checkpoint {directory.name!r} does not fit: {other}")


def _fill(name: str, tensor: torch.Tensor, read: torch.Tensor) -> None:
    if tensor.shape != read.shape:
        raise ValueError(
            f"the checkpoint is of another model: {name} has shape {list(read.shape)}, "
            f"not {list(tensor.shape)}"
        )
    tensor.copy_(read)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file of tensors, which are read one by one. Raises ValueError for a damaged one."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error


def _random_name(mesh: Mesh) -> str:
    return f"random-{mesh.rank:05d}.safetensors"
