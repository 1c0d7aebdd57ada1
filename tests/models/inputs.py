"""Random rows as a model sees them, and one of them alone."""

import torch

from gmeta_models import InputSizes, RowInputs, SparseColumn


def named_sizes(num_single: int, num_multi: int, num_dense: int) -> InputSizes:
    """Columns s0, s1, ... and m0, m1, ...; m0 indexes the table of s0, every other one its own."""
    return InputSizes(
        num_single, num_multi, num_dense,
        tuple(SparseColumn(f"s{i}", f"s{i}") for i in range(num_single)),
        tuple(SparseColumn(f"m{i}", f"m{i}" if i else "s0") for i in range(num_multi)),
    )  # fmt: skip


def some_inputs(num_rows: int, sizes: InputSizes, width: int) -> RowInputs:
    """Random values, bags of 0 to 2 ids."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 3, (num_rows * sizes.num_multi,), generator=generator)
    return RowInputs(
        single_NFD=torch.randn(
            num_rows, sizes.num_single, width, generator=generator, dtype=torch.float64
        ),
        bag_values_VD=torch.randn(
            int(lengths.sum()), width, generator=generator, dtype=torch.float64
        ),
        bag_index_V=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        num_multi=sizes.num_multi,
        dense_NK=torch.randn(num_rows, sizes.num_dense, generator=generator, dtype=torch.float64),
    )


def row(inputs: RowInputs, index: int) -> RowInputs:
    """One row of several."""
    mine = inputs.bag_index_V // max(inputs.num_multi, 1) == index
    return RowInputs(
        single_NFD=inputs.single_NFD[index : index + 1],
        bag_values_VD=inputs.bag_values_VD[mine],
        bag_index_V=inputs.bag_index_V[mine] - index * inputs.num_multi,
        num_multi=inputs.num_multi,
        dense_NK=inputs.dense_NK[index : index + 1],
    )
