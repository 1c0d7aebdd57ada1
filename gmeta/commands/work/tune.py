"""A trial of `gmeta tune` as a process: trains one config, or says in a line why it did not."""

import os
import sys
import threading
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

from gmeta.build import check_on_data
from gmeta.commands.telling import told, told_errors
from gmeta.commands.work.rank import be_rank
from gmeta.config import TrainConfig, config_from_dict
from gmeta.parallel.ranks import Ranks
from gmeta.runs.alike import settings_of_all
from gmeta.train import train


def be_trial(is_check: bool, config: dict[str, Any], log: str, failures: Connection) -> None:
    """Train the config of a trial, as JSON, in this process, which ends with it, or check it and
    its dataset as `gmeta train` does before it starts ranks; what is printed goes to the file
    `log`, the line of an error to `failures` too.
    """
    _leave_with_tune()
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for number in (1, 2):
        os.dup2(opened, number)
    os.close(opened)
    code = 0
    try:
        (check_on_data if is_check else _train)(config_from_dict(config))
    except told_errors() as error:
        line, code = told(error)
        sys.stderr.write(f"error: {line}\n")
        failures.send(line)
    # A fault of the program ends the process with its traceback in the log, which is named.
    failures.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # As gmeta.cli does: native threads of the libraries may abort an interpreter on its way out.
    os._exit(code)


def _train(config: TrainConfig) -> None:
    def work(ranks: Ranks) -> None:
        train(config, ranks)

    run = config.run
    be_rank(run.device, run.collective_timeout_s, settings_of_all(config), work)


def _leave_with_tune() -> None:
    """End this process with the one that started it, however that ended: nobody would hear it."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="leaves-with-tune", daemon=True).start()
