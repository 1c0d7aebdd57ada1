"""Next item: the loss over a step's items and the ranks among all items are what slow code says."""

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gmeta.data.item_catalogue import ItemCatalogue
from gmeta.evaluation.item_vectors import ItemVectors
from gmeta.losses.step_softmax import drawn_softmax_Q, sampled_softmax_Q
from gmeta_models.sequence.encoder import DrawnItems
from metaio import DataError, open_dataset
from metaio.read.compose import compose
from metaio.recipes.next_item import prepare_next_item
from tests.support.commands import evaluate, gmeta, metrics, succeed

NUM_USERS, NUM_ITEMS = 90, 30


def write_log(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Users who walk round a circle of items, some steps at a time."""
    rng = np.random.default_rng(seed)
    lines = []
    for user in range(1, NUM_USERS + 1):
        start, length = rng.integers(NUM_ITEMS), rng.integers(4, 12)
        items = (start + np.arange(length)) % NUM_ITEMS + 1
        lines.append(" ".join(map(str, [user, *items])))
    log, attributes = folder / "log.txt", folder / "attributes.json"
    log.write_text("\n".join(lines) + "\n")
    listed = {str(item): [item % 3 + 1, 4] for item in range(1, NUM_ITEMS)}
    attributes.write_text(str(listed).replace("'", '"'))
    return log, attributes


def test_the_recipe_holds_back_the_last_two(tmp_path: Path) -> None:
    log, attributes = write_log(tmp_path)
    out = str(tmp_path / "data")
    prepare_next_item(str(log), str(attributes), out, seed=0)
    dataset = open_dataset(out)
    users = {
        int(line.split()[0]): list(map(int, line.split()[1:]))
        for line in log.read_text().splitlines()
    }
    vocabulary = pq.read_table(f"{out}/vocabulary/item.parquet")["value"].to_numpy()
    for split, left in (("train", 2), ("valid", 1), ("test", 0)):
        block = dataset.read_block(split, 0)
        batch = compose(dataset.features, [(block, np.arange(block.num_episodes))])
        ids = batch.unique_ids_U[batch.positions_NF[:, 0].long()].numpy()
        events = batch.unique_ids_U[batch.event_positions[:, 0].long()].numpy()
        first_event = 0
        for task in range(batch.num_tasks):
            own = users[int(batch.task_T[task])]
            own = own[: len(own) - left]
            rows = slice(*batch.row_offsets_T1[task : task + 2].tolist())
            known = [vocabulary[one - 1] if one else 0 for one in ids[rows]]
            # Items that train has no row of are unknown.
            assert all(a in (b, 0) for a, b in zip(known, own, strict=True))
            count = int(batch.num_events_T[task])
            assert count == len(own) - 1
            of_task = [
                vocabulary[one - 1] for one in events[first_event : first_event + count] if one
            ]
            assert of_task == [one for one in own[:-1] if one in set(vocabulary)]
            assert batch.events_before_N[rows].tolist() == list(range(len(own)))
            first_event += count
        if split != "train":
            assert (batch.row_offsets_T1.diff() - batch.support_lengths_T == 1).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [("1 2 three 4\n", "line 1"), ("1 2\n", "no user of 3 items"), ("", "no user of 3 items")],
)
def test_a_log_of_another_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "log.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        prepare_next_item(str(tmp_path / "log.txt"), None, str(tmp_path / "data"), seed=0)


def test_the_sampled_softmax_is_the_slow_one() -> None:
    generator = torch.Generator().manual_seed(0)
    user, item = (torch.randn(n, 4, generator=generator).double() for n in (5, 9))
    own, items = torch.tensor([0, 3, 4, 7, 8]), torch.tensor([1, 2, 1, 3, 1, 4, 5, 2, 3])
    log_share = torch.randn(9, generator=generator).double()
    found = sampled_softmax_Q(user, item, own, items, log_share)
    for place, at in enumerate(own.tolist()):
        scores = [
            float(user[place] @ item[other]) - float(log_share[other])
            for other in range(9)
            if other == at or items[other] != items[at]
        ]
        mine = float(user[place] @ item[at]) - float(log_share[at])
        wanted = math.log(sum(map(math.exp, scores))) - mine
        assert float(found[place]) == pytest.approx(wanted, rel=1e-12)
    none = torch.zeros(0, dtype=torch.int64)
    assert sampled_softmax_Q(user[:0], item[:0], none, none, log_share[:0]).shape == (0,)


def popular_items(shares: list[float]) -> tuple[Tensor, Tensor, Tensor, DrawnItems]:
    """A user's vector, those of a tiny catalogue, and all of it as drawn once each."""
    generator = torch.Generator().manual_seed(4)
    user, items = (torch.randn(n, 4, generator=generator).double() for n in (3, len(shares)))
    place = torch.arange(len(shares))
    return user, items, place, DrawnItems(place.unsqueeze(1), place, torch.zeros(len(shares)))


def test_all_items_drawn_once_are_the_full_softmax() -> None:
    user, items, place, drawn = popular_items([0.2] * 5)
    own = torch.tensor([4, 0, 2])
    found = drawn_softmax_Q(user, items, own, place, items, drawn)
    wanted = cross_entropy(user @ items.T, own, reduction="none")
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert drawn_softmax_Q(user[:0], items, own[:0], place, items, drawn).shape == (0,)


def test_popular_negatives_estimate_the_full_softmax() -> None:
    """The sum over the other items is met on average, and loss and gradient by many draws."""
    shares = np.array([0.5, 0.2, 0.15, 0.1, 0.04, 0.01])
    user, items, place, _ = popular_items(shares.tolist())
    own, generator = torch.tensor([1, 0, 5]), np.random.default_rng(6)

    def loss_of(number: int) -> Tensor:
        draw = torch.from_numpy(generator.choice(len(shares), number, p=shares))
        log_expected = torch.from_numpy(np.log(number * shares))[draw]
        drawn = DrawnItems(draw.unsqueeze(1), draw, log_expected)
        return drawn_softmax_Q(user, items, own, place, items[draw], drawn)

    score = user @ items.T
    rivals = score.exp().sum(dim=1) / score[torch.arange(3), own].exp() - 1.0
    estimates = torch.stack([loss_of(8).expm1() for _ in range(4_000)])
    error = (estimates.mean(dim=0) - rivals) / (estimates.std(dim=0) / len(estimates) ** 0.5)
    assert float(error.abs().max()) < 4.0
    user.requires_grad_()
    wanted = cross_entropy(user @ items.T, own, reduction="none")
    found = loss_of(400_000)
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01)
    gradients = [torch.autograd.grad(loss.sum(), user)[0] for loss in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.02)


