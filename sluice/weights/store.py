"""Versions of weights in a shared directory: immutable, verified, committed in one rename.

    <root>/versions/<8 digits>/   a plain HF checkpoint and its manifest.json
    <root>/allocated/<8 digits>   one marker per number ever given out; names the parent
    <root>/staging/<version>-<nonce>{,.lock}   a version in the making and its owner's flock
    <root>/pins/<version>/<owner>   keeps a version from retention
    <root>/trash/                 versions on their way out
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote

from sluice.durable import locked, sync_path, write_new
from sluice.weights.checkpoint import INDEX_NAME, SINGLE_NAME, companion_files, describe_shard
from sluice.weights.checkpoint import shard_paths as checkpoint_shards
from sluice.weights.digest import digest_file
from sluice.weights.errors import (
    DuplicateFileError,
    DuplicateTensorError,
    MissingFileError,
    MissingTensorError,
    StagingLostError,
    UnexpectedTensorError,
    VersionExistsError,
    VersionNotFoundError,
)
from sluice.weights.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    ShardFile,
    StoredTensor,
    TensorEntry,
    encode_manifest,
    read_manifest,
    version_digest,
)
from sluice.weights.staging import Staging, open_staging, sweep_staging

__all__ = [
    "ShardFile",
    "Staging",
    "TensorEntry",
    "VersionRecord",
    "WeightStore",
    "import_checkpoint",
]
