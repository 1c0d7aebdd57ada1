"""How a subcommand comes to its ranks, without starting any."""

import gc
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from gmeta.cli.commands import rank_launch as on_ranks
from gmeta.cli.commands.work.rank_process import run_as_rank
from gmeta.cli.main import main
from gmeta.distributed.ranks import lost_contact
from gmeta.errors import GMetaError, UserError
from tests.support.refusals import catch_message


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_one_rank_is_this_process_and_several_are_started() -> None:
    assert not on_ranks.starts_ranks(1)
    assert on_ranks.starts_ranks(2)


@pytest.mark.parametrize(
    "environment", [{"TORCHELASTIC_RUN_ID": "r"}, {"RANK": "0", "WORLD_SIZE": "2"}]
)
def test_under_torchrun_no_process_starts_ranks_of_its_own(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not on_ranks.starts_ranks(2)


def test_the_exit_code_of_the_ranks_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter((0, 3))
    monkeypatch.setattr(on_ranks, "launch", lambda *given: next(codes))
    on_ranks.start_ranks_here(["train"], 2, 0, 0)
    with pytest.raises(SystemExit) as ended:
        on_ranks.start_ranks_here(["train"], 2, 0, 0)
    assert ended.value.code == 3


class _NoDriver(ModuleType):
    def __getattr__(self, name: str) -> object:
        raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("rank", "line"), [(None, "error: "), ("0", "error on rank 0: "), ("1", "")]
)
def test_ctrl_c_ends_a_command_with_one_line_on_one_rank(
    rank: str | None, line: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gmeta.cli.commands.config.config", interrupted)
    monkeypatch.setattr("gmeta.cli.main._exit_now", sys.exit)  # ends the process at once
    monkeypatch.setattr(sys, "argv", ["gmeta", "config"])
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    told = "interrupted: what was committed stays, what was half-written is dropped\n"
    assert capsys.readouterr().err == (f"{line}{told}" if line else "")


def test_a_fault_has_its_traceback_and_the_process_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault() -> None:
        raise KeyError("nobody thought of it")

    monkeypatch.setattr("gmeta.cli.commands.config.config", fault)
    monkeypatch.setattr("gmeta.cli.main._exit_now", sys.exit)
    monkeypatch.setattr(sys, "argv", ["gmeta", "config"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.endswith("KeyError: 'nobody thought of it'\n")


def test_what_a_rank_imports_is_never_searched_for_garbage() -> None:
    with on_ranks.faster_import():
        assert not gc.isenabled()
        imported = [object()]
    assert gc.isenabled()
    assert not any(searched is imported for searched in gc.get_objects())


def test_kernels_that_miss_the_driver_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", _NoDriver("fbgemm_gpu"))
    with pytest.raises(GMetaError) as missing, on_ranks.faster_import():
        from fbgemm_gpu import split_table_batched_embeddings_ops_training  # noqa: F401
    assert str(missing.value) == (
        "fbgemm-gpu cannot be loaded: libcuda.so.1: cannot open shared object file. On a machine "
        "without an NVIDIA driver make a fresh environment, and run gmeta install-torchrec there"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_cuda_without_a_gpu_is_refused_before_any_rank_waits() -> None:
    assert catch_message(UserError, run_as_rank, "cuda", 60, {}, lambda ranks: None) == (
        'run.device = "cuda", but torch sees no GPU. Set run.device = "cpu" or install the driver'
    )


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert catch_message(UserError, run_as_rank, "auto", 60, {}, lambda ranks: None) == (
        "LOCAL_RANK = 1, and torch sees 1 GPUs on this machine: each rank needs its own, by that "
        "number. Start fewer ranks (--nproc-per-node), let each see all GPUs "
        '(CUDA_VISIBLE_DEVICES), or set run.device = "cpu"'
    )


def test_of_what_nccl_says_the_last_error_is_told() -> None:
    said = (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run "
        "with NCCL_DEBUG=WARN for details), NCCL version 2.28.3\nncclInvalidUsage: This usually "
        "reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 "
        "and rank 0 both on CUDA device 18000"
    )
    assert str(lost_contact(dist.DistBackendError(said))) == (
        "lost contact with the other ranks: Duplicate GPU detected : rank 1 and rank 0 both on "
        "CUDA device 18000. See what the first rank that failed said; --resume goes on from the "
        "newest checkpoint"
    )
