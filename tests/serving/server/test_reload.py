"""A newer version: swapped whole, the old one let go, one that cannot serve refused by name."""

import gc
import json
import os
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import gmeta
from gmeta.config.algorithm import AlgorithmConfig
from gmeta.errors import GMetaError, UserError
from gmeta.platform.files.checksums import describe_file
from gmeta.serving.exported_folder import read_config, write_config
from gmeta.serving.server import model_trial
from gmeta.serving.server import version_loader as loading
from gmeta.serving.server.server_limits import BatchLimits
from gmeta.serving.server.version_loader import load_version
from gmeta.serving.server.versions import version_in
from metaio.format.atomic_folder import replace_folder
from tests.serving.server.serving import get, post, request_of, service_of, values
from tests.support.exported import FEATURES, random_rows, write_random_model

QUERY = random_rows(6, seed=2)
SUPPORT = random_rows(9, seed=1)


def export(folder: Path, steps: int = 1, **options: object) -> str:
    """Another version at `folder`, put there as `gmeta export --overwrite` does."""
    partial = folder.with_name("partial")
    rates = AlgorithmConfig(inner_steps=steps, inner_lr=0.3)
    write_random_model(partial, algorithm=rates, **options)  # type: ignore[arg-type]
    replace_folder(partial, folder)
    return version_in(folder)


def test_a_newer_version_takes_over_with_the_tasks_that_were_kept(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    first = export(folder, 1)
    with service_of(folder) as service:
        before = post(service, request_of(QUERY, SUPPORT, key="kept"))
        assert not service.reload()
        old = weakref.ref(service.loaded.model)
        second = export(folder, 3)
        assert service.reload()
        assert service.loaded.version == second != first
        told = get(service, "/metrics").text.count("gmeta_serve_model_info{")
        assert told == 1  # not one of each version ever served
        gc.collect()
        assert old() is None
        after = post(service, request_of(QUERY, key="kept"))
        again = post(service, request_of(QUERY, key="kept"))
    versions = [each.json()["model_version"] for each in (before, after, again)]
    assert versions == [first, second, second]
    told = [each.json()["parameters"]["task_cache"] for each in (before, after, again)]
    assert told == ["stored", "restored", "hit"]
    expected = gmeta.load(folder).adapt(SUPPORT).predict(QUERY).numpy()
    np.testing.assert_allclose(values(after), expected, rtol=0, atol=1e-6)
    assert np.abs(values(before) - expected).max() > 1e-4


@pytest.mark.parametrize("damage", ["a bit is flipped", "the end is missing"])
def test_a_damaged_version_is_named_and_the_old_one_serves(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    first = export(folder, 1)
    with service_of(folder) as service:
        served = values(post(service, request_of(QUERY, SUPPORT)))
        partial = tmp_path / "bad"
        write_random_model(partial, algorithm=AlgorithmConfig(inner_steps=2))
        table = partial / "table-00001.safetensors"
        content = bytearray(table.read_bytes())
        if damage == "a bit is flipped":
            content[len(content) // 2] ^= 1
        else:
            del content[-16:]
        table.write_bytes(content)
        replace_folder(partial, folder)
        bad = version_in(folder)
        assert not service.reload()
        assert not service.reload()  # looked at once
        status = get(service, "/status").json()
        assert (status["version"], status["refused"]["version"]) == (first, bad)
        assert "table-00001.safetensors" in status["refused"]["reason"]
        page = get(service, "/metrics").text
        assert 'gmeta_serve_reloads_total{result="refused"} 1.0' in page
        assert "gmeta_serve_model_refused 1.0" in page
        assert bad in get(service, "/docs").text
        np.testing.assert_array_equal(values(post(service, request_of(QUERY, SUPPORT))), served)
        good = export(folder, 2)
        assert service.reload()
        assert get(service, "/status").json()["refused"] is None
        assert service.loaded.version == good
        assert "gmeta_serve_model_refused 0.0" in get(service, "/metrics").text


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (AlgorithmConfig(inner_steps=10**9), "has not answered a request of 64 rows within 0.5 s"),
        (AlgorithmConfig(name="encoder", inner_steps=10**9), ""),
        (AlgorithmConfig(inner_steps=2, inner_lr=1e30), "becomes a model whose values are not"),
        ("item", "is not finite"),
        ("city", "is not finite"),
        ("tag", "is not finite"),
    ],
)
def test_a_version_that_cannot_answer_is_not_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: AlgorithmConfig | str, named: str
) -> None:
    monkeypatch.setattr(model_trial, "LEAST_S", 0.5)
    folder, partial = tmp_path / "model", tmp_path / "partial"
    first = export(folder)
    with service_of(folder, batch=BatchLimits(timeout_s=0.5)) as service:
        before = values(post(service, request_of(QUERY, SUPPORT)))
        if isinstance(bad, str):
            write_random_model(partial)
            place = [table.name for table in FEATURES.tables].index(bad)
            file = partial / f"table-{place:05d}.safetensors"
            save_file({"values": load_file(file)["values"] * torch.nan}, file)
            config = read_config(partial)
            entry = {file.name: describe_file(file)}
            write_config(partial, replace(config, files={**config.files, **entry}))
        else:
            write_random_model(partial, algorithm=bad)
        replace_folder(partial, folder)
        assert service.reload() is (not named)  # one whose steps do nothing answers
        if named:
            assert service.refused is not None
            assert service.refused[0] == version_in(folder) != first
            assert named in service.refused[1]
            assert values(post(service, request_of(QUERY, SUPPORT))).tolist() == before.tolist()
    told = pytest.raises(GMetaError, match=named) if named else nullcontext()
    with told, service_of(folder, batch=BatchLimits(timeout_s=0.5)):
        pass  # nor does a server start with it


