"""One long sequence over several ranks: each holds a slice of its places, and attention is exact.

A gradient is that of the sum of all ranks' losses. Of what every rank holds whole (layers, bias
tables, queries of target attention) a rank's gradient is its part: the parts add up over the ranks.
"""
