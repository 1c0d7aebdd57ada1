"""The learner's step on a GPU: what it asks of the device, whether it is right, how long it takes.

  counts    launches, waits, copies, FLOPs and bytes of a step, and of a step of `gmeta train`, on a
            GPU that only pretends (--device pretend): tensors that say cuda:0 and hold their values
            on the CPU. Beside them the floors that they set, at stated speeds, and how few shapes
            the batches of a ragged run have
  check     loss and gradients of every model, algorithm and loop against the CPU's, and what
            gmeta.load predicts
  time      a step, eager and as a CUDA graph, by tasks, shape, inner steps, rectangles and
            precision; MAML of one step by torch.func's vmap, and by JAX's where it is installed.
            Beside each, on a GPU, its products of matrices alone as a graph, and the floors of the
            step that is eager, at the speeds of its products, memory and launches that are measured
            first. Steps follow one another; the host waits at the end
  profile   where the time of a step goes, eager and as a graph
  train     runs of `gmeta train`: losses against the CPU's; rows a second; and rows a second while
            threads or processes read and arrange. --only does one of these: losses, speeds, feeds
  ranks     runs of `gmeta train` on two ranks: losses against two ranks of the CPU

counts is the default without a GPU, check with one. The last five need a GPU; --device cpu tries
the scripts themselves. Each ends within 8 minutes and needs no network."""

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from _common import (
    REPOSITORY,
    environment,
    finish,
    interleaved,
    make_parser,
    print_table,
    seconds_of,
    spread_of,
)
from _gpu_peers import HIDDEN, ROWS, STEPS, jax_on, jax_seconds, products_alone, vmap_step
from _gpu_ranks import ranks_agree
from _gpu_shapes import shapes_of_runs
from _gpu_train import PARTS, trained
from _learner import Step
from _synthetic import even_sizes, ragged_sizes, random_batch, single_id_features
from maml_step import INNER_LR, NUM_FEATURES, WIDTH, model_of
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gmeta.config.algorithm import AlgorithmConfig
from gmeta.data import task_groups as groups
from gmeta.data.cuda_graphs import CudaCapture
from gmeta.learner import MetaLearner
from gmeta.platform.numerics import autocast, choose_products
from metaio.read.batch import TaskBatch
from metaio.recipes.synthetic import SyntheticConfig, prepare_synthetic

sys.path.insert(0, str(REPOSITORY))
from tests.pretended import device as pretended
from tests.pretended.learner_steps import HOST, all_cases, distance, of_cpu, step_of
from tests.pretended.process import built_guard, call_pretended, missing_for_guard
from tests.pretended.serving import compared

ALGORITHMS = [("none", 1), ("fomaml", 1), ("fomaml", 3), ("maml", 1), ("maml", 3)]
CLOSE = {"float32": 1e-9, "bf16": 0.1}  # of gradients to the CPU's: float64, and 8 bits
CLOSE_SERVED = 1e-4  # of predictions in float32


@dataclass(frozen=True)
class Speeds:
    """What the floors of a step follow from."""

    launch_s: float  # from Python
    bytes_a_s: float  # read and written
    flops_a_s: dict[str, float]  # of products, by precision

    def floors_ms(self, counts: pretended.Counts, precision: str) -> dict[str, float]:
        """Return the least milliseconds of a step by its launches, products and bytes."""
        floors = {
            "launches": counts.num_launches * self.launch_s,
            "flops": counts.flops / self.flops_a_s[precision],
            "bytes": counts.bytes / self.bytes_a_s,
        }
        return {name: round(1e3 * seconds, 3) for name, seconds in floors.items()}


# For the pretended device: an H200's, assumed.
ASSUMED = Speeds(5e-6, 4.3e12, {"float32": 60e12, "tf32": 400e12, "bf16": 800e12})


def speeds_of(device: torch.device) -> Speeds:
    """Measure what this GPU does a second at best."""

    def seconds(work: Callable[[], object]) -> float:
        return min(_seconds_of(work, device) for _ in range(5))

    small, large = torch.zeros(64, device=device), torch.randn(1 << 28, device=device)
    other = torch.empty_like(large)
    matrix = torch.randn(8192, 8192, device=device)
    flops = {}
    for precision in ("float32", "tf32", "bf16"):
        choose_products(precision, device)
        with autocast(precision, device):
            factor = matrix.bfloat16() if precision == "bf16" else matrix
            flops[precision] = 2 * 8192**3 / seconds(lambda factor=factor: factor @ factor)
    choose_products("float32", device)
    return Speeds(
        launch_s=seconds(lambda: [small.add_(1) for _ in range(1_000)]) / 1_000,
        bytes_a_s=2 * large.nbytes / seconds(lambda: other.copy_(large)),
        flops_a_s=flops,
    )


