"""What the commands do, as functions: `gmeta.train`, `gmeta.evaluate` and their like."""
