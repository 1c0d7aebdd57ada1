"""From a prepared dataset to batches of complete episodes; only this room needs torch."""
