"""The service as a training process sees it."""
