"""Metrics of an evaluation: which there are, and each as sums over tasks."""
