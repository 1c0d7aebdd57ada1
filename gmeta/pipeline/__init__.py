"""The loop of `gmeta follow`: from closed partitions of a log to a served model, stage by stage.

Each stage is a command of gmeta, and done when what it writes is there: a kill loses nothing.
"""
