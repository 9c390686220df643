"""Weights of a running server: checked, swapped in a pause, or taken from a transfer group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from services.rollout.backends.sglang import checksums
from services.rollout.backends.sglang.client import RefusedError, SglangClient
from services.rollout.backends.sglang.handshake import Capabilities
from services.rollout.backends.sglang.spans import tag
from services.rollout.backends.sglang.staging import StagedVersion
from services.rollout.errors import DigestMismatchError, EngineFailedError, UnfitWeightsError
from sluice import platform

if TYPE_CHECKING:
    from services.rollout.engine import IncomingWeights
    from sluice.weights.transfer.plan import Membership

CHECK_SECONDS = 600.0
STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

Digests = Mapping[str, str]


class ServerWeights:
    """What one server holds. All but `check` is called while nothing decodes.

    `parameters` are SGLang's own names, known after the first check.
    """

    def __init__(
        self, client: SglangClient, capabilities: Capabilities, *, verifies: bool, seconds: float
    ) -> None:
        self._client, self._capabilities = client, capabilities
        self._verifies, self._seconds = verifies, seconds
        self._held: list[dict[str, str]] = []
        self._digests: Digests = {}
        self._groups: list[Membership] = []

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self._held[0]) if self._held else ()

    @property
    def computes(self) -> bool:
        """Whether checksums follow from the files: whole parameters, on a host."""
        capabilities = self._capabilities
        is_whole = capabilities.tp_size == capabilities.pp_size == 1
        return is_whole and capabilities.device == platform.CPU.device_type

    def forget(self) -> None:
        """What the server holds is not known any more."""
        self._held, self._digests = [], {}

    def expected(self, staged: StagedVersion) -> dict[str, str]:
        """Checksums of a version on disk; blocks. Empty where they do not follow from files."""
        if not (self._verifies and self.computes and self._has_dtype(staged)):
            return {}
        return checksums.CheckpointChecksums(staged.shards).of(self.parameters)

    async def load(self, staged: StagedVersion, expected: Mapping[str, str] | None) -> None:
        """Swap in a version of this host's disk.

        Raises UnfitWeightsError where SGLang refuses it, DigestMismatchError where it holds
        something else afterwards.
        """
        body = {
            "model_path": str(staged.directory),
            "weight_version": tag(staged.version, staged.digest),
            "flush_cache": False,  # prompts of another version are not found anyway
            "abort_all_requests": False,
        }
        try:
            await self._client.post("/update_weights_from_disk", body, self._seconds)
        except RefusedError as error:
            raise UnfitWeightsError(str(error), version=staged.version) from error
        await self.check(staged, expected)

    async def check(self, staged: StagedVersion, expected: Mapping[str, str] | None = None) -> None:
        """Compare what the server holds with a version of the disk; the first one is learnt."""
        if not self._verifies:
            return
        found = await self._read()
        before, self._held = self._held, found
        if expected is None:
            expected = await asyncio.to_thread(self.expected, staged)
        wrong = checksums.wrong_values(found, expected)
        self._settle(before, found, staged.tensors, wrong, is_exact=self._has_dtype(staged))

    async def join(self, groups: Sequence[Membership], seconds: float) -> None:
        """Be ranks of these groups in place of those before. Raises EngineFailedError."""
        await self.leave()
        end = time.monotonic() + seconds
        for member in groups:
            host, _, port = member.address.rpartition(":")
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
            except RefusedError as error:
                raise EngineFailedError(str(error)) from error
            self._groups.append(member)

    async def leave(self) -> None:
        """Leave all groups."""
        groups, self._groups = self._groups, []
        for member in groups:
            try:
                await self._client.post(
                    "/destroy_weights_update_group", {"group_name": member.group}, self._seconds
                )
            except RefusedError as error:
                raise EngineFailedError(str(error)) from error

    async def receive(self, incoming: IncomingWeights, end: float) -> None:
        """Take every bucket by the moment `end`; SGLang loads each as it comes.

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
        except RefusedError as error:
            raise EngineFailedError(str(error)) from error
        if self._verifies:
            before, self._held = self._held, await self._read()
            tensors = {name: stored.digest for name, stored in manifest.tensors.items()}
            dtypes = {STORED_DTYPES.get(stored.dtype) for stored in manifest.tensors.values()}
            exact = dtypes == {self._capabilities.dtype}
            self._settle(before, self._held, tensors, [], is_exact=exact)

    async def _read(self) -> list[dict[str, str]]:
        try:
            answer = await self._client.post(
                "/weights_checker", {"action": "checksum"}, CHECK_SECONDS
            )
        except RefusedError as error:
            raise EngineFailedError(str(error)) from error
        return checksums.from_answer(answer)

    def _settle(
        self,
        before: list[dict[str, str]],
        after: list[dict[str, str]],
        tensors: Digests,
        wrong: list[str],
        *,
        is_exact: bool,
    ) -> None:
        old, self._digests = self._digests, dict(tensors)
        if before and old:
            wrong = wrong or checksums.wrong_changes(before, after, old, tensors, exact=is_exact)
        if wrong:
            raise DigestMismatchError(
                f"SGLang holds other weights than it was given, in {len(wrong)} parameters: "
                f"{', '.join(wrong[:4])}",
                tensor=wrong[0],
            )

    def _has_dtype(self, staged: StagedVersion) -> bool:
        stored = {STORED_DTYPES.get(dtype) for dtype, _ in staged.layout.values()}
        return stored == {self._capabilities.dtype}


def _left(end: float) -> float:
    return max(0.01, end - time.monotonic())
