"""Serving: an exported folder as one object that adapts and predicts, with torch, not TorchRec."""
