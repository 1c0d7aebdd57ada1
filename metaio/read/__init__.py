"""From a prepared dataset to batches of whole episodes; the only room here that needs torch."""
