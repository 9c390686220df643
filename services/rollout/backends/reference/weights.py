"""Weight versions on their way from a directory to the model."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from services.rollout.backends.reference.model import ServingModel
from services.rollout.errors import DigestMismatchError, UnfitWeightsError
from sluice.weights.checkpoint import describe_shard, shard_paths
from sluice.weights.digest import digest_version
from sluice.weights.errors import FileDigestError, TensorDigestError, WeightStoreError
from sluice.weights.manifest import MANIFEST_NAME, read_manifest
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
    try:
        manifest = read_manifest(directory)
        if manifest.digest != digest:
            raise DigestMismatchError(
                f"version {version} has digest {manifest.digest}, not {digest}",
                version=version,
                expected=digest,
                actual=manifest.digest,
            )
        if manifest.version != version:
            raise UnfitWeightsError(
                f"{directory.name!r} holds version {manifest.version}, not {version}",
                version=version,
            )
        tensors = dict(load_verified(directory, manifest))
    except TensorDigestError as error:
        raise DigestMismatchError(
            str(error), tensor=error.name, expected=error.expected, actual=error.actual
        ) from error
    except FileDigestError as error:
        raise DigestMismatchError(
            str(error), file=error.file_name, expected=error.expected, actual=error.actual
        ) from error
    except (WeightStoreError, OSError) as error:
        raise UnfitWeightsError(f"version {version} cannot be read: {error}") from error
    model = model or ServingModel(directory, dtype, device)
    if model.names_match(tensors):
        return model, PreparedWeights(version, digest, model.fit(tensors))
    # Checkpoints of some architectures name or cut tensors in another way than the module.
    converted = ServingModel(directory, dtype, device)
    return model, PreparedWeights(version, digest, model.fit(converted.parameters()))


def open_model(
    directory: Path, dtype: torch.dtype, device: torch.device
) -> tuple[ServingModel, PreparedWeights]:
    """Build a model from a plain HF directory and take its weights as version 0.

    Raises UnfitWeightsError or UnsupportedModelError.
    """
    try:
        digest = _directory_digest(directory)
    except (WeightStoreError, OSError) as error:
        raise UnfitWeightsError(f"{directory} cannot be read: {error}") from error
    model = ServingModel(directory, dtype, device)
    return model, PreparedWeights(0, digest, model.parameters())


def _directory_digest(directory: Path) -> str:
    if (directory / MANIFEST_NAME).is_file():
        return read_manifest(directory).digest
    shards = [describe_shard(path) for path in shard_paths(directory)]
    return digest_version(
        (name, tensor.dtype, tensor.shape, tensor.digest)
        for shard in shards
        for name, tensor in shard.tensors.items()
    )


def yield_to_others() -> None:
    """Make the calling thread one of low impact: a single core, and that last in line."""
    torch.set_num_threads(1)
    if sys.platform == "linux":  # elsewhere priorities are of processes only
        thread = threading.get_native_id()
        current = os.getpriority(os.PRIO_PROCESS, thread)  # going back from it needs a privilege
        os.setpriority(os.PRIO_PROCESS, thread, max(current, LOADER_NICENESS))
