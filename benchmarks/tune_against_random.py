"""Compares `gmeta tune` with random search over the same space, by the best score so far.

    python benchmarks/tune_against_random.py FOLDER train.toml --trials 20 [KEY=VALUE ...]

Runs both studies, in FOLDER-tune and FOLDER-random, and prints the best so far of the first beside
the mean best of as many trials of the second, drawn without replacement from all of its trials."""

import json
import subprocess
import sys
from pathlib import Path

# What makes a study a random search.
RANDOM = """
import optuna
from gmeta.tuning import study
study.FIRST_CHANGES = ()
optuna.samplers.TPESampler = lambda seed=None, **_: optuna.samplers.RandomSampler(seed)
"""
AFTER = (1, 5, 10, 15, 20)


def tune(folder: str, arguments: list[str], before: str = "") -> tuple[list[float], bool]:
    """Run a study; return the scores of its whole trials as they came, and if higher is better."""
    words = ["tune", *arguments, "--study", folder, "--no-trees", "--pruner", "none"]
    program = f"{before}\nfrom gmeta.cli.main import main\nmain()"
    subprocess.run([sys.executable, "-c", program, *words], check=True, stdout=subprocess.DEVNULL)
    found = json.loads((Path(folder) / "results.json").read_text())
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
    _, root, *arguments = sys.argv
    tuned, higher = tune(f"{root}-tune", arguments)
    random, _ = tune(f"{root}-random", arguments, RANDOM)
    print("trials | gmeta tune | random, behind the config")
    better = max if higher else min
    # Of both the first trial is the config as it is.
    drawn = [better(score, random[0]) for score in random[1:]]
    for count in AFTER:
        by_chance = expected_best(drawn, count - 1, higher) if count > 1 else random[0]
        print(f"{count:6} | {better(tuned[:count]):.4f}     | {by_chance:.4f}")


if __name__ == "__main__":
    main()
