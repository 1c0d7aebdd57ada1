"""A cluster in simulated time around the ledger, monitor, controller and policies of real jobs."""
