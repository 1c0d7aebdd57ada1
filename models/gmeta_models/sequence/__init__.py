"""Encoders of a task's events: each reads them once for all rows of the task."""
