"""`gmeta plan`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from gmeta.cli.commands.overrides import Overrides
from gmeta.cli.commands.rank_launch import faster_import
from gmeta.config.train_config import load_config
from gmeta.distributed.cluster_spec import CapacityOverrides, Cluster, Speeds
from gmeta.errors import UserError


def plan(
    config: Annotated[Path, typer.Argument(help="TOML file, as for `gmeta train`")],
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=1, max=65_536, help="GPUs, one rank each")] = 8,
    gpus_per_host: Annotated[int, typer.Option(min=1, help="GPUs of a host, with NVLink")] = 8,
    gpu_memory: Annotated[str, typer.Option(help="memory of a GPU")] = "80GB",
    host_memory: Annotated[str, typer.Option(help="memory of a host, for its GPUs")] = "1TB",
    rows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE=ROWS", help="rows of a table, as item=1e9; repeat. Else the dataset's"
        ),
    ] = None,
    rows_per_task: Annotated[
        float, typer.Option(min=0.0, help="support and query rows of a task; 0: the dataset's")
    ] = 0.0,
    unique_share: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="distinct ids of a table among all that a GPU's rows name; 0: as counted in the "
            "dataset, without one 1",
        ),
    ] = 0.0,
    hbm: Annotated[str, typer.Option(help="speed of a GPU's memory")] = "4.3TB/s",
    pcie: Annotated[str, typer.Option(help="a GPU to its host's memory, each way")] = "50GB/s",
    nvlink: Annotated[str, typer.Option(help="a GPU to others of its host, each way")] = "300GB/s",
    network: Annotated[str, typer.Option(help="a GPU to other hosts, each way")] = "50GB/s",
    tflops: Annotated[
        float,
        typer.Option(
            min=0.0, help="10^12 operations a second; 0: 60, with tf32 400, with bf16 800"
        ),
    ] = 0.0,
) -> None:
    """Show where training would put tables on GPUs that are not here, and what a step would cost.

    gmeta plan examples/demo.toml --gpus 64 --gpu-memory 80GB

    gmeta plan mine.toml --gpus 8 --rows item=1e9 data.tasks_per_step=4096"""
    resolved = load_config(config, overrides or [])
    if gpus % min(gpus_per_host, gpus):
        raise UserError(
            f"--gpus {gpus} are no whole number of hosts with {gpus_per_host} GPUs each. Give a "
            "multiple, or another --gpus-per-host"
        )
    of_tables = dict(_parse_table_rows(entry) for entry in rows or [])
    # A cluster smaller than a host is one host. Its ranks share the host's memory equally.
    per_host = min(gpus_per_host, gpus)
    device_bytes = parse_amount("--gpu-memory", gpu_memory, "")
    host_bytes = parse_amount("--host-memory", host_memory, "") / per_host
    bandwidths = {"--hbm": hbm, "--pcie": pcie, "--nvlink": nvlink, "--network": network}
    bytes_a_s = {name[2:]: parse_amount(name, text, "/s") for name, text in bandwidths.items()}
    flops = 1e12 * (tflops or {"float32": 60, "tf32": 400, "bf16": 800}[resolved.run.precision])
    # Late: loading torch takes seconds, and a wrong option is reported at once.
    with faster_import():
        from gmeta.cli.commands.work.plan_report import show_plan
    show_plan(
        resolved,
        CapacityOverrides(of_tables, rows_per_task, unique_share),
        Cluster(gpus, per_host, "cuda", int(device_bytes), int(host_bytes)),
        Speeds(**bytes_a_s, flops=flops),
    )


def _parse_table_rows(entry: str) -> tuple[str, int]:
    name, _, text = entry.rpartition("=")
    try:
        rows = float(text)
    except ValueError:
        rows = 0.0
    if not (name and 1 <= rows <= 2**40):
        raise UserError(
            f"--rows has {entry!r}: write TABLE=ROWS with 1 to 2^40 rows, such as item=1e9"
        )
    return name, int(rows)


def parse_amount(option: str, text: str, per: str) -> float:
    """Return bytes, or bytes a second where `per` is "/s"."""
    # GB are powers of 1,000, GiB of 1,024; Gb and Gbit are bits, of a rate alone.
    pattern = rf"(\d+(?:\.\d+)?) *([KMGTkmgt]?)([iI]?)(b|B{'|bit' * bool(per)}){per}"
    match = re.fullmatch(pattern, text.strip())
    if match is None or float(match.group(1)) <= 0:
        raise UserError(
            f"{option} is {text!r}: a number and a unit are needed, such as 80GB{per}. Correct it"
        )
    power = " KMGT".index(match.group(2).upper() or " ")
    amount = float(match.group(1)) * float(1024 if match.group(3) else 1000) ** power
    # No memory is sold in bits: only rates are divided.
    return amount / 8 if per and match.group(4) != "B" else amount
