"""Embedding tables: what they are called, how they are cut up, how their rows are updated."""
