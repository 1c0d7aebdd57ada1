"""`gmeta evaluate` as a rank; rank 0 writes the report and tells of it."""

from pathlib import Path

from gmeta.checkpoints.loader import best_not_kept
from gmeta.commands.screen import screen, show_table
from gmeta.commands.work.rank import be_rank
from gmeta.config import TrainConfig
from gmeta.evaluate import Shown, evaluate_run
from gmeta.parallel.ranks import Ranks
from gmeta.report.console import console_table
from gmeta.report.files import write
from gmeta.runs.folder import RunFolder


def evaluate_on_rank(
    roots: list[Path],
    splits: list[str],
    draws: int,
    support_sizes: tuple[int, ...],
    out: Path,
    config: TrainConfig,
) -> None:
    """Score the runs at `roots` together with the other ranks, by the first run's `config`."""

    def work(ranks: Ranks) -> None:
        # Folders of the same name in different places are told apart by their paths.
        short = len({root.name for root in roots}) == len(roots)
        runs = [
            evaluate_run(
                root,
                root.name if short else str(root),
                splits,
                ranks,
                Shown(draws, support_sizes),
            )
            for root in roots
        ]
        if ranks.rank == 0:
            evaluated = [each for each in runs if each is not None]
            paths = write(out, evaluated)
            console = screen()
            show_table(console, console_table(paths.evaluation))
            for line in filter(None, (best_not_kept(RunFolder(root)) for root in roots)):
                screen(stderr=True).print(line)
            console.print(f"report: {paths.html}   figures: {paths.evaluation_json}")

    # A run that was trained on a GPU is evaluated on what is here.
    device = "cpu" if config.run.device == "cpu" else "auto"
    configs = [RunFolder(root).read_config().digest for root in roots]
    told = {
        "--split": splits,
        "--draws": draws,
        "--support-sizes": support_sizes,
        "the config of each RUN": configs,
    }
    be_rank(device, config.run.collective_timeout_s, told, work)