def test_ranks_leave_known_items_out() -> None:
    rng = np.random.default_rng(1)
    ids = np.array([2, 3, 5, 7, 11, 13])
    vectors = torch.from_numpy(rng.standard_normal((6, 3)).astype(np.float32))
    vectors[4] = vectors[1]  # two items with one vector
    users = torch.from_numpy(rng.standard_normal((4, 3)).astype(np.float32))
    item, known = np.array([3, 5, 4, 13]), [[2, 7], [5, 5], [2], []]
    found = ItemVectors(ItemCatalogue(ids[:, None]), vectors).rank_N2(
        users, item, (np.concatenate(known).astype(np.int64), np.array([len(k) for k in known]))
    )
    for row, own in enumerate(item):
        if own not in ids:
            assert found[row].tolist() == [6, 0]
            continue
        score = dict(zip(ids.tolist(), (vectors @ users[row]).tolist(), strict=True))
        others = [
            score[other] for other in ids.tolist() if other != own and other not in known[row]
        ]
        above, tied = (one > score[own] for one in others), (one == score[own] for one in others)
        assert found[row].tolist() == [sum(above), sum(tied)]


def config(path: Path, run: Path, **more: object) -> list[str]:
    return [
        f"data.path={path}", "data.valid_split=valid", "data.eval_splits=['test']",
        "data.tasks_per_step=30", "model.name=dot", "model.embedding_dim=16",
        "model.events=sasrec", "algorithm.name=none", "outer.loss=softmax",
        "outer.negatives=step", "outer.dense_lr=0.01", "outer.sparse_optimizer=adam",
        "outer.sparse_lr=0.02", "evaluation.candidates=-1",
        "evaluation.metrics=['hr@3', 'ndcg@3']", f"run.dir={run}", "run.device=cpu",
        *(f"{key}={value}" for key, value in more.items()),
    ]  # fmt: skip


@pytest.mark.parametrize("negatives", ["step", "popular"])
def test_a_run_learns_what_comes_next(tmp_path: Path, negatives: str) -> None:
    log, attributes = write_log(tmp_path)
    data, run = tmp_path / "data", tmp_path / "run"
    succeed("prepare", "--recipe", "next-item", str(log), str(attributes), str(data))
    (tmp_path / "train.toml").write_text("")
    toml = str(tmp_path / "train.toml")
    succeed("train", toml, *config(data, run, **{"run.epochs": 25, "outer.negatives": negatives}))
    report = evaluate(str(run))
    assert report.returncode == 0, report.stderr
    assert "HR@3 of all items" in report.stdout
    scores = [line for line in metrics(run) if "valid" in line][-1]["valid"]
    # The next of 30 items is always the one behind the last: chance would be a tenth.
    assert scores["hr@3"] > 0.6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"outer.loss": "bce"}, "softmax, dot and none are needed"),
        (
            {"outer.negatives": "popular", "outer.loss": "bce"},
            "outer.negatives = 'popular' with outer.loss = 'bce'",
        ),
        ({"algorithm.name": "maml"}, "softmax, dot and none are needed"),
        ({"model.events": "none"}, "it scores one label by the state of an encoder"),
        ({"model.event_options.heads": 3}, "does not divide model.embedding_dim = 16"),
    ],
)
def test_what_does_not_fit_is_said(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    log, _ = write_log(tmp_path)
    data = tmp_path / "data"
    prepare_next_item(str(log), None, str(data), seed=0)
    (tmp_path / "train.toml").write_text("")
    toml = str(tmp_path / "train.toml")
    failed = gmeta("train", toml, *config(data, tmp_path / "run", **changed))
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_loss_is_the_same_for_batches_in_another_order(tmp_path: Path) -> None:
    """`cross_entropy` of all pairs, with the items' shares off: what one step must come to."""
    generator = torch.Generator().manual_seed(2)
    user = torch.randn(6, 4, generator=generator).double()
    item, items = torch.randn(6, 4, generator=generator).double(), torch.arange(6)
    share = torch.full((6,), -1.5).double()
    found = sampled_softmax_Q(user, item, torch.arange(6), items, share).mean()
    torch.testing.assert_close(found, cross_entropy(user @ item.T, torch.arange(6)))
    order = torch.tensor([3, 1, 0, 5, 4, 2])
    again = sampled_softmax_Q(user[order], item[order], torch.arange(6), items[order], share).mean()
    torch.testing.assert_close(again, found)
