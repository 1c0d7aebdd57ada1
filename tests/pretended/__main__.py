"""`python -m tests.pretended MODULE FUNCTION JSON`: calls a function with these arguments in a
process with a pretended GPU, and prints what it returns as JSON, behind whatever else is printed.
"""

import gc
import importlib
import json
import os
import sys

from tests.pretended.process import load_guard

load_guard()  # before torch, which looks for devices once
gc.disable()  # until all is imported: none of that is garbage

import torch  # noqa: E402

from tests.pretended.device import start  # noqa: E402
from tests.support.processes import collect_garbage_rarely  # noqa: E402

if __name__ == "__main__":
    torch.set_num_threads(1)
    start()
    module, function, arguments = sys.argv[1:]
    called = getattr(importlib.import_module(module), function)
    collect_garbage_rarely()
    result = called(*json.loads(arguments))
    print(json.dumps(result), flush=True)
    os._exit(0)  # torch would free what it believes to be memory of a GPU
