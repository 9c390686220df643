"""Executes the commands of the controller on this rank's backend and rows."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from services.trainer.adam import optim_from_proto
from services.trainer.backend import ModelName, PassSums, TrainingBackend, create_backend
from services.trainer.checkpoint_files import check_path, fetched, written_there
from services.trainer.config import LoraConfig, OptimConfig, TrainerConfig
from services.trainer.errors import (
    CheckpointMismatchError,
    OutOfMemoryError,
    RanksPartedError,
    disk_errors,
)
from services.trainer.parking import ParkedTensors, create_parking
from services.trainer.rank import FAILURES
from services.trainer.rank.process_group import find_mesh, join_group, leave_group
from services.trainer.rank.profile import RankProfile
from services.trainer.rank.publisher import RankPublisher
from services.trainer.rank.table import (
    RowTable,
    add_advantages,
    measure_rows,
    relate_scores,
    report_scores,
)
from services.trainer.rows import OLD_LOGPROBS, RowLimits
from sluice import faults, platform
from sluice.algo.collectives import is_disconnected
from sluice.algo.packed_rows import InvalidAdvantageError
from sluice.algo.plugins import PluginSettingError
from sluice.algo.spec import advantage_traits, loss_traits
from sluice.api.trainer.v1 import trainer_service_pb2 as trainer_pb
from sluice.api.trainer.v1 import worker_service_pb2 as pb
from sluice.place import StoreCacheConfig, is_bucket
from sluice.runtime.errors import InvalidFieldError, ServiceError, forget_frames, place_of
from sluice.runtime.wire import (
    advantage_from_proto,
    blob_to_proto,
    invalid_setting,
    invalid_settings,
    loss_from_proto,
)
from sluice.samples.blob_store import open_blobs
from sluice.samples.blobs import Blobs
from sluice.samples.sample import top_columns
from sluice.weights.errors import InvalidAdapterError
from sluice.weights.manifest import FileEntry

logger = logging.getLogger(__name__)

Report = Callable[[pb.FollowRequest], None]  # called by any thread
CLOSE_SECONDS = 4.0  # a checkpoint that is being written has so long when the rank is to end
ROW_COMMANDS = (  # which ranks work on alone, whatever the backend
    "add_rows",
    "drop_batch",
    "set_columns",
    "read_columns",
    "compute_advantages",
    "measure",
    "describe",
)
PASSES = ("compute_logprobs", "compute_values", "forward_backward")
MODELS: dict[int, tuple[ModelName, str]] = {
    trainer_pb.ComputeLogprobsRequest.MODEL_POLICY: ("policy", OLD_LOGPROBS),
    trainer_pb.ComputeLogprobsRequest.MODEL_REFERENCE: ("reference", "reference_logprobs"),
}


class Executor:
    """One rank's backend and rows."""

    def __init__(
        self,
        backend: TrainingBackend,
        blobs: Blobs,
        table: RowTable,
        publisher: RankPublisher,
        report: Report,
        parking: Path,
        profiles: Path,
        cache: StoreCacheConfig,
        user_modules: Sequence[str] = (),
    ) -> None:
        """`parking` is where the state waits while the rank sleeps, if its device is the host."""
        self._backend, self._blobs, self._table = backend, blobs, table
        self._parking, self._parked = parking, None  # type: Path, ParkedTensors | None
        self._publisher, self._user_modules = publisher, user_modules
        self._cache = cache
        self._recorded = RankProfile(backend.mesh.rank, profiles)
        self._behind = WriteBehind(report)  # of a checkpoint
        self._weights_behind = WriteBehind(report)
        self._siblings: list[pb.SiblingScores] = []  # so far, of a batch whose scores are related
        self._relative_scores: list[float] = []  # of the rows of the batch that they were asked for

    @classmethod
    def load(
        cls, config: TrainerConfig, report: Report, meeting: Callable[[], str] | None = None
    ) -> Executor:
        """Build the backend this rank runs. `report` takes what ends beside later commands.

        meeting: of a rank that others launch, waits for the name under which its ranks meet.
        """
        torch.set_num_threads(config.threads)
        mesh = find_mesh(config, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        join_group(config, mesh, meeting)
        backend = create_backend(config.backend, config, mesh)
        blobs = open_blobs(config.store, config.store_cache, sync=config.durable)
        limits = RowLimits.from_config(config, backend.mesh.context_size)
        table, publisher = RowTable(blobs, limits), RankPublisher(config, backend)
        return cls(
            backend,
            blobs,
            table,
            publisher,
            report,
            config.parking,
            config.profiles,
            config.store_cache,
            config.user_modules,
        )

    def describe(self) -> pb.RankReady:
        mesh = self._backend.mesh
        layout = trainer_pb.ParallelLayout(
            data=mesh.data_size,
            tensor=mesh.tensor_size,
            pipeline=mesh.pipeline_size,
            context=mesh.context_size,
            expert=mesh.expert_size,
            virtual_pipeline=mesh.virtual_pipeline_size,
            replicas=mesh.replicas if mesh.replicas > 1 else 0,
        )
        return pb.RankReady(
            layout=layout,
            data_rank=mesh.data_rank,
            reports=mesh.reports,
            operations=self._backend.operations,
            alone=ROW_COMMANDS if self._backend.meets_in_passes else ROW_COMMANDS + PASSES,
        )

    def close(self) -> None:
        if not self._behind.ends_within(CLOSE_SECONDS):
            return  # its thread uses a group, which must not be taken from it
        self._recorded.drop()
        self._publisher.close()
        self._backend.close()
        leave_group()

    def execute(self, command: pb.FollowResponse) -> pb.CommandResult:
        """Answer a command; an error is an answer too, and the next command goes on."""
        name = command.WhichOneof("command") or ""
        result = pb.CommandResult(sequence=command.sequence)
        with self._recorded.command(name, result), answered(result, name):
            self._backend.use_adapter(command.adapter)
            getattr(self, f"_{name}")(getattr(command, name), result)
            done = f"rank{self._backend.mesh.rank}.{name}"
            faults.point(done)
            if faults.due(f"{done}.memory"):
                raise MemoryError("a fault that was armed")
        return result

    def _profile(self, command: pb.ProfileCommand, result: pb.CommandResult) -> None:
        self._recorded.begin(command)

    def _add_rows(self, command: pb.AddRows, result: pb.CommandResult) -> None:
        self._table.add(command)

    def _drop_batch(self, command: pb.DropBatch, result: pb.CommandResult) -> None:
        self._table.drop(command.batch_id)

    def _set_columns(self, command: pb.SetColumns, result: pb.CommandResult) -> None:
        self._table.set_columns(command)

    def _read_columns(self, command: pb.ReadColumns, result: pb.CommandResult) -> None:
        data = self._table.spool_columns(command.batch_id, command.columns)
        result.columns.CopyFrom(blob_to_proto(self._blobs.put(data)))

    def _compute_logprobs(self, command: pb.LogprobsCommand, result: pb.CommandResult) -> None:
        model, column = MODELS[command.model]
        micro_batches = self._table.micro_batches(command.batch_id, command.micro_batches)
        rows, options = self._table.rows(command.batch_id), {"temperature": command.temperature}
        if model == "reference":
            self._backend.use_reference(command.reference_directory)
        if count := command.top_count:
            named = self._backend.compute_top_logprobs(
                micro_batches, model=model, count=count, **options
            )
            logprobs = {sample_id: top.logprobs for sample_id, top in named.items()}
        else:
            named = {}
            logprobs = self._backend.compute_logprobs(micro_batches, model=model, **options)
        positions = [row for part in command.micro_batches for row in part.rows]
        new, rollout, masks = [], [], []
        for position in positions:
            row = rows[position]
            row.columns[column] = values_T = logprobs[row.sample_id]
            if count:
                ids, top = top_columns(count)
                row.columns[ids] = named[row.sample_id].ids
                row.columns[top] = named[row.sample_id].top
            new.append(values_T)
            masks.append(row.loss_mask)
            rollout.append(
                row.columns.get("rollout_logprobs", torch.full_like(values_T, torch.nan))
            )
        if positions:
            _sum_logprobs(torch.cat(new), torch.cat(rollout), torch.cat(masks), result.sums)

    def _compute_values(self, command: pb.ValuesCommand, result: pb.CommandResult) -> None:
        micro_batches = self._table.micro_batches(command.batch_id, command.micro_batches)
        values = self._backend.compute_values(micro_batches)
        rows = self._table.rows(command.batch_id)
        total = result.sums.metrics["value"]
        for position in (row for part in command.micro_batches for row in part.rows):
            row = rows[position]
            row.columns["values"] = values_T = values[row.sample_id]
            total.sum += float(values_T[row.loss_mask].double().sum())
            result.sums.token_count += int(row.loss_mask.sum())
        total.weight = result.sums.token_count

    def _compute_advantages(self, command: pb.AdvantagesCommand, result: pb.CommandResult) -> None:
        spec, rows = advantage_from_proto(command.advantage), self._table.rows(command.batch_id)
        if command.scores_only:
            self._relative_scores.clear()
            report_scores(rows, spec, result)
        elif command.HasField("relative"):
            self._relative_scores.extend(command.relative.scores)
        elif command.HasField("siblings"):
            self._siblings.append(command.siblings)
            if command.siblings.last:
                relate_scores(self._siblings, spec, result)
                self._siblings = []
        else:
            given = self._relative_scores if spec.compares_siblings else []
            add_advantages(rows, spec, command, result, given or None)

    def _forward_backward(self, command: pb.GradientsCommand, result: pb.CommandResult) -> None:
        micro_batches = self._table.micro_batches(command.batch_id, command.micro_batches)
        loss, keeps = loss_from_proto(command.loss), command.keep_logprobs
        sums = self._backend.forward_backward(
            micro_batches,
            loss.with_measured(command.measured),
            keep_outputs=keeps,
            normalizer=command.normalizer,
        )
        if keeps:
            rows = self._table.rows(command.batch_id)
            for position in (row for part in command.micro_batches for row in part.rows):
                rows[position].columns[OLD_LOGPROBS] = sums.outputs[rows[position].sample_id]
        result.sums.CopyFrom(_sums_to_proto(sums))

    def _measure(self, command: pb.MeasureCommand, result: pb.CommandResult) -> None:
        loss = loss_from_proto(command.loss).with_measured(command.measured)
        rows = self._table.rows(command.batch_id)
        own = [rows[position].to_row(1.0) for position in command.rows]
        for name, value in measure_rows(own, loss, command.number).items():
            result.measured[name] = value

    def _describe(self, command: pb.DescribeCommand, result: pb.CommandResult) -> None:
        """Imports what the algorithm names. Raises InvalidFieldError."""
        if command.HasField("loss"):
            loss = loss_from_proto(command.loss)
            with invalid_settings("loss", loss.plugins, self._user_modules):
                traits = loss_traits(loss)
            result.traits.columns.extend(sorted(traits.columns))
            result.traits.head, result.traits.silent = traits.head, traits.silent
            result.traits.rounds = traits.rounds
        else:
            advantage = advantage_from_proto(command.advantage)
            with invalid_settings("advantage", advantage.plugins, self._user_modules):
                known = advantage_traits(advantage)
            result.traits.columns.extend(sorted(known.columns))
            result.traits.compares_siblings = known.compares_siblings
            result.traits.whitens, result.traits.width = known.whitens, known.width

    def _step(self, command: pb.StepCommand, result: pb.CommandResult) -> None:
        self._behind.keep()
        outcome = self._backend.step(
            normalizer=command.normalizer,
            learning_rate=command.learning_rate,
            optim=_optim_of(command),
        )
        result.step.grad_norm = outcome.grad_norm
        result.step.learning_rate = outcome.learning_rate
        result.step.skipped_reason = outcome.skipped_reason
        result.step.metrics.update(outcome.metrics)
        device = platform.current()
        full = device.memory()
        result.memory.peak_bytes, result.memory.total_bytes = full.peak, full.total
        device.begin_peak()

    def _discard(self, command: pb.DiscardCommand, result: pb.CommandResult) -> None:
        self._backend.discard_gradients()

    def _sleep(self, command: pb.SleepCommand, result: pb.CommandResult) -> None:
        """Raises OSError where there is no room for what is to leave: none of it does."""
        if self._parked is not None:
            return
        device = platform.current()
        before = device.memory().allocated
        self._backend.release_spare()
        held = self._backend.held_tensors()
        kept, cleared = [*held.state], held.gradients
        if command.keep_gradients:
            kept, cleared = [*kept, *cleared], ()
        self._parked = ParkedTensors.park(kept, cleared, create_parking(self._parking))
        del held, kept, cleared
        device.release_memory()
        result.slept.state_bytes = self._parked.nbytes
        result.slept.freed_bytes = max(0, before - device.memory().allocated)

    def _wake(self, command: pb.WakeCommand, result: pb.CommandResult) -> None:
        parked, self._parked = self._parked, None
        if parked is not None:
            parked.restore()

    def _add_adapter(self, command: pb.AddAdapter, result: pb.CommandResult) -> None:
        """Raises InvalidFieldError for targets that the model has not."""
        settings = LoraConfig(
            rank=command.rank, alpha=command.alpha, targets=tuple(command.targets)
        )
        try:
            seed = command.seed if command.HasField("seed") else None
            self._backend.create_adapter(command.name, settings, seed)
        except InvalidAdapterError as error:
            raise InvalidFieldError("targets", str(error)) from error

    def _drop_adapter(self, command: pb.DropAdapter, result: pb.CommandResult) -> None:
        self._backend.delete_adapter(command.name)

    def _save(self, command: pb.SaveCommand, result: pb.CommandResult) -> None:
        with ExitStack() as stack:
            directory, upload = Path(command.directory), None
            if is_bucket(command.directory):
                place = written_there(command.directory, self._cache)
                directory, upload = stack.enter_context(place)
            staged, held = self._backend.stage_checkpoint(directory), stack.pop_all()

        def write(written: pb.CommandResult) -> None:
            with held:
                files = staged.write()
                if upload is not None:
                    upload(files)
                written.checkpoint_files.extend(files_to_proto(files))

        if not command.write_behind:
            write(result)
            return

        def write_behind(written: pb.CommandResult) -> None:
            write(written)
            faults.point(f"rank{self._backend.mesh.rank}.written")

        self._behind.start("save", write_behind, result.sequence, keep=staged.keep)

    def _load(self, command: pb.LoadCommand, result: pb.CommandResult) -> None:
        files = {file.name: FileEntry(file.size_bytes, file.digest) for file in command.files}
        mesh, location = self._backend.mesh, command.directory
        self._behind.keep()
        if is_bucket(location):
            reading = fetched(location, files, self._cache, mesh.rank)
        else:
            reading = checked_beside(Path(location), files, mesh.rank, mesh.world_size)
        with reading as directory:
            try:
                self._backend.load_checkpoint(directory, weights_only=command.weights_only)
            except (OSError, ValueError) as error:
                raise CheckpointMismatchError(str(error)) from error

    def _publish(self, command: pb.PublishCommand, result: pb.CommandResult) -> None:
        self._publisher.publish(command, result)

    def _write_weights(self, command: pb.WriteWeightsCommand, result: pb.CommandResult) -> None:
        def write(_: pb.CommandResult) -> None:
            self._publisher.write(command)
            faults.point(f"rank{self._backend.mesh.rank}.weights_written")

        self._weights_behind.start("write_weights", write, result.sequence)

    def _open_transfer(self, command: pb.OpenTransferCommand, result: pb.CommandResult) -> None:
        self._publisher.open_transfer(command, result)

    def _send_weights(self, command: pb.SendWeightsCommand, result: pb.CommandResult) -> None:
        self._publisher.send(command, result)


@contextmanager
def answered(result: pb.CommandResult, name: str) -> Iterator[None]:
    """Put an error of the block into the answer: the rank is fit for the next command."""
    try:
        with disk_errors():
            yield
    except ServiceError as error:
        result.error.CopyFrom(error.to_status())
    except InvalidAdvantageError as error:
        wrong = InvalidFieldError("advantage", str(error), sample_id=error.sample_id)
        result.error.CopyFrom(wrong.to_status())
    except PluginSettingError as error:  # what only the rows show to be wrong
        result.error.CopyFrom(invalid_setting(error, "advantage").to_status())
    except FAILURES as error:
        if platform.is_out_of_memory(error):
            result.error.CopyFrom(_out_of_memory(name, error).to_status())
            return
        logger.error("%s failed", name, exc_info=error)
        message = f"{type(error).__name__} in {name}: {error}{place_of(error)}"
        kind = RanksPartedError if is_disconnected(error) else ServiceError
        result.error.CopyFrom(kind(message).to_status())


def _out_of_memory(name: str, error: BaseException) -> OutOfMemoryError:
    """Says how full the device is, and lets go of what the command held on it."""
    device = platform.current()
    full = device.memory()
    message = f"{name} is out of memory: {platform.explain_memory(error, full)}"
    joining = device.joining(full)
    logger.error("%s", message)
    forget_frames(error)
    device.release_memory()
    sizes = {"allocated": full.allocated, "free": full.free, "total": full.total}
    pieces = {"in_pieces": full.reserved - full.allocated, "joining": joining} if joining else {}
    return OutOfMemoryError(message, **sizes, **pieces)


class WriteBehind:
    """Writes files in a thread, beside the commands that follow; those of one command at a time."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._keep: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        name: str,
        write: Callable[[pb.CommandResult], None],
        sequence: int,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to `write`, which adds to the report; that repeats `sequence`.

        `keep` copies what is not written yet of a state that is about to change.
        """
        assert self._keep is None, "the controller has one of a kind written at a time"
        self._keep = keep
        self._thread = threading.Thread(
            target=self._write, args=(name, write, sequence), name=f"{name}-behind", daemon=True
        )
        self._thread.start()

    def keep(self) -> None:
        """Copy what is not written yet: the state is about to change."""
        if (keep := self._keep) is not None:
            keep()

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of what is being written; False if it does not come."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _write(self, name: str, write: Callable[[pb.CommandResult], None], sequence: int) -> None:
        result = pb.CommandResult(sequence=sequence)
        with answered(result, name):
            write(result)
        self._keep = None
        self._report(pb.FollowRequest(written=result))


def files_to_proto(files: Mapping[str, FileEntry]) -> Iterator[pb.CheckpointFile]:
    for name, entry in files.items():
        yield pb.CheckpointFile(name=name, size_bytes=entry.size, digest=entry.digest)


BULK = (".distcp", ".safetensors")
CHECKING_THREADS = 4


@contextmanager
def checked_beside(
    directory: Path, files: Mapping[str, FileEntry], rank: int, world_size: int
) -> Iterator[Path]:
    """Check a checkpoint while the block reads it, tensors by threads and one rank each.

    Pickles and JSON come before: a reader must not even begin with damaged ones. Raises
    CheckpointDamagedError; where the block fails, for whatever file on any rank was the cause.
    """
    bulk = sorted((n for n in files if n.endswith(BULK)), key=lambda n: (-files[n].size, n))
    for name in files.keys() - set(bulk):
        _check_file(directory, name, files[name])
    with ThreadPoolExecutor(CHECKING_THREADS, "check-checkpoint") as pool:

        def check(names: Sequence[str]) -> list[Future[None]]:
            return [pool.submit(_check_file, directory, name, files[name]) for name in names]

        checks = check(bulk[rank::world_size])
        try:
            yield directory
        except FAILURES:
            for each in check(bulk):
                each.result()
            raise
        for each in checks:
            each.result()


def _check_file(directory: Path, name: str, entry: FileEntry) -> None:
    check_path(directory / name, name, entry)


def _sum_logprobs(
    new_T: torch.Tensor, rollout_T: torch.Tensor, mask_T: torch.Tensor, sums: pb.PassSums
) -> None:
    """Add up the new column and of its distance from the engine's, over trained tokens."""
    count = int(mask_T.sum())
    sums.token_count = count
    sums.metrics["logprob"].sum = float(new_T[mask_T].double().sum())
    sums.metrics["logprob"].weight = count
    both_T = mask_T & ~rollout_T.isnan()
    if both_T.any():
        distance_T = (new_T - rollout_T)[both_T].abs().double()
        mismatch = sums.metrics["rollout_mismatch"]
        mismatch.sum, mismatch.weight = float(distance_T.sum()), float(both_T.sum())
        mismatch.max = float(distance_T.max())


def _sums_to_proto(sums: PassSums) -> pb.PassSums:
    return pb.PassSums(
        loss=sums.loss,
        token_count=sums.token_count,
        metrics={
            name: pb.WeightedSum(sum=total, weight=weight)
            for name, (total, weight) in sums.metrics.items()
        },
    )


def _optim_of(command: pb.StepCommand) -> OptimConfig | None:
    return optim_from_proto(command.adam, OptimConfig()) if command.HasField("adam") else None
