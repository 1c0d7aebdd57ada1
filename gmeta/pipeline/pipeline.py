"""The loop: closed partitions become increments, each trained on, judged and promoted in its turn.

What is done is read from files, so that a loop killed anywhere goes on: each increment says which
files it has, and in RUNS/000007/ `trained.json`, `model/`, `verdict.json`, the channel's log and
`frozen.json` each end a stage."""

import json
import logging
import math
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from gmeta.config.losses import RANGES
from gmeta.config.train_config import load_config
from gmeta.errors import GMetaError, NotFiniteError, UserError
from gmeta.pipeline.follow_config import FollowConfig
from gmeta.pipeline.kafka_topic import NOTHING_NEW
from gmeta.pipeline.log_partitions import (
    SUCCESS,
    LogPartition,
    LogState,
    QuarantineChecks,
    TakenFiles,
    closed_partitions,
    sort_partitions,
)
from gmeta.pipeline.stage_outcome import (
    CHALLENGE_FILE,
    ENDED_FILE,
    FROZEN_FILE,
    RunningStage,
    StageOutcome,
)
from gmeta.runs.run_folder import CONFIG_FILE as RUN_CONFIG_FILE
from gmeta.runs.run_folder import RunFolder, write_json
from gmeta.serving.channel.channel import Channel, CurrentVersion
from gmeta.serving.channel.decision_files import PROMOTED, PROMOTIONS, read_verdict, write_verdict
from gmeta.serving.channel.model_version import Version
from gmeta.serving.channel.version_retention import prune
from gmeta.serving.exported_folder import CONFIG_FILE
from metaio.errors import MetaIOError
from metaio.prepare.schema.schema_file import fingerprint_schema, load_schema
from metaio.quantities import format_count
from metaio.stream.chain import list_increment_numbers, name_increment_folder, open_stream
from metaio.stream.quarantine import list_quarantine

# The exit code of a refusal, and of `gmeta prepare` for quarantined rows.
SET_ASIDE = 3
RunStage = Callable[[list[str], Path], int]
_KnownModels = tuple[dict[str, int], dict[str, dict[str, Any]]]
_log = logging.getLogger(__name__)


