"""The service process: its RPCs, its metrics, and how a job runs its own service."""
