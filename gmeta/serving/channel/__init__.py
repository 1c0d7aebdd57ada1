"""Delivery: versions of a model in a channel, full or as what changed since the one before; how a
new one is judged, and how it reaches the processes that predict. No ranks, no TorchRec.
"""
