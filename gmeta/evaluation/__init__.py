"""Evaluation: predictions of splits, the baselines beside them, and the report."""
