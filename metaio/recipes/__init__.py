"""Ready-made datasets: one file a recipe."""
