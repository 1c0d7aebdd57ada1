"""The outer loop: its optimizers, and when it ends."""
