"""Every method on every scenario: the table behind `gmeta sim run`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gmeta.antdt.simulation.asynchronous_jobs import run_pulling, run_pulling_with_backups
from gmeta.antdt.simulation.job_config import JobConfig, JobOutcome
from gmeta.antdt.simulation.synchronous_jobs import (
    run_antdt,
    run_backup_workers,
    run_lb_bsp,
    run_lb_bsp_at_once,
    run_static,
)
from gmeta.antdt.simulation.traces import SCENARIOS, Trace, recorded_trace, synthetic_trace
from gmeta.errors import UserError

# How many times a healthy job's length moments are drawn for; a longer job has none after that.
TRACE_LENGTH = 12.0
METHODS: dict[str, Callable[[JobConfig, Trace], JobOutcome]] = {
    "BSP": run_static,
    "ASP-like pulling": run_pulling,
    "pulling with backups": run_pulling_with_backups,
    "backup workers": run_backup_workers,
    "LB-BSP": run_lb_bsp,
    "LB-BSP at once": run_lb_bsp_at_once,
    "AntDT-ND": partial(run_antdt, "nd"),
    "AntDT-DD": partial(run_antdt, "dd"),
}


class StudyResult(NamedTuple):
    """The outcome of one method on one scenario."""

    scenario: str
    method: str
    outcome: JobOutcome
    healthy_s: float

    @property
    def slowdown(self) -> float:
        """Return the completion time over that of a healthy cluster without noise."""
        return self.outcome.completion_s / self.healthy_s


def find_methods(names: Sequence[str]) -> dict[str, Callable[[JobConfig, Trace], JobOutcome]]:
    """Return the methods by name, all where none is named. Raise UserError."""
    methods: dict[str, Callable[[JobConfig, Trace], JobOutcome]] = {}
    for name in names or METHODS:
        # FILE.py:FUNCTION is AntDT with that policy.
        if ":" in name:
            methods[name] = partial(run_antdt, name)
        elif name in METHODS:
            methods[name] = METHODS[name]
        else:
            raise UserError(
                f"method {name!r} is unknown; choose from {', '.join(METHODS)}, or name a policy "
                "as FILE.py:FUNCTION"
            )
    return methods


def run_study(
    config: JobConfig, scenarios: Sequence[str], methods: Sequence[str], recorded: Path | None
) -> Iterator[StudyResult]:
    """Yield one result after the other; all methods see the same stragglers."""
    chosen = find_methods(methods)
    unknown = [name for name in scenarios if name not in SCENARIOS]
    if unknown:
        raise UserError(f"scenario {unknown[0]!r} is unknown; choose from {', '.join(SCENARIOS)}")
    names = [recorded.stem] if recorded is not None else list(scenarios or SCENARIOS)
    for name in names:
        for method, run in chosen.items():
            # Anew for each method: a trace moves on with the job that it slows.
            if recorded is not None:
                trace, _ = recorded_trace(recorded, config.seed)
            else:
                until_s = TRACE_LENGTH * config.healthy_s
                trace = synthetic_trace(SCENARIOS[name], config.num_workers, until_s, config.seed)
            yield StudyResult(name, method, run(config, trace), config.healthy_s)
