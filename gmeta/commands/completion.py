"""`gmeta completion`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from gmeta.config import types_of_keys


@dataclass(frozen=True)
class Words:
    """What may follow a command."""

    flags: tuple[str, ...]
    below: tuple[str, ...]  # commands below it
    takes_keys: bool  # SECTION.KEY=VALUE


def completion(
    context: typer.Context,
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="bash, zsh or fish")],
) -> None:
    """Print what lets a shell complete commands, flags and config keys.

    eval "$(gmeta completion bash)"    # in ~/.bashrc; zsh alike, in ~/.zshrc

    gmeta completion fish > ~/.config/fish/completions/gmeta.fish
    """
    commands = {name: words_of(one) for name, one in context.obj().items()}
    keys = key_choices()
    if shell == "fish":
        typer.echo(fish_script(commands, keys))
        return
    script = bash_script(commands, keys)
    # zsh runs functions of bash as they are.
    head = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
    typer.echo(f"{head if shell == 'zsh' else ''}{script}")


def words_of(command: Any) -> Words:
    """Return what may follow a command of click's."""
    below = getattr(command, "commands", {})
    flags = {word for one in (command, *below.values()) for word in _flags(one)}
    takes_keys = any(str(one.metavar).startswith("[SECTION.KEY") for one in command.params)
    return Words(tuple(sorted(flags)), tuple(below), takes_keys)


def _flags(command: Any) -> list[str]:
    words = [w for one in command.params for w in (*one.opts, *one.secondary_opts)]
    return ["--help", *(word for word in words if word.startswith("--"))]


def key_choices() -> dict[str, tuple[str, ...]]:
    """Return every key of a training config, with its values where it takes one of a few."""
    return {key: _choices(hint) for key, hint in types_of_keys().items()}


def _choices(hint: Any) -> tuple[str, ...]:
    if hint is bool:
        return ("true", "false")
    return tuple(map(str, get_args(hint))) if get_origin(hint) is Literal else ()


def bash_script(commands: Mapping[str, Words], keys: Mapping[str, Sequence[str]]) -> str:
    """Return a function of bash, which splits `key=value` at the =, and its registration."""
    cases = [
        f'    {name}) flags="{" ".join((*words.below, *words.flags))}"'
        f"{' keys=1' if words.takes_keys else ''} ;;"
        for name, words in commands.items()
    ]
    values = [f'      {key}) values="{" ".join(some)}" ;;' for key, some in keys.items() if some]
    return "\n".join(
        [
            "_gmeta() {",
            '  local cur="${COMP_WORDS[COMP_CWORD]}" flags="" keys="" values="" key=""',
            "  COMPREPLY=()",
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f'    COMPREPLY=($(compgen -W "{" ".join(commands)} --help --version" -- "$cur"))',
            "    return",
            "  fi",
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac",
            '  if [ "$cur" = "=" ]; then',
            '    key="${COMP_WORDS[COMP_CWORD-1]}" cur=""',
            '  elif [ "${COMP_WORDS[COMP_CWORD-1]}" = "=" ]; then',
            '    key="${COMP_WORDS[COMP_CWORD-2]}"',
            "  fi",
            '  if [ -n "$keys" ] && [ -n "$key" ]; then',
            '    case "$key" in',
            *values,
            "    esac",
            '    COMPREPLY=($(compgen -W "$values" -- "$cur"))',
            '  elif [ -n "$keys" ] && [ "${cur#-}" = "$cur" ] && [ -n "$cur" ]; then',
            f'    COMPREPLY=($(compgen -W "{" ".join(f"{key}=" for key in keys)}" -- "$cur"))',
            "    compopt -o nospace 2>/dev/null",
            "  else",
            '    COMPREPLY=($(compgen -W "$flags" -- "$cur"))',
            "  fi",
            "}",
            # Where nothing fits, files do.
            "complete -o default -F _gmeta gmeta",
        ]
    )


def fish_script(commands: Mapping[str, Words], keys: Mapping[str, Sequence[str]]) -> str:
    """Return the lines that fish reads."""
    lines = [f"complete -c gmeta -n __fish_use_subcommand -f -a '{' '.join(commands)}'"]
    told = " ".join(f"{key}={value}" for key, some in keys.items() for value in some or ("",))
    for name, words in commands.items():
        after = f"complete -c gmeta -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{after} -l {flag.removeprefix('--')}" for flag in words.flags]
        lines += [f"{after} -f -a '{' '.join(words.below)}'"] if words.below else []
        lines += [f"{after} -a '{told}'"] if words.takes_keys else []
    return "\n".join(lines)
