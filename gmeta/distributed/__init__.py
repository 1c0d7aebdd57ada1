"""Ranks, sharded tables and the steps that all ranks take together.

The only package that touches torch.distributed and TorchRec's sharding."""
