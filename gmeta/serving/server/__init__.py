"""The server: `gmeta serve` answers the Open Inference Protocol over HTTP and gRPC.

From the outside in: process.py starts workers; http_app.py and grpc_service.py translate a request
(protocol.py, tensors.py) and hand it to batcher.py, whose one thread runs compute.py on all
requests that wait. versions.py holds the model that answers and swaps it for a newer one.
"""
