"""The loop of `gmeta follow`: from closed partitions of a log to a served model, stage by stage."""
