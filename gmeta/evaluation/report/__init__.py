"""The report of an evaluation: JSON for machines; page, pictures and console table for people."""
