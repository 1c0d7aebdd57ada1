"""All that tests ask of the pretended GPU, of one start: that takes longer than a hundred cases."""

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from tests.pretended import learner_steps, training


def everything(steps: list[Any], runs: list[Any]) -> dict[str, Any]:
    """Return what the learner's steps show, in an early fork, and whole runs beside it."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_tell_of_steps, args=(here, there, steps))
    process.start()
    there.close()
    with here:  # closed where a run fails: nobody would hear the other, which would wait for that
        found = training.everything(*runs)
        told = {"runs": found, "steps": here.recv()}  # EOFError: it failed, as it has printed
    process.join()
    return told


def _tell_of_steps(heard: Connection, told: Connection, steps: list[Any]) -> None:
    heard.close()
    told.send(learner_steps.everything(*steps))
