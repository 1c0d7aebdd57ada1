"""The ledger in protobuf, and the event loop that calls run on."""
