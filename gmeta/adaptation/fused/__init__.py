"""The fast inner loop, for models whose MLPs adapt."""
