"""Checkpoints: written beside training, checked, loaded by any number of ranks."""
