"""Inputs that joined a stream since a checkpoint: its model predicts as before, and learns from
them from then on.

The weights that read a new input begin at 0, its embeddings as those of any table.

Shape suffixes: N rows, F single-id or pooled features, M multi-id features, V values, K dense
columns, D embedding width"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gmeta.errors import UserError
from gmeta.platform.internals import ShardedTensor
from gmeta_models.dlrm import DLRM
from gmeta_models.eval_mode import in_eval_mode
from gmeta_models.inputs import RowInputs
from gmeta_models.model_config import InputSizes, ModelConfig, SparseColumn
from gmeta_models.model_outputs import split_output
from gmeta_models.registry import build_model
from metaio.format.dataset import Dataset
from metaio.format.features import Features

if TYPE_CHECKING:
    from gmeta.learner import MetaLearner

_MODEL = "learner.model."
# What reads a new input begins at 0 there; what optimizers and rates keep of it as in a new run.
_OF_WEIGHTS = (f"model.{_MODEL}", "model.learner.encoder.")
_ROWS = 16  # that the model is tried on, before and after
_Places = dict[tuple[int, int], list[int]]


@dataclass(frozen=True)
class JoinedInputs:
    """The columns of a checkpoint's last increment, and those of the next one, which are more."""

    before: Features
    after: Features
    model: ModelConfig

    @property
    def names(self) -> list[str]:
        """Return the inputs that joined."""
        old, new = (
            [*(one.name for one in each.sparse), *each.dense] for each in (self.before, self.after)
        )
        return [name for name in new if name not in old]


def find_joined_inputs(
    before: Dataset, dataset: Dataset, model: ModelConfig
) -> JoinedInputs | None:
    """Return the inputs that `dataset` has and `before`, an earlier increment, has not; None: there
    is none."""
    found = JoinedInputs(before.features, dataset.features, model)
    return found if found.names else None


class GrownLayers:
    """The layers of a fresh model that are larger than a checkpoint's; `wanted` is what to load."""

    def __init__(self, joined: JoinedInputs, learner: MetaLearner, index: Metadata) -> None:
        self._joined, self._learner = joined, learner
        self._index = index.state_dict_metadata
        self._grown: list[tuple[str, Tensor, Tensor]] = []  # name, as it is here, as it was
        self._stored: dict[str, Tensor] = {}  # the model's layers, as the checkpoint has them

    def fit(self, state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """Return a nested state to load: without what is new, with tensors of their earlier sizes
        in place of layers that have grown."""
        found: dict[str, Any] = {}
        for key, value in state.items():
            name = f"{prefix}{key}"
            stored = self._index.get(name)
            if isinstance(value, Mapping):
                if inner := self.fit(value, f"{name}."):
                    found[key] = inner
            elif stored is None:
                continue  # of a table or a layer that reads new inputs alone
            elif (
                isinstance(stored, TensorStorageMetadata)
                and isinstance(value, Tensor)
                and not isinstance(value, ShardedTensor)
                and value.shape != stored.size
            ):
                found[key] = torch.empty(stored.size, dtype=value.dtype, device=value.device)
                self._grown.append((name, value, found[key]))
            else:
                found[key] = value
            if name.startswith(f"model.{_MODEL}") and key in found:
                self._stored[name.removeprefix(f"model.{_MODEL}")] = found[key]
        return found

    @torch.no_grad()
    def place(self) -> None:
        """Fill the layers that have grown from what was loaded. Raises UserError: the model reads
        its inputs in another order than ours do, so that its predictions would change."""
        places = find_places(self._joined, self._learner)
        for name, live, stored in self._grown:
            chosen = [
                list(range(size)) if size == now else places.get((size, now))
                for size, now in zip(stored.shape, live.shape, strict=False)
            ]
            if live.ndim != stored.ndim or None in chosen:
                raise self._refuse(f"{name} of {[*stored.shape]} cannot become {[*live.shape]}")
            if name.startswith(_OF_WEIGHTS):
                live.zero_()
            indexes = [torch.tensor(own, device=live.device) for own in chosen]
            live[torch.meshgrid(*indexes, indexing="ij")] = stored
        # Else a layer that reads new inputs alone, such as the first one of dense columns, is all.
        self._check_predictions()

    def _check_predictions(self) -> None:
        joined, learner = self._joined, self._learner
        old, new = joined.before, joined.after
        sizes, device = learner.tables.inputs, next(learner.model.parameters()).device
        num_dense = sizes.num_dense - len(new.dense) + len(old.dense)
        single, multi = (
            tuple(SparseColumn(one.name, one.table) for one in kind)
            for kind in (old.single, old.multi)
        )
        fewer = InputSizes(len(single), len(multi), num_dense, single, multi, sizes.outputs)
        # The run's own random numbers stay what they are.
        with torch.random.fork_rng(devices=[]):
            model = build_model(joined.model, fewer).to(device)
        model.load_state_dict(self._stored)
        draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
        width, num_values = learner.tables.width, _ROWS * sizes.num_multi
        rows = RowInputs(
            draw(_ROWS, sizes.num_single, width),
            draw(num_values, width),
            torch.arange(num_values, device=device),
            sizes.num_multi,
            draw(_ROWS, sizes.num_dense),
        )
        outputs: list[Tensor] = []
        for one, inputs in ((model, _without(rows, joined, learner)), (learner.model, rows)):
            with in_eval_mode(one):
                outputs.append(split_output(one(inputs))[0])
        if not torch.allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-4):
            raise self._refuse("its predictions would change")

    def _refuse(self, why: str) -> UserError:
        return UserError(
            f"{', '.join(self._joined.names)} joined the stream, and model.name = "
            f"{self._joined.model.name!r} of this run cannot take more inputs: {why}. Begin a new "
            "model: a run without run.continue_from"
        )


