"""Serving: an exported folder as one object that adapts to a task and predicts, in one process.

`gmeta.load` is the way in. Needs torch, but neither TorchRec nor a process group nor the dataset
that the model was trained on.
"""
