"""Hub names without a network: a one-line error, or the cached files."""

import shutil

import huggingface_hub.constants
import pytest
from conftest import complaint, metrics, short_run

import humanline


@pytest.fixture(autouse=True)
def hub(tmp_path_factory, monkeypatch):
    """A hub that is offline, with a cache of its own."""
    cache = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    return cache


@pytest.mark.parametrize("flag, name",
                         [("--model", "Qwen/Qwen2.5-0.5B"), ("--data", "openai/gsm8k:main:train")])
def test_a_hub_name_without_network_gives_a_one_line_error_that_says_how_to_use_a_folder(
        tiny, data_files, tmp_path, capsys, flag, name):
    flags = {"--model": tiny, "--data": data_files["groups"], "--out": str(tmp_path / "out")} | {flag: name}
    line = complaint([word for pair in flags.items() for word in pair], tmp_path, capsys)
    assert line.startswith(f"humanline.py: error: {flag} {name}: ")
    assert "`hf download NAME" in line and "--local-dir FOLDER`" in line


def test_a_cached_hub_model_trains_without_network(hub, tiny, data_files, tmp_path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    cached = hub / "models--some--model"
    shutil.copytree(tiny, cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    assert humanline.main(short_run("some/model", data_files["groups"], f"--out {tmp_path / 'out'}")) == 0
    assert len(metrics(tmp_path / "out")) == 3