def batch_of(tasks: int, ragged: bool) -> TaskBatch:
    """So many tasks of 10 support and 10 query rows, exactly or on average."""
    sizes = [
        ragged_sizes(tasks, ROWS, side) if ragged else even_sizes(tasks, ROWS) for side in (1, 2)
    ]
    return random_batch(single_id_features(NUM_FEATURES, 100_000), *sizes, seed=0)


def learner_of(algorithm: str, steps: int) -> MetaLearner:
    """The benchmark's MLP, 832-512-256-1, and the way it adapts."""
    config = AlgorithmConfig(algorithm, steps, INNER_LR, adapt_embeddings=False)
    return MetaLearner(model_of(HIDDEN), config, "bce")


def step_on(
    device: torch.device,
    batch: TaskBatch,
    algorithm: str,
    steps: int,
    precision: str = "float32",
    as_graph: bool = False,
) -> Step:
    """A step, its batch on the device already; as a graph, the first two make it ready."""
    learner = learner_of(algorithm, steps).to(device)
    if as_graph:
        learner.in_buckets = True
        assert learner.use_graphs(CudaCapture()) == ""
    episodes = learner.collate(batch).to(device)
    rows_UD = (torch.randn(batch.unique_ids_U.numel(), WIDTH) * 0.1).to(device).requires_grad_()

    def step() -> torch.Tensor:
        rows_UD.grad = None
        learner.zero_grad()
        with autocast(precision, device):
            loss: torch.Tensor = learner(rows_UD, episodes, 1 / episodes.num_terms)
        loss.backward()
        return loss.detach()

    return step


def counted() -> list[dict[str, Any]]:
    """What steps ask of the pretended device, in whose process this runs."""
    found = []
    for ragged, (algorithm, steps) in itertools.product((False, True), ALGORITHMS):
        learner = learner_of(algorithm, steps)
        batch = batch_of(128, ragged)
        with pretended.PretendedDevice():
            learner.to(pretended.CUDA)
            rows_UD = torch.randn(batch.unique_ids_U.numel(), WIDTH).to(pretended.CUDA)
            rows_UD.requires_grad_()
            learner.in_buckets = True  # as a run on CUDA is by default
            with pretended.counting() as counts:
                episodes = learner.collate(batch).to(pretended.CUDA)
                learner(rows_UD, episodes, 1 / episodes.num_terms).backward()
        found.append(
            {
                "case": f"{algorithm} k={steps} {'ragged' if ragged else 'even'}",
                "launches": counts.num_launches,
                "waits": len(counts.waits),
                "copies": len(counts.to_device),
                "gflop": round(counts.flops / 1e9, 2),
                "megabytes": round(counts.bytes / 1e6, 1),
            }
        )
    return found


def counts(quick: bool) -> dict[str, Any]:
    """Print what steps ask of a GPU; return it."""
    if missing := missing_for_guard():
        raise SystemExit(f"a pretended GPU needs {missing}")
    with tempfile.TemporaryDirectory() as folder:
        guard = built_guard(Path(folder))
        steps = call_pretended(guard, "gpu", "counted")
        prepare_synthetic(f"{folder}/data", SyntheticConfig(num_tasks=200, num_items=60))
        training = "tests.pretended.training", "trained"
        runs = {
            "maml": [],
            "maml, clipped": ["outer.clip_norm=0.1"],
            "maml, Adam": ["outer.sparse_optimizer=adam"],
            "maml, graphs": ["run.cuda_graphs=on"],
            "maml, TorchRec's exchange": ["sharding.exchange=torchrec"],
        }
        trained = call_pretended(guard, *training, f"{folder}/runs", f"{folder}/data", runs)
    rows = []
    for step in steps:
        floors = {
            "launches": step["launches"] * ASSUMED.launch_s,
            "float32": step["gflop"] * 1e9 / ASSUMED.flops_a_s["float32"],
            "tf32": step["gflop"] * 1e9 / ASSUMED.flops_a_s["tf32"],
            "bytes": step["megabytes"] * 1e6 / ASSUMED.bytes_a_s,
        }
        step["floors_ms"] = {name: round(1e3 * seconds, 3) for name, seconds in floors.items()}
        values = [step[name] for name in ("launches", "waits", "copies", "gflop", "megabytes")]
        rows.append([step["case"], *map(str, [*values, *step["floors_ms"].values()])])
    header = ["learner's step", "launches", "waits", "copies", "GFLOP", "MB"]
    print_table([*header, "launches ms", "float32 ms", "tf32 ms", "bytes ms"], rows)
    whole = {}
    for name, run in trained.items():
        taken = run["steps"][1:]  # the first makes ready
        # Where there are graphs, a step that captured none.
        replayed = [one for one in taken if one["graphs"]]
        step = min(replayed or taken[:1], key=itemgetter("launches"))
        whole[name] = {
            "launches": step["launches"],
            "waits": max(len(one["waits"]) for one in taken),
            "copies": len(step["to_device"]),
        }
    print()
    table = [[name, *map(str, step.values())] for name, step in whole.items()]
    print_table(["step of gmeta train", "launches", "waits", "copies"], table)
    print()
    learner = learner_of("maml", 1)
    learner.in_buckets = True
    shapes = shapes_of_runs(learner, 20 if quick else 400)
    return {"learner": {step.pop("case"): step for step in steps}, "train": whole, "shapes": shapes}


