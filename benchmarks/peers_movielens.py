"""gmeta against learn2learn, torch.func.vmap, JAX and a plain loop.

Workload `movielens`: MeLU's model and protocol on MovieLens-1M (8 embeddings of 32, layers
256-64-64-1, 32 users a step). Workload `large`: the same layers over 8 tables of a million rows,
32 tasks a step, 10 support and 10 query rows a task. In both: second-order MAML, one inner step,
the decision layers adapt, float32, Adam on the layers, Adagrad on the tables.

Every peer must first give the plain loop's outer gradient and losses. A step starts with a batch in
memory, in the layout that the peer wants, and ends with updated parameters. Peers take turns in
interleaved rounds, each in its own process, pinned to as many cores as it has threads. Those that
need other packages than gmeta's live in .venv-peers, which --setup makes."""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import (
    REPOSITORY,
    available_cores,
    environment,
    finish,
    interleaved,
    make_parser,
    positive_int,
    print_table,
    spread_of,
)
from peers.agreement import DisagreementError, require_agreement, require_equal_losses
from peers.interface import OURS, PEERS, REFERENCE
from peers.remote import SETUP_COMMAND, PeerFailedError, RemotePeer, running
from peers.setup import set_up
from peers.workload import MOVIELENS, Rates, has_movielens, load_workload

# MeLU's published settings: local rate 5e-6, global rate 5e-5. Speed does not depend on them.
MELU_RATES = Rates(inner=5e-6, outer=5e-5, tables=0.01)
# Gradients are compared dense: a million rows would be a gigabyte a peer.
CHECKED_ROWS_PER_TABLE = 20_000


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int
    visit_s: float  # how long a peer is timed in a round, at least
    num_batches: int
    dense_steps: int  # of peers whose step takes seconds on large tables


Measured = dict[str, list[float]]  # samples/s (support and query rows) of each round, by peer


def main() -> int:
    """Entry point; returns the exit status."""
    options = parse_options()
    if options.setup:
        set_up(options.peers_env)
        print(f"The peers are installed in {options.peers_env}.")
        return 0
    try:
        run(options)
    except (DisagreementError, PeerFailedError) as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    return 0


