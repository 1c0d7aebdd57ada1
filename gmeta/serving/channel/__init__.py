"""Delivery: versions of a model in a channel, how a new one is judged and how it is brought.

No ranks, no TorchRec."""
