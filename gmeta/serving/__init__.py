"""Serving: an exported folder as one object that adapts to a task and predicts, in one process;
`gmeta.load` needs torch, but no TorchRec, process group or dataset."""
