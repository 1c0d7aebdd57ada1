"""What a shell completes: in a real bash; of zsh and fish only that the script says so."""

import subprocess

import pytest

from gmeta.cli.main import COMMANDS
from gmeta.config.train_config import describe_config
from tests.support.commands import gmeta


@pytest.fixture(scope="module")
def script() -> str:
    done = gmeta("completion", "bash")
    assert done.returncode == 0, done.stderr
    return done.stdout


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last word of a line, split as bash splits it."""
    typed = " ".join(f"'{word}'" for word in words)
    ask = (
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _gmeta; "
        'printf "%s\\n" "${COMPREPLY[@]}"; complete -p gmeta >&2'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True
    )
    assert done.stderr == "complete -o default -F _gmeta gmeta\n"
    return done.stdout.split()


def test_commands_and_their_flags(script: str) -> None:
    assert set(completed(script, "gmeta", "")) == {*COMMANDS, "--help", "--version"}
    assert completed(script, "gmeta", "ru") == ["runs"]
    flags = completed(script, "gmeta", "train", "x.toml", "--")
    assert {"--resume", "--nproc-per-node", "--quiet", "--verbose", "--json"} <= set(flags)
    assert completed(script, "gmeta", "evaluate", "runs/x", "--no-t") == ["--no-trees"]
    assert "status" in completed(script, "gmeta", "shards", "")


def test_config_keys_and_their_values(script: str) -> None:
    keys = {f"{key}=" for key, _, _ in describe_config()}
    for command in ("train", "tune", "config", "evaluate"):
        found = completed(script, "gmeta", command, "x.toml", "outer.")
        assert set(found) == {key for key in keys if key.startswith("outer.")}
    # bash makes three words of outer.loss=bce.
    assert completed(script, "gmeta", "train", "x.toml", "outer.loss", "=") == [
        *("bce", "mse", "huber", "mae", "softmax", "pairwise")
    ]
    assert completed(script, "gmeta", "train", "x.toml", "outer.loss", "=", "h") == ["huber"]
    assert completed(script, "gmeta", "train", "x.toml", "data.shuffle", "=", "f") == ["false"]


def test_what_is_no_key_is_left_to_files(script: str) -> None:
    assert completed(script, "gmeta", "train", "examples/de") == []
    assert completed(script, "gmeta", "predict", "outer.") == []


def test_the_other_shells() -> None:
    zsh = gmeta("completion", "zsh").stdout
    assert "bashcompinit" in zsh
    assert "complete -o default -F _gmeta gmeta" in zsh
    fish = gmeta("completion", "fish").stdout.splitlines()
    assert "complete -c gmeta -n '__fish_seen_subcommand_from train' -l resume" in fish
    assert any("outer.loss=huber" in line for line in fish)
    refused = gmeta("completion", "tcsh")
    assert refused.returncode == 2
    assert "tcsh" in refused.stderr
