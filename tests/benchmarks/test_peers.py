"""Peers compute the same thing, and the check before the timing notices one that does not."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peers.agreement import (
    CHECK_RATES,
    GRADIENT_TOLERANCE,
    DisagreementError,
    gradient_difference,
    require_equal_losses,
)
from peers.interface import Parameters, Peer, load_peer
from peers.torch_common import DenseTables, TorchBatch, TorchPeer, episodes
from peers.torch_loop import Loop
from peers.workload import (
    Workload,
    initial_parameters,
    large_workload,
    movielens_workload,
    synthetic_tasks,
)
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import mse_loss


@pytest.fixture(scope="module", params=["movielens", "large"])
def workload(request: pytest.FixtureRequest) -> Workload:
    if request.param == "large":
        return large_workload(rows_per_table=500, num_batches=3)
    return movielens_workload(synthetic_tasks(num_users=100, num_items=200), num_batches=3)


def gradients_of(peer: Peer, workload: Workload) -> Parameters:
    peer.build(workload, initial_parameters(workload), CHECK_RATES)
    return peer.gradients(peer.prepare(workload.batches[0]))


def losses_of(peer: Peer, workload: Workload) -> list[float]:
    peer.build(workload, initial_parameters(workload), CHECK_RATES)
    return [peer.step(peer.prepare(batch)) for batch in workload.batches]


@final
class FirstOrder(TorchPeer):
    """The loop with the inner gradient held constant."""

    def query_loss(self, prepared: TorchBatch) -> Tensor:
        theta = dict(self.head.named_parameters())
        losses = []
        for support, support_label, query, query_label in episodes(
            prepared, self.tables.read(prepared)
        ):
            loss = mse_loss(self.head(support), support_label)
            grads = torch.autograd.grad(loss, list(theta.values()), retain_graph=True)
            updates = zip(theta.items(), grads, strict=True)
            theta_t = {name: weight - self.inner_rate * grad for (name, weight), grad in updates}
            losses.append(mse_loss(functional_call(self.head, theta_t, (query,)), query_label))
        return torch.stack(losses).mean()


@final
class NoInnerStep(TorchPeer):
    """Query loss without adaptation."""

    def query_loss(self, prepared: TorchBatch) -> Tensor:
        rows_NX = self.tables.read(prepared)
        losses = [
            mse_loss(self.head(query), label) for _, _, query, label in episodes(prepared, rows_NX)
        ]
        return torch.stack(losses).mean()


def test_vmap_equals_the_loop(workload: Workload) -> None:
    vmap = load_peer("vmap")
    gradient_difference("vmap", gradients_of(vmap, workload), gradients_of(Loop(), workload))
    require_equal_losses("vmap", losses_of(vmap, workload), losses_of(Loop(), workload))


@pytest.mark.parametrize("impostor", [FirstOrder, NoInnerStep])
def test_another_algorithm_is_noticed(workload: Workload, impostor: type[TorchPeer]) -> None:
    found, expected = gradients_of(impostor(), workload), gradients_of(Loop(), workload)
    message = (
        r"impostor's outer gradient of [a-z0-9_.]+ is off by [0-9.e+-]+ of its largest entry, "
        r"at most 2e-04 is allowed: it computes something else than the plain loop\. "
        r"Correct the peer"
    )
    with pytest.raises(DisagreementError) as caught:
        gradient_difference("impostor", found, expected)
    assert re.fullmatch(message, str(caught.value))


def test_the_check_rates_put_first_order_far_beyond_the_tolerance(workload: Workload) -> None:
    found, expected = gradients_of(FirstOrder(), workload), gradients_of(Loop(), workload)
    difference = np.abs(found["fc1.weight"] - expected["fc1.weight"]).max()
    assert difference > 50 * GRADIENT_TOLERANCE * np.abs(expected["fc1.weight"]).max()


def trained(peer: TorchPeer, workload: Workload) -> Mapping[str, NDArray[np.float32]]:
    losses_of(peer, workload)
    tables = peer.tables
    if isinstance(tables, DenseTables):
        return {name: bag.weight.detach().numpy() for name, bag in tables.bags.items()}
    return {
        field.name: tables.weight[first : first + field.num_rows].numpy()
        for field, first in zip(tables.fields, tables.first_rows, strict=False)
    }


def test_rows_trained_alone_equal_whole_tables_trained() -> None:
    workload = large_workload(rows_per_table=50, num_batches=4)
    alone, whole = trained(Loop(), workload), trained(Loop(), replace(workload, large_tables=False))
    initial = initial_parameters(workload)
    for name, table in whole.items():
        np.testing.assert_allclose(alone[name], table, atol=1e-5)
        assert np.abs(table - initial[f"emb.{name}"]).max() > 0.01, "nothing was trained"
