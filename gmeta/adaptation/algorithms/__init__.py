"""The meta-learning algorithms: one file each."""
