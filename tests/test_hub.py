"""Hub names without a network: a one-line error, or the cached files."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, metrics

SHORT = "--steps 2 --batch-size 2 --max-new-tokens 4".split()


def command(tmp_path, *flags: str) -> subprocess.CompletedProcess:
    """Run python humanline.py FLAGS with the hub offline."""
    line = [sys.executable, str(ROOT / "humanline.py"), *flags, "--out", str(tmp_path / "out")]
    environment = os.environ | dict(HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("flag, name",
                         [("--model", "Qwen/Qwen2.5-0.5B"), ("--data", "openai/gsm8k:main:train")])
def test_a_hub_name_without_network_gives_a_one_line_error_that_says_how_to_use_a_folder(
        tiny, data_files, tmp_path, flag, name):
    flags = {"--model": tiny, "--data": data_files["groups"]} | {flag: name}
    done = command(tmp_path, *[word for pair in flags.items() for word in pair])
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()
    assert done.stderr.startswith(f"humanline.py: error: {flag} {name}: ")
    assert "`hf download NAME" in done.stderr and "--local-dir FOLDER`" in done.stderr


def test_a_cached_hub_model_trains_without_network(tiny, data_files, tmp_path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "home" / "hub" / "models--some--model"
    shutil.copytree(tiny, cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    done = command(tmp_path, "--model", "some/model", "--data", data_files["groups"], *SHORT)
    assert done.returncode == 0 and len(metrics(tmp_path / "out")) == 2, done.stderr
