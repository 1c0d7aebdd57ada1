"""What a shell completes, in a real bash."""

import os
import subprocess
import sys

import pytest

from gmeta.cli.main import COMMANDS
from gmeta.config.train_config import describe_config

GMETA = "import sys; sys.argv[0] = 'gmeta'; from gmeta.cli.main import main; main()"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where `gmeta` is a command."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "gmeta").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{GMETA}" "$@"\n')
    (folder / "gmeta").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def script(environment: dict[str, str]) -> str:
    """What `gmeta --install-completion` has bash read."""
    done = subprocess.run(
        ["gmeta"], env={**environment, "_GMETA_COMPLETE": "source_bash"}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout


def completed(script: str, environment: dict[str, str], *words: str) -> list[str]:
    """What bash offers for the last word of a line, split as bash splits it."""
    typed = " ".join(f"'{word}'" for word in words)
    ask = (
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _gmeta_completion gmeta; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{ask}"], env=environment, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_commands_and_their_flags(script: str, environment: dict[str, str]) -> None:
    assert set(completed(script, environment, "gmeta", "")) == {
        name.split()[0] for name in COMMANDS
    }
    flags = completed(script, environment, "gmeta", "train", "x.toml", "--")
    assert {"--resume", "--nproc-per-node", "--quiet", "--verbose", "--json"} <= set(flags)
    assert "status" in completed(script, environment, "gmeta", "shards", "")
    channel = ["judge", "promote", "rollback", "publish"]
    assert completed(script, environment, "gmeta", "channel", "") == channel
    assert "--champion" in completed(script, environment, "gmeta", "channel", "judge", "m", "--")


@pytest.mark.parametrize("command", ["train", "tune", "plan", "config", "evaluate"])
def test_config_keys(script: str, environment: dict[str, str], command: str) -> None:
    found = completed(script, environment, "gmeta", command, "x.toml", "outer.")
    keys = {key for key, _, _ in describe_config() if key.startswith("outer.")}
    assert {override.partition("=")[0] for override in found} == keys
    assert "outer.loss=huber" in found


def test_values_of_config_keys(script: str, environment: dict[str, str]) -> None:
    # bash makes three words of outer.loss=bce.
    before = ("gmeta", "train", "x.toml", "outer.loss", "=")
    losses = ["bce", "mse", "huber", "mae", "softmax", "pairwise"]
    assert completed(script, environment, *before) == losses
    assert completed(script, environment, *before, "h") == ["huber"]


def test_what_is_no_key_is_left_to_files(script: str, environment: dict[str, str]) -> None:
    assert "complete -o default -F _gmeta_completion gmeta" in script
    assert completed(script, environment, "gmeta", "train", "examples/de") == []
    assert completed(script, environment, "gmeta", "train", "x.toml", "") == []
    assert completed(script, environment, "gmeta", "predict", "outer.") == []
