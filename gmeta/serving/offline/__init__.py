"""Many tasks at once, adapted ahead of time: their states as rows of a table."""
