"""A cluster in simulated time around the ledger, monitor, controller and policies that serve real
jobs."""
