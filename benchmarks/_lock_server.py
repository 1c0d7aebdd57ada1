"""What a user writes in an afternoon: `gmeta.load` behind one FastAPI process, call by call.

python benchmarks/_lock_server.py FOLDER PORT"""

import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

import gmeta


def main() -> None:
    folder, port = sys.argv[1:]
    torch.set_num_threads(1)
    model, app = gmeta.load(folder), FastAPI()

    @app.post("/predict")
    def predict(request: dict[str, Any]) -> dict[str, Any]:
        found = model.adapt(request["support"]).predict(request["query"])
        return {"prediction": found.tolist()}

    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
