"""Exact MAML against plain training on the same rows, and against the usual ways to do it.

Times the learner's step (forward and backward from fetched rows; no tables, no ranks) of an MLP
over 26 features x 32. Where tasks are ragged every step has a batch of its own, as in training:
sizes that never come again are what libraries that compile for a size pay for. Variants of one size
take turns in one process:

  plain        the same model without an inner loop, on support and query rows together
  maml, fomaml ours, second and first order
  common       as maml, but half of the features are the task's: the same on all of its rows
  two_labels   as maml, with two labels a row, half of the second not known
  loop         a loop over tasks with explicit weights
  vmap         torch.func: every task gets its own copy of each weight
  bmm          per-task weights written out, one batched product a layer

Peak memory is the growth of the process's high-water mark during a step, in fresh processes."""

import argparse
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
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
from _synthetic import even_sizes, ragged_sizes, random_batch, single_id_features
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.config.labels import LabelsConfig
from gmeta.learner import MetaLearner
from gmeta.losses.named_losses import make_objectives
from gmeta_models import InputSizes, ModelConfig, build_model
from metaio.read.batch import TaskBatch

NUM_FEATURES, WIDTH, TASKS, INNER_LR = 26, 32, 128, 0.05
CALLS = 2  # of a variant in a round
MODELS = {"832-256-128-1": (256, 128), "832-512-256-1": (512, 256)}


def model_of(hidden: tuple[int, ...], num_labels: int = 1) -> nn.Module:
    """The MLP of the benchmark, initialised the same in every variant."""
    torch.manual_seed(0)
    config = ModelConfig(name="melu", embedding_dim=WIDTH, hidden=hidden)
    return build_model(config, InputSizes(NUM_FEATURES, 0, 0, outputs=num_labels))


def equal_batch(rows: int) -> TaskBatch:
    """T tasks of `rows` support and `rows` query rows."""
    features = single_id_features(NUM_FEATURES, 100_000)
    return random_batch(features, even_sizes(TASKS, rows), even_sizes(TASKS, rows), 0)


def batches_of(rows: int, ragged: bool, calls: int) -> list[TaskBatch]:
    """For so many steps: T tasks of `rows` support and `rows` query rows, exactly or on average."""
    if not ragged:
        return [equal_batch(rows)]
    features = single_id_features(NUM_FEATURES, 100_000)
    sizes = [
        [ragged_sizes(TASKS, rows, 2 * call + side) for side in (1, 2)] for call in range(calls)
    ]
    return [random_batch(features, *of_call, call) for call, of_call in enumerate(sizes)]


def with_common(batch: TaskBatch) -> TaskBatch:
    """The batch where every other feature has, on all rows of a task, the id of its first row."""
    first_row_N = torch.repeat_interleave(
        batch.row_offsets_T1[:-1], batch.row_offsets_T1.diff(), output_size=batch.num_rows
    )
    positions_NF = batch.positions_NF.clone()
    positions_NF[:, ::2] = batch.positions_NF[first_row_N, ::2]
    return replace(batch, positions_NF=positions_NF)


def with_second_label(batch: TaskBatch) -> TaskBatch:
    """The batch with a second label, which every other row has: the first of the row before."""
    second_N = batch.label_N.roll(1).masked_fill(torch.arange(batch.num_rows) % 2 == 0, torch.nan)
    return replace(batch, label_N=torch.stack([batch.label_N, second_N], dim=1))


def ours(batches: list[TaskBatch], hidden: tuple[int, ...], name: str, steps: int) -> Step:
    """A step of the engine's learner; arranging the batch is the host's work and not in it."""
    algorithm = AlgorithmConfig(
        name=name, inner_steps=steps, inner_lr=INNER_LR, adapt_embeddings=False
    )
    num_labels = 1 if batches[0].label_N.dim() == 1 else 2
    names = ("click", "buy")[: num_labels if num_labels > 1 else 0]
    objectives = make_objectives("bce", 1.0, LabelsConfig(), names)
    learner = MetaLearner(model_of(hidden, num_labels), algorithm, objectives)
    return learner_step(learner, batches, WIDTH)


