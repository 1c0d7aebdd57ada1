"""Writes checkpoints beside training: a step waits only for a copy of its state in host memory."""

import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from gmeta.config.sharding import keeps_tables_beyond
from gmeta.config.train_config import TrainConfig
from gmeta.distributed.collective_errors import run_on_first
from gmeta.distributed.optim.optimizers import OuterOptimizer
from gmeta.distributed.ranks import Ranks, gather_values, lost_contact, new_control_group
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.errors import GMetaError, NotWrittenError
from gmeta.platform.files.checksums import FileChecksum, describe_file
from gmeta.platform.internals import ShardedTensor, map_sharded
from gmeta.runs.checkpoints.index import read_index
from gmeta.runs.checkpoints.integrity import describe_failure, translate_damage
from gmeta.runs.checkpoints.lineage import Lineage, lineage_to_json
from gmeta.runs.checkpoints.loader import collect_state
from gmeta.runs.checkpoints.progress_file import (
    PROGRESS_FILE,
    REPLACED_PREFIX,
    TEMPORARY_PREFIX,
    format_progress,
)
from gmeta.runs.checkpoints.run_mirror import RunMirror
from gmeta.runs.checkpoints.selected_checkpoint import tied_config
from gmeta.runs.run_folder import checkpoint_name, list_checkpoints
from gmeta.runs.run_progress import RunProgress
from metaio.format.atomic_folder import flush_to_disk


def _do_nothing(checkpoint: Path) -> None:
    """Do nothing after a commit."""


