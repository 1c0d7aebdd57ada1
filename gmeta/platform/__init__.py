"""This machine: threads, forks, numerics, files, and what private parts of torch we use."""
