"""Projections of narrow tables: each row by its own table's matrix, and no gradient beyond it."""

import torch

from gmeta_models.table_projections import TableProjections, pad_width_UD

WIDTHS = {"item": 4, "city": 8, "tag": 4}


def test_each_row_goes_through_the_matrix_of_its_table() -> None:
    projections = TableProjections(WIDTHS, 8).double()
    assert [*projections.layers] == ["item", "tag"]
    rows_UD = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    found = projections(rows_UD, (3, 1, 2))
    for place, table in enumerate(["item", "item", "item", "city", "tag", "tag"]):
        row = rows_UD[place]
        if table != "city":
            row = sum(row[i] * projections.layers[table].weight[:, i] for i in range(4))
        torch.testing.assert_close(found[place], row)
    # What stands behind a narrow row is not read.
    (grad_UD,) = torch.autograd.grad(found.square().sum(), rows_UD)
    assert not grad_UD[[0, 1, 2, 4, 5], 4:].any()
    assert grad_UD[3].all()


def test_tables_of_the_models_width_stay_as_they_are() -> None:
    projections = TableProjections({"item": 8, "city": 8}, 8)
    rows_UD = torch.randn(3, 8)
    assert projections(rows_UD, (1, 2)) is rows_UD
    assert [*projections.parameters()] == []


def test_a_row_of_zeros_is_what_rare_rows_share_and_has_no_gradient() -> None:
    projections = TableProjections(WIDTHS, 8, shares=True).double()
    assert projections.shared_BD is not None
    torch.nn.init.normal_(projections.shared_BD)
    rows_UD = torch.randn(6, 8, dtype=torch.float64)
    rows_UD[[1, 3], :] = 0.0
    rows_UD[5, :4] = 0.0  # of a narrow table: what stands behind is not read
    rows_UD.requires_grad_()
    found = projections(rows_UD, (3, 1, 2))
    shared = {1: ("item", 0), 3: ("city", 1), 5: ("tag", 2)}
    for row, (table, place) in shared.items():
        vector = projections.shared_BD[place]
        wanted = vector if table == "city" else projections.layers[table](vector[:4])
        torch.testing.assert_close(found[row], wanted)
    torch.testing.assert_close(found[0], projections.layers["item"](rows_UD[0, :4]))
    inputs = rows_UD, projections.shared_BD
    grad_UD, shared_grad_BD = torch.autograd.grad(found.square().sum(), inputs)
    assert not grad_UD[[1, 3, 5]].any()
    assert grad_UD[[0, 2, 4], :4].all()
    assert shared_grad_BD[1].all()
    assert not shared_grad_BD[[0, 2], 4:].any()  # their tables have four columns


def test_projected_rows_vary_as_those_of_a_wide_table_do() -> None:
    torch.manual_seed(0)
    projections = TableProjections({"item": 16}, 256)
    made = projections(torch.randn(4_000, 16), (4_000,))
    # 4,096 values of the matrix: their mean square is within 10 % of 1/16 but once in 10^5.
    assert 0.9 < float(made.detach().square().mean()) < 1.1


def test_rows_are_filled_with_zeros() -> None:
    assert pad_width_UD(torch.ones(1, 2), 3).tolist() == [[1, 1, 0]]
