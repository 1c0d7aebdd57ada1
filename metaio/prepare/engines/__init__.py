"""Spark in place of this machine: the same rows in, the same bytes out."""
