"""Checks versions for SGLang, loads them into it, and checks what it then holds.

SGLang reports a checksum of each of its parameters (/weights_checker). On a host they are the
first 8 bytes of the SHA-256 of the parameter's bytes (`tensor_hash` in SGLang 0.5.23), so that
they follow from the checkpoint; elsewhere, or where a parameter is cut over ranks or cast, they
must at least have changed with the tensors that changed and with no others.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.rollout.engine.images import ImageReader
from services.rollout.engine.sglang.client import Capabilities, SglangClient, SGLangRefusedError
from services.rollout.engine.versions import (
    check_processor,
    checked_manifest,
    describe_model,
    reading,
    tag,
)
from services.rollout.errors import DigestMismatchError, EngineFailedError, UnfitWeightsError
from sluice import platform
from sluice.address import split_address
from sluice.weights.checkpoint import (
    CheckedShards,
    Extent,
    parse_header,
    shard_paths,
    verify_files,
)
from sluice.weights.manifest import Manifest, StoredTensor, TensorEntry
from sluice.weights.prediction import predicts
from sluice.weights.stored_experts import are_straight

if TYPE_CHECKING:
    from services.rollout.engine.interface import IncomingWeights
    from sluice.weights.transfer.plan import Membership


SEEING_MIXTURE, SEEING_MIXTURE_LAYERS = "Qwen3VLMoeForConditionalGeneration", 3


@dataclass(frozen=True)
class DiskVersion:
    """A version in an HF directory of this host, every byte of it checked."""

    version: int
    digest: str
    directory: Path
    tensors: Mapping[str, TensorEntry | StoredTensor]
    config: Mapping[str, Any]  # config.json
    images: ImageReader
    line: str = ""

    @property
    def tag(self) -> str:
        """The name under which SGLang has it."""
        return tag(self.version, self.digest)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.config.get("architectures") or ())

    def renamed(self, manifest: Manifest) -> DiskVersion:
        """Returns the version that has replaced this one in a server, without files here."""
        return replace(
            self, version=manifest.version, digest=manifest.digest, tensors=manifest.tensors
        )


def read_version(
    version: int, digest: str, directory: Path, checked: CheckedShards | None = None
) -> DiskVersion:
    """Checks a version of the store but for shards that were `checked` before; blocks.

    Raises DigestMismatchError naming the tensor or file, or UnfitWeightsError.
    """
    with reading(version):
        manifest = checked_manifest(directory, version, digest)
        verify_files(directory, manifest, checked)
    config = read_config(directory)
    _refuse_straight_experts(directory.name, config, manifest.tensors)
    images = ImageReader.of_model(directory, config)
    check_processor(manifest, images.processor)
    return DiskVersion(version, digest, directory, manifest.tensors, config, images)


def read_model(directory: Path) -> DiskVersion:
    """Hashes a model directory, which is version 0; blocks. Raises UnfitWeightsError."""
    digest, tensors = describe_model(directory)
    config = read_config(directory)
    _refuse_straight_experts(directory.name, config, tensors)
    images = ImageReader.of_model(directory, config)
    return DiskVersion(0, digest, directory, tensors, config, images)


def read_config(directory: Path) -> dict[str, Any]:
    """Reads `config.json`. Raises UnfitWeightsError, also where SGLang would serve it wrong."""
    try:
        document = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UnfitWeightsError(f"{directory.name}: config.json cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise UnfitWeightsError(f"{directory.name}: config.json is no object")
    _refuse_dense_layers(directory.name, document)
    _refuse_halves(directory.name, document)
    _refuse_other_deepstack(directory.name, document)
    return document


def _refuse_dense_layers(name: str, document: Mapping[str, Any]) -> None:
    """Refuses a mixture of Qwen3's with dense layers, whose weights SGLang leaves unread."""
    architectures = document.get("architectures") or ()
    if not {"Qwen3MoeForCausalLM", SEEING_MIXTURE} & {*architectures}:
        return
    text = document.get("text_config")
    text = text if isinstance(text, Mapping) else document
    if text.get("mlp_only_layers") or text.get("decoder_sparse_step") not in (None, 1):
        raise UnfitWeightsError(
            f"{name}: dense layers among those of experts (mlp_only_layers, decoder_sparse_step), "
            "which SGLang 0.5.23 would serve with weights of its own making"
        )


def _refuse_halves(name: str, document: Mapping[str, Any]) -> None:
    """Refuses a GLM-5 whose indexers SGLang would rotate by halves, as no trainer does."""
    is_glm5 = "GlmMoeDsaForCausalLM" in (document.get("architectures") or ())
    if is_glm5 and document.get("indexer_rope_interleave") is not True:
        raise UnfitWeightsError(
            f"{name}: config.json has no `indexer_rope_interleave: true`, as published ones have: "
            "without it SGLang 0.5.23 attends to other keys than trainers; add it"
        )


