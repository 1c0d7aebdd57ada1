"""Choosing settings by short runs that are scored on the validation split; without torch."""
