"""What of the data is in a checkpoint, and what that proves."""
