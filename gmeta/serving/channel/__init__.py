"""Delivery: a model's versions in a channel, judged and brought. No ranks, no TorchRec."""
