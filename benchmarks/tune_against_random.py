"""Compares `gmeta tune` with random search over the same space, by the best score so far.

    python benchmarks/tune_against_random.py --config train.toml --work runs/book [KEY=VALUE ...]

Runs both studies, in WORK-tune and WORK-random, and prints the best so far of the first beside the
mean best of as many trials of the second, drawn without replacement from all of its trials. Without
--config the runs are on small synthetic clicks. --quick tries three settings of these."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from _common import REPOSITORY, environment, finish, make_parser, positive_int, print_table

# What makes a study a random search.
RANDOM = """
import optuna
from gmeta.tuning import study
study.FIRST_CHANGES = ()
optuna.samplers.TPESampler = lambda seed=None, **_: optuna.samplers.RandomSampler(seed)
"""
AFTER = (1, 5, 10, 15, 20)
QUICK_TRIALS = 3


def run_gmeta(words: list[str], before: str = "") -> None:
    """Run a command of gmeta, behind some lines of Python."""
    program = f"{before}\nfrom gmeta.cli.main import main\nmain()"
    subprocess.run([sys.executable, "-c", program, *words], check=True, stdout=subprocess.DEVNULL)


def make_demo(work: Path) -> list[str]:
    """Make small synthetic clicks; return the words of their config."""
    data = work.with_name(f"{work.name}-data")
    shutil.rmtree(data, ignore_errors=True)
    sizes = ["--tasks", "600", "--items", "200"]
    run_gmeta(["prepare", "--recipe", "synthetic", *sizes, str(data)])
    config = REPOSITORY / "examples" / "demo.toml"
    return [str(config), f"data.path={data}", "run.epochs=1", "evaluation.tuning_tasks=20"]


def tune(folder: Path, arguments: list[str], before: str = "") -> tuple[list[float], bool]:
    """Run a study; return the scores of its whole trials as they came, and if higher is better."""
    words = ["tune", *arguments, "--study", str(folder), "--no-trees", "--pruner", "none"]
    run_gmeta(words, before)
    found = json.loads((folder / "results.json").read_text())
    whole = [one for one in found["trials"] if one["state"] == "complete"]
    in_order = [one["score"] for one in sorted(whole, key=lambda one: int(one["number"]))]
    # Ranked, the best first.
    return in_order, whole[0]["score"] > whole[-1]["score"]


def expected_best(scores: list[float], count: int, higher: bool) -> float:
    """Return the mean of the best of `count` of the scores, over all ways to draw them."""
    ranked = sorted(scores, reverse=higher)
    best, left, total = 0.0, 1.0, len(ranked)
    for rank, score in enumerate(ranked):
        # The share of draws that have this one and none before it.
        share = left * min(1.0, count / (total - rank))
        best, left = best + share * score, left - share
    return best


def main() -> None:
    """Run both studies and print the table."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--config", type=Path, help="TOML file, as of `gmeta tune`")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "tune-against-random")
    parser.add_argument("--trials", type=positive_int, default=20)
    parser.add_argument("--parallel", type=positive_int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    trials = QUICK_TRIALS if options.quick else options.trials
    work: Path = options.work
    if options.quick:
        work = work.with_name(f"{work.name}-quick")
        for side in ("tune", "random"):
            shutil.rmtree(work.with_name(f"{work.name}-{side}"), ignore_errors=True)
    is_given = options.config is not None and not options.quick
    words = [str(options.config)] if is_given else make_demo(work)
    words += [*options.overrides, "--trials", str(trials), "--parallel", str(options.parallel)]
    tuned, higher = tune(work.with_name(f"{work.name}-tune"), words)
    random, _ = tune(work.with_name(f"{work.name}-random"), words, RANDOM)
    better = max if higher else min
    # Of both the first trial is the config as it is.
    drawn = [better(score, random[0]) for score in random[1:]]
    best = {
        count: (
            better(tuned[:count]),
            expected_best(drawn, count - 1, higher) if count > 1 else random[0],
        )
        for count in sorted({1, *(count for count in AFTER if count < trials), trials})
    }
    rows = [[f"{count}", *(f"{score:.4f}" for score in pair)] for count, pair in best.items()]
    print_table(["trials", "gmeta tune", "random, behind the config"], rows)
    names = ("tune", "random")
    figures = {
        f"{name}_after_{count}": score
        for count, pair in best.items()
        for name, score in zip(names, pair, strict=True)
    }
    finish(
        "tune_against_random",
        figures | {"higher_is_better": higher, "quick": options.quick} | environment(),
    )


if __name__ == "__main__":
    main()
