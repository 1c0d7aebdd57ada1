"""Method: mutants. Each is the service with one safety rule taken out; a suite that lets one
live proves little.

make mutants prints which method catches which mutant, and exits 1 when one lives

A mutant is a text replacement in a copy of the package, so nothing in the product knows of it."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tests.support.forked import SOURCE_ROOTS, run_forked

ROOT = Path(__file__).parents[3]
COPIED = (
    "gmeta/__init__.py", "gmeta/errors.py", "gmeta/config/settings.py", "gmeta/antdt",
    "gmeta/cli/commands", "protos", "benchmarks/_socket_paths.py", "tests/antdt",
    "tests/support/processes.py", "tests/support/refusals.py", "tests/support/waiting.py",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below gmeta/antdt
    old: str
    new: str
    by: str = "behaviours"  # the cheapest method that catches it: all that CI runs against it


MUTANTS = (
    Mutant(
        "no token check",
        "ledger/worker_results.py",
        "if token in worker.tokens:\n",
        "if token in state.leases:\n",
    ),
    Mutant(
        "END when TODO is empty",
        "ledger/ledger.py",
        "nothing = offers.wait_for_others(table, command.seq)",
        "nothing = cmd.End(command.seq)",
    ),
    Mutant(
        "drop after n failures",
        "ledger/table.py",
        "ShardState.QUARANTINED if exhausted",
        "ShardState.DONE if exhausted",
    ),
    Mutant(
        "ack before commit",
        "storage/committer.py",
        "        self._store.append(RecordBatch(first_event, records, self.ledger.head))\n",
        "        late, self.late = getattr(self, 'late', None), RecordBatch(first_event, records, "
        "self.ledger.head)\n"
        "        late and self._store.append(late)\n",
    ),
    Mutant(
        "same token on re-issue",
        "ledger/offers.py",
        "(state.token_counter + 1)\n",
        "(positions[0] + 1)\n",
    ),
    Mutant(
        "expiry by wall clock",
        "service/shard_server.py",
        "time.monotonic, self.config",
        "time.time, self.config",
    ),
    Mutant(
        "lease retry takes new shards",
        "ledger/call_numbers.py",
        "if command.seq == last_seq + 1:",
        "if command.seq == last_seq + 1 or isinstance(command, cmd.LeaseShards):",
    ),
    Mutant(
        "offset ignored on restore",
        "ledger/state.py",
        "table.units_done[item.position] = item.units_done",
        "pass",
    ),
    Mutant(
        "no generation fence",
        "ledger/fences.py",
        "if caller.run_generation != state.generation:",
        "if False:",
    ),
    Mutant(
        "no incarnation fence",
        "ledger/fences.py",
        "if caller.incarnation != worker.incarnation:",
        "if False:",
    ),
    Mutant(
        "service epoch not in the token",
        "ledger/offers.py",
        "(state.service_epoch << TOKEN_COUNTER_BITS) |",
        "0 |",
    ),
    Mutant(
        "progress not durable", "ledger/events.py", "*(LeasesGranted, BackupGranted,",
        "*(UnitsProgressed, LeasesGranted, BackupGranted,", by="schedules",
    ),
    Mutant(
        "END before the disk has it",
        "storage/request.py",
        "isinstance(answer, cmd.GrantReply | cmd.HeartbeatReply)",
        "isinstance(answer, cmd.GrantReply | cmd.HeartbeatReply | cmd.End)",
    ),
    Mutant(
        "heartbeat renews what it does not name",
        "ledger/ledger.py",
        "self._renew(live, now_s)\n        revoked",
        "self._renew(list(worker.tokens), now_s)\n        revoked",
    ),
    Mutant("WAIT uses no number", "ledger/call_numbers.py", "call.seq > worker.last_seq", "False"),
    Mutant(
        "END of a group that the store did not take",
        "ledger/call_numbers.py",
        "self._unrecorded = older._unrecorded",
        "self._unrecorded = older._unrecorded | older._unstored",
    ),
    Mutant(
        "a changed page is not stored",
        "ledger/table.py",
        "        self.dirty_pages.add(position // SHARDS_PER_PAGE)\n",
        "        self.dirty_pages.add(0 if position else 0) if state == ShardState.DOING else "
        "None\n",
        by="model",
    ),
    Mutant(
        "no epoch check in the store",
        "storage/store.py",
        "    if stored_epoch != mine:\n",
        "    if False:\n",
    ),
    Mutant(
        "two completes of one shard both accepted",
        "ledger/state.py",
        "                if twin is not None:\n",
        "                if False:\n",
    ),
    Mutant(
        "second lease where results cannot be discarded",
        "ledger/offers.py",
        "return table.spec.speculative and not",
        "return not",
    ),
    Mutant(
        "parts of two leases counted together",
        "ledger/worker_results.py",
        "if table.spec.speculative or units_done",
        "if units_done",
    ),
    Mutant(
        "a shard goes back while another worker holds it",
        "ledger/table.py",
        "        if still_held:\n",
        "        if False:\n",
    ),
    Mutant(
        "second leases forgotten by the snapshot",
        "storage/snapshot.py",
        "        state.backups.pair(token, other)\n",
        "        pass\n",
    ),
)  # fmt: skip

# Name -> what pytest is given; in the order of their cost.
METHODS: dict[str, Sequence[str]] = {
    "behaviours": (
        "tests/antdt/ledger/test_ledger.py", "tests/antdt/ledger/test_backups.py",
        "tests/antdt/storage/test_store.py", "tests/antdt/storage/test_writer.py",
        "tests/antdt/faults/test_known_defects.py", "tests/antdt/faults/test_clock_steps.py",
    ),
    "model": ("tests/antdt/faults/test_reference_model.py",),
    "schedules": ("tests/antdt/faults/test_simulated_schedules.py",),
}  # fmt: skip
MUTANT_SCHEDULES = "600"
# The same examples each time; the first that fails is enough.
CONFTEST = """
from hypothesis import Phase, settings

