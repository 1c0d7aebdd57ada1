"""Inner loops: how a model adapts to a task. Pure torch, no distribution, no files."""
