"""What an inner loop costs, in multiply-adds, for each way to hold the change of a layer."""

from typing import Literal, NamedTuple


class PathCosts(NamedTuple):
    """What the cheaper path of a layer depends on, beside its widths."""

    support_rows: int  # of the longest task
    query_rows: int  # of the longest task
    steps: int

    def low_rank(self, width_in: int, width_out: int, uses: int) -> int:
        """Multiply-adds a task over one meta-step's forward passes, for a layer that works `uses`
        times on each row: pass j on the support rows applies j - 1 steps' factors, the query pass
        all.
        """
        support, query = self.support_rows * uses, self.query_rows * uses
        support_passes = support * self.steps * (self.steps - 1) // 2
        return (width_in + width_out) * support * (support_passes + query * self.steps)

    def low_rank_of_fixed(self, width_in: int, width_out: int) -> int:
        """The same for a layer that works once on each row and sees the same inputs in every step:
        its steps' factors are one pair.
        """
        support = self.support_rows
        return (width_in + width_out) * support * (support * (self.steps - 1) + self.query_rows)

    def materialised(self, width_in: int, width_out: int, uses: int) -> int:
        """The same where every step forms a weight change, and every pass but the first applies
        it.
        """
        support, query = self.support_rows * uses, self.query_rows * uses
        return width_in * width_out * (support * (2 * self.steps - 1) + query)

    def cheaper(
        self, width_in: int, width_out: int, uses: int
    ) -> Literal["low_rank", "materialised"]:
        """The path of fewer multiply-adds for such a layer."""
        low_rank = self.low_rank(width_in, width_out, uses)
        materialised = self.materialised(width_in, width_out, uses)
        return "low_rank" if low_rank <= materialised else "materialised"
