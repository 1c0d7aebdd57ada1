"""Streams: datasets that continue each other window by window; ids keep their rows."""
