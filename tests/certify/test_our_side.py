"""What needs no engine, against codecs and chats of ours that would be wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from actors.chat import Chat
from actors.codec import ByteLevelCodec, ModelFiles, decode
from actors.history import History
from actors.observations import ENDLESS
from actors.raw import RawChat
from actors.toolcalls import FORMATS
from common.types import ids_array
from tests.certify.conftest import TINY
from tools.certifying import dialogues, sampling, spellings, texts
from tools.certifying.engine import Ask, Sample

TEMPLATE = json.loads((TINY / "tokenizer_config.json").read_text())["chat_template"]


class Trusting(ByteLevelCodec):
    """Recognises control tokens in anybody's text."""

    def encode_text(self, text: str) -> list[int]:
        return self.encode_template(text)


class Forgetful(ByteLevelCodec):
    """Loses control strings out of texts: filtering instead of encoding."""

    def encode_text(self, text: str) -> list[int]:
        for name in self.control:
            text = text.replace(name, "")
        return super().encode_text(text)


class WordByWord(ByteLevelCodec):
    """Decodes each token alone."""

    def _pieces(self) -> list[bytes]:
        return [piece.decode("utf-8", "replace").encode() for piece in super()._pieces()]


class NoNewline(Chat):
    """Leaves out what the template writes behind an end token."""

    def bridge(self, ended, messages, room=ENDLESS):
        context = super().bridge(ended, messages, room)
        return type(context)(context.ids[1:], context.spans)


class Reencoding(History):
    """Keeps a dialogue as text: what was sampled is encoded again for the next prompt."""

    def stored(self, prompt, ids, index):
        super().stored(prompt, ids, index)
        self.ids = ids_array(self._chat.codec.encode_template(decode(self._chat.codec, self.ids.tolist())))


class EndsAgain(History):
    """Loses the id that ended a turn and lets the bridge write it: the same ids, but not what was sampled."""

    def turn(self, ids, spans, messages):
        super().turn(ids, spans, messages)
        if self._chat.ended(ids):
            self._turns[-1] = replace(self._turns[-1], ended=False)
            self.ids = self.ids[:-1]


class LosesTheEnd(History):
    """Shows a sampled turn without its last id."""

    def stored(self, prompt, ids, index):
        super().stored(prompt, ids, index)
        self.ids = self.ids[:-1]


class SaysAnotherParent(History):
    """The right prompts, recorded as if they had nothing in common with what was there."""

    def show(self, view):
        return replace(super().show(view), prefix_len=0)


class SaysTooMuch(History):
    """Records more of its parent than there is."""

    def show(self, view):
        prompt = super().show(view)
        return replace(prompt, prefix_len=prompt.prefix_len + 1)


def files(kind=ByteLevelCodec) -> ModelFiles:
    return ModelFiles(kind(TINY / "tokenizer.json"), TEMPLATE, "<|im_end|>", 1024)


def failed(rows) -> dict[str, str]:
    return {row.check: row.reason for row in rows if row.verdict == "FAIL"}


def test_ours_is_right() -> None:
    chat = Chat(files())
    rows = [*dialogues.scripted(chat, files(), {}), *texts.injection(chat), texts.parser(chat), *texts.utf8(chat)]
    assert failed(rows) == {}
    assert len(rows) == 16


def test_control_strings_that_become_control_tokens() -> None:
    chat = Chat(files(Trusting))
    found = failed([*texts.injection(chat), texts.parser(chat)])
    assert len(found) == 8
    assert "became control ids" in found["injection: tool's answer"]
    assert "spelled by ordinary tokens made a call" in found["injection: parser"]


def test_control_strings_that_are_lost() -> None:
    found = failed(texts.injection(Chat(files(Forgetful))))
    assert len(found) == 7
    assert "reads as" in found["injection: user"]


def test_characters_that_are_decoded_in_pieces() -> None:
    rows = list(texts.utf8(Chat(files(WordByWord))))
    assert "'é' reads as '\ufffd\ufffd\ufffd'" in failed(rows)["utf8: streams"]
    assert not any(row.holds for row in rows)


def test_a_bridge_that_is_not_the_templates() -> None:
    found = failed(dialogues.scripted(NoNewline(files()), files(), {}))
    assert len(found) == 5
    assert "at character 119" in found["prefix: user turns"]


PREFIX, RECORD = "prompt 2 does not begin with prompt 1 and its sample", "the record gives back another prompt 2"


@pytest.mark.parametrize(
    ("history", "words"),
    [
        (LosesTheEnd, PREFIX),
        (EndsAgain, "segments: prompts do not grow"),
        (SaysAnotherParent, RECORD),
        (SaysTooMuch, "the record breaks a rule"),
    ],
)
def test_a_history_that_does_not_keep_what_was_there(history, words) -> None:
    found = failed(dialogues.scripted(Chat(files()), files(), {}, history))
    assert len(found) >= 4
    assert all(words in reason for check, reason in found.items() if "cut" not in check), found
    raw = RawChat(files(), "$instructions\nQ: $task\nA:", "\n$observation\n", FORMATS["react"]())
    assert failed(dialogues.scripted(raw, files(), {})) == {}
    assert len(failed(dialogues.scripted(raw, files(), {}, history))) >= 4


def test_a_history_that_encodes_samples_again() -> None:
    """Shows with unusual spellings alone: a script's turns are the tokenizer's own."""
    chat = Chat(files())
    found = spellings.spellings(chat.codec)[: spellings.COUNT]
    assert spellings.played(chat, found).problems() == []
    assert PREFIX in spellings.played(chat, found, Reencoding).problems()


def test_spellings_are_other_ids_of_the_same_text() -> None:
    codec = ByteLevelCodec(TINY / "tokenizer.json")
    found = spellings.spellings(codec)
    assert len(found) >= spellings.COUNT
    for each in found:
        assert codec.encode_text(each.text) == each.usual != each.other


@pytest.mark.parametrize(
    ("ids", "finish", "words"),
    [
        ([5, 9], {"type": "stop", "matched": 9}, ""),
        ([5, 6, 7], {"type": "length", "length": 3}, ""),
        ([5, 6, 9], {"type": "length", "length": 3}, ""),  # both at once: length is looked at first
        ([5], {"type": "stop", "matched": 9}, "the id that ends the turn is missing"),
        ([5, 9], {"type": "stop", "matched": None}, "says matched None"),
        ([9, 5, 6], {"type": "length", "length": 3}, "went on behind the stop id 9"),
        ([5, 6], {"type": "length", "length": 3}, "finish length after 2 of 3"),
        ([5], {"type": "abort"}, "finish is 'abort'"),
    ],
)
def test_ends(ids, finish, words) -> None:
    sample = Sample(Ask([1], 3, stops=(9,)), ids, [-1.0] * len(ids), ids, finish, {})
    problems = sampling.end_problems(sample, Chat(files()))
    assert words in " ".join(problems)
    assert bool(problems) == bool(words)
