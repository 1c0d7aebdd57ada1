"""Checkpoints in memory, for ranks that are started again: what steps changed since the newest
checkpoint on disk lies with the launcher of this node, and with that of the next."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

import numpy as np
import torch
from torchrec.optim.keyed import CombinedOptimizer

from gmeta.antdt.manifests.shard_manifest import MANIFEST_FILE_NAME
from gmeta.config.train_config import TrainConfig
from gmeta.distributed.forked_ranks import MEMORY_VARIABLE
from gmeta.distributed.ranks import Ranks, broadcast_value, gather_values
from gmeta.distributed.sharded_learner import DistributedLearner
from gmeta.errors import UserError
from gmeta.runs.checkpoints.memory.changed_state import ChangedState, join_rows, read_about
from gmeta.runs.checkpoints.memory.memory_log import (
    Bytes,
    EntryHead,
    MemoryLog,
    frame_entry,
    iterate_entries,
)
from gmeta.runs.checkpoints.selected_checkpoint import tied_config
from gmeta.runs.rank_agreement import check_alike
from gmeta.runs.run_progress import RunProgress, is_due

# A log that has grown to so many times its largest entry is written anew, as one entry.
MOST_GROWTH = 3
# Checkpoints in memory while one is written to disk: the shard service forgets a manifest after 16
# newer ones, and could not commit it.
MOST_BESIDE_WRITING = 12


@dataclass(frozen=True)
class FoundSteps:
    """What a rank's steps changed from the newest checkpoint on disk to a later step, by `progress`
    (None: nothing was found); `files` are what rank 0 has beside the model then, texts by name."""

    bodies: list[Bytes] = field(default_factory=list)
    progress: RunProgress | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def manifest(self) -> str:
        """Return the shard manifest of that step on rank 0; "": there is none."""
        return self.files.get(MANIFEST_FILE_NAME, "")

    @property
    def messages(self) -> list[str]:
        """Return the lines on it for the screen."""
        if self.progress is None:
            return []
        return [f"goes on from step {self.progress.step}, kept in memory"]


@final
class MemoryCheckpoints:
    """Keeps and finds them; all ranks make one and call it in the same places. Without
    `every_steps` it does nothing."""

    def __init__(
        self, every_steps: int, paths: str, made_of: Sequence[Any], base: int, ranks: Ranks
    ) -> None:
        """Look in the launcher's logs `paths` for a run that is `made_of` this and whose newest
        checkpoint on disk is of step `base`."""
        self._every_steps, self._ranks = every_steps, ranks
        # Another plan or number of ranks would mean other rows by the same numbers.
        text = json.dumps([*made_of, ranks.world_size], sort_keys=True)
        self._run = hashlib.sha256(text.encode()).digest()[:16]
        self.committed = base  # the newest checkpoint on disk, as far as this rank knows
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # To the same rank of the next node. A single node has no other memory.
        self._shift = on_node if on_node < ranks.world_size else 0
        self._num_kept = 0
        self._state: ChangedState | None = None
        if every_steps:
            self._own, self._others = map(MemoryLog, paths.split(":"))

    def find(self) -> FoundSteps:
        """Return what leads to the latest step that can be had of all ranks. Collective."""
        if not self._every_steps:
            return FoundSteps()
        rank, base = self._ranks.rank, self.committed
        held = [
            (head.rank, head.step)
            for log in (self._own, self._others)
            for head in log.heads_for(self._run, base)
        ]
        everyone = gather_values(held, self._ranks) or []
        step, holders = broadcast_value(_choose_step(everyone), self._ranks)
        entries = self._fetch(step, holders) if holders else None
        if entries is None or self._find_log(rank, step) is not self._own:
            self._own.drop_after(-1)
            if entries is not None:
                self._own.write(entries)
        self._own.drop_after(step)
        before = (rank - self._shift) % self._ranks.world_size
        self._others.drop_after(step if self._find_log(before, step) is self._others else -1)
        if entries is None:
            return FoundSteps()
        bodies = [body for _, body in iterate_entries(entries)]
        about = read_about(bodies[-1])
        return FoundSteps(bodies, RunProgress(**about["progress"]), about["files"])

    def track(
        self, sharded: DistributedLearner, optimizer: CombinedOptimizer, found: FoundSteps
    ) -> None:
        """Bring a model and optimizer of the checkpoint on disk to the step that was found, if one
        was, and take note of what steps change from now on."""
        if self._every_steps:
            self._state = ChangedState(sharded, optimizer)
            if found.bodies:
                self._state.fill(found.bodies)

    def keep_if_due(
        self,
        progress: RunProgress,
        saved_step: int,
        finish_writing: Callable[[], None],
        collect_files: Callable[[], Mapping[str, str]],
    ) -> None:
        """Keep the state as it is now, if that is due, with rank 0's files; a checkpoint of
        `saved_step` may still be written. Collective."""
        if self._state is None or not is_due(self._every_steps, progress.step):
            return
        if progress.step - saved_step >= MOST_BESIDE_WRITING * self._every_steps:
            finish_writing()
        self._keep(self._state, progress, collect_files())

    def _keep(self, state: ChangedState, progress: RunProgress, files: Mapping[str, str]) -> None:
        rows_GU = state.take_rows()
        known = [place.head for place in self._own.places if place.head.step > self.committed]
        sizes = [head.num_bytes for head in known]
        needs_from = known[0].step if known else progress.step
        # The first one goes to a rank that may have none of those before.
        if known and (not self._num_kept or sum(sizes) > MOST_GROWTH * max(sizes)):
            chain = iterate_entries(self._own.read_chain(known[-1].step))
            rows_GU = join_rows([body for head, body in chain if head in known], rows_GU)
            needs_from = progress.step
        self._num_kept += 1
        about = {"progress": asdict(progress), "files": dict(files)}
        head = EntryHead(
            self._run, self._ranks.rank, progress.step, needs_from, self.committed, 0, 0
        )
        entry = frame_entry(head, state.to_bytes(about, rows_GU))
        self._own.append(entry)
        if self._shift:
            self._pass_on(entry)

    def _pass_on(self, entry: Bytes) -> None:
        """Send an entry to the next node, and keep the one that comes from the node before."""
        rank, world_size = self._ranks.rank, self._ranks.world_size
        to, source = (rank + self._shift) % world_size, (rank - self._shift) % world_size
        received = self._exchange({to: entry})[source]
        if self._others.places and self._others.places[-1].head.rank != source:
            self._others.drop_after(-1)
        self._others.append(received)

    def _exchange(self, to_send: Mapping[int, Bytes]) -> dict[int, Bytes]:
        """Send bytes to some other ranks; return what each of them sent, if only nothing.
        Collective."""
        transport = self._ranks.transport
        others = [rank for rank in range(self._ranks.world_size) if rank != self._ranks.rank]
        if not others:
            return {}
        parts = [torch.from_numpy(to_send.get(rank, np.zeros(0, np.uint8))) for rank in others]
        sizes, ones = [part.numel() for part in parts], [1] * len(others)
        theirs = torch.cat(transport.swap(torch.tensor(sizes), ones, ones).parts()).tolist()
        received = transport.swap(torch.cat(parts), sizes, theirs).parts()
        return {rank: part.numpy() for rank, part in zip(others, received, strict=True)}

    def _find_log(self, rank: int, step: int) -> MemoryLog | None:
        """Return the log here that has what a rank's steps changed up to this step."""
        for log in (self._own, self._others):
            heads = log.heads_for(self._run, self.committed)
            if any((head.rank, head.step) == (rank, step) for head in heads):
                return log
        return None

    def _fetch(self, step: int, holders: Sequence[int]) -> Bytes:
        """Return this rank's entries up to a step, of which each rank's lie with one of `holders`.
        Collective."""
        own, to_send = self._ranks.rank, {}
        for rank, holder in enumerate(holders):
            log = self._find_log(rank, step)
            if holder == own and log is not None:
                to_send[rank] = log.read_chain(step)
        mine = to_send.pop(own, None)
        received = self._exchange(to_send)
        return received[holders[own]] if mine is None else mine


