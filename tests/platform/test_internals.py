"""Each private call of torch and TorchRec still does what the engine uses it for: when a new
version moves one, the failing test's name says which. That of `place_row_states` is in
tests/distributed/test_checkpoint.py, where tables have one row."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn

from gmeta.distributed.ranks import Ranks
from gmeta.distributed.sharding import table_shards
from gmeta.distributed.tables.plain_tables import PlainTables
from gmeta.platform.internals import (
    ShardedTensor,
    call_after_backward,
    job_store,
    map_sharded,
    table_kernels,
)
from gmeta_models.internals import has_hooks, onednn_linear
from tests.distributed.harness import on_ranks
from tests.distributed.test_sharding_plans import FEATURES, MODEL, Run
from tests.test_house import MODULES, ROOT

# torch, collections and os document these; what a class of ours inherits is not looked at.
ALLOWED = re.compile(
    r"torch\._foreach_|os\._exit$|.*\._(replace|asdict|fields|make)$|(self|super\(\))\."
    # Of Python's own, and a documented constant of confluent-kafka.
    r"|sys\._current_frames$|server\._forkserver|KafkaError\._PARTITION_EOF$"
)


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
    copies = {
        name: map_sharded(one, torch.empty_like) for name, one in table_shards(run.sharded).items()
    }
    job_store().set("word", "heard")
    return {
        "heard": job_store().get("word"),
        "tables": sorted(table.name for kernel in kernels for table in kernel.tables),
        "shards": [len(kernel.tables) for kernel in kernels],
        "offsets": [len(kernel.group.first_row_of_table) for kernel in kernels],
        "widths": {kernel.group.width for kernel in kernels},
        "kinds": {type(kernel.group) for kernel in kernels},
        "updates": {(kernel.group.optimizer, kernel.group.learning_rate) for kernel in kernels},
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
def test_tables_kept_by_puts_our_module_in_place_of_fbgemms(sharded: dict[str, Any]) -> None:
    assert sharded["kinds"] == {PlainTables}


@pytest.mark.distributed
def test_update_in_backward_gives_tables_their_optimizer(sharded: dict[str, Any]) -> None:
    assert sharded["updates"] == {(EmbOptimType.EXACT_ADAGRAD, 0.1)}


@pytest.mark.distributed
def test_job_store_keeps_what_a_rank_leaves_there(sharded: dict[str, Any]) -> None:
    assert sharded["heard"] == b"heard"


@pytest.mark.distributed
def test_empty_like_sharded_has_the_layout_and_memory_of_its_own(sharded: dict[str, Any]) -> None:
    assert sharded["same"]
    assert all(sharded["same"])
    assert all(sharded["own"])


def own_names() -> set[str]:
    """Private names that our own code defines: of functions, classes, fields and attributes."""
    found: set[str] = set()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                is_own = isinstance(node, ast.Name) or ast.unparse(node.value) == "self"
                found |= {node.id if isinstance(node, ast.Name) else node.attr} if is_own else set()
    return found


def private_names(path: Path, own: set[str]) -> Iterator[str]:
    """Private names of others that a file imports or takes from an object."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = node.module.split(".") + [alias.name for alias in node.names]
            if any(re.match("_(?!_)", name) for name in names):
                yield node.module
        elif isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr):
            name = ast.unparse(node)
            is_known = node.attr in own and not name.startswith("torch.")
            if not (is_known or ALLOWED.match(name)):
                yield name


def test_private_names_of_torch_and_torchrec_stand_in_internals_alone() -> None:
    own = own_names()
    found = {
        str(path.relative_to(ROOT)): names
        for path in MODULES.values()
        if (names := list(private_names(path, own)))
    }
    assert set(found) == {"gmeta/platform/internals.py", "models/gmeta_models/internals.py"}
