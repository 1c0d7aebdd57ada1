"""Baselines of a report, from the training split and support rows: bias model, boosted trees."""
