"""What is given for a config or a run folder and is another thing: its name, and what takes it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gmeta.config.train_config import load_config
from gmeta.errors import ConfigError, UserError
from gmeta.pipeline.follow_config import load_follow_config
from gmeta.runs.checkpoints.progress_file import PROGRESS_FILE
from gmeta.runs.run_folder import CONFIG_FILE, RunFolder
from gmeta.serving.channel.channel import CURRENT_FILE
from gmeta.serving.exported_folder import LAYERS_FILE
from gmeta.tuning.study import STUDY_FILE
from gmeta_keys.path_kinds import describe_folder
from metaio.errors import SchemaError
from metaio.format.layout import MANIFEST_NAME
from metaio.prepare.schema.schema_file import load_schema
from metaio.stream.chain import STREAM_FILE
from tests.support.refusals import catch_message

SCHEMA = "a schema: gmeta prepare --schema schema.toml takes it, and gmeta train a config as gmeta "
SCHEMA += "init writes it"
STUDY = "a study of gmeta tune: gmeta train takes place/best.toml; its runs are in place/trials, "
STUDY += "where the best trial's has checkpoints"
EXPORT = "an exported model: gmeta predict, adapt, score, serve and inspect take it"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.mark.parametrize(
    ("mark", "described"),
    [
        (STUDY_FILE, "a study of gmeta tune: "), (STREAM_FILE, "a stream of datasets: "),
        (MANIFEST_NAME, "a prepared dataset: "), (CURRENT_FILE, "a channel: "),
        (LAYERS_FILE, "an exported model: "), (PROGRESS_FILE, "a checkpoint: "),
        (CONFIG_FILE, "a run folder: "),
    ],
)  # fmt: skip
def test_a_folder_is_known_by_the_file_that_its_owner_writes(
    place: Path, mark: str, described: str
) -> None:
    (place / mark).touch()
    assert describe_folder(Path("place")).startswith(described)
    with pytest.raises(ConfigError) as caught:
        load_config("place")
    assert str(caught.value).startswith(f"config 'place' is no TOML file but {described}")


@pytest.mark.parametrize(("mark", "described"), [(STUDY_FILE, STUDY), (LAYERS_FILE, EXPORT)])
def test_what_is_no_run_is_named_also_where_it_has_a_config(
    place: Path, mark: str, described: str
) -> None:
    (place / CONFIG_FILE).write_text('{"format": "gmeta-model"}')
    (place / mark).touch()
    with pytest.raises(UserError) as caught:
        RunFolder(Path("place")).read_config()
    assert str(caught.value) == f"place is no run folder but {described}"


@pytest.mark.parametrize(
    ("load", "content", "message"),
    [
        (load_config, "[task]\n", f"config 'schema.toml' is {SCHEMA}"),
        (load_follow_config, "[task]\n", f"config 'schema.toml' is {SCHEMA}"),
        (load_config, "[follow]\n", "config 'schema.toml' is a config of gmeta follow, which "),
        (load_schema, "[run]\n", "schema 'schema.toml' is a training config: gmeta train takes it"),
    ],
)
def test_a_toml_file_of_another_kind_is_named(
    load: Callable[[Path], object], content: str, message: str
) -> None:
    Path("schema.toml").write_text(content)
    with pytest.raises((ConfigError, SchemaError)) as caught:
        load(Path("schema.toml"))
    assert str(caught.value).startswith(message)


def test_a_mistyped_path_is_told_with_the_one_that_is_there(place: Path) -> None:
    (place / "train.toml").touch()
    for wrong in ("place/trian.toml", "plaec/train.toml", "plcae/tran.toml"):
        assert catch_message(ConfigError, load_config, wrong) == (
            f"config {wrong!r} cannot be read: No such file or directory. Give a TOML file. "
            "Did you mean 'place/train.toml'?"
        )
    assert catch_message(UserError, RunFolder(Path("palce")).read_config) == (
        "palce is no run folder: config.json is missing or broken. Give the run.dir of a training "
        "run. Did you mean 'place'?"
    )
    with pytest.raises(ConfigError, match=r"Give a TOML file$"):
        load_config("nowhere/at/all.toml")
