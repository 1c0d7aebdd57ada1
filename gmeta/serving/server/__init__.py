"""`gmeta serve`: the Open Inference Protocol over HTTP and gRPC. From the outside in:
server_processes.py starts workers; http_app.py and grpc_service.py translate a request and hand it
to batcher.py, whose one thread runs compute.py on all requests that wait."""
