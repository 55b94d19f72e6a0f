"""Names on the hub where there is no network: one line within seconds, and nothing is asked that lies here."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, metrics

import humanline

SHORT = "--steps 2 --batch-size 2 --max-new-tokens 4".split()


@contextlib.contextmanager
def hub(kind: str):
    """An endpoint on this machine that refuses, is silent, or answers that it knows nothing; and who came."""
    server, guests = socket.socket(), []
    server.bind(("127.0.0.1", 0))
    endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    if kind == "refuses":
        server.close()  # nobody listens at a port that was free a moment ago
    else:
        server.listen()

        def welcome():
            with contextlib.suppress(OSError):
                while True:
                    guests.append(server.accept()[0])
                    if kind == "answers":
                        guests[-1].sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        threading.Thread(target=welcome, daemon=True).start()
    try:
        yield endpoint, guests
    finally:
        server.close()


def command(endpoint: str, home, *flags: str) -> subprocess.CompletedProcess:
    """python humanline.py FLAGS with the hub at `endpoint`."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_OFFLINE")}
    environment |= dict(HF_ENDPOINT=endpoint, HF_HOME=str(home), OMP_NUM_THREADS="1", NO_PROXY="127.0.0.1")
    line = [sys.executable, str(ROOT / "humanline.py"), *flags]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("kind, offline", [("refuses", True), ("silent", True), ("answers", False)])
def test_a_hub_that_does_not_answer_is_given_up_within_seconds(monkeypatch, kind, offline):
    from huggingface_hub import constants

    with hub(kind) as (endpoint, guests):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        started = time.perf_counter()
        humanline.go_offline_without_hub(humanline.parse_config(["--model", "some/model"]))
        assert time.perf_counter() - started < humanline.HUB_SECONDS + 1 <= 5
        assert constants.HF_HUB_OFFLINE == offline and len(guests) == (kind != "refuses")


@pytest.mark.parametrize("flag, name, kind, unreachable, repository", [
    ("--model", "Qwen/Qwen2.5-0.5B", "silent", r"couldn't connect to 'http://127", "NAME"),
    ("--data", "openai/gsm8k:main:train=2", "refuses", r"Couldn't reach 'openai/gsm8k' on the Hub",
     "NAME --repo-type dataset")])
def test_a_hub_name_without_network_is_one_line_that_says_how_to_use_a_folder(
        tiny, tmp_path, flag, name, kind, unreachable, repository):
    flags = {"--out": str(tmp_path / "out"), flag: name} | ({} if flag == "--model" else {"--model": tiny})
    with hub(kind) as (endpoint, guests):  # and no embedded data is made first
        done = command(endpoint, tmp_path / "home", *[word for pair in flags.items() for word in pair])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "out").exists(), done.stderr
    assert done.stderr.startswith(f"humanline.py: error: {flag} {name.split('=')[0]}: ")
    assert re.search(unreachable, done.stderr)
    assert "folder" in done.stderr and f"`hf download {repository} --local-dir FOLDER`" in done.stderr
    assert len(guests) == (kind == "silent")


def test_local_folders_and_files_train_without_a_word_to_the_hub(tiny, data_files, tmp_path):
    with hub("silent") as (endpoint, guests):
        done = command(endpoint, tmp_path / "home", "--model", tiny, "--data", data_files["groups"],
                       "--out", str(tmp_path / "out"), *SHORT)
    assert done.returncode == 0 and len(metrics(tmp_path / "out")) == 2, done.stderr
    assert not guests


def test_the_embedded_default_asks_nobody(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a word to the hub")

    from huggingface_hub import constants

    monkeypatch.setattr(humanline.threading, "Thread", forbidden)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    humanline.go_offline_without_hub(humanline.parse_config(["--model", "some/model"]))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    humanline.go_offline_without_hub(humanline.parse_config([]))
    local = ["--data", "embedded:worse=2", "missing.jsonl", "--reward", "exact"]
    humanline.go_offline_without_hub(humanline.parse_config(local))
    with pytest.raises(AssertionError, match="a word to the hub"):
        humanline.go_offline_without_hub(humanline.parse_config(["--model", "some/model"]))
    with pytest.raises(AssertionError, match="a word to the hub"):
        humanline.go_offline_without_hub(humanline.parse_config(["--reward", "model:some/judge"]))


def test_a_cached_hub_model_still_trains_without_network(tiny, data_files, tmp_path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "home" / "hub" / "models--some--model"
    shutil.copytree(tiny, cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    with hub("silent") as (endpoint, guests):
        done = command(endpoint, tmp_path / "home", "--model", "some/model", "--data", data_files["groups"],
                       "--out", str(tmp_path / "out"), *SHORT)
    assert done.returncode == 0 and len(metrics(tmp_path / "out")) == 2, done.stderr
    assert len(guests) == 1
    assert "base_model: some/model" in (tmp_path / "out" / "final" / "README.md").read_text()
