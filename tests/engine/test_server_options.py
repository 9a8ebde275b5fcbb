"""The server's command line: what cannot work is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_engine.server.options import OptionError, parse


def test_defaults_serve_the_embedded_pair_on_loopback() -> None:
    options = parse([])
    assert (options.host, options.port, options.model, options.mode) == ("127.0.0.1", 30001, "embedded", "tree")
    assert (options.served_model_name, options.api_key) == ("demo-code", "")


def test_a_folder_lends_its_name() -> None:
    assert parse(["--model", "/models/tiny-code/"]).served_model_name == "tiny-code"
    assert parse(["--model", "/models/x", "--served-model-name", "y"]).served_model_name == "y"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--budget", "0"], "--budget is 0; it must be at least 1"),
        (["--topk", "-1"], "--topk is -1"),
        (["--context-length", "1"], "at least 2"),
        (["--max-concurrent", "0"], "--max-concurrent is 0"),
        (["--max-queue", "0"], "--max-queue is 0"),
        (["--threads", "0"], "--threads is 0"),
        (["--stall-seconds", "0.1"], "--stall-seconds"),
        (["--draft", "none"], "--mode tree needs a drafter"),
        (["--draft", "none", "--mode", "linear"], "--mode linear needs a drafter"),
    ],
)
def test_values_that_cannot_work_are_named(arguments: list[str], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse(arguments)


@pytest.mark.parametrize("arguments", [["--mode", "fast"], ["--context-len", "9"], ["--budget", "x"], ["stray"]])
def test_unknown_words_are_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert "usage: python -m ddtree_engine.server" in capsys.readouterr().err


def test_the_key_is_read_from_its_file_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("  s3cret-key\n")
    options = parse(["--api-key-file", str(file)])
    assert options.api_key == "s3cret-key"
    assert "s3cret" not in repr(options)


@pytest.mark.parametrize(
    ("content", "says"), [("", "exactly one key"), ("two keys", "exactly one key"), ("schlüssel", "ASCII")]
)
def test_key_files_without_one_plain_key_are_refused(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "key"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(OptionError, match=says) as caught:
        parse(["--api-key-file", str(file)])
    assert not content or content not in str(caught.value)
