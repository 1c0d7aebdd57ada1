"""The work of `gmeta score`."""

from collections.abc import Sequence
from pathlib import Path

from gmeta.cli.commands.console import make_console, make_table, show_table
from gmeta.data.opening import open_by_name
from gmeta.runs.run_folder import write_json
from gmeta.serving.channel.model_scores import score_model


def score_export(model: Path, on: str, splits: Sequence[str], out: Path | None) -> None:
    """Score an exported model, write the scores to `out` and print them."""
    document = score_model(model, open_by_name(on), splits)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, document)
    # All splits have the same metrics.
    names = next(iter(document["splits"].values()))["scores"]
    table = make_table(str(model), "split", "tasks", *names, text=("split",))
    for name, split in document["splits"].items():
        value_texts = (
            "-" if value is None else f"{value:.4f}" for value in split["scores"].values()
        )
        table.add_row(name, f"{split['num_tasks']:,}", *value_texts)
    show_table(make_console(), table)
    if not splits:
        make_console(stderr=True).print(
            f"scored every split of {on} that holds tasks: {', '.join(document['splits'])}. One "
            "that the model was trained on looks better than new tasks will; --split NAME chooses"
        )