def check(device: torch.device, quick: bool) -> dict[str, Any]:
    """Hold the device's steps to the CPU's; return how many are right."""
    # A graph of the CPU there is not: --device cpu leaves those out.
    cases = [case for case in all_cases() if device.type == "cuda" or not case.graph]
    cases = cases[:: 8 if quick else 1]
    wrong, waiting = [], []
    step_of(cases[0], device)  # libraries make themselves ready
    for case in cases:
        expected, _, _ = step_of(of_cpu(case), HOST)
        waits: list[Any] = []
        found, _, _ = step_of(case, device, around=partial(_noting_waits, device, waits))
        far = distance(expected, found)
        is_right = far < CLOSE[case.precision]
        wrong += [] if is_right else [case.name]
        waiting += [case.name] if waits else []
        told = "right" if is_right else "WRONG"
        print(f"{case.name:40s} {told}  {far:.1e} off, {len(waits)} waits", flush=True)
    served = {}
    if device.type == "cuda":
        served = {case: max(far) for case, far in compared(nullcontext).items()}
        wrong += [case for case, far in served.items() if far > CLOSE_SERVED]
        print(f"gmeta.load: {len(served)} models, {max(served.values()):.1e} off", flush=True)
    return {"cases": len(cases), "wrong": wrong, "waiting": waiting, "served": served}


@contextmanager
def _noting_waits(device: torch.device, waits: list[Any]) -> Iterator[None]:
    """Have `waits` hold what torch says of waits for the stream meanwhile; nothing but on CUDA."""
    import warnings

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        yield
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        # Once it says of itself that it is a prototype.
        said = [str(one.message) for one in told]
        waits[:] = [one for one in said if "synchroniz" in one and "prototype" not in one]


def floors_of(step: Step, precision: str, speeds: Speeds) -> dict[str, float]:
    """Return the floors of a step, from what it asks of its device."""
    with pretended.counting() as counts, pretended.Counting():
        step()
    return speeds.floors_ms(counts, precision)


def timed(device: torch.device, quick: bool, rounds: int) -> dict[str, Any]:
    """Time steps; return milliseconds by case, beside the floors of the step that is eager."""
    found: dict[str, Any] = {}
    on_gpu = device.type == "cuda"
    peer = jax_on(device)
    speeds = speeds_of(device) if on_gpu else ASSUMED
    if on_gpu:
        print(speeds, flush=True)
        found["speeds"] = asdict(speeds)
    precisions = ["float32", "tf32", "bf16"] if on_gpu else ["float32"]
    for tasks, ragged in itertools.product([128] if quick else [128, 512, 2048], (False, True)):
        batch = batch_of(tasks, ragged)
        for precision, (algorithm, steps) in itertools.product(precisions, ALGORITHMS):
            choose_products(precision, device)
            measures = {}
            for most in (1, 8) if ragged and algorithm != "none" else (8,):
                with _rectangles(most):
                    measures[f"{most} rectangles"] = step_on(
                        device, batch, algorithm, steps, precision
                    )
            eager = next(iter(measures.values()))
            if on_gpu and algorithm != "none":
                measures["graph"] = step_on(device, batch, algorithm, steps, precision, True)
            if algorithm == "maml" and steps == 1 and not ragged:
                measures["vmap"] = vmap_step(device, batch, precision)
            seconds = {
                name: (lambda step=step: _seconds_of(step, device))
                for name, step in measures.items()
            }
            # Those of a GPU say nothing of a CPU, whose loops call other operations.
            floors = floors_of(eager, precision, speeds) if on_gpu else {}
            if "graph" in measures:
                alone = products_alone(eager)
                seconds["products alone"] = partial(_seconds_of, alone, device)
            if peer is not None and "vmap" in measures and precision == "float32":
                seconds["jax.vmap"] = jax_seconds(peer, batch)
            for measure in seconds.values():
                measure()
            taken_ms = {
                name: round(1e3 * spread_of(values).median, 3)
                for name, values in interleaved(seconds, rounds).items()
            }
            if "graph" in measures:  # whatever the host takes to launch it
                taken_ms["kernels of the graph"] = _kernels_ms(measures["graph"])
            for name, taken in taken_ms.items():
                shape = "ragged" if ragged else "even"
                case = f"T={tasks} {shape} {algorithm} k={steps} {precision} {name}"
                found[case] = {"ms": taken, "floors_ms": floors}
                beside = ", ".join(f"{what} {least:.3f}" for what, least in floors.items())
                print(f"{case:52s} {taken:9.3f} ms  {beside}", flush=True)
    choose_products("float32", device)
    return found


