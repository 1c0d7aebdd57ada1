"""The on-disk format of a prepared dataset: written, opened, checked."""
