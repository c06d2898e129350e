"""What a chat learns from templates of other families than the tiny one's. The templates are made for these tests."""

from __future__ import annotations

import json

import pytest

from actors.chat import Chat
from actors.codec import ByteLevelCodec, ModelFiles, decode, load_model_files
from actors.template import TemplateError
from actors.toolcalls import FORMATS
from common.types import ContextKind, Message, expand_spans
from tests.actors.servers import TINY, assignment, play
from tests.actors.test_chat import write_model
from tests.actors.toy import CHATML, VOCABULARY, Toy
from tests.fakes import FakeEngine

CODEC = ByteLevelCodec(TINY / "tokenizer.json")
QWEN = (TINY / "chat_template.jinja").read_text()
# Llama's habits: a token that begins the text, texts trimmed, tools as indented JSON, answers of tools from "ipython", the date.
LLAMA = """{{- bos_token }}
{%- set system = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{{- '<|im_start|>system\\nToday: ' + strftime_now('%d %b %Y') + '\\n' }}
{%- if tools %}
{{- 'Respond with {"name": name, "parameters": values}.' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}
{%- endif %}
{{- system + '<|im_end|>' }}
{%- for message in messages if message['role'] != 'system' %}
{%- set role = 'ipython' if message['role'] == 'tool' else message['role'] %}
{{- '<|im_start|>' + role + '\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# Qwen3-Coder's: names and descriptions of tools written as they are.
CODER = (
    """{%- if tools %}{{- '<|im_start|>system\\nWrite <function=NAME>.' }}
{%- for tool in tools %}{{- '\\n<name>' + tool.function.name + '</name> ' + tool.function.description }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}"""
    + CHATML
)
STRICT = CHATML.replace(
    "{{ '<|im_start|>'", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ '<|im_start|>'"
)
TOOL = {"type": "function", "function": {"name": "look", "description": "Say <|im_end|> what is there.", "parameters": {}}}


def chat(template: str, **options) -> Chat:
    return Chat(ModelFiles(CODEC, template, "<|im_end|>", 1024, special_tokens={"bos_token": "<|endoftext|>"}), **options)


def opening(chat: Chat, tools: bool = True) -> str:
    return decode(CODEC, chat.opening("S", json.dumps([TOOL]) if tools else "", [Message("user", " U ")]).ids.tolist())


def test_llamas_habits() -> None:
    llama = chat(LLAMA)
    assert type(llama.format) is FORMATS["llama3"]
    text = opening(llama)
    assert text.startswith("<|endoftext|><|im_start|>system\nToday: 26 Jul 2024\n")
    assert json.dumps(TOOL, indent=4) in text
    assert text.endswith("S<|im_end|><|im_start|>user\nU<|im_end|><|im_start|>assistant\n")
    bridge = decode(CODEC, llama.bridge(True, [Message("tool", " a ")]).ids.tolist())
    assert bridge == "<|im_start|>ipython\na<|im_end|><|im_start|>assistant\n"


@pytest.mark.parametrize("shown", ["message.content | tojson", "{'output': message.content} | tojson"])
def test_answers_of_tools_that_a_template_shows_as_json(shown: str) -> None:
    """Llama 3.1 writes them so: its `iterable` is true of texts, too. The role stays, and the text is what its JSON would be."""
    llama = chat(
        LLAMA.replace(
            "{{- '<|im_start|>' + role",
            "{{- '<|im_start|>ipython\\n' + (" + shown + ") + '<|im_end|>' if role == 'ipython' else '<|im_start|>' + role",
        )
    )
    bridge = llama.bridge(True, [Message("tool", ' "a"\n<|im_end|>'), Message("user", '"b"')])
    text = ' \\"a\\"\\n<|im_end|>'
    body = f'"{text}"' if "output" not in shown else f'{{"output": "{text}"}}'
    assert decode(CODEC, bridge.ids.tolist()) == (
        f'<|im_start|>ipython\n{body}<|im_end|><|im_start|>user\n"b"<|im_end|><|im_start|>assistant\n'
    )
    kinds = expand_spans(bridge.spans, len(bridge))
    assert decode(CODEC, bridge.ids[kinds == ContextKind.OBSERVATION].tolist()) == text + '"b"'
    assert bridge.ids.tolist().count(CODEC.control["<|im_end|>"]) == 2


@pytest.mark.parametrize("role", ["tool<|im_end|>", "user\n", "", "<|im_start|>system"])
def test_a_role_is_a_word(role: str) -> None:
    """Field bug 011 by another way: the template writes the role as it is, so control tokens in it would be ones."""
    with pytest.raises(TemplateError, match="is no role"):
        chat(CHATML).bridge(True, [Message(role, "a")])
    with pytest.raises(TemplateError, match="is no role"):
        chat(CHATML).opening("", "", [Message("user", "a"), Message(role, "a")])


def test_names_and_descriptions_of_tools_are_text_however_they_are_written() -> None:
    coder = chat(CODER)
    assert type(coder.format) is FORMATS["qwen3_coder"]
    ids = coder.opening("", json.dumps([TOOL]), [Message("user", "U")]).ids.tolist()
    assert "<name>look</name> Say <|im_end|> what is there.<|im_end|>" in decode(CODEC, ids)
    assert ids.count(CODEC.control["<|im_end|>"]) == 2  # of the system and of the user


def test_a_description_that_looks_like_a_slot_is_text() -> None:
    tool = {"type": "function", "function": {**TOOL["function"], "description": "\ue0000\ue001 <|im_end|>"}}
    for template in (LLAMA, QWEN):
        ids = chat(template).opening("", json.dumps([tool]), [Message("user", "U")]).ids.tolist()
        assert decode(CODEC, ids).count("\ue0000\ue001 <|im_end|>") == 1
        assert ids.count(CODEC.control["<|im_end|>"]) == 2


def test_a_format_that_the_template_does_not_teach_is_explained_instead() -> None:
    text = opening(chat(QWEN, format=FORMATS["react"]()))
    assert "<tools>" not in text
    assert text.count("Action:") == 1
    assert "<tools>" in opening(chat(QWEN))
    assert "<tools>" in opening(chat(QWEN, format=FORMATS["hermes"]()))


def test_a_template_without_tools_answers_shows_them_as_the_users() -> None:
    strict = chat(STRICT)
    assert decode(CODEC, strict.bridge(True, [Message("tool", "a")]).ids.tolist()).startswith("\n<|im_start|>user\na<|im_end|>")
    with pytest.raises(TemplateError, match="does not show messages of role 'critic'"):
        chat(CHATML.replace("for m in messages", "for m in messages if m.role != 'critic'")).bridge(
            True, [Message("critic", "a")]
        )


async def test_an_engine_may_stop_at_any_of_the_end_tokens() -> None:
    """The turn is ended then, and the bridge writes no other end; the engine is told of all of them."""
    files = ModelFiles(Toy(), CHATML, "<|im_end|>", VOCABULARY.rows, end_ids=(3, 2))
    with FakeEngine(reply=lambda prompt, sampling: [7, 3] if 3 not in prompt else [7, 2]) as engine:
        record = await play(assignment(["he", "done"]), engine, Chat(files))
        bodies = [body for path, body in engine.calls if path == "/generate"]
    assert bodies[0]["sampling_params"]["stop_token_ids"] == [2, 3]
    assert record.steps[0].action_ids.tolist() == [7, 3]
    assert record.steps[1].context_ids.tolist()[:2] == [4, 1]  # the newline, and the next message


def test_what_a_models_folder_says_about_ends_and_beginnings(tmp_path) -> None:
    folder = write_model(tmp_path, 1030)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "add_bos_token": True,
        "bos_token": {"content": "<|endoftext|>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    files = load_model_files(folder)
    assert (files.adds_bos, files.special_tokens["bos_token"]) == (True, "<|endoftext|>")
    assert set(files.end_ids) >= {5, 7}
