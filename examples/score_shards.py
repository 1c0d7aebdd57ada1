"""Score a dataset with several independent workers. An idle worker also processes the last shards
of a slow one; the first complete result of a shard counts.

With these lines in antdt.toml:

    [controller]
    policy = "nd"
    synchronous = false

    gmeta shard-service --insecure --store sqlite:///shards.db --antdt-config antdt.toml &
    python examples/score_shards.py 127.0.0.1:7070 runs/scores worker0   # and worker1, ...

Kill any of them (-9) at any moment and start it again under its name: no result is lost or written
twice.
"""

import os
import sys
import time
from pathlib import Path

from gmeta.antdt import DatasetSpec, Lease, LeaseLostError, ShardClient
from gmeta.antdt.reports import Report

NUM_ROWS, ROWS_PER_SHARD = 1_200, 20


def score(row: int, row_ms: float) -> float:
    """Return a score; stands in for your model."""
    time.sleep(row_ms / 1000)
    return row * row / 2


def main(address: str, folder: Path, worker_id: str, row_ms: float = 2.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    spec = DatasetSpec("rows", NUM_ROWS, ROWS_PER_SHARD, speculative=True)
    report, num_counted, num_discarded = Report(), 0, 0
    with ShardClient(address, worker_id) as client:
        client.register_dataset(spec)
        client.report(report)  # the monitor judges workers that report
        for part in folder.glob(f"*.{worker_id}.*.part"):  # of a killed process of this worker
            settle(part, client.completed(int(part.name.split(".")[-2])))
        for lease in client.shards("rows"):
            part = folder / f"{lease.shard_index:05d}.{worker_id}.{lease.token}.part"
            try:
                report = write_scores(part, lease, client, report, row_ms)
            except LeaseLostError:  # another worker was first
                settle(part, False)
                num_discarded += 1
                continue
            counts = client.complete(lease)
            settle(part, counts)
            num_counted += counts
            num_discarded += not counts
    print(f"{worker_id}: {num_counted} shards counted, {num_discarded} discarded")


def write_scores(
    part: Path, lease: Lease, client: ShardClient, report: Report, row_ms: float
) -> Report:
    """Write one line for each row and sync it to disk. Return the totals of this process."""
    with part.open("w") as file:
        for row in lease.units():
            began_s = time.perf_counter()
            file.write(f"{row} {score(row, row_ms)}\n")
            compute_ms = report.compute_ms + 1000 * (time.perf_counter() - began_s)
            report = Report(report.step + 1, report.tasks_done + 1, compute_ms)
            client.report(report)
        file.flush()
        os.fsync(file.fileno())
    return report


def settle(part: Path, counts: bool) -> None:
    """Give the shard's name to a result that counts, remove any other."""
    if counts:
        part.rename(part.with_name(part.name.split(".")[0] + ".txt"))
    else:
        part.unlink()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], *map(float, sys.argv[4:]))