def _refuse_other_deepstack(name: str, document: Mapping[str, Any]) -> None:
    """Refuses a Qwen3-VL-MoE whose images add to another count of layers than SGLang's."""
    if SEEING_MIXTURE not in (document.get("architectures") or ()):
        return
    tower = document.get("vision_config")
    layers = tower.get("deepstack_visual_indexes") if isinstance(tower, Mapping) else None
    if not isinstance(layers, list) or len(layers) != SEEING_MIXTURE_LAYERS:
        raise UnfitWeightsError(
            f"{name}: deepstack_visual_indexes is {layers}, and SGLang 0.5.23 adds images to "
            f"{SEEING_MIXTURE_LAYERS} layers of a {SEEING_MIXTURE}"
        )


def _refuse_straight_experts(
    name: str, document: Mapping[str, Any], tensors: Mapping[str, TensorEntry | StoredTensor]
) -> None:
    """Refuses experts of a Qwen3-VL-MoE as transformers writes them: SGLang takes them for others.

    Where they are square it would serve them transposed without a word.
    """
    if SEEING_MIXTURE not in (document.get("architectures") or ()):
        return
    if are_straight({key: tuple(tensor.shape) for key, tensor in tensors.items()}):
        raise UnfitWeightsError(
            f"{name}: experts.gate_up_proj is [experts, 2 x width, hidden], as transformers writes "
            "it; SGLang reads [experts, hidden, 2 x width], as it is published. `sluice convert` "
            "to torch_dist and back makes that of it: docs/converter.md"
        )


def check_drafts(version: DiskVersion) -> None:
    """Raises UnfitWeightsError unless the version has a layer that tokens can be drafted by."""
    if not any(predicts(name, version.config) for name in version.tensors):
        raise UnfitWeightsError(
            f"version {version.version} has no layer of multi-token prediction, which "
            "engine.sglang.speculative_steps drafts by",
            version=version.version,
        )


def check_encoders(serving: DiskVersion, new: DiskVersion) -> None:
    """Raises UnfitWeightsError where encoder-only servers would go on with weights of before.

    They take no new ones while they run (SGLang 0.5.23).
    """
    from sluice.vision import part_of  # torch: only where there are encoders

    changed = sorted(
        name
        for name, tensor in new.tensors.items()
        if part_of(name) != "text" and tensor.digest != serving.tensors[name].digest
    )
    if changed:
        raise UnfitWeightsError(
            f"version {new.version} has other weights of what sees than the model that serves, in "
            f"{len(changed)} tensors ({', '.join(changed[:8])}), which encoder-only servers do not "
            "take: train without the tower and the projector, or leave out engine.sglang.encoders",
            version=new.version,
        )


def check_fit(serving: DiskVersion, new: DiskVersion) -> None:
    """Raises UnfitWeightsError unless `new` can be loaded into the model that serves."""
    if new.architectures != serving.architectures:
        raise UnfitWeightsError(
            f"version {new.version} is of {', '.join(new.architectures) or 'nothing'}, the engine "
            f"serves {', '.join(serving.architectures) or 'nothing'}",
            version=new.version,
        )
    if serving.images.processor != new.images.processor:  # the server keeps the one it began with
        raise UnfitWeightsError(
            f"version {new.version} is shown images by another preprocessor_config.json than the "
            "model that serves",
            version=new.version,
            expected=serving.images.processor,
            actual=new.images.processor,
        )
    old, shapes = serving.shapes, new.shapes
    differing = {n for n in old.keys() | shapes.keys() if old.get(n) != shapes.get(n)}
    if differing:
        raise UnfitWeightsError(
            f"version {new.version} differs from the model that serves in {len(differing)} "
            f"tensors: {', '.join(sorted(differing)[:8])}",
            version=new.version,
        )


# checkpoints hold apart, in this order, what SGLang holds in one parameter
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PADDED = ("embed_tokens.weight", "lm_head.weight")  # SGLang adds rows of zeros to the vocabulary
PADDED_ROWS = 64
_STACKED_NAME = re.compile(r"^(.*\.)(qkv_proj|gate_up_proj)(\.(?:weight|bias))$")

Checksums = Mapping[str, str]
Tensors = Mapping[str, TensorEntry | StoredTensor]  # by HF name


def tensors_of(parameter: str) -> tuple[str, ...]:
    """Returns the HF names of the tensors that make up a parameter of SGLang."""
    match = _STACKED_NAME.match(parameter)
    if match is None:
        return (parameter,)
    before, stacked, after = match.groups()
    return tuple(f"{before}{part}{after}" for part in STACKED[stacked])


