"""Scripts in processes of their own that need not import torch: each is a fork of one that has done so."""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([
    "torch.distributed.nn", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama",
    "transformers.generation", "safetensors.torch", "tyro", "tqdm"])


def close_standard_output() -> None:
    """As `>&-` does, and what Python makes of it."""
    os.close(1)
    sys.stdout = sys.__stdout__ = None


def be(line: list[str], cwd: str, environment: dict, files: list[str], before: tuple) -> None:
    """In the new process: do what `python LINE` would do."""
    for number, file in enumerate(files):
        descriptor = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    if "PYTHONIOENCODING" in environment:
        sys.stdout.reconfigure(encoding=environment["PYTHONIOENCODING"])
    os.chdir(cwd)
    sys.argv = line
    ours = str(Path(__file__).parent.parent)  # which may hold the environment, too
    others = [path for path in sys.path if ours not in path or "site-packages" in path]
    sys.path[:] = [os.path.dirname(os.path.abspath(line[0])), *others]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if before:
        function, *arguments = before
        function(*arguments)
    try:
        runpy.run_path(line[0], run_name="__main__")
    finally:  # as at the end of an interpreter, which a process of multiprocessing does not reach
        threading._shutdown()
        atexit._run_exitfuncs()


class Started:
    """A script that was started, with the interface of subprocess.Popen."""

    def __init__(self, *line: object, cwd: Path | None = None, before: tuple = (), input: bytes = b"",
                 **environment: str):
        self.folder = tempfile.TemporaryDirectory()
        self.files = [os.path.join(self.folder.name, name) for name in ("stdin", "stdout", "stderr")]
        for file, content in zip(self.files, (input, b"", b"")):
            Path(file).write_bytes(content)
        self.process = SERVER.Process(target=be, args=(
            [str(word) for word in line], str(cwd or os.getcwd()), {**os.environ, **environment}, self.files,
            before))
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def so_far(self) -> tuple[str, str]:
        """What it has written to stdout and stderr."""
        return tuple(Path(file).read_text(encoding="utf-8", errors="replace") for file in self.files[1:])

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout, *self.so_far())
        return self.so_far()
