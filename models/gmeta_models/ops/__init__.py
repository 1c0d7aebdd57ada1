"""Torch operations that the models are made of."""