def by_hand(batch: TaskBatch, hidden: tuple[int, ...], kind: str, steps: int) -> Step:
    """A step of one of the usual ways, on equally sized tasks: x [T, S, I] gathered once."""
    model = model_of(hidden).decision
    rows = int(batch.support_lengths_T[0])
    position_V = batch.positions_NF.flatten().long()
    label_TR = batch.label_N.view(TASKS, 2 * rows)
    torch.manual_seed(0)
    rows_UD = torch.randn(batch.unique_ids_U.numel(), WIDTH).mul_(0.1).requires_grad_()
    parameters = dict(model.named_parameters())

    def task_loss(weights: Mapping[str, Tensor], x_SI: Tensor, label_S: Tensor) -> Tensor:
        """Mean loss of one task's rows under its weights: a scalar."""
        return F.binary_cross_entropy_with_logits(
            functional_call(model, weights, (x_SI,)).squeeze(-1), label_S
        )

    def adapt_and_score(weights: Mapping[str, Tensor], x_RI: Tensor, label_R: Tensor) -> Tensor:
        """Query loss after the inner steps on the first rows: a scalar."""
        for _ in range(steps):
            gradient = grad(task_loss)(weights, x_RI[:rows], label_R[:rows])
            weights = {name: w - INNER_LR * gradient[name] for name, w in weights.items()}
        return task_loss(weights, x_RI[rows:], label_R[rows:])

    def loop_loss(x_TRI: Tensor) -> Tensor:
        """One task after the other, as papers write it down."""
        losses = []
        for x_RI, label_R in zip(x_TRI, label_TR, strict=True):
            weights: dict[str, Tensor] = dict(parameters)
            for _ in range(steps):
                loss = task_loss(weights, x_RI[:rows], label_R[:rows])
                # Second order: the outer gradient goes through these.
                gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                pairs = zip(weights.items(), gradients, strict=True)
                weights = {name: w - INNER_LR * g for (name, w), g in pairs}
            losses.append(task_loss(weights, x_RI[rows:], label_R[rows:]))
        return torch.stack(losses).mean()

    def vmap_loss(x_TRI: Tensor) -> Tensor:
        """All tasks at once, by torch.func."""
        return vmap(adapt_and_score, in_dims=(None, 0, 0))(parameters, x_TRI, label_TR).mean()

    def bmm_logits(weights: list[Tensor], x_TSI: Tensor) -> Tensor:
        """The model [T, S] under the weights [T, O, I] and biases [T, O] of each task."""
        for index in range(0, len(weights), 2):
            x_TSI = torch.baddbmm(weights[index + 1].unsqueeze(1), x_TSI, weights[index].mT)
            x_TSI = torch.relu(x_TSI) if index + 2 < len(weights) else x_TSI
        return x_TSI.squeeze(-1)

    def bmm_loss(x_TRI: Tensor) -> Tensor:
        """All tasks at once, by batched products with their own weights."""
        weights = [p.expand(TASKS, *p.shape) for p in parameters.values()]
        for _ in range(steps):
            logits_TS = bmm_logits(weights, x_TRI[:, :rows])
            losses_TS = F.binary_cross_entropy_with_logits(
                logits_TS, label_TR[:, :rows], reduction="none"
            )
            # A sum over tasks gives each copy of the weights the gradient of its own task's mean.
            gradients = torch.autograd.grad(losses_TS.mean(1).sum(), weights, create_graph=True)
            weights = [w - INNER_LR * g for w, g in zip(weights, gradients, strict=True)]
        return F.binary_cross_entropy_with_logits(
            bmm_logits(weights, x_TRI[:, rows:]), label_TR[:, rows:]
        )

    losses = {"loop": loop_loss, "vmap": vmap_loss, "bmm": bmm_loss}

    def step() -> Tensor:
        rows_UD.grad = None
        model.zero_grad()
        # Not rows_UD[...], whose backward is slower: by up to 7 % of a peer's step.
        x_TRI = rows_UD.index_select(0, position_V).view(TASKS, 2 * rows, -1)
        loss = losses[kind](x_TRI)
        loss.backward()
        return loss.detach()

    return step


def variant(name: str, batches: list[TaskBatch], hidden: tuple[int, ...], steps: int) -> Step:
    """The step of a variant by its name in the table."""
    if name in ("loop", "vmap", "bmm"):
        return by_hand(batches[0], hidden, name, steps)
    if name == "common":
        return ours([with_common(batch) for batch in batches], hidden, "maml", steps)
    if name == "two_labels":
        return ours([with_second_label(batch) for batch in batches], hidden, "maml", steps)
    return ours(batches, hidden, {"plain": "none"}.get(name, name), steps)


