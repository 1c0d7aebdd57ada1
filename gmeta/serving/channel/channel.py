"""A channel, one model's versions in a folder: versions/00000013/ is a full export or a delta and
never changes, current.json names the one that is served, promotions.jsonl says what happened."""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gmeta.errors import GMetaError, UserError
from gmeta.platform.files.atomic_write import write_atomically
from gmeta.platform.files.local_paths import link_or_copy
from gmeta.serving.channel.decision_files import (
    PROMOTED,
    PROMOTIONS,
    REFUSED,
    ROLLED_BACK,
    PromotionLog,
    extend_log,
    parse_log,
)
from gmeta.serving.channel.model_version import (
    ParentVersion,
    Version,
    VersionChain,
    check_version,
    copy_version,
    description_of,
    model_checksum,
    model_config,
    parse_checked,
    read_version,
)
from gmeta.serving.exported_folder import ExportedConfig, new_folder
from metaio.format.atomic_folder import lock_writer
from metaio.format.checked_json import write_checked_json
from metaio.prepare.schema.schema_changes import may_become

CURRENT_FILE = "current.json"
CURRENT_FORMAT = "gmeta-channel"
VERSIONS = "versions"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CurrentVersion:
    """What current.json says: the version that is served, since when, and by what verdict."""

    number: int
    checksum: str
    action: str
    at: str
    verdict: Mapping[str, Any] | None
    # The seal of the log's line before it: a log without that line was cut short.
    before: str = ""

    @property
    def parent(self) -> ParentVersion:
        """Return the version as the parent of the next one."""
        return ParentVersion(self.number, self.checksum)

    @property
    def since_s(self) -> float:
        """Return when it was promoted, in seconds since 1970."""
        return datetime.fromisoformat(self.at).timestamp()


def parse_current(content: bytes, name: str, channel: str) -> CurrentVersion:
    """Return what current.json says; `name` and `channel` are for messages."""
    remedy = f"Run: gmeta channel rollback {channel} --to N"
    body = parse_checked(content, name, CURRENT_FORMAT, remedy)
    try:
        at, action, verdict = str(body["at"]), str(body["action"]), body["verdict"]
        number, checksum = int(body["number"]), str(body["checksum_of"])
        before = str(body.get("before", ""))  # an earlier release wrote none
        current = CurrentVersion(number, checksum, action, at, verdict, before)
        datetime.fromisoformat(at)
    except (LookupError, TypeError, ValueError) as error:
        raise GMetaError(f"{name} names no version ({error!r:.100}). {remedy}") from error
    return current


def is_channel(path: Path) -> bool:
    """Return whether a folder is a channel, be it one whose current.json is damaged."""
    return (path / CURRENT_FILE).is_file() or (path / VERSIONS).is_dir()


