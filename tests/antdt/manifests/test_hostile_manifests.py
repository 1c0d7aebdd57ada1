"""Manifests of hostile or broken callers: each is refused in one line, none is misunderstood."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from gmeta.antdt.errors import ManifestError
from gmeta.antdt.manifests.shard_manifest import (
    DatasetManifest,
    Exceptional,
    ShardManifest,
    parse_manifest,
)
from gmeta.antdt.model import DatasetSpec
from tests.support.refusals import catch_message

INF, NAN = float("inf"), float("nan")
SPEC = DatasetSpec("d", num_units=22, units_per_shard=4, seed=3, num_epochs=2)
ENTRY = DatasetManifest(
    SPEC, 0, done=((0, 2),), partial=(Exceptional(3, 1, 1, "lease of w expired", "w"),)
)
GOOD = ShardManifest("job", "c", 1, 1, "", 7, "00", (ENTRY,))

Body = dict[str, Any]


def signed(change: Callable[[Body, Body], Any]) -> str:
    """A manifest changed by a stranger who can compute a digest; its dataset is given too."""
    body = json.loads(GOOD.to_json())
    del body["digest"]
    change(body, body["datasets"][0])
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # A lone surrogate has no bytes, so no digest fits.
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return json.dumps({**body, "digest": digest})


def item(*fields: Any) -> Callable[[Body, Body], Any]:
    return lambda _, dataset: dataset["partial"].append(list(fields))


def spec(**fields: Any) -> Callable[[Body, Body], Any]:
    return lambda _, dataset: dataset["spec"].update(fields)


def entry(**fields: Any) -> Callable[[Body, Body], Any]:
    return lambda _, dataset: dataset.update(fields)


def top(**fields: Any) -> Callable[[Body, Body], Any]:
    return lambda body, _: body.update(fields)


CHANGES = {
    "done up to infinity": entry(done=[[0, INF]]),
    "done from NaN": entry(done=[[NAN, 1]]),
    "done of a number beyond all": entry(done=[[0, 10**400]]),
    "done of floats": entry(done=[[0, 2.0]]),
    "done of bools": entry(done=[[False, True]]),
    "done of text": entry(done=["02"]),
    "done of nothing, as an object": entry(done={}),
    "a run of three": entry(done=[[0, 1, 2]]),
    "a position as float": item(4.0, 0, 0, "", ""),
    "a position at infinity": item(INF, 0, 0, "", ""),
    "no position": item(None, 0, 0, "", ""),
    "a lone surrogate in a note": item(4, 0, 0, "\ud800", ""),
    "attempts as text": item(4, 0, "many", "", ""),
    "more attempts than the wire carries": item(4, 0, 1 << 32, "", ""),
    "attempts below zero": item(4, 0, -1, "", ""),
    "a number for a note": item(4, 0, 1, 5, ""),
    "an object for a note": item(4, 0, 1, {"a": 1}, ""),
    "a note without end": item(4, 0, 1, "x" * 10_000, ""),
    "a list for a worker": item(4, 0, 1, "", ["x"]),
    "units as text": item(4, "2", 1, "", ""),
    "units as float": item(4, 0.5, 1, "", ""),
    "units as bool": item(4, True, 1, "", ""),
    "one field too many": item(4, 0, 0, "", "", ""),
    "an epoch in words": entry(epoch="one"),
    "an epoch below zero": entry(epoch=-5),
    "an epoch after the last": entry(epoch=2),
    "an epoch as float": entry(epoch=0.0),
    "an epoch as bool": entry(epoch=True),
    "shards beyond memory": spec(num_units=1 << 47, units_per_shard=1),
    "a seed as text": spec(seed="x"),
    "a seed as float": spec(seed=3.0),
    "a list for a name": spec(name=["x"]),
    "a number for a fingerprint": spec(fingerprint=5),
    "shuffle in words": spec(shuffle="no"),
    "an unknown field of the spec": spec(extra=1),
    "no spec": entry(spec=None),
    "a list for the job": top(job=["default"]),
    "a step in words": top(step="zzz"),
    "no generation": top(generation=None),
    "a number for the head": top(ledger_head=7),
    "datasets as an object": top(datasets={"a": 1}),
    "no datasets, as an object": top(datasets={}),
    "a dataset twice": lambda body, dataset: body["datasets"].append(dict(dataset)),
    "an unknown field": top(extra=1),
    "an unknown field of a dataset": entry(extra=1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_with_a_field_of_another_type_or_range_is_refused_in_one_line(name: str) -> None:
    assert parse_manifest(signed(lambda *_: None)) == GOOD
    message = catch_message(ManifestError, parse_manifest, signed(CHANGES[name]))
    assert message.startswith("the manifest ")
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 50_000, "[1,2]", "{}", "null", "1", '"x"', "", "\ud800"]
)
def test_a_text_that_is_no_manifest_is_refused_in_one_line(text: str) -> None:
    message = catch_message(ManifestError, parse_manifest, text)
    assert message.startswith("the manifest is no shard manifest (")
    assert len(message) < 600


def test_the_field_that_does_not_fit_is_named_with_its_value() -> None:
    for change, said in (
        (CHANGES["an epoch in words"], "epoch is 'one'; allowed is a value of type int"),
        (CHANGES["an epoch below zero"], "epoch is -5; allowed is 0 to 1"),
        (CHANGES["a seed as float"], "seed is 3.0; allowed is a value of type int"),
        (CHANGES["a dataset twice"], "dataset d is listed 2 times; once is allowed"),
    ):
        with pytest.raises(ManifestError) as refused:
            parse_manifest(signed(change))
        assert f"the manifest has a field that does not fit: {said}. " in str(refused.value)