@pytest.mark.parametrize("change", ["cut", "copied over"])
def test_files_changed_in_place_are_not_answered_from(tmp_path: Path, change: str) -> None:
    folder, other = tmp_path / "model", tmp_path / "other"
    first = export(folder, 1)
    export(other, 1)
    with service_of(folder) as service:
        whole = values(post(service, request_of(QUERY, SUPPORT)))
        table = folder / "table-00000.safetensors"
        if change == "cut":
            os.truncate(table, 4)
        else:
            content = table.read_bytes()
            table.write_bytes(content[:-4] + bytes(4))
        for request in (request_of(QUERY, SUPPORT), request_of(QUERY)):
            answer = post(service, request)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert f"{table} was changed in place after it was loaded" in answer.text
        assert not service.reload()
        assert service.refused is not None
        assert str(table) in service.refused[1]
        # The same version, put there anew, serves at the next look.
        replace_folder(other, folder)
        assert service.reload()
        assert service.loaded.version == first
        np.testing.assert_array_equal(values(post(service, request_of(QUERY, SUPPORT))), whole)


def test_a_version_copied_over_another_is_taken_up_whole(tmp_path: Path) -> None:
    """As `cp -r` does, file by file."""
    folder, other = tmp_path / "model", tmp_path / "other"
    export(folder, 1)
    second = export(other, 3)
    with service_of(folder) as service:
        for file in sorted(other.iterdir()):
            (folder / file.name).write_bytes(file.read_bytes())
            if service.reload():
                break
            assert post(service, request_of(QUERY, SUPPORT)).status_code in (200, 503)
        service.reload()
        expected = gmeta.load(other).adapt(SUPPORT).predict(QUERY).numpy()
        answer = post(service, request_of(QUERY, SUPPORT))
    assert answer.json()["model_version"] == second
    np.testing.assert_allclose(values(answer), expected, rtol=0, atol=1e-6)


def test_a_version_with_other_columns_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    first = export(folder)
    with service_of(folder) as service:
        other = export(folder, features=replace(FEATURES, dense=("price", "age")))
        assert not service.reload()
        assert service.refused == (
            other,
            f"version {other} has another column age than version {first}, which serves: its "
            "callers' requests would fail. Serve it with a server of its own",
        )
        assert post(service, request_of(QUERY)).status_code == 200


def test_a_folder_that_is_gone_for_a_moment_is_no_news(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export(folder)
    with service_of(folder) as service:
        folder.rename(tmp_path / "away")
        assert not service.reload()
        assert service.refused is None
        (tmp_path / "away").rename(folder)
        assert not service.reload()
        # Nor is the next moment; but whoever waits for a newer version hears of a mount that went.
        folder.rename(tmp_path / "away")
        assert not service.reload()
        assert service.refused is None
        assert not service.reload()
        assert service.refused is not None
        assert str(folder) in service.refused[1]
        (tmp_path / "away").rename(folder)
        assert not service.reload()
        assert service.refused is None


def test_a_folder_replaced_amid_is_reread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    export(folder, 1)
    load, steps = loading.load, iter((2, 3))

    def slow(path: Path, verify: bool) -> object:
        found = load(path, verify)
        for number in steps:
            export(folder, number)
            break
        return found

    monkeypatch.setattr(loading, "load", slow)
    found = load_version(folder)
    assert found.version == version_in(folder)
    assert found.model.config.algorithm.inner_steps == 3
    monkeypatch.setattr(loading, "load", lambda *_, **__: export(folder, next(more)))
    more = iter(range(4, 40))
    with pytest.raises(GMetaError, match="was replaced 3 times while it was read"):
        load_version(folder)


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no exported model: it has no config\.json"):
        load_version(tmp_path)


def test_the_version_names_the_content(tmp_path: Path) -> None:
    one, same, other = (
        export(tmp_path / name, steps) for name, steps in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == same != other
    assert json.loads((tmp_path / "a" / "config.json").read_text())["format"] == "gmeta-model"
