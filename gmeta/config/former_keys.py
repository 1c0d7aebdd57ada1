"""Keys of configs that older releases wrote: where their values stand now, and which are gone."""

from collections.abc import Mapping
from typing import Any

from gmeta.errors import ConfigError

# Each was a key of its section, whatever model or algorithm that named. No later option is here.
_NOW_OPTIONS = {
    "model": (
        *("bottom", "interaction", "clusters", "history", "attention", "cross_layers"),
        *("cross_rank", "structure", "experts", "own_experts", "expert", "levels"),
    ),
    "algorithm": (
        *("learned_rates", "encoder_hidden", "encoder_pooling", "encoder_modulation"),
        *("cold_weight", "content", "train_base"),
    ),
}
MOVED = {
    f"{section}.{name}": f"{section}.options.{name}"
    for section, names in _NOW_OPTIONS.items()
    for name in names
}
_INNER_PATH = "algorithm.inner_path"  # now an entry of algorithm.layer_paths for all layers
# Of what is gone: the value that changes nothing, and what became of another one.
GONE: dict[str, tuple[Any, str]] = {
    "data.lanes": (
        1,
        "a step draws from all blocks; data.blocks_per_step lets each rank read its own",
    ),
    "data.window_blocks": (0, "how many blocks are shuffled together follows from the split"),
    "data.drop_last": (False, "an epoch's last step may be smaller"),
    "data.tasks_per_shard": (0, "the size of a shard follows from the split"),
    "support_features.bias_start": (False, "model.linear_start starts as a regression of more"),
    "outer.adagrad_floor": (0.0, "outer.adagrad_decay holds for all sums alike"),
    "sharding.dense_wire_dtype": ("float32", "gradients of the layers travel in float32"),
    "sharding.shared_memory": (False, "ranks of one host exchange over TCP as others do"),
    "run.early_stop_min_delta": (0.0, "any improvement counts"),
}


def with_current_keys(raw: Mapping[str, Any], is_saved: bool = False) -> dict[str, Any]:
    """Return nested dicts of a config with today's keys. Where it `is_saved` by a run, an export or
    a checkpoint, keys that are gone are left out whatever they say: none of them tells what the
    weights are. Raises ConfigError: a key that is gone has a value that would change something."""
    found = {name: dict(keys) if isinstance(keys, Mapping) else keys for name, keys in raw.items()}
    for key, where in MOVED.items():
        section, name = _keys_with(found, key)
        if name in section:
            value, options = section.pop(name), section.get("options", {})
            if isinstance(options, Mapping):
                section["options"] = {where.rpartition(".")[2]: value, **options}
    section, name = _keys_with(found, _INNER_PATH)
    if (path := section.pop(name, "auto")) != "auto":
        exceptions = section.get("layer_paths", ())
        section["layer_paths"] = [f"*={path}", *exceptions]
    for line in describe_gone_keys(found):
        if not is_saved:
            raise ConfigError(f"{line}. Remove it")
    for key in GONE:
        section, name = _keys_with(found, key)
        section.pop(name, None)
    return found


def describe_gone_keys(raw: Mapping[str, Any]) -> list[str]:
    """Return a line for each key that is gone and has a value that would change something."""
    lines = []
    for key, (idle, why) in GONE.items():
        section, name = _keys_with(raw, key)
        if (value := section.get(name, idle)) != idle:
            lines.append(f"{key} = {value!r} is no key any more: {why}")
    return lines


def _keys_with(raw: Mapping[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the section that a key stands in, empty if it is not there, and its name there."""
    section, _, name = key.partition(".")
    keys = raw.get(section)
    return keys if isinstance(keys, dict) else {}, name
