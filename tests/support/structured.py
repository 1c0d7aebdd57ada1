"""Changes of a JSON value as an attacker, a faulty program or a bad disk would make them."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

NUM_CHANGES = 500
# What no reader of ours expects where it stands.
ODD: list[Any] = [
    None, True, -1, 0, 1.5, 2**63, 10**30, "", "..", "../../etc/passwd", "/etc/passwd", "a\nb",
    "\ud800", "x" * 300, [], {}, [[]], {"": None}, [None] * 3,
]  # fmt: skip
NOT_JSON = ["NaN", "Infinity", "1e999", "[" * 3000, "", "{", '"' + "x" * 50]


def changed_texts(value: Any, seed: int) -> Iterator[str]:
    """Yield NUM_CHANGES texts, each `value` with one thing changed; the same for the same seed."""
    chance = random.Random(seed)
    text = json.dumps(value)
    for number in range(NUM_CHANGES):
        if number % 10 == 0:  # a byte, or a spelling that json.dumps would not give
            place = chance.randrange(len(text))
            wrong = chance.choice([chr(chance.randrange(32, 127)), *NOT_JSON])
            yield text[:place] + wrong + text[place + 1 :]
            continue
        own = copy.deepcopy(value)
        holder, key = chance.choice(list(_places(own)))
        if isinstance(holder, dict) and chance.random() < 0.3:
            kept = holder.pop(key)
            if chance.random() < 0.5:
                holder[f"{key}{chance.choice(['s', '/', ' '])}"] = kept
        else:
            holder[key] = chance.choice([*ODD, [holder[key]], {"x": holder[key]}])
        yield json.dumps(own)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container inside a value with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])
