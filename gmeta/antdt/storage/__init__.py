"""Group commit and the stores: which answers wait until what they say is on the disk."""
