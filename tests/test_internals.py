"""Each private call of torch and TorchRec still does what the engine uses it for: when a new
version moves one, the failing test's name says which.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gmeta.internals import (
    ShardedTensor,
    call_after_backward,
    empty_like_sharded,
    job_store,
    table_kernels,
)
from gmeta.parallel.ranks import Ranks
from gmeta.parallel.sharding import table_shards
from gmeta_models.internals import has_hooks, onednn_linear
from tests.distributed.harness import on_ranks
from tests.distributed.test_sharding_plans import FEATURES, MODEL, Run
from tests.test_house import PACKAGES, ROOT

# `torch._foreach_*` is documented by torch.
ELSEWHERE = ("torch._foreach_",)
# Attributes of TorchRec's and torch's objects that internals.py reads.
PRIVATE = ("_lookups", "_emb_modules", "_execution_engine", "_process_group")


def test_call_after_backward_comes_behind_the_last_operation_of_backward() -> None:
    order: list[str] = []
    first = torch.ones(2, requires_grad=True)
    middle = first * 2

    def ask(_: Tensor) -> None:
        call_after_backward(lambda: order.append("after"))

    middle.register_hook(ask)
    first.register_post_accumulate_grad_hook(lambda _: order.append("last gradient"))
    middle.sum().backward()
    assert order == ["last gradient", "after"]


def test_onednn_linear_is_torchs_linear_in_full_precision() -> None:
    rows, weight, bias = torch.randn(70, 300), torch.randn(9, 300), torch.randn(9)
    exact = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
    for has in (bias, None):
        found = onednn_linear(rows, weight, has).double()
        wanted = exact if has is not None else exact - bias.double()
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_what_is_called_around_a_part_of_a_model_is_seen() -> None:
    for hooked in (
        nn.Module.register_forward_hook,
        nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
    ):
        model = nn.Sequential(nn.Linear(2, 2))
        assert not has_hooks(model)
        hooked(model[0], lambda *_: None)
        assert has_hooks(model)


def sharded_on_rank(ranks: Ranks) -> dict[str, Any]:
    run = Run(ranks, "row_wise")
    kernels = list(table_kernels(run.sharded))
    copies = {name: empty_like_sharded(one) for name, one in table_shards(run.sharded).items()}
    job_store().set("word", "heard")
    return {
        "heard": job_store().get("word"),
        "tables": sorted(table.name for kernel in kernels for table in kernel.tables),
        "shards": [len(kernel.tables) for kernel in kernels],
        "offsets": [len(kernel.group.first_row_of_table) for kernel in kernels],
        "widths": {kernel.group.width for kernel in kernels},
        "same": [
            isinstance(copy, ShardedTensor)
            and copy.size() == run.sharded.state_dict()[name].size()
            and [s.metadata for s in copy.local_shards()]
            == [s.metadata for s in run.sharded.state_dict()[name].local_shards()]
            for name, copy in copies.items()
        ],
        "own": [
            copy.local_shards()[0].tensor.data_ptr()
            != run.sharded.state_dict()[name].local_shards()[0].tensor.data_ptr()
            for name, copy in copies.items()
        ],
    }


@pytest.fixture(scope="module")
def sharded() -> dict[str, Any]:
    (found,) = on_ranks(1, sharded_on_rank)
    return dict(found)


@pytest.mark.distributed
def test_table_kernels_finds_every_table_and_where_it_lies(sharded: dict[str, Any]) -> None:
    assert sharded["tables"] == sorted(table.name for table in FEATURES.tables)
    assert sharded["shards"] == sharded["offsets"]
    assert sharded["widths"] == {MODEL.embedding_dim}


@pytest.mark.distributed
def test_job_store_keeps_what_a_rank_leaves_there(sharded: dict[str, Any]) -> None:
    assert sharded["heard"] == b"heard"


@pytest.mark.distributed
def test_empty_like_sharded_has_the_layout_and_memory_of_its_own(sharded: dict[str, Any]) -> None:
    assert sharded["same"]
    assert all(sharded["same"])
    assert all(sharded["own"])


def private_names(path: Path) -> Iterator[str]:
    """Private modules of torch and TorchRec that a file imports, and private names it takes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            library, *rest = node.module.split(".")
            if library in ("torch", "torchrec", "fbgemm_gpu") and any(
                name.startswith("_") for name in [*rest, *(alias.name for alias in node.names)]
            ):
                yield node.module
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            name = ast.unparse(node)
            is_torchs = name.startswith("torch.") and not node.attr.startswith("__")
            if (is_torchs or node.attr in PRIVATE) and name != "torch._C":
                yield name


def test_private_names_of_torch_and_torchrec_stand_in_internals_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for package, root in PACKAGES.items()
        for path in (root / package).rglob("*.py")
        if path.name != "internals.py"
        for name in private_names(path)
        if not name.startswith(ELSEWHERE) and not name.startswith("self.")
    ]
    assert found == []
    assert set(private_names(ROOT / "gmeta" / "internals.py"))
