"""Call a function in a separate process, possibly of another Python.

configs/external.py runs inference engines this way. The trainer creates a FunctionProcess, which starts this
same file as a program. The program loads the function and answers calls. It needs only the standard library.
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
    """A function from the user's file, running in a separate process.

    If the function hangs, crashes or runs out of memory, only the call fails: with TimeoutError after the
    time limit, otherwise with RuntimeError. A timeout kills the process and everything it has started; the
    next call starts a new one. Arguments and results are sent as JSON, one line each.

    Args:
        path, name: the file and the function in it.
        seconds: time limit per call.
        command: the command that starts Python; this Python by default.
        environment: environment variables of the process; ours by default.
        log: file for what the function prints.
    """

    def __init__(self, path: str, name: str, seconds: float, command: Iterable[str] = (),
                 environment: dict | None = None, log: Path | None = None):
        # -P keeps the folder of this file out of sys.path.
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
                # A new session, so that it can be killed with its children, and Ctrl-C does not reach it.
                start_new_session=True,
            )
        self.end = weakref.finalize(self, self.kill, self.process)  # when this object is deleted, or at exit
        self.answer(seconds=300)  # wait until it has loaded the file

    @staticmethod
    def kill(process: subprocess.Popen) -> int:
        with contextlib.suppress(OSError):  # it may have ended already, with unread input
            os.killpg(process.pid, signal.SIGKILL)
            process.stdin.close()
        return process.wait()

    def __call__(self, *arguments: Any) -> Any:
        if not self.end.alive:
            self.start()
        with contextlib.suppress(OSError):  # it has died; `answer` will report that
            self.process.stdin.write(json.dumps(arguments, default=str).encode() + b"\n")
            self.process.stdin.flush()
        return self.answer(self.seconds)

    def answer(self, seconds: float) -> Any:
        """Wait up to `seconds` for the answer to the last call."""
        if not multiprocessing.connection.wait([self.process.stdout], seconds):
            self.end()
            raise TimeoutError(f"took longer than {seconds:.4g} s")
        line = self.process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # it has closed its output and is probably exiting
            raise RuntimeError(f"its process ended with status {self.end()}")
        value, error = json.loads(line)
        if error:
            raise RuntimeError(error)
        return value


def serve_function(path: str, name: str, seconds: float) -> None:
    """The process's side: load the file, report that, and answer calls. Exits when the trainer exits, even in
    the middle of a call."""
    requests = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # programs started by the function must not read requests
    os.dup2(2, 1)  # what the function prints must not be taken for an answer
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if memory runs out, Linux kills this process, not the trainer
    calls = queue.SimpleQueue()

    def listen():
        for line in requests:
            calls.put(json.loads(line))
        os.killpg(0, signal.SIGKILL)  # including its children, such as an engine's workers

    def load():
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # the file may import modules next to it
        # Import by path, because the file may have the name of a standard module.
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
                # This works even if a loop in C keeps `listen` from running.
                faulthandler.dump_traceback_later(seconds + 5, exit=True)
                value = function(*arguments)
            answer = json.dumps([value, ""], default=lambda value: value.tolist())  # tensors and arrays
        except BaseException as error:  # sys.exit() too
            answer = json.dumps([None, f"{type(error).__name__}: {error}".splitlines()[0]])
        faulthandler.cancel_dump_traceback_later()
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    serve_function(sys.argv[1], sys.argv[2], float(sys.argv[3]))
