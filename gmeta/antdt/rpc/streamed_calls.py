"""Which calls a stream of calls carries; client and service read it from here."""

from gmeta_protos.antdt.v1 import shard_service_pb2 as pb

# The name of each RPC, and its field in a stream's requests and responses.
STREAMED = {
    field.message_type.name.removesuffix("Request"): field.name
    for field in pb.StreamRequest.DESCRIPTOR.oneofs_by_name["call"].fields
}
