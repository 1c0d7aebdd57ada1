"""An exported model for other runtimes: programs of torch.export and ONNX, a Triton repository."""
