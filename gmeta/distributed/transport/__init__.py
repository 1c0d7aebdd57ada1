"""Carries messages between ranks: gloo, or memory that they share."""
