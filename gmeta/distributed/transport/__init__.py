"""Carries messages between ranks: gloo."""
