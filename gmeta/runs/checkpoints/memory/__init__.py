"""Checkpoints in the memory of launchers: what changed since the last checkpoint on disk."""
