"""Adds up what the groups' copies of the same rows bring: gradients, or how far they moved.

Shape suffixes: U unique ids, D embedding width, W ranks or workers, G groups of tables"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gmeta.distributed.groups.row_union import RowUnion
from gmeta.distributed.transport.narrow_transport import NarrowTransport


def sum_rows(
    unions: Sequence[RowUnion],
    values_G: Sequence[Tensor],
    wire: NarrowTransport,
    scale: float = 1.0,
) -> list[Tensor]:
    """Return the sums [U, D] of what the ranks with copies of the same rows bring, for each group
    of tables: the same bits on all of them. Collective.

    `values_G` are this rank's, in the order of its rows; `scale` is NarrowTransport's."""
    both = list(zip(unions, values_G, strict=True))
    others = range(wire.num_others)
    # To each rank the parts of the sums that it adds up.
    sent_WG = [
        [values.index_select(0, one.send_W[peer]) for one, values in both] for peer in others
    ]
    counts_WG = [[one.into_W[peer].numel() for one, _ in both] for peer in others]
    parts_WG = _swap_rows(wire, sent_WG, counts_WG, values_G, scale)
    sums_G = []
    for place, (one, values) in enumerate(both):
        total = values.new_zeros(one.summed.numel(), values.shape[1])
        total.index_add_(0, one.into_own, values.index_select(0, one.keep))
        for into, parts_G in zip(one.into_W, parts_WG, strict=True):
            total.index_add_(0, into, parts_G[place])
        # As the others get it: copies of a row stay equal.
        sums_G.append(wire.round(total, scale))
    counts_WG = [[one.receive_W[peer].numel() for one, _ in both] for peer in others]
    received_WG = _swap_rows(wire, [sums_G for _ in others], counts_WG, values_G, scale)
    found_G = []
    for place, (one, values) in enumerate(both):
        whole_UD = values.new_empty(one.row_U.numel(), values.shape[1])
        whole_UD.index_copy_(0, one.summed, sums_G[place])
        for where, received_G in zip(one.receive_W, received_WG, strict=True):
            whole_UD.index_copy_(0, where, received_G[place])
        found_G.append(whole_UD)
    return found_G


def _swap_rows(
    wire: NarrowTransport,
    sent_WG: Sequence[Sequence[Tensor]],
    counts_WG: Sequence[Sequence[int]],
    like_G: Sequence[Tensor],
    scale: float,
) -> list[list[Tensor]]:
    """Send each other rank rows of each group of tables, and return theirs, `counts_WG` of them."""
    widths = [values.shape[1] for values in like_G]
    sizes_WG = [
        [count * width for count, width in zip(counts_G, widths, strict=True)]
        for counts_G in counts_WG
    ]
    flat = torch.cat([rows.flatten() for sent_G in sent_WG for rows in sent_G])
    send_counts = [sum(rows.numel() for rows in sent_G) for sent_G in sent_WG]
    message = wire.send(flat, send_counts, [sum(sizes_G) for sizes_G in sizes_WG], scale=scale)
    return [
        [
            part.view(-1, width)
            for part, width in zip(values.split_with_sizes(sizes_G), widths, strict=True)
        ]
        for values, sizes_G in zip(wire.receive(message, scale), sizes_WG, strict=True)
    ]
