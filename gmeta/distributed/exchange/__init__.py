"""Brings embedding rows to the ranks that need them, and their gradients back."""
