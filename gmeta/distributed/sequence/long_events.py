"""Long tasks' events, encoded by all ranks: what an encoder of events is given, which knows none.

Shape suffixes: T tasks, N rows, H longest list or task, M multi-id features, D embedding width"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gmeta.config.train_config import TrainConfig
from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sequence.encode import encode_over_ranks, gather, pool_over_ranks
from gmeta.distributed.sequence.peers import add_over
from gmeta.distributed.sequence.sharding import SequenceSharding, shard_sequences
from gmeta_models.options import event_options
from gmeta_models.sequence.encoder import EventRectangle, KnownEvents, Layer

if TYPE_CHECKING:  # which learner is spread over the ranks is its builder's business
    from gmeta.learner import MetaLearner


def spread_long_events(learner: "MetaLearner", config: TrainConfig, ranks: Ranks) -> None:
    """Have all ranks encode each long task's events together, as [sharding] says. Raises
    ConfigError: the ranks cannot share the encoder's heads. Collective."""
    kind = config.sharding.sequence
    if kind == "none" or learner.events is None or learner.event_columns is None:
        return
    # Pooling has no heads: every kind is the same there.
    heads = getattr(event_options(config.model), "heads", 0)
    sharding = shard_sequences(kind if heads else "ring", heads, ranks)
    learner.events.over_ranks = LongEventsOverRanks(sharding, ranks)
    long_from = config.sharding.sequence_from
    learner.event_columns = replace(learner.event_columns, long_from=long_from)


@dataclass(frozen=True)
class LongEventsOverRanks:
    """Encodes long tasks with all ranks, see gmeta_models.sequence.encoder.LongEvents. All methods
    are collective, and so is the backward pass of what they return: each rank's loss uses it."""

    sharding: SequenceSharding
    ranks: Ranks

    def align(self, own: Sequence[EventRectangle], none: EventRectangle) -> list[EventRectangle]:
        """Return a rectangle for each power of two up to which a task of any rank has events."""
        # So a task is padded to less than twice its length, however long another rank's are.
        by_size = {(one.position_THM.shape[1] - 1).bit_length(): one for one in own}
        of_ranks = gather(list(by_size), self.sharding.slices, self.ranks)
        return [by_size.get(size, none) for size in sorted(set().union(*of_ranks))]

    def encode(
        self, layers: Sequence[Layer], inputs_THD: Tensor, seconds_TH: Tensor,
        known: KnownEvents,
    ) -> Tensor:  # fmt: skip
        """Return the states behind all layers, from the start to the last event that a row knows,
        [T, H, D]."""
        length_T = torch.tensor([max(of_task) + 1 for of_task in known], dtype=torch.int64)
        return encode_over_ranks(
            layers, inputs_THD, length_T, self.sharding, self.ranks, seconds_TH
        )

    def pool(
        self, pool: Callable[[Tensor, Tensor, Tensor], Tensor], events_THD: Tensor,
        target_TND: Tensor, known: KnownEvents,
    ) -> Tensor:  # fmt: skip
        """Return the sum over all ranks of what `pool` makes of a slice of events, all tasks'
        targets and how many events of the slice each row knows, [T, N, D]."""
        slices = self.sharding.slices

        def pool_slice(events_THD: Tensor, target_TND: Tensor, before_TN: Tensor) -> Tensor:
            places = events_THD.shape[1]
            of_slice_TN = (before_TN - self.sharding.first(places)).clamp(0, places)
            return add_over(pool(events_THD, target_TND, of_slice_TN.to(events_THD.device)), slices)

        before_TN = torch.tensor(known, dtype=torch.int64).view(target_TND.shape[:2])
        return pool_over_ranks(pool_slice, events_THD, target_TND, before_TN, slices, self.ranks)
