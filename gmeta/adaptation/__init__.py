"""Inner loops: how a model adapts to a task. Pure torch, no distribution, no files.

`task_adapter.TaskAdapter` is MAML for a module of one's own."""