class Channel:
    """A channel on this machine, or in a folder that all machines mount."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def current(self) -> CurrentVersion | None:
        """Return what is served; None where nothing was promoted yet."""
        path = self.root / CURRENT_FILE
        try:
            return parse_current(path.read_bytes(), str(path), str(self.root))
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise UserError(
                f"{self.root} is a file: the folder of a channel is needed. Choose another"
            ) from error

    def require_current(self) -> CurrentVersion:
        """Return what is served. Raise UserError where there is nothing."""
        if (current := self.current()) is not None:
            return current
        raise UserError(
            f"{self.root} is a channel without a version, or none at all. "
            f"Run: gmeta channel promote RUN {self.root}"
        )

    def numbers(self) -> list[int]:
        """Return the numbers of all versions, promoted or not, ascending."""
        folder = self.root / VERSIONS
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        # Partial and half-removed folders have names of other kinds.
        return sorted(int(name) for name in names if name.isdecimal())

    def version(self, number: int) -> Version:
        """Return a version."""
        folder = self.folder_of(number)
        lacking = folder if not folder.is_dir() else folder / description_of(folder)
        if not lacking.exists():
            raise GMetaError(
                f"version {number} of {self.root} is missing: there is no {lacking}. "
                "Bring it back from a copy, or promote a full export"
            )
        return read_version(folder, number)

    def folder_of(self, number: int) -> Path:
        """Return the folder of a version."""
        return self.root / VERSIONS / f"{number:08d}"

    def chain(self, number: int) -> VersionChain:
        """Return a version with all that it builds on."""
        version = self.version(number)
        deltas: list[Version] = []
        while version.delta is not None:
            deltas.insert(0, version)
            parent = version.delta.parent
            # Without this check two deltas over each other would be followed for ever.
            if parent.number >= version.number:
                raise GMetaError(
                    f"version {version.name} of {self.root} is a delta over version "
                    f"{parent.number}, which comes after it: they are out of order. Promote a full "
                    "export"
                )
            below = self.version(parent.number)
            # A number alone is no proof: the folder may have been replaced by hand.
            if below.checksum != parent.checksum:
                raise GMetaError(
                    f"version {version.name} of {self.root} is a delta over {parent.name}, but "
                    f"{below.name} stands there. Promote a full export"
                )
            version = below
        return VersionChain(version, tuple(deltas))

    def check_chain(self, number: int) -> VersionChain:
        """Return a version with all that it builds on; every file is read and compared."""
        chain = self.chain(number)
        for version in (chain.base, *chain.deltas):
            check_version(version)
        return chain

    def promotions(self) -> list[dict[str, Any]]:
        """Return every verdict and every move of current.json, oldest first. Raise GMetaError for a
        log that was edited or cut short."""
        if damage := (log := self._read_log()).damage:
            raise GMetaError(
                f"{self.root / PROMOTIONS}: {damage}. Put the file back from a copy, or run: "
                f"gmeta channel rollback {self.root} --to N, which keeps what is sound of it"
            )
        return log.entries

    def _read_log(self) -> PromotionLog:
        current = None
        # Before the log, which only grows; one that is damaged is told by who needs it.
        with suppress(GMetaError):
            current = self.current()
        log = parse_log(self._log_content())
        if current is not None and current.before and current.before not in log.seals:
            log.damage = log.damage or "lines are missing that came before what serves"
        return log

    def _log_content(self) -> bytes:
        path = self.root / PROMOTIONS
        return path.read_bytes() if path.exists() else b""

    def _repair_log(self, current: CurrentVersion | None) -> list[dict[str, Any]]:
        """Return what the log holds. Of a damaged one the sound lines are kept, versions that none
        of them names are entered, and that is told."""
        log, path = self._read_log(), self.root / PROMOTIONS
        if not log.damage:
            return log.entries
        promoted = [entry["number"] for entry in log.entries if entry["action"] == PROMOTED]
        # What serves has its line in current.json.
        promoted += [current.number] if current and current.action == PROMOTED else []
        entered = []
        for number in sorted({*self.numbers()}.difference(promoted)):
            with suppress(GMetaError):  # one that cannot be read cannot serve either
                checksum, model = self.version(number).checksum, self.model_of(number)
                own = asdict(CurrentVersion(number, checksum, PROMOTED, _now(), None))
                entered.append({**own, "model": model})
        # First: what came of them is unknown, so that no rollback goes to one unless it is named.
        entries = [*entered, *log.entries]
        # Copied, not moved: killed before the next line, the sound lines are kept again.
        if path.exists():
            write_atomically(path.with_name(f"{PROMOTIONS}.damaged"), self._log_content())
        write_atomically(path, extend_log(b"", entries))
        _log.warning(
            f"{path} is made anew, as {log.damage}. Entered by their folders: versions "
            f"{[one['number'] for one in entered]}; a rollback among lost lines is forgotten. What "
            f"it was is {PROMOTIONS}.damaged"
        )
        return entries

    def promote(
        self,
        candidate: Path,
        verdict: Mapping[str, Any] | None = None,
        *,
        is_own: bool = False,
        named_in_messages: Path | None = None,
    ) -> CurrentVersion:
        """Serve the model in a folder that `gmeta export` wrote; return the new current version.

        The folder is copied, or linked with `is_own`: nobody else has it and its files never
        change. Raises UserError for a delta over another version than is served, and for a model
        that takes other requests than the one that serves."""
        offered = read_version(candidate)
        with self.lock_for_change() as current:
            if current is not None and self.serves_model_of(offered):
                # Promoted again, as after a lost answer: only a new verdict is kept.
                if verdict is None or verdict == current.verdict:
                    return current
                return self._set_current(self.version(current.number), PROMOTED, verdict)
            number = self.number_for(offered, current, named_in_messages or candidate)
            if offered.delta is not None:
                # The cache of this machine may hold what no other reader could make.
                self.check_chain(offered.delta.parent.number)
            if (before := self._known_config(current)) is not None:
                _check_requests(before, model_config(offered), self.root)
            # Last of the checks, as it reads every byte.
            check_version(offered)
            # What a promotion left that was killed before it moved current.json is not trusted.
            with new_folder(self.folder_of(number), overwrite=True) as partial:
                copy_version(offered, partial, link_or_copy if is_own else shutil.copyfile)
            return self._set_current(self.version(number), PROMOTED, verdict)

    def serves_model_of(self, offered: Version) -> bool:
        """Return whether the channel serves the model of this version now, whenever exported, by a
        chain that is whole."""
        current = self.current()
        if current is None:
            return False
        try:
            configs = [model_config(version) for version in (self.version(current.number), offered)]
            first, second = (
                replace(one, source={**one.source, "exported_at": None}) for one in configs
            )
            if first == second:
                self.check_chain(current.number)
        except GMetaError:
            return False
        return first == second

    def rollback(self, to: int | None = None) -> CurrentVersion:
        """Serve an earlier version again, or version `to`; return what current.json then says."""
        # A damaged current.json is what `to` repairs.
        with self.lock_for_change(must_be_readable=to is None) as current:
            numbers = self.numbers()
            if to is None:
                to = self.version_before(current)
                if to is None:
                    current_name = "the first" if current is None else current.number
                    raise UserError(
                        f"{self.root} has no version before {current_name}: there is nothing to "
                        "roll back to. Promote another model"
                    )
            elif to not in numbers:
                raise UserError(
                    f"{self.root} has no version {to}: it has "
                    f"{', '.join(map(str, numbers)) or 'none'}. Choose one of them"
                )
            return self._set_current(self.check_chain(to).newest, ROLLED_BACK, None)

    def version_before(self, current: CurrentVersion | None) -> int | None:
        """Return the version to which a rollback goes; None where there is none."""
        # A version that was rolled back from does not count: it was found to be bad.
        last, kept = current.number if current is not None else 0, set(self.numbers())
        return next((one for one in reversed(self.history()) if one in kept and one < last), None)

    def history(self) -> list[int]:
        """Return the versions that served, ascending, without those that were rolled back from."""
        numbers: list[int] = []
        for number in (entry.get("number") for entry in self.promotions()):
            if isinstance(number, int):  # a refusal has none
                # A smaller number is a rollback: what came after it had been given up.
                while numbers and numbers[-1] >= number:
                    numbers.pop()
                numbers.append(number)
        return numbers

    def record(self, verdict: Mapping[str, Any]) -> None:
        """Keep a verdict that refuses a candidate."""
        with self.lock_for_change():
            self._log({"action": REFUSED, "at": _now(), "number": None, "verdict": dict(verdict)})

    @contextmanager
    def lock_for_change(self, must_be_readable: bool = True) -> Iterator[CurrentVersion | None]:
        """Keep other processes out and yield what is served; None where current.json is damaged."""
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / VERSIONS).mkdir(exist_ok=True)
        with lock_writer(self.root / ".lock", str(self.root), remedy="Wait for it"):
            try:
                current = self.current()
            except GMetaError:
                if must_be_readable:
                    raise
                current = None
            # A promotion that was killed after it wrote current.json is not in the log yet.
            entries = self.promotions() if must_be_readable else self._repair_log(current)
            if current is not None and current.at not in [entry["at"] for entry in entries]:
                self._log(asdict(current))
            yield current

    def number_for(
        self, offered: Version, current: CurrentVersion | None, named_in_messages: Path
    ) -> int:
        """Return the number that a candidate gets. Raise UserError for one that does not follow."""
        numbers = self.numbers()
        logged = (entry.get("number") for entry in self.promotions())
        logged_numbers = {number for number in logged if isinstance(number, int)}
        offered_checksum = model_checksum(offered.folder)
        for number in numbers:
            if self.model_of(number) == offered_checksum:
                # A promotion that was killed before it wrote current.json goes on where it was.
                if number == numbers[-1] and number not in logged_numbers:
                    return number
                # What serves comes here only if it is damaged: then it is promoted whole.
                if current is not None and number == current.number and offered.delta is None:
                    continue
                raise UserError(
                    f"{named_in_messages} is version {number} of {self.root} already, and a "
                    "version is promoted once. To serve it again: "
                    f"gmeta channel rollback {self.root} --to {number}"
                )
        if offered.delta is not None:
            parent = offered.delta.parent
            if current is None:
                raise UserError(
                    f"{named_in_messages} is a delta over version {parent.name}, but {self.root} "
                    "serves none yet. Promote a full export first"
                )
            if parent != current.parent:
                known = self.version(parent.number).checksum if parent.number in numbers else ""
                is_late = known == parent.checksum
                why = "it is out of order" if is_late else f"{self.root} never had that version"
                raise UserError(
                    f"{named_in_messages} is a delta over version {parent.name}, but {self.root} "
                    f"serves {current.parent.name}: {why}. Export it again with --since"
                )
        # A version that was lost leaves its number: copies of the channel may have it.
        return max((*numbers, *logged_numbers), default=0) + 1

    def model_of(self, number: int) -> str:
        """Return the checksum of the model that a version leads to; "" of one that is missing."""
        try:
            return model_checksum(self.folder_of(number))
        except FileNotFoundError:
            return ""

    def _known_config(self, current: CurrentVersion | None) -> ExportedConfig | None:
        """Return the config of the model that is served, or of the newest that can be read."""
        if current is None:
            return None
        # Any of them will do: all models of a channel take the same requests.
        for number in (current.number, *reversed(self.numbers())):
            with suppress(GMetaError):
                return model_config(self.version(number))
        return None

    def _set_current(
        self, version: Version, action: str, verdict: Mapping[str, Any] | None
    ) -> CurrentVersion:
        # By now the version's files are on the disk: current.json never names what is not.
        kept = None if verdict is None else dict(verdict)
        before = self._read_log().last
        current = CurrentVersion(version.number, version.checksum, action, _now(), kept, before)
        body = {"number": version.number, "checksum_of": version.checksum, "action": action}
        body |= {"at": current.at, "verdict": kept, "before": before}
        write_checked_json(self.root / CURRENT_FILE, CURRENT_FORMAT, body)
        self._log(asdict(current))
        return current

    def _log(self, entry: Mapping[str, Any]) -> None:
        # With the model's checksum, which a delta's own is not: a reader may come after the version
        # is gone.
        model = {} if entry["number"] is None else {"model": self.model_of(entry["number"])}
        # Written anew as one file: a process killed while it appends would leave half a line.
        content = extend_log(self._log_content(), [{**entry, **model}])
        write_atomically(self.root / PROMOTIONS, content)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _check_requests(before: ExportedConfig, after: ExportedConfig, root: Path) -> None:
    """Raise UserError for a model to which requests of the one served would mean something else."""
    old, new = before.columns, after.columns
    names = [[feature.name for feature in one.features.sparse] for one in (before, after)]
    changed = {
        "another loss": before.losses != after.losses,
        "another task or label column": (old.task, old.label) != (new.task, new.label),
        # Inputs may join: requests that lack one are refused by name, and mean what they meant.
        "another schema": not may_become(old.schema, new.schema),
        "other columns": old.schema is None
        and (names[0] != names[1] or before.features.dense != after.features.dense),
    }
    for what, is_changed in changed.items():
        if is_changed:
            raise UserError(
                f"the candidate has {what} than the model that {root} serves: requests of "
                "its callers would fail or mean something else. Promote it to a channel of its own"
            )