phases = [Phase.explicit, Phase.generate]
settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=phases)
settings.load_profile("mutants")
"""


def mutated(mutant: Mutant) -> str:
    """The file's text with the mutation. Raises ValueError when its text is not found once."""
    text = (ROOT / "gmeta/antdt" / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"mutant {mutant.name!r}: its text occurs {text.count(mutant.old)} times in "
            f"{mutant.file}; once is needed. Adapt the mutant to the code."
        )
    return text.replace(mutant.old, mutant.new)


def make_copy(folder: Path, mutant: Mutant | None) -> None:
    """The package and its tests with the mutation; what is compiled already is copied too."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    (folder / "tests/__init__.py").touch()
    (folder / "tests/conftest.py").write_text(CONFTEST)
    if mutant is not None:
        changed = folder / "gmeta/antdt" / mutant.file
        changed.write_text(mutated(mutant))
        Path(cache_from_source(str(changed))).unlink(missing_ok=True)


def survives(folder: Path, files: Sequence[str]) -> bool:
    """Whether the tests all pass in the copy; a hang counts as caught."""
    roots = os.pathsep.join(str(folder / root) for root in SOURCE_ROOTS)
    try:
        done = run_forked(
            "pytest", *("-x", "-q", "--tb", "native", "-p", "no:cacheprovider", *files),
            env={**os.environ, "PYTHONPATH": roots, "ANTDT_SCHEDULES": MUTANT_SCHEDULES},
            cwd=folder, anew=("gmeta", "gmeta_protos", "tests"), timeout_s=600,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def main() -> int:
    """Prints the kill matrix."""
    width = max(len(mutant.name) for mutant in MUTANTS)
    print(" " * width, *(f"{name:>10}" for name in METHODS), flush=True)
    living = []
    for mutant in (None, *MUTANTS):
        with tempfile.TemporaryDirectory() as name:
            make_copy(Path(name), mutant)
            passed = [survives(Path(name), files) for files in METHODS.values()]
        title = mutant.name if mutant else "(no mutation)"
        print(
            f"{title:<{width}}",
            *(f"{'-' if each else 'caught':>10}" for each in passed),
            flush=True,
        )
        if all(passed) == (mutant is not None):
            living.append(title)
    print(f"{len(MUTANTS)} mutants, not as they should be: {living or 'none'}")
    return 1 if living else 0


if __name__ == "__main__":
    sys.exit(main())