def find_places(joined: JoinedInputs, learner: MetaLearner) -> _Places:
    """Return where the entries of an axis stand that had one size and now has another: features
    and dense columns side by side, one kind alone, pairs of them, or tables."""
    old, new, model = joined.before, joined.after, learner.model
    width = learner.tables.width
    features = [_list_features(each, getattr(model, "history", None), new) for each in (old, new)]
    fields = _find_all(*features)
    dense = _find_dense(joined, learner)
    side = [field * width + place for field in fields for place in range(width)]
    num_old, num_new = len(features[0]), len(features[1])
    num_dense = learner.tables.inputs.num_dense
    sizes = len(dense), num_dense
    found: _Places = {sizes: dense}
    behind = [num_new * width + place for place in dense]
    found[num_old * width + len(dense), num_new * width + num_dense] = [*side, *behind]
    if isinstance(model, DLRM):
        # The vector of the dense columns stands first, where there are any.
        first = int(num_dense > 0), int(bool(dense))
        vectors = [0] * first[1] + [first[0] + field for field in fields]
        counts = first[1] + num_old, first[0] + num_new
        if model.interaction == "cat":
            found[counts[0] * width, counts[1] * width] = [
                vector * width + place for vector in vectors for place in range(width)
            ]
        else:
            pairs = [
                high * (high - 1) // 2 + low
                for at in range(len(vectors))
                for high, low in ((vectors[at], before) for before in vectors[:at])
            ]
            offsets = [width * has for has in first]
            own = [*range(width)] if first[1] else []
            total = [count * (count - 1) // 2 for count in counts]
            key = offsets[1] + total[0], offsets[0] + total[1]
            found[key] = [*own, *(offsets[0] + pair for pair in pairs)]
    tables = [[table.name for table in each.tables] for each in (old, new)]
    found[len(tables[0]), len(tables[1])] = _find_all(*tables)
    for (size, now), places in list(found.items()):
        # The rows of an encoder of support rows: features, those times the error, label and error.
        found.setdefault(
            (2 * size + 2, 2 * now + 2),
            [*places, *(now + place for place in places), 2 * now, 2 * now + 1],
        )
    return found


def _find_all(old: Sequence[Any], new: Sequence[Any]) -> list[int]:
    return [new.index(one) for one in old]


def _list_features(features: Features, history: int | None, newest: Features) -> list[Any]:
    """Return the features as they stand side by side: a model's history before its other lists."""
    multi = [("multi", one.name) for one in features.multi]
    if history is not None:
        multi.sort(key=lambda one: one[1] != newest.multi[history].name)
    return [*(("single", one.name) for one in features.single), *multi]


def _find_dense(joined: JoinedInputs, learner: MetaLearner) -> list[int]:
    """Return where dense inputs stand: the vector of events, the columns, statistics."""
    old, new = joined.before.dense, joined.after.dense
    events = 0 if learner.events is None else learner.events.outputs
    num_statistics = learner.tables.inputs.num_dense - events - len(new)
    places = [*range(events), *(events + new.index(name) for name in old)]
    return [*places, *(events + len(new) + one for one in range(num_statistics))]


def _without(rows: RowInputs, joined: JoinedInputs, learner: MetaLearner) -> RowInputs:
    """Return rows without the inputs that joined."""
    old, new = joined.before, joined.after
    singles, multis = (
        _find_all([one.name for one in mine], [one.name for one in theirs])
        for mine, theirs in ((old.single, new.single), (old.multi, new.multi))
    )
    width = rows.bag_values_VD.shape[1]  # not -1, which no list at all does not tell
    values_NMD = rows.bag_values_VD.view(_ROWS, rows.num_multi, width)[:, multis]
    return RowInputs(
        rows.single_NFD[:, singles],
        values_NMD.flatten(0, 1),
        torch.arange(_ROWS * len(multis), device=rows.dense_NK.device),
        len(multis),
        rows.dense_NK[:, _find_dense(joined, learner)],
    )
