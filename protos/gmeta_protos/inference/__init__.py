"""Message definitions and the code generated from them (make protos)."""
