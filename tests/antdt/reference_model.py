"""The ledger again, small and slow: a list, a few dictionaries, no pages, no cursor, no events, no
store. Written from the specification, not from the code. Where the two disagree one of them is
wrong."""

import copy
from dataclasses import dataclass, field

from gmeta.antdt.model import DatasetSpec
from gmeta.antdt.order import ShardOrder


@dataclass
class Shard:
    index: int
    state: str = "READY"
    units_done: int = 0
    attempts: int = 0
    tokens: list[int] = field(default_factory=list)  # two where a worker is backed up


@dataclass
class Model:
    spec: DatasetSpec
    ttl_s: float
    shards: list[Shard] = field(default_factory=list)  # in the order in which they are offered
    epoch: int = 0
    holder: dict[int, str] = field(default_factory=dict)  # live token -> worker
    expires_s: dict[int, float] = field(default_factory=dict)
    completed_by: dict[int, str] = field(default_factory=dict)
    slow: set[int] = field(default_factory=set)  # tokens whose shard another worker may do too
    saved: dict[str, tuple[int, list[Shard]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        order = ShardOrder(self.spec.num_shards, self.spec.seed, epoch, self.spec.shuffle)
        self.epoch = epoch
        self.shards = [Shard(order.index_of(position)) for position in range(self.spec.num_shards)]

    def finished(self) -> bool:
        return all(shard.state in ("DONE", "SKIPPED") for shard in self.shards)

    def of_token(self, token: int) -> Shard:
        (shard,) = [shard for shard in self.shards if token in shard.tokens]
        assert shard.state == "DOING"
        return shard

    def forget(self, shard: Shard, token: int) -> None:
        shard.tokens.remove(token)
        self.slow.discard(token)
        del self.holder[token], self.expires_s[token]

    def expire(self, now_s: float) -> None:
        for token in [token for token, when_s in self.expires_s.items() if when_s <= now_s]:
            self.give_back(token, attempt=True)

    def give_back(self, token: int, attempt: bool) -> None:
        shard = self.of_token(token)
        shard.attempts += attempt
        self.forget(shard, token)
        if not shard.tokens:
            shard.state = "QUARANTINED" if shard.attempts > self.spec.max_attempts else "READY"

    def give_back_all(self, worker: str | None = None) -> None:
        for token in [t for t, owner in self.holder.items() if worker in (None, owner)]:
            self.give_back(token, attempt=False)

    def lease(
        self, worker: str, tokens: list[int], epoch: int, max_shards: int, now_s: float
    ) -> object:
        """A list of (shard index, units_done, attempts), "WAIT" or "END"."""
        if epoch < self.epoch:
            return "END"
        if epoch == self.epoch + 1 and self.finished():
            self.begin_epoch(epoch)
        if epoch > self.epoch:
            return "WAIT"
        chosen = [shard for shard in self.shards if shard.state == "READY"][:max_shards]
        if not chosen:
            chosen = self.to_back_up(worker)[:1]
        if not chosen:
            return "END" if self.finished() else "WAIT"
        for token, shard in zip(tokens, chosen, strict=False):
            shard.state = "DOING"
            shard.tokens.append(token)
            self.holder[token] = worker
            self.expires_s[token] = now_s + self.ttl_s
        return [(shard.index, shard.units_done, shard.attempts) for shard in chosen]

    def to_back_up(self, worker: str) -> list[Shard]:
        """Shards that only a slow worker holds, the longest held first; none for a slow worker."""
        if any(self.holder[token] == worker for token in self.slow):
            return []
        alone = [
            shard
            for shard in self.shards
            if len(shard.tokens) == 1
            and shard.tokens[0] in self.slow
            and shard.attempts <= self.spec.max_attempts
        ]
        return sorted(alone, key=lambda shard: shard.tokens[0])

    def back_up(self, worker: str) -> int:
        """The worker is slow: how many more of its shards another may do as well."""
        if not self.spec.speculative or any(shard.state == "READY" for shard in self.shards):
            return 0
        alone = {shard.tokens[0] for shard in self.shards if len(shard.tokens) == 1} - self.slow
        mine = {token for token in alone if self.holder[token] == worker}
        self.slow |= mine
        return len(mine)

    def complete(self, worker: str, token: int) -> str:
        if self.holder.get(token) != worker:
            return "ALREADY" if self.completed_by.get(token) == worker else "FENCED"
        shard = self.of_token(token)
        shard.state, shard.units_done, shard.attempts = "DONE", 0, 0
        self.completed_by[token] = worker
        for each in list(shard.tokens):
            self.forget(shard, each)
        return "ACCEPTED"

    def progress(self, worker: str, token: int, units_done: int, now_s: float) -> str:
        if self.holder.get(token) != worker:
            return "FENCED"
        shard = self.of_token(token)
        if self.spec.speculative or units_done > self.spec.length_of(shard.index):
            return "INVALID"
        if units_done <= shard.units_done:
            return "ALREADY"
        shard.units_done = units_done
        self.expires_s[token] = now_s + self.ttl_s
        return "ACCEPTED"

    def release(self, worker: str, token: int, attempt: bool) -> str:
        if self.holder.get(token) != worker:
            return "FENCED"
        self.give_back(token, attempt)
        return "ACCEPTED"

    def save(self, name: str) -> None:
        shards = copy.deepcopy(self.shards)
        for shard in shards:
            shard.state = "READY" if shard.state == "DOING" else shard.state
            shard.tokens.clear()
        self.saved[name] = (self.epoch, shards)

    def restore(self, name: str | None) -> None:
        self.holder.clear()
        self.expires_s.clear()
        self.slow.clear()
        if name is None:
            self.begin_epoch(0)
        else:
            epoch, shards = self.saved[name]
            self.epoch, self.shards = epoch, copy.deepcopy(shards)

    def set_state(self, index: int, state: str) -> None:
        (shard,) = [shard for shard in self.shards if shard.index == index]
        for token in list(shard.tokens):
            self.forget(shard, token)
        shard.state = state
        if state == "READY":
            shard.attempts = 0

    def counts(self) -> dict[str, int]:
        names = ("READY", "DOING", "DONE", "SKIPPED", "QUARANTINED")
        return {name: sum(shard.state == name for shard in self.shards) for name in names}
