"""`python -m gmeta` is the `gmeta` command: what torchrun starts on every rank."""

from gmeta.cli.main import main

# Not where multiprocessing imports the program's main module again, in a stage of `gmeta follow`.
if __name__ == "__main__":
    main()
