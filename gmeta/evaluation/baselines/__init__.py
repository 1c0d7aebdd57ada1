"""Baselines of a report, from the training split and support rows: a bias model and boosted
trees."""
