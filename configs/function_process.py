"""A function in a process of another Python, such as an engine's; configs/external.py draws with it.

The trainer makes a FunctionProcess; that starts this same file as a program, which loads the function and answers.
The process needs nothing but Python's own library.
"""

import contextlib
import faulthandler
import importlib.util
import json
import multiprocessing.connection
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class FunctionProcess:
    """A function of the user's file in a process of its own, where it may hang, crash or exhaust its memory:
    only the call fails, with RuntimeError, or with TimeoutError beyond its limit, in seconds, which ends the
    process and what it has started; the next call starts another. Arguments and results travel as JSON, a
    line each.

    seconds: the limit. command: what starts its Python. environment: its variables, else ours. log: a file
    for what it prints.
    """

    def __init__(self, path: str, name: str, seconds: float, command: Iterable[str] = (),
                 environment: dict | None = None, log: Path | None = None):
        # -P: no modules from the folder of this file.
        self.line = [*(command or [sys.executable]), "-P", __file__, path, name, str(seconds)]
        self.seconds, self.environment, self.log = seconds, environment, log
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") if self.log else contextlib.nullcontext() as log:
            self.process = subprocess.Popen(
                self.line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,
                start_new_session=True,  # it can be ended as a whole, and Ctrl-C is not for it
            )
        self.end = weakref.finalize(self, self.kill, self.process)  # with this object, or at exit
        self.answer(seconds=300)  # when it has loaded the file

    @staticmethod
    def kill(process: subprocess.Popen) -> int:
        with contextlib.suppress(OSError):  # it may have ended by itself, and not read everything
            os.killpg(process.pid, signal.SIGKILL)
            process.stdin.close()
        return process.wait()

    def __call__(self, *arguments: Any) -> Any:
        if not self.end.alive:
            self.start()
        with contextlib.suppress(OSError):  # it is dead, as `answer` will find
            self.process.stdin.write(json.dumps(arguments, default=str).encode() + b"\n")
            self.process.stdin.flush()
        return self.answer(self.seconds)

    def answer(self, seconds: float) -> Any:
        """The answer to the last call, at most so many seconds from now."""
        if not multiprocessing.connection.wait([self.process.stdout], seconds):
            self.end()
            raise TimeoutError(f"took longer than {seconds:.4g} s")
        line = self.process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # it has closed its output, and may be about to end
            raise RuntimeError(f"its process ended with status {self.end()}")
        value, error = json.loads(line)
        if error:
            raise RuntimeError(error)
        return value


def serve_function(path: str, name: str, seconds: float) -> None:
    """In a FunctionProcess: load the file, say so, and answer calls until the trainer ends, even amid a
    call."""
    requests = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a program that the function starts must not read requests
    os.dup2(2, 1)  # what the function prints is no answer
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where no memory is left, Linux ends this process, and not the trainer
    calls = queue.SimpleQueue()

    def listen():
        for line in requests:
            calls.put(json.loads(line))
        os.killpg(0, signal.SIGKILL)  # with what it has started, such as an engine's workers

    def load():
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # the file may import from its folder
        # By its path, as it may have the name of a module of Python's.
        spec = importlib.util.spec_from_file_location("users_file", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["users_file"] = module
        spec.loader.exec_module(module)
        return getattr(module, name)

    threading.Thread(target=listen, daemon=True).start()
    function = value = None
    while True:
        try:
            if function is None:
                function = load()
            else:
                arguments = calls.get()
                # Where a loop in C keeps `listen` from running, too.
                faulthandler.dump_traceback_later(seconds + 5, exit=True)
                value = function(*arguments)
            answer = json.dumps([value, ""], default=lambda value: value.tolist())  # tensors and arrays
        except BaseException as error:  # sys.exit() too
            answer = json.dumps([None, f"{type(error).__name__}: {error}".splitlines()[0]])
        faulthandler.cancel_dump_traceback_later()
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    serve_function(sys.argv[1], sys.argv[2], float(sys.argv[3]))