def measure_sizes(
    sizes: list[tuple[str, int, bool, int]], rounds: int, peers: bool
) -> dict[tuple[str, int, bool, int], dict[str, float]]:
    """Median seconds of each variant at each (model, rows, ragged, inner steps)."""
    results = {}
    for size in sizes:
        model, rows, ragged, steps = size
        names = ["plain", "maml", "fomaml", "common", "two_labels"]
        if peers and not ragged and steps == 1:
            # They stack the tasks, which must be of one size.
            names += ["loop", "vmap", "bmm"]
        # The one more is for the first call, which makes buffers and chooses kernels.
        batches = batches_of(rows, ragged, 1 + CALLS * rounds)
        built = {name: variant(name, batches, MODELS[model], steps) for name in names}
        torch.manual_seed(0)
        for step in built.values():
            step()
        timed = {name: (lambda step=step: seconds_of(step, CALLS)) for name, step in built.items()}
        results[size] = {
            name: spread_of(values).median for name, values in interleaved(timed, rounds).items()
        }
    return results


def peak_bytes(name: str, model: str, rows: int) -> int:
    """Growth of the high-water mark during three steps, in a fresh process."""
    command = [sys.executable, "-W", "ignore", __file__, "--peak-of", name, model, str(rows)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak(name: str, model: str, rows: int) -> None:
    """What the process of `peak_bytes` prints."""
    from pathlib import Path

    def kilobytes(field: str) -> int:
        """A size that the kernel keeps of this process."""
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{field}:")[1].split()[0])

    step = variant(name, [equal_batch(rows)], MODELS[model], 1)
    # What libraries, model and batch take is the same in every variant.
    before = kilobytes("VmRSS")
    for _ in range(3):
        step()
    print((kilobytes("VmHWM") - before) * 1024)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--peak-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak_of:
        print_peak(options.peak_of[0], options.peak_of[1], int(options.peak_of[2]))
        return
    first = next(iter(MODELS))
    sizes = [(first, 5, False, 1), (first, 20, False, 1)]
    if not options.quick:
        sizes = [
            (model, rows, ragged, steps)
            for model in MODELS
            for rows in (5, 10, 20)
            for ragged in (False, True)
            for steps in (1, 3)
        ]
    results = measure_sizes(sizes, options.rounds or (4 if options.quick else 9), peers=True)
    lines, second, one, common, two, speedup = [], [], [], [], [], {}
    for (model, rows, ragged, steps), seconds in results.items():
        to_plain = {name: seconds[name] / seconds["plain"] for name in RATIOS}
        peers = {name: s for name, s in seconds.items() if name in ("loop", "vmap", "bmm")}
        if steps == 1:
            second.append(to_plain["maml"])
            one.append(to_plain["fomaml"])
            common.append(to_plain["common"])
            two.append(seconds["two_labels"] / seconds["maml"])
        if peers and model == first:
            speedup[rows] = min(peers.values()) / seconds["maml"]
        samples = 2 * rows * TASKS / 1e3
        lines.append(
            [f"{model} S=Q={'~' if ragged else ''}{rows} k={steps}"]
            + [f"{samples / seconds[name]:.0f}k" if name in seconds else "-" for name in COLUMNS]
            + [f"{ratio:.2f}" for ratio in to_plain.values()]
        )
    memory = peak_bytes("maml", first, 20) / peak_bytes("plain", first, 20)
    print(f"samples/s, {options.threads} thread(s), {TASKS} tasks")
    print_table(["size", *COLUMNS, *(f"{name}/plain" for name in RATIOS)], lines)
    finish(
        "maml_step",
        {
            "ratio_to_plain": max(second),
            "ratio_to_plain_first_order": max(one),
            "ratio_to_plain_common": max(common),
            "two_labels_ratio": max(two),
            "peak_memory_ratio": memory,
            **{f"speedup_s{rows}": value for rows, value in speedup.items()},
            "threads": options.threads,
            "environment": environment(("torch",)),
        },
    )


COLUMNS = ("plain", "fomaml", "maml", "common", "two_labels", "loop", "vmap", "bmm")
RATIOS = ("maml", "fomaml", "common", "two_labels")

if __name__ == "__main__":
    main()
