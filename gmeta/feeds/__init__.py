"""Where a rank's batches come from, and what decides how many tasks are in them."""