def open_memory(
    config: TrainConfig, made_of: Sequence[Any], base: int, ranks: Ranks
) -> MemoryCheckpoints:
    """Return the memory checkpoints of a rank, see MemoryCheckpoints. Raises UserError: no launcher
    of ours holds memory that outlives the ranks."""
    every_steps = config.run.memory_checkpoint_every_steps
    paths = os.environ.get(MEMORY_VARIABLE, "")
    if every_steps:
        check_alike({f"{MEMORY_VARIABLE}, set by our launchers,": bool(paths)}, ranks)
    if every_steps and not paths:
        raise UserError(
            f"run.memory_checkpoint_every_steps = {every_steps} needs a launcher that holds memory "
            "as ranks come and go: gmeta train with --nproc-per-node 2 or more, or train-node, on "
            "Linux. Start the run so, or set it 0"
        )
    return MemoryCheckpoints(every_steps, paths, (*made_of, tied_config(config)), base, ranks)


def _choose_step(everyone: Sequence[Sequence[tuple[int, int]]]) -> tuple[int, list[int]]:
    """Return the latest step that is held of every rank, and by whom each rank's is: nobody where
    there is no such step. `everyone`: each rank's list of the (rank, step) that it holds."""
    holders: dict[tuple[int, int], list[int]] = {}
    for holder, held in enumerate(everyone):
        for of_rank in held:
            holders.setdefault(of_rank, []).append(holder)
    ranks = range(len(everyone))
    steps_of = [{step for of, step in holders if of == rank} for rank in ranks]
    common = set.intersection(*steps_of) if steps_of else set()
    if not common:
        return 0, []
    step = max(common)
    by_rank = [holders[rank, step] for rank in ranks]
    return step, [own if own in held else held[0] for own, held in enumerate(by_rank)]
