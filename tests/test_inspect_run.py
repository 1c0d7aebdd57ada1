"""`gmeta inspect` on a run and on a checkpoint: what is in it, and whether all of it is there."""

from pathlib import Path

from tests.commands import SMALL_MODEL, gmeta, write_config


def test_a_run_and_its_checkpoints_are_described_and_a_cut_file_is_found(
    tmp_path: Path, click_logs: Path
) -> None:
    run = tmp_path / "run"
    config = write_config(tmp_path / "train.toml", click_logs, run)
    trained = gmeta("train", config, *SMALL_MODEL, "run.checkpoint_every_steps=4")
    assert trained.returncode == 0, trained.stderr

    of_run = gmeta("inspect", run)
    assert of_run.returncode == 0, of_run.stderr
    rows = [line.split() for line in of_run.stdout.splitlines()]
    # step, epoch, ranks, config, size
    assert [row[:6] for row in rows if row[-1:] == ["complete"]] == [
        ["4", "1", "+", "4", "steps", "1"],
        ["8", "1", "+", "8", "steps", "1"],
    ]
    (item,) = [row for row in rows if row[:1] == ["item"]]
    num_rows = int(item[1].replace(",", ""))
    assert item[2:] == ["4", "float32", *size(num_rows * 16), "momentum1", *size(num_rows * 4)]
    (layer,) = [row for row in rows if row[:1] == ["model.bottom.0.bias"]]
    assert layer[1:] == ["8", "float32", "32", "B", "exp_avg,", "exp_avg_sq,", "step"]

    newest = run / "checkpoints" / "step-00000008"
    whole = gmeta("inspect", newest)
    assert whole.stdout.startswith(
        f"checkpoint {newest}: step 8, epoch 1, 8 steps into it, written by 1 ranks, config "
    )
    assert whole.stdout.endswith("complete: every file that its index names is there in full\n")

    file = newest / "__0_0.distcp"
    num_bytes = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    cut = gmeta("inspect", run)
    assert cut.returncode == 1
    assert cut.stdout.splitlines()[-1] == (
        f"{file} holds {num_bytes - 1:,} bytes, the index says {num_bytes:,}: it was cut short"
    )
    refused = gmeta("inspect", run, "--verify")
    assert refused.returncode == 2
    assert refused.stderr.strip() == (
        f"error: {run} is no dataset: --verify and --picture are for datasets. Leave them out"
    )


def size(num_bytes: int) -> list[str]:
    """As the tables show it."""
    return [str(num_bytes), "B"] if num_bytes < 1024 else [f"{num_bytes / 1024:.1f}", "KiB"]
