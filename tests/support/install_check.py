"""Installs the wheel of a folder as its users do, and serves and trains with it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = """
[data]
path = "data"
[model]
hidden = [8]
[run]
dir = "run"
device = "cpu"
epochs = 1
"""
PREDICT = """
import sys, gmeta
from metaio.recipes.synthetic import FEATURES_DENSE, FEATURES_SINGLE
rows = dict.fromkeys(FEATURES_SINGLE, [1, 2]) | dict.fromkeys(FEATURES_DENSE, [0.5, 1.0])
rows["tags"] = [[1], [2, 3]]
print(gmeta.load("model").adapt({**rows, "click": [1, 0]}).predict(rows))
assert "torchrec" not in sys.modules
"""


def main() -> None:
    """Install from the folder of argv, say each environment's size, and fail where a step fails."""
    (wheel,) = Path(sys.argv[1]).absolute().glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        here, venv = Path(folder), Path(folder, "venv")
        bin_folder = venv / "bin"
        environment = {**os.environ, "PYTHONPATH": ""}

        def run(*command: str | Path, fails_with: str = "") -> None:
            print("$", *command, flush=True)
            done = subprocess.run(
                [*map(str, command)], cwd=here, env=environment, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            said = done.stdout + done.stderr
            if bool(done.returncode) != bool(fails_with) or fails_with not in said:
                sys.exit(f"{said}\nexit code {done.returncode}")

        def say_size(what: str) -> None:
            num_bytes = sum(path.stat().st_size for path in venv.rglob("*") if path.is_file())
            print(f"{what}: {num_bytes / 1e6:,.0f} MB", flush=True)

        (here / "train.toml").write_text(CONFIG)
        run(sys.executable, "-m", "venv", venv)
        run(bin_folder / "pip", "install", "--quiet", f"{wheel}[serve]")
        run(bin_folder / "pip", "check")
        say_size("to serve and predict")
        run(bin_folder / "gmeta", "prepare", "--recipe", "synthetic", "--tasks", "300", "data")
        told = "Run: gmeta install-torchrec"
        run(bin_folder / "gmeta", "train", "train.toml", fails_with=told)
        run(bin_folder / "gmeta", "install-torchrec")
        run(bin_folder / "pip", "check")
        say_size("to train")
        run(bin_folder / "gmeta", "train", "train.toml")
        run(bin_folder / "gmeta", "export", "run", "model")
        run(bin_folder / "pip", "uninstall", "--quiet", "--yes", "torchrec", "fbgemm-gpu-cpu")
        run(bin_folder / "python", "-c", PREDICT)
    print("all steps passed")


if __name__ == "__main__":
    main()
