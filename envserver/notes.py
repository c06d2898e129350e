"""Notes that an agent writes for itself: the tools of one session, and the files that keep notes for later ones."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from common.files import replace_file
from envserver.toolenv import ToolError, clean

NAME_CHARACTERS = 64
LOCK_S = 10.0  # a writer holds a lock for one small file's time


class NotesError(RuntimeError):
    """Kept notes cannot be read or written: infrastructure, never the agent's fault."""


@dataclass(frozen=True)
class NoteLimits:
    notes: int  # at most so many
    characters: int  # of one note's text


class Notes:
    """The notes of one session. Its methods are the tools, and a mistake is what the agent reads."""

    def __init__(self, limits: NoteLimits, found: Mapping[str, str]) -> None:
        """`found` is what earlier sessions kept."""
        self.limits = limits
        self.texts = dict(found)  # by name, in the order of their last writing
        self.writes = self.reads = 0  # calls that changed a note; calls that read one, or the list
        self._found = frozenset(found)
        self._touched: set[str] = set()

    @property
    def written(self) -> dict[str, str]:
        """What this session leaves, in the order of its writing. What it only found is not its own."""
        return {name: text for name, text in self.texts.items() if name in self._touched}

    @property
    def deleted(self) -> frozenset[str]:
        """What it found and removed. A note that it wrote and removed again was never there for others."""
        return (self._found & self._touched) - self.texts.keys()

    def write_note(self, name: str, text: str) -> str:
        """Keep a text under a name. It replaces the note of that name."""
        name, text = name.strip(), clean(text)
        if not name.isprintable() or not 0 < len(name) <= NAME_CHARACTERS:
            raise ToolError(f"a note's name is one line of 1 to {NAME_CHARACTERS} characters")
        if not text.strip():
            raise ToolError("the text is empty; delete_note removes a note")
        if len(text) > self.limits.characters:
            raise ToolError(f"the text has {len(text)} characters, a note has at most {self.limits.characters}")
        if name not in self.texts and len(self.texts) >= self.limits.notes:
            raise ToolError(f"there are {len(self.texts)} notes, at most {self.limits.notes} are kept; replace or delete one")
        self._changed(name)
        self.texts[name] = text
        return "Saved."

    def read_note(self, name: str) -> str:
        """Read a note."""
        text = self.texts[self._known(name)]
        self.reads += 1
        return text

    def list_notes(self) -> str:
        """List the names of your notes."""
        self.reads += 1
        return "\n".join(self.texts) or "There are no notes."

    def delete_note(self, name: str) -> str:
        """Remove a note."""
        self._changed(self._known(name))
        return "Deleted."

    def _known(self, name: str) -> str:
        name = name.strip()
        if name not in self.texts:
            raise ToolError(f"there is no note of that name; notes: {', '.join(self.texts) or 'none'}")
        return name

    def _changed(self, name: str) -> None:
        self.texts.pop(name, None)  # so that what is written now stands last
        self._touched.add(name)
        self.writes += 1


NOTE_TOOLS = (Notes.write_note, Notes.read_note, Notes.list_notes, Notes.delete_note)


class _Note(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    text: str


class _Kept(BaseModel):
    """One file: the notes of one task, what was written longest ago first."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task: str
    notes: list[_Note]


class NoteFolder:
    """The kept notes of `tasks`, one file a task. Sessions of other tasks begin without notes and leave none.

    Any number of processes on one host may use one folder: files appear whole, so reading needs no lock, and whoever merges
    holds one of 256 lock files.
    """

    def __init__(self, folder: Path, limits: NoteLimits, tasks: Collection[str] = (), lock_s: float = LOCK_S) -> None:
        self.limits = limits
        self.tasks = frozenset(tasks)
        self._folder = folder
        self._lock_s = lock_s

    def open(self, task_id: str) -> Notes:
        """The notes of a session that begins now. Raises NotesError, OSError."""
        return Notes(self.limits, self._read(task_id) if task_id in self.tasks else {})

    def merge(self, task_id: str, notes: Notes) -> None:
        """Keep what a session changed: note by note, whoever ends last wins; of too many, the newest stay.

        What the session did not touch stays as others have left it since. Raises NotesError, OSError.
        """
        if task_id not in self.tasks or not (notes.written or notes.deleted):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked(task_id):
            kept = {name: text for name, text in self._read(task_id).items() if name not in notes.deleted | notes.written.keys()}
            newest = list((kept | notes.written).items())[-self.limits.notes :]
            content = {"task": task_id, "notes": [{"name": name, "text": text} for name, text in newest]}
            replace_file(self.path(task_id), json.dumps(content, ensure_ascii=False, indent=1).encode())

    def path(self, task_id: str) -> Path:
        """A task's id may be any text: the file's name shows what a name can hold of it, and the hash tells ids apart."""
        return self._folder / f"{re.sub('[^A-Za-z0-9._-]', '_', task_id)[:80]}-{_hash(task_id)}.json"

    def _read(self, task_id: str) -> dict[str, str]:
        path = self.path(task_id)
        try:
            kept = _Kept.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise NotesError(f"{path} does not hold notes: {where}: {first['msg']}; repair or remove it") from error
        texts = {note.name: note.text for note in kept.notes}
        if kept.task != task_id or len(texts) != len(kept.notes):
            raise NotesError(f"{path} does not hold notes of task {task_id!r}, each name once; repair or remove it")
        return texts

    @contextmanager
    def _locked(self, task_id: str) -> Iterator[None]:
        """The kernel gives the lock back when its holder dies."""
        path = self._folder / f".lock-{_hash(task_id)[:2]}"
        give_up = time.monotonic() + self._lock_s
        with open(path, "ab") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > give_up:
                        raise NotesError(f"{path} has been locked by another process for {self._lock_s:g} s") from error
                    time.sleep(0.005)
            yield


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
