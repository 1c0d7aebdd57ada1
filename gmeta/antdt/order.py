"""The order in which an epoch's shards are offered: a permutation that is computed, not stored."""

import hashlib
import math
from typing import final

ORDER_NAME = "feistel-v1"  # stored in manifests; a changed permutation needs another name
NUM_ROUNDS = 6  # even, so that both halves are mixed equally often

_MASK64 = (1 << 64) - 1


@final
class ShardOrder:
    """A bijection between positions and shard indices, both 0 .. num_shards - 1.

    An alternating Feistel network over Z_a x Z_b with a*b >= num_shards: `left += F(right) mod
    a`, then `right += F(left) mod b`; values outside are walked back in (Black and Rogaway,
    Ciphers with Arbitrary Finite Domains, 2002). With a = ceil(sqrt(n)) at most one value in
    sqrt(n) has to walk.

    >>> order = ShardOrder(10, seed=7, epoch=0, shuffle=True)
    >>> sorted(order.index_of(position) for position in range(10)) == list(range(10))
    True
    >>> [order.position_of(order.index_of(position)) for position in (0, 3, 9)]
    [0, 3, 9]"""

    def __init__(self, num_shards: int, seed: int, epoch: int, shuffle: bool) -> None:
        # All shard state is kept by position in this order: an epoch in progress is one long run of
        # DONE and a few exceptions, so a manifest of ten million shards has a few hundred bytes.
        self._num_shards = num_shards
        self._shuffle = shuffle and num_shards > 1
        self._left_size = max(1, math.isqrt(max(num_shards - 1, 0)) + 1)
        self._right_size = max(1, -(-num_shards // self._left_size))
        self._keys = [_round_key(seed, epoch, number) for number in range(NUM_ROUNDS)]

    def index_of(self, position: int) -> int:
        """Return the shard offered at `position`."""
        if not self._shuffle:
            return position
        # A value outside is encrypted again until it falls inside: the larger range is permuted in
        # cycles, and this one holds `position` itself, so it ends.
        value = self._encrypt(position)
        while value >= self._num_shards:
            value = self._encrypt(value)
        return value

    def position_of(self, index: int) -> int:
        """Return the position at which shard `index` is offered."""
        if not self._shuffle:
            return index
        value = self._decrypt(index)
        while value >= self._num_shards:
            value = self._decrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = divmod(value, self._right_size)
        for number in range(0, NUM_ROUNDS, 2):
            left = (left + _mix(right ^ self._keys[number])) % self._left_size
            right = (right + _mix(left ^ self._keys[number + 1])) % self._right_size
        return left * self._right_size + right

    def _decrypt(self, value: int) -> int:
        left, right = divmod(value, self._right_size)
        for number in range(NUM_ROUNDS - 2, -1, -2):
            right = (right - _mix(left ^ self._keys[number + 1])) % self._right_size
            left = (left - _mix(right ^ self._keys[number])) % self._left_size
        return left * self._right_size + right


def _round_key(seed: int, epoch: int, number: int) -> int:
    text = f"{ORDER_NAME}:{seed}:{epoch}:{number}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def _mix(value: int) -> int:
    """Return the finaliser of splitmix64 for `value`."""
    # Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
