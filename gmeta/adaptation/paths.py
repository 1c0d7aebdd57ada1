"""How the change of each layer is held: as the config says, or in the cheapest way; here that of
the fused loop with fixed inputs, by what its products and its calls cost.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal, cast, get_args

from gmeta.adaptation.config import AlgorithmConfig, InnerPath
from gmeta.adaptation.costs import PathCosts

Path = Literal["fixed", "low_rank", "materialised"]

# Multiply-adds of small products that take as long as calling one more does: 6 us on one core.
CALL = 75_000


def paths_of_layers(config: AlgorithmConfig, layers: Sequence[str]) -> dict[str, InnerPath]:
    """What the config says of each adapted layer, by name.

    Raises:
        ValueError: an entry of `layer_paths` matches none of them, or names no path.
    """
    paths = dict.fromkeys(layers, config.inner_path)
    for entry in config.layer_paths:
        pattern, _, path = entry.partition("=")
        if path not in get_args(InnerPath):
            raise ValueError(
                f"algorithm.layer_paths has {entry!r}: write layer=path with one of the paths "
                f"{', '.join(get_args(InnerPath))}"
            )
        matched = [name for name in layers if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"algorithm.layer_paths: {pattern!r} matches no layer that adapts; those are "
                f"{', '.join(layers) or 'none'}. Name one of them, or remove the entry"
            )
        paths |= dict.fromkeys(matched, cast(InnerPath, path))
    return paths


@cache
def cheaper_path(
    tasks: int, costs: PathCosts, width_in: int, width_out: int, fixed: bool, path: InnerPath
) -> Path:
    """The path that takes less time for so many tasks of one size, unless the config says which;
    `fixed`: every step has the same activations.

    Backward does twice the multiply-adds of forward. Of two thin products and their four
    derivatives there are k^2 in low rank, with the passes that come back, or k if fixed.
    """
    low_rank: Path = "fixed" if fixed else "low_rank"
    if path != "auto":
        return low_rank if path == "low_rank" else "materialised"
    width, steps = (width_in, width_out), costs.steps
    low = costs.low_rank_of_fixed(*width) if fixed else costs.low_rank(*width, uses=1)
    low_time = 3 * tasks * low + CALL * 6 * (steps if fixed else steps * steps)
    matrix = costs.materialised(*width, uses=1)
    matrix_time = 3 * tasks * matrix + CALL * (12 * steps - 3)
    return low_rank if low_time <= matrix_time else "materialised"
