"""This machine: threads, forks, numerics, files, and the private parts of torch in use."""
