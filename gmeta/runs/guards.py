"""Ends a run at a loss or gradient that is not finite, and saves the batch that it came from."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gmeta.adaptation.layout.common_features import CommonFeatures
from gmeta.adaptation.layout.padded_layout import (
    PaddedFeatures,
    PaddedHistory,
    PaddedRows,
    PaddedTasks,
    Rectangle,
)
from gmeta.adaptation.layout.ragged import RowLayout
from gmeta.adaptation.layout.sides import Side, Sides, TaskGroups
from gmeta.adaptation.layout.sparse_matrix import Bags, GatherMatrix, ScatterMatrix, SparseRows
from gmeta.data.accumulate import MicroBatches
from gmeta.data.episodes import Episodes, LearnerInputs
from gmeta.data.transfer import map_tree
from gmeta.distributed.ranks import Ranks, broadcast_value, gather_values, start_any_rank
from gmeta.errors import GMetaError
from gmeta.platform.files.atomic_write import open_atomically
from gmeta.runs.run_progress import RunProgress

# Each rank checks its batch's loss and the gradient of its rows before gradients are averaged:
# averages only say that some rank is to blame. The answers travel while the next step computes: the
# guard reports one step late, but always before a checkpoint.
NAMED_TASKS = 5  # in a message; the saved batch has all of them
# All classes that a saved batch is made of: torch loads no other.
_SAVED_CLASSES = (
    Bags, CommonFeatures, Episodes, GatherMatrix, LearnerInputs, PaddedFeatures,
    PaddedHistory, PaddedRows, PaddedTasks, Rectangle, RowLayout,
    ScatterMatrix, Side, Sides, SparseRows, TaskGroups,
)  # fmt: skip


@dataclass(frozen=True)
class _PendingStep:
    """A step whose ranks have not all answered; `before` is the progress before it."""

    before: RunProgress
    episodes: Episodes | MicroBatches
    loss: Tensor
    rows_sum: Tensor
    any_bad: Callable[[], bool]


class StepGuard:
    """Checks a run's steps, and saves a bad batch to `folder`; a part of every rank."""

    def __init__(
        self, folder: Path, layers: Iterable[nn.Parameter], ranks: Ranks, ending: Callable[[], None]
    ) -> None:
        """Watch the gradients of `layers`; `ending` is called on every rank before the run ends."""
        self._folder = folder
        self._ending = ending
        self._layers = list(layers)
        self._ranks = ranks
        self._watched: _PendingStep | None = None

    def watch(
        self, before: RunProgress, episodes: Episodes | MicroBatches, loss: Tensor, rows_sum: Tensor
    ) -> None:
        """Check a step after its backward, by the sum of its rows' gradient. Raises GMetaError: the
        step before was not finite on some rank."""
        grads = [layer.grad for layer in self._layers if layer.grad is not None]
        norms = torch._foreach_norm(grads) if grads else []
        # One check for all: a sum is as finite as its terms.
        total = torch.stack([loss.detach(), rows_sum, *norms]).sum()
        bad = ~total.isfinite()
        any_bad = start_any_rank(bad, self._ranks)
        now = _PendingStep(before, episodes, loss.detach(), rows_sum, any_bad)
        self.check()
        self._watched = now

    def check(self) -> None:
        """Report the last step now: before a checkpoint, and at the end."""
        watched, self._watched = self._watched, None
        if watched is not None and watched.any_bad():
            message = self._blame(watched)
            self._ending()
            raise GMetaError(message)

    def _blame(self, step: _PendingStep) -> str:
        """Save this rank's batch if it is to blame; return the line that every rank ends with."""
        found = ""
        if not step.loss.isfinite():
            found = f"the loss is {step.loss.item()}"
        elif not step.rows_sum.isfinite():
            found = "the gradient is not finite"
        own_problem = ""
        if found:
            saved = self._save_bad_batch(step)
            tasks = step.episodes.task_T.tolist()
            named = ", ".join(map(str, tasks[:NAMED_TASKS]))
            more = f" and {len(tasks) - NAMED_TASKS} more" if len(tasks) > NAMED_TASKS else ""
            rank = self._ranks.rank
            own_problem = f"{found} on rank {rank}, in a batch of tasks {named}{more}, {saved}"
        # Collective: a rank to blame is known to itself alone.
        everyone = gather_values(own_problem, self._ranks)
        blamed = [one for one in everyone or [] if one]
        message = "the gradient of the layers is not finite, though each rank's loss and rows are"
        if blamed:
            message = blamed[0]
        if len(blamed) > 1:
            others = len(blamed) - 1
            message += (
                f" ({others} more {'rank has' if others == 1 else 'ranks have'} such a batch)"
            )
        before = step.before
        return broadcast_value(
            f"step {before.step + 1} (step {before.epoch_step + 1} of epoch {before.epoch + 1}): "
            f"{message}. A value in the data is no number, or training diverged. Lower "
            "outer.dense_lr, outer.sparse_lr or algorithm.inner_lr, or divide a label whose "
            "scale is far from 1",
            self._ranks,
        )

    def _save_bad_batch(self, step: _PendingStep) -> str:
        """Save this rank's batch; return where it is, or why it is not."""
        path = self._folder / f"step-{step.before.step + 1:08d}-rank-{self._ranks.rank}.pt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_batch(path, step.episodes)
        # Not raised: the other ranks wait for this one's answer.
        except (OSError, RuntimeError) as error:  # torch tells of a full disk by the latter
            return f"which cannot be saved: {(str(error).splitlines() or [''])[0]}"
        return f"saved as {path}"


def save_batch(path: Path, episodes: Episodes | MicroBatches) -> None:
    """Save a rank's share of a step as one file, for `load_batch`."""
    parts = episodes.parts if isinstance(episodes, MicroBatches) else (episodes,)
    # Without the fetch: messages between ranks cannot lie in a file.
    alone = [replace(part, plan=None, fetch=None) for part in parts]
    on_host = [part.to(torch.device("cpu")) for part in alone]
    # In memory of their own: a file takes no tensors of several kinds from one block.
    on_host = [map_tree(part, torch.clone) for part in on_host]
    with open_atomically(path) as file:
        torch.save(on_host, file)


def load_batch(path: Path) -> list[Episodes]:
    """Return the episodes of a saved batch by micro-batches. Raises pickle.UnpicklingError: the
    file holds anything else; no code of it has run."""
    with torch.serialization.safe_globals([*_SAVED_CLASSES]):
        parts: list[Episodes] = torch.load(path, weights_only=True)
    return parts


def named_tensors(part: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a loaded batch with its place, such as "rows.query.label_N"."""
    if isinstance(part, Tensor):
        yield name, part
        return
    if is_dataclass(part):
        inside = [(field.name, getattr(part, field.name)) for field in fields(part)]
        if isinstance(part, Episodes):  # `held` under the names of its properties
            own = dict(inside)
            del own["held"]
            inside = list({**own, **part.inputs._asdict()}.items())
    elif isinstance(part, tuple):
        names = getattr(part, "_fields", map(str, range(len(part))))
        inside = list(zip(names, part, strict=True))
    else:
        return
    for inner_name, inner in inside:
        yield from named_tensors(inner, f"{name}.{inner_name}" if name else inner_name)
