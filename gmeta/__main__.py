"""`python -m gmeta` is the `gmeta` command: what torchrun starts on every rank."""

from gmeta.cli import main

main()
