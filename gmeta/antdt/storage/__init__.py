"""Group commit and the stores: which answer waits for what to be on the disk."""
