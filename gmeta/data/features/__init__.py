"""Dense inputs computed from a task's support rows and from training rows."""
