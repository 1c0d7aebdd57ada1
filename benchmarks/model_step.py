"""What an inner loop costs with each model, at the sizes of a cold-start data set.

Times the learner's step (forward and backward from fetched rows; no tables, no ranks) of plain
training and of MAML and FOMAML where the decision layers adapt, on the same rows: users with 3 to
90 support rows and 10 query rows, eight single-id columns of 32, and a history of up to 30 items.
In `dlrm-all` the bottom MLP over four dense columns and the embedding rows adapt too. `general` is
MAML in the general inner loop, which adapts any model. The variants of one model take turns in one
process."""

from dataclasses import dataclass, replace

import torch
from _common import (
    environment,
    finish,
    interleaved,
    make_parser,
    print_table,
    seconds_of,
    spread_of,
)
from _learner import Step, learner_step
from _synthetic import random_batch

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.runs.build import build_learner
from gmeta_models import ModelConfig
from metaio.format.features import Features, FeatureSpec, TableSpec
from metaio.read.batch import TaskBatch

NUM_SINGLE, WIDTH, TABLE_ROWS, LONGEST_HISTORY = 8, 32, 4_000, 30
MOST_SUPPORT, QUERY_ROWS = 90, 10
VARIANTS = ("plain", "fomaml", "maml", "general")


@dataclass(frozen=True)
class Case:
    """A model and what of it adapts."""

    model: str
    layers: str
    embeddings: bool = False
    num_dense: int = 0


CASES = {
    "melu": Case("melu", "decision.*"),
    "dlrm": Case("dlrm", "top.*"),
    "dlrm-all": Case("dlrm", "*", embeddings=True, num_dense=4),
    "cbml": Case("cbml", "decision.*"),
    "din": Case("din", "decision.*"),
}


def features(num_dense: int) -> Features:
    """Single-id columns with a table each, a history of the first and so many dense columns."""
    names = [f"f{index}" for index in range(NUM_SINGLE)]
    return Features(
        tables=tuple(TableSpec(name, TABLE_ROWS) for name in names),
        single=tuple(FeatureSpec(name, name) for name in names),
        multi=(FeatureSpec("history", names[0]),),
        dense=tuple(f"d{index}" for index in range(num_dense)),
    )


def batch_of(tasks: int, num_dense: int) -> TaskBatch:
    """Users of any number of support rows, with the histories of a growing account."""
    generator = torch.Generator().manual_seed(0)
    support_T = torch.randint(3, MOST_SUPPORT + 1, (tasks,), generator=generator)
    batch = random_batch(features(num_dense), support_T, torch.full((tasks,), QUERY_ROWS), seed=0)
    lengths_N1 = torch.randint(0, LONGEST_HISTORY + 1, (batch.num_rows, 1), generator=generator)
    # Positions of the first table, which come first: the history is of its ids.
    items = int(batch.unique_lengths_B[0])
    values_V = torch.randint(0, items, (int(lengths_N1.sum()),), generator=generator)
    return replace(
        batch,
        multi_positions_V=values_V.to(torch.int32),
        multi_lengths_NM=lengths_N1.to(torch.int32),
    )


def step_of(case: Case, variant: str, batch: TaskBatch, inner_steps: int) -> Step:
    """A step of a variant by its name in the table; arranging the batch is not in it."""
    algorithm = AlgorithmConfig(
        # The other names are the algorithms' own.
        name={"plain": "none", "general": "maml"}.get(variant, variant),
        inner_steps=inner_steps,
        adapt_layers=(case.layers,),
        adapt_embeddings=case.embeddings,
    )
    config = ModelConfig(
        name=case.model, embedding_dim=WIDTH, hidden=(64, 64), options={"history": "history"}
    )
    # Each variant begins with the same weights.
    torch.manual_seed(0)
    learner = build_learner(features(case.num_dense), config, algorithm, "bce")
    if variant == "general":
        learner.use_general_loop()
    return learner_step(learner, [batch], WIDTH)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--tasks", type=int, default=32, help="users in a step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds = options.rounds or (5 if options.quick else 11)
    lines, ratios = [], {}
    for model, case in CASES.items():
        batch = batch_of(options.tasks, case.num_dense)
        for inner_steps in (1, 3):
            steps = {name: step_of(case, name, batch, inner_steps) for name in VARIANTS}
            # The first call makes buffers and chooses kernels.
            for step in steps.values():
                step()
            timed = {name: (lambda step=step: seconds_of(step)) for name, step in steps.items()}
            seconds = {
                name: spread_of(values).median
                for name, values in interleaved(timed, rounds).items()
            }
            to_plain = {name: seconds[name] / seconds["plain"] for name in VARIANTS[1:]}
            ratios[f"{model}_k{inner_steps}"] = to_plain
            lines.append(
                [f"{model} k={inner_steps}", f"{batch.num_rows / seconds['plain'] / 1e3:.0f}k"]
                + [f"{to_plain[name]:.2f}" for name in VARIANTS[1:]]
            )
    print(f"{options.tasks} users, {batch.num_rows} rows, {options.threads} thread(s)")
    print_table(["model", "plain samples/s", *(f"{v}/plain" for v in VARIANTS[1:])], lines)
    finish(
        "model_step",
        {"ratio_to_plain": ratios, "threads": options.threads, "environment": environment()},
    )


if __name__ == "__main__":
    main()
