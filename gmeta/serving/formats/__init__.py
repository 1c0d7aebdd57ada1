"""An exported model for other runtimes: programs of torch.export and ONNX, and a Triton repository.

They compute what `gmeta.load` does, from table ids; inputs.json says how raw columns become these.
"""
