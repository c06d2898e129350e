"""What a run's model/ has of the tokenizer's folder: everything that decides how texts become ids."""

import shutil

from actors.codec import load_model_files
from common.cli import load
from tests.launch.stage import REPOSITORY
from tools.launching.preflight import write_folder


def test_the_templates_of_a_model_with_several(tmp_path):
    source, run = tmp_path / "tokenizer", tmp_path / "run"
    shutil.copytree(REPOSITORY / "configs" / "tokenizers" / "tiny", source)
    (source / "chat_template.jinja").unlink()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "default.jinja").write_text("the folder's")
    run.mkdir()
    config = load(REPOSITORY / "configs" / "tiny.toml", [f"--model.tokenizer={source}"])
    for _ in range(2):  # a resumed run writes it again
        write_folder(config, run)
    assert load_model_files(run / "model").template == "the folder's"