def _kernels_ms(step: Step) -> float:
    """Return the milliseconds of a step's kernels, without the gaps between them."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    # Not what is added up by name: there a graph's launch has the time of its kernels once more.
    kernels = [one for one in profiler.events() if one.device_type == DeviceType.CUDA]
    return round(sum(one.time_range.elapsed_us() for one in kernels) / 1e3, 3)


def _seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a step, of several that follow one another, until all are done."""

    def work() -> None:
        for _ in range(STEPS):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return seconds_of(work) / STEPS


@contextmanager
def _rectangles(most: int) -> Iterator[None]:
    """Arrange ragged tasks in at most so many rectangles, where that saves any row."""
    before = groups.MOST_RECTANGLES, dict(groups.RECTANGLE_WORK)
    groups.MOST_RECTANGLES = most
    groups.RECTANGLE_WORK["cuda"] = 0
    try:
        yield
    finally:
        groups.MOST_RECTANGLES = before[0]
        groups.RECTANGLE_WORK.update(before[1])


def profiled(device: torch.device) -> dict[str, Any]:
    """Print where the time of ragged steps goes; return the most costly operations of each."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    kind = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = {}
    for as_graph in (False, True) if on_gpu else (False,):
        step = step_on(device, batch_of(128, True), "maml", 1, as_graph=as_graph)
        _seconds_of(step, device)
        with profile(activities=activities) as profiler:
            _seconds_of(step, device)
        averages = profiler.key_averages()
        name = "as a graph" if as_graph else "eager"
        print(name)
        print(averages.table(sort_by=kind, row_limit=25, max_name_column_width=60))
        most = sorted(averages, key=lambda one: -getattr(one, kind))[:10]
        found[name] = {one.key: round(getattr(one, kind) / STEPS / 1e3, 4) for one in most}
    return found


def main() -> None:
    """Do what is asked; print figures, then JSON."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "what", nargs="?", choices=["counts", "check", "time", "profile", "train", "ranks"]
    )
    parser.add_argument("--device", choices=["cuda", "cpu", "pretend"])
    parser.add_argument("--only", choices=PARTS, help="train: this part alone")
    options = parser.parse_args()
    kind = options.device or ("cuda" if torch.cuda.is_available() else "pretend")
    what = options.what or ("counts" if kind == "pretend" else "check")
    if (kind == "pretend") != (what == "counts"):
        parser.error(f"{what} is not for --device {kind}: counts is for pretend, and that for it")
    if options.only and what != "train":
        parser.error("--only is for train")
    if kind == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no GPU: use pretend, or install the driver")
    device = torch.device("cuda", 0) if kind == "cuda" else HOST
    figures: dict[str, Any]
    if what == "counts":
        figures = counts(options.quick)
    elif what == "check":
        figures = check(device, options.quick)
    elif what == "time":
        figures = timed(device, options.quick, options.rounds or (3 if options.quick else 10))
    elif what == "train":
        figures = trained(kind, options.quick, [options.only] if options.only else PARTS)
    elif what == "ranks":
        figures = ranks_agree(kind, options.quick)
    else:
        figures = profiled(device)
    about = environment() | {"device": kind}
    if kind == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    finish("gpu", {"what": what, **figures, "environment": about})
    if figures.get("wrong"):
        sys.exit(1)


if __name__ == "__main__":
    main()
