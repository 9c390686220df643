"""Weight versions on their way from a directory to the model."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from services.rollout.backends.reference.model import ServingModel
from services.rollout.errors import UnfitWeightsError
from services.rollout.version_files import checked_manifest, directory_digest, reading
from sluice.weights.errors import WeightStoreError
from sluice.weights.manifest import Manifest
from sluice.weights.shards import load_verified

LOADER_NICENESS = 5


@dataclass(frozen=True)
class PreparedWeights:
    """Parameters on the device, ready to be swapped in."""

    version: int
    digest: str
    parameters: dict[str, torch.nn.Parameter]


def load_version(
    model: ServingModel | None,
    dtype: torch.dtype,
    device: torch.device,
    version: int,
    digest: str,
    directory: Path,
) -> tuple[ServingModel, PreparedWeights]:
    """Read, verify and fit a version directory; a `model` that serves goes on serving.

    Without a model the directory's config builds it. Raises DigestMismatchError,
    UnfitWeightsError or UnsupportedModelError.
    """
    with reading(version):
        manifest = checked_manifest(directory, version, digest)
        tensors = dict(load_verified(directory, manifest))
    model = model or ServingModel(directory, dtype, device)
    if model.names_match(tensors):
        return model, PreparedWeights(version, digest, model.fit(tensors))
    # Checkpoints of some architectures name or cut tensors in another way than the module.
    converted = ServingModel(directory, dtype, device)
    return model, PreparedWeights(version, digest, model.fit(converted.parameters()))


def fit_received(
    model: ServingModel, manifest: Manifest, tensors: Iterator[tuple[str, torch.Tensor]]
) -> PreparedWeights:
    """Take a version that comes tensor by tensor; all of it is read, whatever it fits.

    Raises UnfitWeightsError and what the iterator raises.
    """
    received = dict(tensors)
    if not model.names_match(received):
        raise UnfitWeightsError(
            "the checkpoint names tensors in another way than the model: it needs the store",
            version=manifest.version,
        )
    return PreparedWeights(manifest.version, manifest.digest, model.fit(received))


def open_model(
    directory: Path, dtype: torch.dtype, device: torch.device
) -> tuple[ServingModel, PreparedWeights]:
    """Build a model from a plain HF directory and take its weights as version 0.

    Raises UnfitWeightsError or UnsupportedModelError.
    """
    try:
        digest = directory_digest(directory)
    except (WeightStoreError, OSError) as error:
        raise UnfitWeightsError(f"{directory} cannot be read: {error}") from error
    model = ServingModel(directory, dtype, device)
    return model, PreparedWeights(0, digest, model.parameters())


def yield_to_others() -> None:
    """Make the calling thread one of low impact: a single core, and that last in line."""
    torch.set_num_threads(1)
    if sys.platform == "linux":  # elsewhere priorities are of processes only
        thread = threading.get_native_id()
        current = os.getpriority(os.PRIO_PROCESS, thread)  # going back from it needs a privilege
        os.setpriority(os.PRIO_PROCESS, thread, max(current, LOADER_NICENESS))