def parse_options() -> argparse.Namespace:
    """What the command line asks for; exits with status 2 if that cannot be."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--setup", action="store_true", help="install the peers into --peers-env, then stop"
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=list(PEERS),
        metavar="NAME",
        help=" ".join(PEERS),
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=("movielens", "large"), default=["movielens", "large"]
    )
    parser.add_argument(
        "--threads", nargs="+", type=positive_int, metavar="N", help="default: 1 2, quick: 1"
    )
    parser.add_argument(
        "--rows-per-table",
        type=positive_int,
        metavar="N",
        help="of `large`; default: 1000000, quick: 100000",
    )
    parser.add_argument(
        "--peers-env", type=Path, default=REPOSITORY / ".venv-peers", help="default: .venv-peers"
    )
    parser.add_argument(
        "--movielens", type=Path, default=MOVIELENS, help="folder of tasks.npz and init_seed0.npz"
    )
    options = parser.parse_args()
    cores = len(available_cores())
    options.threads = options.threads or ([1] if options.quick or cores == 1 else [1, 2])
    options.rows_per_table = options.rows_per_table or (100_000 if options.quick else 1_000_000)
    if max(options.threads) > cores:
        parser.error(
            f"--threads {max(options.threads)}: this machine has {cores} cores, "
            f"at most {cores} is allowed. Ask for fewer"
        )
    # Absolute, as workers run elsewhere; never resolved, as an environment's python is a link.
    options.peers_env, options.movielens = (
        options.peers_env.absolute(),
        options.movielens.absolute(),
    )
    return options


def run(options: argparse.Namespace) -> None:
    """Check, time, and print tables and the line of JSON."""
    quick = Effort(rounds=options.rounds or 7, visit_s=0.1, num_batches=2, dense_steps=1)
    full = Effort(rounds=options.rounds or 9, visit_s=0.4, num_batches=8, dense_steps=3)
    effort = quick if options.quick else full
    # The loop takes part in any case: every other peer is checked against it.
    names = [name for name in PEERS if name in {*options.peers, REFERENCE}]
    origin = (
        "MovieLens-1M" if has_movielens(options.movielens) else "synthetic, of MovieLens-1M's shape"
    )
    if "movielens" in options.workloads and not has_movielens(options.movielens):
        print(
            f"{options.movielens} holds no tasks.npz: timing on made-up tasks of the same shape.",
            flush=True,
        )

    measured: dict[str, dict[str, Measured]] = {workload: {} for workload in options.workloads}
    absent: dict[str, str] = {}
    versions: dict[str, dict[str, str]] = {}
    for threads in options.threads:
        cores = available_cores()[-threads:]
        with (
            tempfile.TemporaryDirectory() as folder,
            running(names, options.peers_env, cores, options.movielens, Path(folder)) as (
                peers,
                missing,
            ),
        ):
            versions |= {name: peer.versions for name, peer in peers.items()}
            if missing and not absent:
                report_missing(missing)
            absent |= missing
            for workload in options.workloads:
                measured[workload][str(threads)] = measure(
                    peers, workload, options, effort, Path(folder)
                )
                print_measured(workload, threads, measured[workload][str(threads)])
    circumstances = {
        "data": origin,
        "missing": absent,
        "rows_per_table": options.rows_per_table,
        "rounds": effort.rounds,
        "quick": options.quick,
        "versions": versions,
        "environment": environment(),
    }
    finish("peers_movielens", summary(measured) | circumstances)


def report_missing(missing: Mapping[str, str]) -> None:
    """Say which peers are left out, and how to get them."""
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}.", flush=True)
    if missing:
        print(f"Install the peers with: {SETUP_COMMAND}", flush=True)


def measure(
    peers: Mapping[str, RemotePeer],
    workload: str,
    options: argparse.Namespace,
    effort: Effort,
    folder: Path,
) -> Measured:
    """Check the peers against the loop, then time them."""
    spec = {
        "name": workload,
        "rows_per_table": CHECKED_ROWS_PER_TABLE,
        "num_batches": effort.num_batches,
    }
    difference = require_agreement(peers, spec, folder)
    print(
        f"{workload}: {len(peers)} peers agree; gradients differ by at most {difference:.1e}.",
        flush=True,
    )

    spec["rows_per_table"] = options.rows_per_table
    data = load_workload(**spec, movielens=options.movielens)
    rows_per_step = sum(batch.num_rows for batch in data.batches) / len(data.batches)
    dense = {name for name in peers if PEERS[name].dense_gradients and data.large_tables}
    resident = {name: peer for name, peer in peers.items() if name not in dense}
    losses = {name: build(peer, spec) for name, peer in resident.items()}
    times = interleaved(
        {name: visit(peer, len(data.batches), effort.visit_s) for name, peer in resident.items()},
        effort.rounds,
    )
    for peer in resident.values():
        peer.ask("drop")
    # A step of theirs takes about a second and some gigabytes: one after the other, few steps.
    for name in sorted(dense):
        losses[name] = build(peers[name], spec)
        times[name] = [
            peers[name].ask("time", steps=1)["seconds"] for _ in range(effort.dense_steps)
        ]
        peers[name].ask("drop")
    # Again, at full size: the check above was on small tables.
    for name, found in losses.items():
        require_equal_losses(name, found, losses[REFERENCE])
    return {name: [rows_per_step / seconds for seconds in times[name]] for name in peers}


def build(peer: RemotePeer, spec: dict[str, Any]) -> list[float]:
    """Have a peer start afresh, compile and warm up; its losses on the way."""
    losses: list[float] = peer.ask("build", workload=spec, rates=vars(MELU_RATES))["losses"]
    return losses


def visit(peer: RemotePeer, num_batches: int, at_least_s: float) -> Any:
    """A measure that times whole turns over the batches, and returns seconds a step."""
    turn_s = peer.ask("time", steps=num_batches)["seconds"]
    steps = num_batches * max(1, round(at_least_s / turn_s))
    return lambda: peer.ask("time", steps=steps)["seconds"] / steps


def summary(measured: Mapping[str, Mapping[str, Measured]]) -> dict[str, Any]:
    """Figures of the JSON line. Speedups are the worst over workloads and threads."""
    speedups = {
        workload: {threads: speedups_of(found) for threads, found in by_threads.items()}
        for workload, by_threads in measured.items()
    }
    flat = [found for by_threads in speedups.values() for found in by_threads.values()]
    against_best = [found for found in flat if found["vs_best_peer"] is not None]
    worst = min(against_best, key=lambda found: found["vs_best_peer"], default={})
    return {
        "speedup_vs_learn2learn": min(
            (found["vs_learn2learn"] for found in flat if found["vs_learn2learn"] is not None),
            default=None,
        ),
        "speedup_vs_best_peer": worst.get("vs_best_peer"),
        "best_peer": worst.get("best_peer"),
        "speedups": speedups,
        "samples_per_s": nested(measured, lambda of: round(statistics.median(of))),
        "samples_per_s_range": nested(measured, lambda of: [round(min(of)), round(max(of))]),
    }


def speedups_of(found: Measured) -> dict[str, Any]:
    """Ours against learn2learn and against that other which comes nearest."""
    against = {
        name: speedup(found[OURS], theirs)
        for name, theirs in found.items()
        if OURS in found and name != OURS
    }
    best = min(against, key=lambda name: against[name], default=None)
    return {
        "vs_learn2learn": round(against["learn2learn"], 3) if "learn2learn" in against else None,
        "vs_best_peer": None if best is None else round(against[best], 3),
        "best_peer": best,
    }


def speedup(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the rounds, so that both sides of a ratio are of the same minute; against a
    peer that is timed by itself the ratio of the medians."""
    if len(ours) == len(theirs):
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours) / statistics.median(theirs)


def nested(measured: Mapping[str, Mapping[str, Measured]], figure: Any) -> dict[str, Any]:
    """workload -> threads -> peer -> figure of its rounds."""
    return {
        workload: {
            threads: {name: figure(rounds) for name, rounds in found.items()}
            for threads, found in by_threads.items()
        }
        for workload, by_threads in measured.items()
    }


def print_measured(workload: str, threads: int, found: Measured) -> None:
    """A table of the peers, the fastest first."""
    rows: list[Sequence[str]] = []
    spreads = {name: spread_of(rounds) for name, rounds in found.items()}
    for name, spread in sorted(spreads.items(), key=lambda item: -item[1].median):
        ratio = f"{speedup(found[OURS], found[name]):.2f}" if OURS in found else "-"
        rows.append(
            [name, f"{spread.median:,.0f}", f"{spread.lowest:,.0f}-{spread.highest:,.0f}", ratio]
        )
    print(f"\n{workload}, {threads} thread{'s' if threads > 1 else ''}:")
    print_table(["peer", "samples/s", "range", f"{OURS} is x times as fast"], rows)
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
