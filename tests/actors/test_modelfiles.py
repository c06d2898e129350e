"""Which of a model folder's templates is its own, against what transformers loads and renders of the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.chat import Chat
from actors.codec import CodecError, ModelFiles, decode, load_model_files
from common.types import Message
from tests.actors.servers import TINY
from tests.actors.test_chat import write_model
from tests.actors.toy import CHATML, VOCABULARY, Toy

USUAL = CHATML.replace("'\\n' + m.content", "'\\nsaid: ' + m.content")
ALONE, MORE = "chat_template.jinja", "additional_chat_templates/"
DIALOGUE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


def folder_of(path: Path, entry: Any, files: dict[str, str]) -> Path:
    folder = write_model(path, 1030)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": entry, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def named(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": text} for name, text in templates.items()]


@pytest.mark.parametrize(
    ("entry", "files"),
    [
        (USUAL, {}),
        ("not this one", {ALONE: USUAL}),
        (None, {ALONE: USUAL}),
        (named(tool_use="not this one", default=USUAL), {}),
        ({"default": USUAL, "rag": "not this one"}, {}),
        (named(default="not this one"), {ALONE: USUAL}),
        ("not this one", {ALONE: USUAL, f"{MORE}rag.jinja": "nor this"}),
        ("not this one", {ALONE: "nor this", f"{MORE}default.jinja": USUAL}),
    ],
)
def test_the_template_is_the_one_that_transformers_takes(tmp_path: Path, entry: Any, files: dict[str, str]) -> None:
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path, entry, files)
    assert load_model_files(folder).template == AutoTokenizer.from_pretrained(folder).get_chat_template() == USUAL


@pytest.mark.parametrize(
    ("entry", "files", "words"),
    [
        (named(tool_use=USUAL, rag=USUAL), {}, r"tokenizer_config.json: no .* is called 'default' \(rag, tool_use\)"),
        (USUAL, {f"{MORE}rag.jinja": USUAL}, r"additional_chat_templates: no .* is called 'default' \(rag\)"),
        ([], {}, "no chat template is called 'default'"),
        ([USUAL], {}, "tokenizer_config.json: chat_template is a list, but not of tables"),
        ([{"name": "default"}], {}, "not of tables with a name and a template"),
        ([*named(default=USUAL), {"name": ["a"], "template": USUAL}], {}, "not of tables with a name and a template"),
        (5, {}, "tokenizer_config.json: chat_template is '5', no text"),
        ({"default": [USUAL]}, {}, "tokenizer_config.json: chat_template is .* no text"),
        (False, {}, "no text"),
    ],
)
def test_what_is_no_template_is_refused_in_words(tmp_path: Path, entry: Any, files: dict[str, str], words: str) -> None:
    with pytest.raises(CodecError, match=words):
        load_model_files(folder_of(tmp_path, entry, files))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, None, {})
    (folder / ALONE).write_bytes(b"\xff")
    with pytest.raises(CodecError, match=r"chat_template.jinja: not UTF-8"):
        load_model_files(folder)


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert load_model_files(folder_of(tmp_path, None, {})).template == ""


# Transformers' own tag; what is set inside stays inside.
MARKED = (
    "{%- set mark = '!' %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' %}\n  {%- generation %}{%- set mark = '?' %}{{- m.content + '<|im_end|>' }}"
    "{%- endgeneration %}\n  {{- mark + '\\n' }}{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LOOSE = CHATML.replace("{{ '<|im_start|>'", "{% generation %}\n{{ '<|im_start|>'").replace(
    "{% endfor", "\n  {% endgeneration %}\n{% endfor"
)


@pytest.mark.parametrize("template", [MARKED, LOOSE])
def test_the_body_of_a_generation_tag_is_shown(template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_file=str(TINY / "tokenizer.json"))
    theirs = reference.apply_chat_template(DIALOGUE, chat_template=template, tokenize=False, add_generation_prompt=True)
    toy = Toy()
    chat = Chat(ModelFiles(toy, template, "<|im_end|>", VOCABULARY.rows))
    ids = chat.opening("", "", [Message("user", "a")]).ids.tolist()
    ids += [*toy.encode_text("b"), chat.end_id, *chat.bridge(True, [Message("user", "c")]).ids.tolist()]
    assert decode(toy, ids) == theirs
    assert ("!" in theirs) == (template is not LOOSE)