def from_answer(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    """Reads checksums by parameter of every rank, in the order of ranks."""

    def place(rank: Mapping[str, Any]) -> tuple[int, ...]:
        info = rank["parallelism_info"]
        info = info[0] if isinstance(info, list) else info
        return (info["dp_rank"], info["pp_rank"], info["tp_rank"])

    return [dict(rank["checksums"]) for rank in sorted(answer["ranks"], key=place)]


class CheckpointChecksums:
    """Computes SGLang's checksums of parameters from safetensors files."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._places: dict[str, tuple[Path, Extent]] = {}
        for path in files:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                for name, extent in parse_header(mapped, file_name=path.name).items():
                    self._places[name] = (path, extent)

    def of(self, parameters: Iterable[str]) -> dict[str, str]:
        """Returns the checksums of those parameters whose tensors are all here."""
        checksums: dict[str, str] = {}
        for parameter in parameters:
            names = tensors_of(parameter)
            if all(name in self._places for name in names):
                checksums[parameter] = self._digest(names)
        return checksums

    def _digest(self, names: Iterable[str]) -> str:
        hasher = hashlib.sha256()
        for name in names:
            path, extent = self._places[name]
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                with memoryview(mapped) as view, view[extent.begin : extent.end] as piece:
                    hasher.update(piece)
                    hasher.update(bytes(_padding(name, extent)))
        return f"{int.from_bytes(hasher.digest()[:8], 'big'):016x}"


def _padding(name: str, extent: Extent) -> int:
    """Returns the number of bytes that SGLang adds to a tensor."""
    rows = extent.shape[0] if extent.shape else 0
    if not (rows and name.endswith(PADDED)):
        return 0
    return (extent.end - extent.begin) // rows * (-rows % PADDED_ROWS)


def wrong_values(ranks: Iterable[Checksums], expected: Checksums) -> list[str]:
    """Names parameters that are not what the checkpoint says, on any rank."""
    return sorted(
        {
            name
            for rank in ranks
            for name in rank
            if name in expected and rank[name] != expected[name]
        }
    )


def wrong_changes(
    before: list[dict[str, str]],
    after: list[dict[str, str]],
    old: Mapping[str, str],
    new: Mapping[str, str],
    *,
    exact: bool,
) -> list[str]:
    """Names parameters that changed though their tensors did not, or stayed though they changed.

    `old` and `new` are digests of the tensors of the two versions by HF name. A parameter has
    changed when it has on some rank: the others may hold what stayed of it. Unless the server
    keeps them as `exact` as they came, small changes may be lost in a cast.
    """
    wrong: list[str] = []
    for name in {name for rank in before for name in rank}:
        parts = tensors_of(name)
        if not all(part in old and part in new for part in parts):
            continue
        wanted = any(old[part] != new[part] for part in parts)
        found = any(
            one.get(name) != other.get(name) for one, other in zip(before, after, strict=True)
        )
        if (found and not wanted) or (exact and wanted and not found):
            wrong.append(name)
    return sorted(wrong)


CHECK_SECONDS = 600.0
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

Digests = Mapping[str, str]


class ServerWeights:
    """Loads weights into one server and checks what it holds.

    All but `check` is called while nothing decodes.

    `parameters` are SGLang's own names, known after the first check.
    """

    def __init__(
        self, client: SglangClient, capabilities: Capabilities, *, verifies: bool, seconds: float
    ) -> None:
        self._client, self._capabilities = client, capabilities
        self._verifies, self._seconds = verifies, seconds
        self._checksums: list[dict[str, str]] = []
        self._digests: Digests = {}
        self._groups: list[Membership] = []

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self._checksums[0]) if self._checksums else ()

    @property
    def computes(self) -> bool:
        """Whether checksums follow from the files: whole parameters, on a host."""
        capabilities = self._capabilities
        is_whole = capabilities.tp_size == capabilities.pp_size == 1
        return is_whole and capabilities.device == platform.CPU.device_type

    def forget(self) -> None:
        """Forgets what the server holds."""
        self._checksums, self._digests = [], {}

    def expected(self, version: DiskVersion) -> dict[str, str]:
        """Computes checksums of a version on disk; blocks. Empty where files do not give them."""
        if not (self._verifies and self.computes and self._is_exact(version.tensors)):
            return {}
        return CheckpointChecksums(shard_paths(version.directory)).of(self.parameters)

    async def load(self, version: DiskVersion, expected: Mapping[str, str] | None) -> None:
        """Swaps in a version of this host's disk.

        Raises UnfitWeightsError where SGLang refuses it, DigestMismatchError where it holds
        something else afterwards.
        """
        body = {
            "model_path": str(version.directory),
            "weight_version": version.tag,
            "flush_cache": False,  # prompts of another version are not found anyway
            "abort_all_requests": False,
        }
        try:
            await self._client.post("/update_weights_from_disk", body, self._seconds)
        except SGLangRefusedError as error:
            raise UnfitWeightsError(str(error), version=version.version) from error
        await self.check(version, expected)

    async def check(self, version: DiskVersion, expected: Mapping[str, str] | None = None) -> None:
        """Compares what the server holds with a version of the disk; the first one is learnt."""
        if not self._verifies:
            return
        checksums = await self._read()
        before, self._checksums = self._checksums, checksums
        if expected is None:
            expected = await asyncio.to_thread(self.expected, version)
        wrong = wrong_values(checksums, expected)
        exact = self._is_exact(version.tensors)
        self._settle(before, checksums, version.tensors, wrong, is_exact=exact)

    async def join(self, groups: Sequence[Membership], seconds: float) -> None:
        """Joins these groups in place of those before. Raises EngineFailedError."""
        await self.leave()
        end = time.monotonic() + seconds
        for member in groups:
            host, port = split_address(member.address)
            body = {
                "master_address": host,
                "master_port": int(port),
                "rank_offset": member.rank,
                "world_size": member.world_size,
                "group_name": member.group,
                "backend": member.backend,
            }
            try:
                await self._client.post("/init_weights_update_group", body, _left(end))
            except SGLangRefusedError as error:
                raise EngineFailedError(str(error)) from error
            self._groups.append(member)

    async def leave(self) -> None:
        """Leaves all groups."""
        groups, self._groups = self._groups, []
        for member in groups:
            try:
                await self._client.post(
                    "/destroy_weights_update_group", {"group_name": member.group}, self._seconds
                )
            except SGLangRefusedError as error:
                raise EngineFailedError(str(error)) from error

    async def receive(self, incoming: IncomingWeights, end: float) -> None:
        """Takes every bucket by the moment `end`; SGLang loads each as it comes.

        Raises EngineFailedError where that breaks (a server whose sender is gone waits in a
        broadcast, and is of no more use), DigestMismatchError.
        """
        manifest = incoming.manifest
        name = tag(manifest.version, manifest.digest)
        try:
            await self._client.post("/begin_weight_update", {"selector": "all"}, _left(end))
            for member, buckets in zip(self._groups, incoming.buckets, strict=True):
                for bucket in buckets:
                    body = {
                        "names": [piece.name for piece in bucket.pieces],
                        "dtypes": [STORED_DTYPES[piece.dtype] for piece in bucket.pieces],
                        "shapes": [list(piece.shape) for piece in bucket.pieces],
                        "group_name": member.group,
                        "load_format": "flattened_bucket",
                        "flush_cache": False,
                    }
                    path = "/update_weights_from_distributed"
                    await self._client.post(path, body, _left(end))
            await self._client.post("/end_weight_update", {}, _left(end))
            renamed = {"new_version": name, "abort_all_requests": False}
            await self._client.post("/update_weight_version", renamed, _left(end))
        except SGLangRefusedError as error:
            raise EngineFailedError(str(error)) from error
        if self._verifies:
            before, self._checksums = self._checksums, await self._read()
            exact = self._is_exact(manifest.tensors)
            self._settle(before, self._checksums, manifest.tensors, [], is_exact=exact)

    async def _read(self) -> list[dict[str, str]]:
        try:
            answer = await self._client.post(
                "/weights_checker", {"action": "checksum"}, CHECK_SECONDS
            )
        except SGLangRefusedError as error:
            raise EngineFailedError(str(error)) from error
        return from_answer(answer)

    def _settle(
        self,
        before: list[dict[str, str]],
        after: list[dict[str, str]],
        tensors: Tensors,
        wrong: list[str],
        *,
        is_exact: bool,
    ) -> None:
        new = {name: tensor.digest for name, tensor in tensors.items()}
        old, self._digests = self._digests, new
        if before and old:
            wrong = wrong or wrong_changes(before, after, old, new, exact=is_exact)
        if wrong:
            raise DigestMismatchError(
                f"SGLang holds other weights than it was given, in {len(wrong)} parameters: "
                f"{', '.join(wrong[:4])}",
                tensor=wrong[0],
            )

    def _is_exact(self, tensors: Tensors) -> bool:
        """Whether the server keeps these tensors as they came, without a cast."""
        stored = {STORED_DTYPES.get(tensor.dtype) for tensor in tensors.values()}
        known = self._capabilities
        return stored == {known.dtype} and not known.quantization


def _left(end: float) -> float:
    return max(0.01, end - time.monotonic())