class CheckpointWriter:
    """Writes a run's checkpoints to `folder`/step-N and keeps the `run.keep_last` newest and the
    best. All ranks make one, and call it in the same places.

    `on_commit` gets a checkpoint's path on every rank, in the training thread, once it has that
    name. `lineage` are the increments that the model is trained on, the current one last."""

    def __init__(
        self,
        folder: Path,
        sharded: DistributedLearner,
        optimizer: OuterOptimizer,
        config: TrainConfig,
        ranks: Ranks,
        on_commit: Callable[[Path], None] = _do_nothing,
        lineage: Lineage = (),
    ) -> None:
        # A checkpoint appears whole or not at all: the rename of its temporary folder, after all of
        # it is on disk, is the one commit point. At most one is being written.
        self._folder = folder
        self._mirror: RunMirror | None = None
        self._has_mirror = bool(config.run.mirror)
        if self._has_mirror and ranks.rank == 0:
            self._mirror = RunMirror(config.run.mirror, Path(config.run.dir))
        self._sharded = sharded
        self._optimizer = optimizer
        # Its own group: the thread's messages must not meet those of the steps.
        self._ranks = replace(ranks, control=new_control_group())
        # The first group of ranks writes, as all hold the same.
        levels = sharded.local.levels
        self._writes = levels.group == 0
        self._writers = self._ranks.control
        if levels.across is not None:
            self._writers = new_control_group(range(levels.inside.world_size))
        self._writer = {
            "world_size": ranks.world_size,
            "config_digest": config.digest,
            "config": tied_config(config),
        }
        self._lineage = lineage
        self._keep_last = config.run.keep_last
        self._keep_best = config.run.keep_best
        self._committed = on_commit
        # Of tables that are not in memory there is no room for a copy there.
        self._in_background = config.run.checkpoint_in_background and not keeps_tables_beyond(
            config.sharding
        )
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        self._thread: threading.Thread | None = None
        self._error: GMetaError | None = None
        if ranks.rank == 0:
            # From a writer that was killed.
            for left_over in folder.glob(f"{TEMPORARY_PREFIX}*"):
                shutil.rmtree(left_over, ignore_errors=True)

    def save(self, progress: RunProgress, files: Mapping[str, str] = MappingProxyType({})) -> None:
        """Checkpoint the state as it is now, with rank 0's `files` (texts by name) beside it."""
        # One at a time: the copy in host memory is reused.
        self.finish()
        self._final = self._folder / checkpoint_name(progress.step)
        self._optimizer.sync()
        state = collect_state(self._sharded, self._optimizer) if self._writes else {}
        # Before the first step optimizers have no state: memory for a copy would fit no later one.
        if not self._in_background or not progress.step:
            # No copy is made: the step waits until the checkpoint is written.
            self._write(_as_whole_storages(state), progress, files)
            self._raise_or_commit()
            return
        staged = self._stage(state)
        # A daemon: after an error the process ends, and does not wait for ranks that are gone.
        self._thread = threading.Thread(
            target=self._write, args=(staged, progress, files), name="checkpoint", daemon=True
        )
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> None:
        """Call `on_commit`, or raise, for a checkpoint that has been written."""
        if self._thread is not None and not self.is_writing:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._raise_or_commit()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error a rank may be gone, and the thread would wait for it.
        if kind is None:
            self.finish()
            if self._has_mirror:
                run_on_first(self._finish_mirror, self._ranks)

    def _finish_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.finish()

    def _raise_or_commit(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._committed(self._final)

    def _stage(self, state: dict[str, Any]) -> dict[str, Any]:
        # Always the same host memory; for CUDA the stager pins it.
        if self._ranks.device.type == "cpu" and self._stager.state_dict_cache is None:
            # torch's stager would make a deep copy: tables would be in memory three times at first.
            self._stager.state_dict_cache = _map_tensors(state, torch.empty_like)
        return self._stager.stage(state)

    def _write(
        self, state: dict[str, Any], progress: RunProgress, files: Mapping[str, str]
    ) -> None:
        # Errors are left in `_error`, on every rank alike, for the training thread to raise.
        final = self._final
        temporary = self._folder / f"{TEMPORARY_PREFIX}{final.name}"
        # Stays if the thread dies of anything else: silence must not pass for a commit.
        self._error = GMetaError(
            f"checkpoint {final} cannot be written: what the traceback above says ended the "
            "writing. Go on from the checkpoint before with --resume"
        )
        try:
            run_on_first(lambda: _make_empty(temporary), self._ranks)
            own_entries = self._write_shards(state, temporary) if self._writes else {}
            file_entries = gather_values(own_entries, self._ranks) or []
            run_on_first(
                lambda: self._commit(temporary, final, progress, files, file_entries), self._ranks
            )
        except (OSError, RuntimeError, CheckpointException) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            self._error = lost_contact(error) or NotWrittenError(
                f"checkpoint {final} cannot be written: {describe_failure(error)}; "
                f"{_format_free_space(self._folder)} were free there",
                "Free some, then go on from the checkpoint before with --resume",
            )
        except GMetaError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            self._error = error
        else:
            self._error = None
            if self._mirror is not None:
                self._mirror.upload(final)

    def _write_shards(
        self, state: dict[str, Any], folder: Path
    ) -> dict[str, FileChecksum] | OSError:
        # Nothing is copied ahead: torch would take memory of the first GPU that it sees, another
        # rank's, even where the run is on the CPU.
        writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
        try:
            save_shards(state, storage_writer=writer, process_group=self._writers)
        except CheckpointException as error:
            if self._writers is self._ranks.control:  # else those who do not write must hear of it
                raise
            return OSError(describe_failure(error))
        return _describe_files(folder, self._ranks.rank)

    def _commit(
        self,
        temporary: Path,
        final: Path,
        progress: RunProgress,
        files: Mapping[str, str],
        file_entries: list[dict[str, FileChecksum] | OSError],
    ) -> None:
        entries: dict[str, FileChecksum] = {}
        for of_rank in file_entries:
            if isinstance(of_rank, OSError):
                raise of_rank
            entries.update(of_rank)
        # Torch wrote it: an unreadable one must not take a good checkpoint's place.
        with translate_damage(temporary, "Use a Python and torch of docs/install.md, and --resume"):
            read_index(temporary)
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
        # These files, and the index, were written by no rank.
        for path in temporary.iterdir():
            if path.name not in entries:
                entries[path.name] = describe_file(path)
        writer = {**self._writer, **lineage_to_json(self._lineage, progress.step)}
        (temporary / PROGRESS_FILE).write_text(format_progress(progress, writer, entries))
        # Files before the rename and the folder behind it: a power cut leaves all of it or nothing.
        flush_to_disk((*temporary.iterdir(), temporary))
        # Already there if a saved step ends its epoch, too. Put aside, not removed: until the new
        # one has its name it may be the only checkpoint.
        replaced = self._folder / f"{REPLACED_PREFIX}{final.name}"
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        flush_to_disk([self._folder])
        shutil.rmtree(replaced, ignore_errors=True)
        # Only now that the new one has its name: until then an older one may be the last good one.
        best = checkpoint_name(progress.best_step) if self._keep_best else ""
        for old in list_checkpoints(self._folder)[: -self._keep_last]:
            if old.name != best:
                _discard(old)


def _describe_files(folder: Path, rank: int) -> dict[str, FileChecksum] | OSError:
    # While this machine still has the files in memory. An error is returned, for rank 0 to raise:
    # raised here, it would leave the others in a collective.
    try:
        return {path.name: describe_file(path) for path in folder.glob(f"__{rank}_*")}
    except OSError as error:
        return error


def _as_whole_storages(state: dict[str, Any]) -> Any:
    # Of a part of a storage, as a table among those that are looked up together, torch's writer
    # would make a copy. Here it is the same memory.
    return _map_tensors(
        state, lambda own: torch.from_numpy(own.detach().numpy()) if own.is_cpu else own
    )


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _map_tensors(one, function) for key, one in value.items()}
    if isinstance(value, ShardedTensor):
        return map_sharded(value, function) if value.local_shards() else value
    return function(value) if isinstance(value, torch.Tensor) else value


def _discard(checkpoint: Path) -> None:
    # Renamed first: half of one must not pass for a checkpoint. One that cannot be removed, as
    # while another host reads it over NFS, goes at the next start.
    doomed = checkpoint.with_name(TEMPORARY_PREFIX + checkpoint.name)
    with suppress(OSError):
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _format_free_space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB"
    except OSError:
        return "an unknown number of bytes"
