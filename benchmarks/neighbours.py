"""Neighbours of a million items: what it costs to count 50 of each, without each fold of tasks and
of all tasks, and to make a batch's features of them.

Synthetic tasks of 20 rows: items of three tastes of 200 items each, the first ones of a taste more
often. Seconds are the process's own, whatever else runs. Memory is what no file backs: the lists
are mapped from a temporary file of `lists_mb`."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _common import environment, finish, make_parser, positive_int

from gmeta.data.features.neighbours import RatedRows, make_neighbour_features
from gmeta.data.neighbour_counts import Baskets, NeighbourLists, count_neighbours
from gmeta.data.sums import NUM_FOLDS
from metaio.ragged import Int64, owners

TASK_ROWS, TASTES, TASTE_ITEMS, BATCH_TASKS = 20, 3, 200, 256


def draw_items(num_tasks: int, num_items: int, rng: np.random.Generator) -> Int64:
    """The items of tasks, task by task; 0 is none."""
    num_tastes = num_items // TASTE_ITEMS
    tastes_T3 = rng.integers(0, num_tastes, (num_tasks, TASTES))
    task_N = owners(np.full(num_tasks, TASK_ROWS))
    taste_N = tastes_T3[task_N, rng.integers(0, TASTES, len(task_N))]
    place_N = (TASTE_ITEMS * rng.random(len(task_N)) ** 2).astype(np.int64)
    items_N: Int64 = 1 + taste_N + num_tastes * place_N
    return items_N


def measure(work: Callable[[], object], calls: int = 1) -> tuple[float, float]:
    """Seconds of one call, and the most memory above that at the beginning, in MB."""
    ended, seen = threading.Event(), [anonymous_mb()]

    def watch() -> None:
        while not ended.wait(0.02):
            seen.append(anonymous_mb())

    thread = threading.Thread(target=watch)
    thread.start()
    begun_s = time.process_time()
    for _ in range(calls):
        work()
    seconds = (time.process_time() - begun_s) / calls
    ended.set()
    thread.join()
    return seconds, max(seen) - seen[0]


def anonymous_mb() -> float:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--items", type=positive_int, help="how many items (a million)")
    parser.add_argument("--neighbours", type=positive_int, default=50, help="kept of each")
    options = parser.parse_args()
    num_items = options.items or (20_000 if options.quick else 1_000_000)
    rng, num_tasks = np.random.default_rng(0), num_items // 4
    item_N = draw_items(num_tasks, num_items, rng)
    label_N, lengths_T = rng.normal(size=len(item_N)), np.full(num_tasks, TASK_ROWS)
    fold_T = rng.integers(0, NUM_FOLDS, num_tasks)
    baskets = Baskets.of(lengths_T, item_N, label_N, fold_T)
    kept_T = np.diff(baskets.offsets_T1)
    pairs = int((kept_T * (kept_T - 1)).sum())
    lists = NeighbourLists.make_on_disk(NUM_FOLDS, num_items + 1, options.neighbours)
    count_s, count_mb = measure(lambda: count_neighbours(baskets, lists))
    rows = slice(0, BATCH_TASKS * TASK_ROWS)
    task_N, zeros_N = owners(lengths_T[:BATCH_TASKS]), np.zeros(BATCH_TASKS * TASK_ROWS)
    rated = RatedRows(
        task_N, item_N[rows], zeros_N == 0, label_N[rows], label_N[rows] > 0, zeros_N,
        zeros_N + TASK_ROWS - 1,
    )  # fmt: skip
    batch_s, _ = measure(lambda: make_neighbour_features(lists, fold_T[task_N], rated), 10)
    figures = {
        "items": num_items,
        "neighbours": options.neighbours,
        "rows": len(item_N),
        "pairs": pairs,
        "count_s": round(count_s, 2),
        "pairs_per_s": round(pairs / count_s),
        "count_mb": round(count_mb),
        "baskets_mb": round((baskets.item_N.nbytes + baskets.above_N.nbytes) / 1e6),
        "lists_mb": round((lists.ids.nbytes + lists.weights.nbytes) / 1e6),
        "mean_neighbours": round(float((lists.ids[-1, 1:] != 0).sum(axis=1).mean()), 1),
        "batch_rows": len(task_N),
        "batch_ms": round(1e3 * batch_s, 2),
    }
    for name, value in figures.items():
        print(f"{name:>16}  {value:,}")
    finish("neighbours", figures | environment(("numpy",)))


if __name__ == "__main__":
    main()
