"""The end-to-end run of fine-tuning: its data, and in its long form all of it."""

import json

import pytest

from tests.script import load_script


def test_chats_are_signatures_and_the_first_lines_of_docstrings(tmp_path):
    script = load_script("fine_tune")
    script.write_chats(tmp_path / "chats.jsonl", 50)
    chats = [json.loads(line)["messages"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert len(chats) == 50
    for question, answer in chats:
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert question["content"].endswith(")")
        assert "\n" not in answer["content"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fine_tuning_end_to_end(tmp_path):
    for package in ("torch", "transformers", "tokenizers", "peft", "pyarrow", "PIL", "sklearn"):
        pytest.importorskip(package)
    load_script("fine_tune").main(tmp_path)