@final
class Pipeline:
    """Runs one stage at a time: `run_stage` runs a command, `last_line` reads its log's end."""

    def __init__(
        self,
        config: FollowConfig,
        run_stage: RunStage,
        last_line: Callable[[Path], str],
        is_strict: bool = False,
    ) -> None:
        self.config, self._is_strict = config, is_strict
        self.channel = Channel(config.follow.channel)
        self._runs = Path(config.follow.runs)
        self._stream = config.follow.stream
        self._run_stage, self._last_line = run_stage, last_line
        self.under_way: RunningStage | None = None
        self.failed_stage = ""  # the last that failed, until that is counted
        # Fingerprints of increments whose run was trained on them.
        self._run_on: set[str] = set()
        self._files, self._quarantine_checks = TakenFiles(self._stream), QuarantineChecks()
        # What is stored here beside the files never changes on the disk: a step need not read all
        # verdicts.
        self._verdicts: dict[int, dict[str, Any]] = {}
        self._logged: tuple[object, _KnownModels] = (None, ({}, {}))
        # The state of the log, if the last step found nothing to do.
        self.idle: LogState | None = None
        # When the version that the mirror serves was promoted; not known at the start.
        self._published = ""
        # Why the mirror lacks the version that serves, once a try has failed.
        self.unpublished = ""
        # Whether publishing waits for another stage: the mirror may be away for hours.
        self._is_put_off = False
        # When the topic of Kafka was last copied, of time.monotonic; never yet.
        self._fetched_s = -math.inf

    def step(self) -> StageOutcome | None:
        """Run the next stage and return its outcome; None if no stage is due. Raises GMetaError."""
        done = self._step()
        if done is not None and done.increment:
            # Read by the page alone: whether a stage is done is never read from it.
            line = {"stage": done.stage, "took_s": round(done.took_s, 3), "at_s": time.time()}
            root = self.folder(done.increment)
            # The stage has ended, also where the disk is full by now.
            with suppress(OSError):
                root.mkdir(parents=True, exist_ok=True)
                with (root / ENDED_FILE).open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return done

    def _step(self) -> StageOutcome | None:
        self.idle = None
        self._check_runs()
        current = self.channel.current()
        if current is None or not self.config.follow.mirror or current.at == self._published:
            return self._take_next(current)
        # The mirror may be away for hours: after a failure another stage comes first. A version
        # that a person promoted or rolled back is copied too.
        is_put_off, self._is_put_off = self._is_put_off, False
        done = self._take_next(current) if is_put_off else None
        return done or self._publish(current)

    def _check_runs(self) -> None:
        """Raise GMetaError for a run on another increment than the stream has under its number."""
        for number, fingerprint in self._files.fingerprints().items():
            if fingerprint in self._run_on:
                continue
            run = RunFolder(self.folder(number) / "run")
            trained_on = run.trained_on()
            if trained_on and trained_on != fingerprint:
                self._verdicts.clear()  # of the folders that will be moved
                raise GMetaError(
                    f"{run.root} was trained on {trained_on[:12]}, but {self._stream} has "
                    f"{fingerprint[:12]} as increment {number}: one of them was put back from an "
                    f"older copy. Put back the other as well, or move {self.folder(number)} and "
                    "all later ones away, and these increments are trained again"
                )
            self._run_on |= {fingerprint} if trained_on else set()

    def _take_next(self, current: CurrentVersion | None) -> StageOutcome | None:
        # Read from files, never remembered: a kill between two stages costs nothing.
        number = self.first_unfinished()
        if number is None:
            if (challenge := self._challenge()) is not None:
                return challenge
            log = self.log_state()
            # Until it has taken over, the other loop alone prepares increments.
            if log.waiting and (not self.config.follow.takes_over or self.has_taken_over()):
                return self._prepare(log.waiting[0], log.held)
            kafka = self.config.kafka
            is_due = time.monotonic() - self._fetched_s >= kafka.every_s
            if kafka.servers and is_due and (fetched := self._fetch()):
                return fetched
            # With nothing else to do the first promoted version is scored on later increments: it
            # shows what a model that does not go on is worth.
            unscored = self._next_unscored()
            if unscored is not None:
                return self._score(*unscored)
            self.idle = log
            return None
        refused = self.refused_before(number)
        if len(refused) >= self.config.judge.max_refused:
            raise self._too_many_refused(refused)
        root = self.folder(number)
        if not (root / "trained.json").exists():
            return self._train(number)
        # An export appears complete or not at all: one that was killed is made again.
        if not (root / "verdict.json").exists() or self._is_outdated(number, current):
            if not (root / "model" / CONFIG_FILE).exists():
                return self._export(number)
            return self._judge(number, root / "model")
        return self._promote(number)

    def log_state(self) -> LogState:
        """Return the state of the log's partitions."""
        follow, taken = self.config.follow, self._files.files()
        partitions = closed_partitions(follow.inputs, follow.closed_after_s)
        notes = list_quarantine(Path(self._stream))
        if any("schema" in note for note in notes):
            # A note by an older schema does not hold: the schema may have been corrected since.
            mark = fingerprint_schema(load_schema(follow.schema))
            notes = [note for note in notes if note.get("schema", mark) == mark]
        # An empty file may have been opened by its writer just now: no row of it was trained, so it
        # is no rewritten file when it grows.
        old = {
            name: taken[name] for name in self._quarantine_checks.find_rewritten(partitions, taken)
        }
        new = {name for name, file in old.items() if not file["num_bytes"]}
        rewritten = {
            name: f"it was rewritten since increment {file['increment']} took it, and increments "
            "do not change. Give new rows in a file of a new name"
            for name, file in old.items()
            if name not in new
        }
        notes_in_force = self._quarantine_checks.notes_in_force(notes, taken.keys() - new)
        return sort_partitions(partitions, taken.keys() - new, notes_in_force, rewritten)

    def missing_input(self) -> str:
        """Return what is lacking if no increment could be made yet; "" if one was, or can be."""
        if list_increment_numbers(self._stream):
            return ""
        log, follow = self.log_state(), self.config.follow
        if log.waiting:
            return ""
        if log.refused:
            name, why = next(iter(log.refused.items()))
            return f"no increment yet: {name} is refused: {why}"
        if log.held:
            return (
                f"no increment yet: too few rows for one in {format_count(len(log.held), 'file')}"
            )
        return (
            f"no closed partition matches follow.inputs = {follow.inputs!r}. A folder is closed by "
            f"a file {SUCCESS}, or by its age with follow.closed_after_s; else correct the pattern"
        )

    def first_unfinished(self) -> int | None:
        """Return the first increment that is neither promoted nor refused."""
        for number in list_increment_numbers(self._stream):
            verdict = self.verdict(number)
            if verdict is None or (
                verdict["verdict"] == "promote" and not self.promoted_version(number)
            ):
                return number
        return None

    def verdict(self, number: int) -> dict[str, Any] | None:
        """Return the verdict on an increment's candidate; None if there is none yet."""
        path, known_verdict = self.folder(number) / "verdict.json", self._verdicts.get(number)
        try:
            # A verdict does not change: else each step would read all of them.
            known_verdict = self._verdicts[number] = known_verdict or read_verdict(path)
            return known_verdict
        except (OSError, ValueError) as error:
            logged, is_missing = None, isinstance(error, FileNotFoundError)
            if not is_missing or path.with_name("trained.json").exists():
                versions, verdicts = self._read_log()
                logged = verdicts.get(self._files.fingerprints()[number])
            # One that was refused may have been removed by a person, to be judged again.
            if is_missing and (logged is None or logged.get("model") not in versions):
                return None
            if logged is None or path.is_dir():
                raise GMetaError(
                    f"{path} is damaged: {error}. Remove it, and the candidate is judged again"
                ) from error
            write_verdict(path, logged)
            _log.warning(f"{path} is restored from {self.channel.root / PROMOTIONS}: {error}")
            return logged

    def _is_outdated(self, number: int, current: CurrentVersion | None) -> bool:
        """Return whether a person promoted or rolled back since a candidate was judged."""
        verdict, serves = self.verdict(number) or {}, current.number if current else None
        if serves is not None and self.channel.model_of(serves) == verdict.get("model"):
            # The candidate serves by now: its promotion was killed after the change.
            return False
        # The candidate was compared with a champion that does not serve any more.
        return bool(verdict.get("champion_version", serves) != serves)

    def promoted_version(self, number: int) -> int | None:
        """Return the version of the channel that an increment's candidate became."""
        verdict = self.verdict(number)
        return self._read_log()[0].get((verdict or {}).get("model", ""))

    def continued_from(self, number: int) -> int | None:
        """Return the increment from whose run this one's goes on; None if there is none."""
        # No run goes on from an increment that was refused or rolled back: its version is not in
        # `served`.
        by_version = {
            self.promoted_version(earlier): earlier
            for earlier in list_increment_numbers(self._stream)
            if earlier < number
        }
        current, served = self.channel.current(), self.channel.history()
        if current is not None:
            # A rollback that was killed after it is not in the log yet.
            served = [*(one for one in served if one < current.number), current.number]
        # The newest whose model serves or, if a model of no increment does, served before it.
        return next((by_version[one] for one in reversed(served) if one in by_version), None)

    def refused_before(self, number: int) -> list[int]:
        """Return the increments before this one that were refused since the last promotion."""
        refused: list[int] = []
        for earlier in list_increment_numbers(self._stream):
            if earlier >= number:
                break
            # A promotion starts the count anew.
            refused = [] if self.promoted_version(earlier) is not None else [*refused, earlier]
        return refused

    def frozen_version(self) -> tuple[int, Version] | None:
        """Return the first promoted increment and its version; None if that is gone, or a delta."""
        for number in list_increment_numbers(self._stream):
            version_number = self.promoted_version(number)
            if version_number is not None:
                is_there = self.channel.folder_of(version_number).is_dir()
                version = self.channel.version(version_number) if is_there else None
                return (number, version) if version and version.delta is None else None
        return None

    def _next_unscored(self) -> tuple[int, Version] | None:
        if self.config.follow.frozen and (frozen := self.frozen_version()):
            for number in list_increment_numbers(self._stream):
                if number > frozen[0] and not (self.folder(number) / FROZEN_FILE).exists():
                    return number, frozen[1]
        return None

    def _fetch(self) -> StageOutcome | None:
        follow, kafka = self.config.follow, self.config.kafka
        arguments = ["fetch", kafka.servers, kafka.topic, follow.inputs, "--stream", self._stream]
        arguments += ["--properties", kafka.properties] if kafka.properties else []
        log = self._runs / "logs" / "fetch.log"
        _, took_s = self._run(0, arguments, f"topic {kafka.topic}", log)
        self._fetched_s = time.monotonic()
        summary = self._last_line(log)
        return None if summary == NOTHING_NEW else StageOutcome("fetch", 0, took_s, summary)

    def _prepare(self, partition: LogPartition, held: Sequence[str]) -> StageOutcome:
        arguments = ["prepare", "--extend", self._stream, *partition.files]
        # The late files of a partition are judged by themselves: with more of their kind they would
        # pass for new.
        along = [] if partition.is_begun else [one for one in held if one not in partition.files]
        arguments += [one for name in along for one in ("--along", name)]
        # Columns that join, and policies, are taken from it; other changes are refused.
        arguments += ["--schema", self.config.follow.schema]
        schema = load_schema(self.config.follow.schema)
        # Rows with labels that a loss does not take would fail every training.
        train = load_config(self.config.follow.train, ["data.path=-", "run.dir=-"])
        for name in schema.label_columns:
            if (loss := train.loss_of(name)) in RANGES:
                least, most = RANGES[loss]
                arguments += ["--label-range", f"{name}={least:g}:{most:g}"]
        arguments += ["--strict"] if self._is_strict else []
        # The increment, whose folder has the logs of its other stages, does not exist yet.
        log = self._runs / "logs" / f"prepare-{Path(partition.name).name}.log"
        code, took_s = self._run(0, arguments, partition.name, log, (0, SET_ASIDE))
        if code == SET_ASIDE:
            why = self._last_line(log).removeprefix("error: ")
            return StageOutcome("prepare", 0, took_s, f"{partition.name}: {why}")
        newest = open_stream(self._stream).newest
        summary = f"{partition.name}: {newest.num_rows:,} training rows"
        if quarantined := newest.report["account"]["quarantined"]:
            summary += f", {format_count(quarantined, 'row')} quarantined"
        return StageOutcome("prepare", newest.number, took_s, summary)

    def _train(self, number: int) -> StageOutcome:
        follow, root = self.config.follow, self.folder(number)
        place = [f'data.path="{self._stream}"', f'data.increment="{number}"']
        arguments = ["train", follow.train, *place, f'run.dir="{root / "run"}"']
        begun = RunFolder(root / "run")
        if (begun.root / RUN_CONFIG_FILE).exists():
            # A run goes on as it began, whatever was promoted or rolled back meanwhile.
            run = begun.read_config().run
            before, skipped = run.continue_from, list(run.skip_increments)
        else:
            last = self.continued_from(number)
            before = "" if last is None else str(self.folder(last) / "run")
            skipped = [] if last is None else list(range(last + 1, number))
        arguments += [f'run.continue_from="{before}"'] if before else []
        arguments += [f"run.skip_increments={skipped}"] if skipped else []
        # A stage that was killed goes on from its newest checkpoint, or begins again without one.
        arguments += ["--resume"] if begun.root.exists() else []
        if follow.nproc_per_node > 1:
            arguments += ["--nproc-per-node", str(follow.nproc_per_node)]
        _, took_s = self._run(number, arguments)
        # Written last, as it marks the stage as done.
        write_json(root / "trained.json", {"increment": number, "at_s": time.time()})
        suffix = f", without increment {', '.join(map(str, skipped))}" if skipped else ""
        return StageOutcome("train", number, took_s, f"{root / 'run'}{suffix}")

    def _export(self, number: int) -> StageOutcome:
        root = self.folder(number)
        tables = self.config.export.tables
        arguments = ["export", str(root / "run"), str(root / "model"), "--tables", tables]
        allowed = (0, NotFiniteError.exit_code)
        code, took_s = self._run(number, [*arguments, "--overwrite"], allowed=allowed)
        if code:
            # Weights that are not finite cannot be exported: the judge refuses the run, and says
            # why.
            return self._judge(number, root / "run")
        return StageOutcome("export", number, took_s, f"{tables} tables")

    def _judge(self, number: int, candidate: Path) -> StageOutcome:
        out = self.folder(number) / "verdict.json"
        took_s = self._judge_against(number, candidate, str(self.channel.root), out)
        # This candidate may have been judged before, against another champion.
        self._verdicts.pop(number, None)
        verdict = self.verdict(number) or {}
        return StageOutcome("judge", number, took_s, _format_verdict(verdict))

    def _judge_against(
        self, number: int, candidate: Path, champion: str, out: Path, log: Path | None = None
    ) -> float:
        """Write the verdict of an increment on a candidate; return the seconds that took."""
        judge, dataset = self.config.judge, f"{self._stream}:{number}"
        arguments = ["judge", str(candidate), "--champion", champion]
        arguments += ["--on", dataset, "--split", judge.split, "--pool", str(judge.pool)]
        arguments += ["--margin", str(judge.margin)] if judge.margin else []
        arguments += ["--calibration", ":".join(map(str, judge.calibration))]
        arguments += ["--out", str(out)]
        return self._run(number, arguments, log=log, allowed=(0, SET_ASIDE))[1]

    def _promote(self, number: int) -> StageOutcome:
        root = self.folder(number)
        arguments = ["promote", str(root / "model"), str(self.channel.root)]
        _, took_s = self._run(number, [*arguments, "--verdict", str(root / "verdict.json")])
        version = self.channel.version(self.channel.require_current().number)
        if self.promoted_version(number) is None:  # it would be promoted again and again
            log = self.channel.root / PROMOTIONS
            raise GMetaError(
                f"{log} does not name {root / 'model'}: it was edited. Put back a copy"
            )
        summary = f"version {version.name}, {version.kind}{self._remove_old()}"
        return StageOutcome("promote", number, took_s, summary)

    def has_taken_over(self) -> bool:
        """Return whether the channel of `follow.takes_over` serves a model of this loop."""
        if not self.config.follow.takes_over:
            return False
        live = Channel(self.config.follow.takes_over)
        serves = live.current()
        return serves is not None and live.model_of(serves.number) in self._read_log()[0]

    def _challenge(self) -> StageOutcome | None:
        """Compare the newest model with what the channel of `follow.takes_over` serves, or promote
        it there once it is better; None if neither is due."""
        url = self.config.follow.takes_over
        if not url:
            return None
        live, numbers = Channel(url), list_increment_numbers(self._stream)
        current = live.current()
        number = next((n for n in reversed(numbers) if self.promoted_version(n) is not None), None)
        if current is None or number is None:
            return None
        serves, verdict = live.model_of(current.number), self.challenge(number)
        if serves == (self.verdict(number) or {}).get("model"):
            return None
        root = self.folder(number)
        model, path, log = root / "model", root / CHALLENGE_FILE, root / "challenge.log"
        if verdict.get("champion_version") != current.number:
            took_s = self._judge_against(number, model, url, path, log)
            summary = _format_verdict(self.challenge(number))
            return StageOutcome("challenge", number, took_s, summary)
        low = (verdict.get("difference") or {}).get("low")
        # Of another shape it must be better; its own next versions need only be no worse.
        is_better = serves in self._read_log()[0] or (low is not None and low > 0)
        if verdict.get("verdict") != "promote" or not is_better:
            return None
        arguments = ["promote", str(model), url, "--verdict", str(path)]
        _, took_s = self._run(number, arguments, log=log)
        return StageOutcome("challenge", number, took_s, f"takes over {url}")

    def challenge(self, number: int) -> dict[str, Any]:
        """Return the verdict on an increment's model against the channel that it is to take over;
        {} if there is none."""
        with suppress(OSError, ValueError):  # a damaged one is made again
            return read_verdict(self.folder(number) / CHALLENGE_FILE)
        return {}

    def _publish(self, current: CurrentVersion) -> StageOutcome:
        mirror, name = self.config.follow.mirror, current.parent.name
        log = self._runs / "logs" / "publish.log"
        arguments = ["publish", str(self.channel.root), mirror]
        try:
            _, took_s = self._run(0, arguments, f"version {name}", log)
        except GMetaError as error:
            self.unpublished, self._is_put_off = str(error), True
            raise
        # By its time, not its number: a rollback serves an older version again.
        self._published, self.unpublished = current.at, ""
        return StageOutcome("publish", 0, took_s, f"version {name} is at {mirror}")

    def _remove_old(self) -> str:
        """Remove versions and checkpoints that are not needed, and return what to say of it."""
        keep = self.config.follow.keep
        if not keep:
            return ""
        try:
            gone = prune(self.channel, keep)
            # Each version that is left may be rolled back to, and its run gone on from.
            versions = set(self.channel.numbers())
            numbers = list_increment_numbers(self._stream)
            stay = [one for one in numbers if self.promoted_version(one) in versions]
            for number in numbers:
                if number < max(stay, default=0) and number not in stay:
                    for name in ("run/checkpoints", "model"):
                        shutil.rmtree(self.folder(number) / name, ignore_errors=True)
        except (GMetaError, MetaIOError, OSError) as error:
            # The next promotion tries again.
            return f"; old versions stay: {error}"
        return f"; removed {format_count(len(gone), 'version')}" if gone else ""

    def _read_log(self) -> _KnownModels:
        """Return the version that each model became, and the last verdict by what it was on."""
        path = self.channel.root / PROMOTIONS
        # A person may promote at any time; the log is read only when it has changed.
        stamp = (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None
        if stamp != self._logged[0]:
            versions: dict[str, int] = {}
            verdicts: dict[str, dict[str, Any]] = {}
            for entry in self.channel.promotions():
                verdict = entry.get("verdict") or {}
                dataset = str(verdict.get("dataset"))
                # A challenger's refusal says nothing of the model that was promoted.
                if entry["action"] == PROMOTED or verdicts.get(dataset, {}).get("model") not in (
                    versions
                ):
                    verdicts[dataset] = verdict
                if entry["action"] == PROMOTED:
                    # Without a verdict (a person promoted) the entry itself has the model.
                    versions[str(verdict.get("model") or entry.get("model"))] = int(entry["number"])
            self._logged = stamp, (versions, verdicts)
        return self._logged[1]

    def _score(self, number: int, version: Version) -> StageOutcome:
        arguments = ["score", str(version.folder), "--on", f"{self._stream}:{number}"]
        arguments += ["--out", str(self.folder(number) / FROZEN_FILE)]
        _, took_s = self._run(number, arguments)
        return StageOutcome("score", number, took_s, f"version {version.name}, the frozen one")

    def _run(
        self,
        number: int,
        arguments: list[str],
        what: str = "",
        log: Path | None = None,
        allowed: tuple[int, ...] = (0,),
    ) -> tuple[int, float]:
        """Run a stage on `what` (default: increment `number`); return exit code and seconds."""
        stage = arguments[0]
        log = log or self.folder(number) / f"{stage}.log"
        began_s = time.monotonic()
        self.under_way = RunningStage(stage, number, began_s)
        try:
            code = self._run_stage(arguments, log)
        finally:
            self.under_way = None
        if code not in allowed:
            self.failed_stage = stage
            # The exit code says whether the user can correct it.
            kind = UserError if code == UserError.exit_code else GMetaError
            why = self._last_line(log).removeprefix("error: ")
            # A signal.
            if code < 0:
                # A killed process leaves no reason: the last line of its log may be of an earlier
                # try.
                why = signal.Signals(-code).name
                why += ", as where memory runs out" if code == -signal.SIGKILL else ""
            what = what or f"increment {number}"
            raise kind(f"{stage} of {what} ended with {code}: {why} (see {log})")
        return code, time.monotonic() - began_s

    def _too_many_refused(self, refused: list[int]) -> GMetaError:
        last = refused[-1]
        reasons = "; ".join((self.verdict(last) or {}).get("reasons", []))
        root, channel = self.folder(last), self.channel.root
        serves = (
            "The version before them serves on" if self.channel.current() else "None serves yet"
        )
        return GMetaError(
            f"increments {', '.join(map(str, refused))} are set aside: {len(refused)} candidates "
            f"were refused in a row, the last because {reasons}. {serves}. Raise "
            f"judge.max_refused, or promote by hand: gmeta channel promote {root / 'model'} "
            f"{channel} --verdict {root / 'verdict.json'} --force"
        )

    def folder(self, number: int) -> Path:
        """Return the folder with the outcome of an increment."""
        return self._runs / name_increment_folder(number)


def _format_verdict(verdict: dict[str, Any]) -> str:
    if verdict.get("verdict") != "promote":
        return f"refused: {'; '.join(verdict.get('reasons', []))}"
    scores = verdict["candidate"]
    scores_text = ", ".join(
        f"{name} {value:.4f}" for name, value in scores.items() if value is not None
    )
    text = f"promote: {scores_text}, over {verdict['num_tasks']:,} tasks"
    waiting = verdict.get("num_waiting", 0)
    return text + (f"; {format_count(waiting, 'row')} wait for a label" if waiting else "")
