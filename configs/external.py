"""Samplers in a process of their own: an engine on other GPUs, or servers on other machines. Copy it for another.

  python humanline.py ... --sample-every 64 --sampler configs/external.py:vllm       # sampler_vllm.py
  python humanline.py ... --sample-every 64 --sampler configs/external.py:servers    # sampler_server.py

`--sampler FILE.py:NAME` calls NAME(run) once, on every rank, with the trainer's Run; what it returns is called for each
drawing as draw(prompts, count, step, greedy) and gives `count` completions for each prompt, the first prompt's first:
token ids up to and with the stop token, and the log-prob of each. Here the first rank asks a process for them, which
gets the weights through a folder. Two settings come from the environment:

  HUMANLINE_SAMPLER_COMMAND    what starts its Python: env CUDA_VISIBLE_DEVICES=6,7 vllm/bin/python. Default: this one
  HUMANLINE_SAMPLER_WEIGHTS    where the folder of weights lies, which servers must see. Default: in --out
"""

import contextlib
import hashlib
import itertools
import os
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import torch

import humanline
from humanline import explained, from_first_rank, warn

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

from function_process import FunctionProcess

SECONDS = 3600  # how long a drawing may take


def vllm(run: "humanline.Run") -> "External":
    return External(run, f"{HERE}/sampler_vllm.py:sample")


def servers(run: "humanline.Run") -> "External":
    return External(run, f"{HERE}/sampler_server.py:sample")


class External:
    """Draws by `function`, FILE.py:NAME, in a process that the first rank starts; all ranks get what it draws."""

    def __init__(self, run: "humanline.Run", function: str):
        self.policy, self.tokenizer, self.config = run.policy, run.sampler.tokenizer, run.config
        self.stops = run.sampler.stops
        self.checked = run.sampler.checked
        self.name = f"--sampler {run.config.sampler}"
        self.log = run.out / "sampler.log"
        key = hashlib.sha256(str(run.out.resolve()).encode()).hexdigest()[:12]  # others may have the same folder
        self.folder = Path(os.environ.get("HUMANLINE_SAMPLER_WEIGHTS", run.out)).resolve() / f"weights-{key}"
        self.weights = None  # the policy's, for the process; None: they have changed
        run.optimizer.register_step_post_hook(self.forget_weights)
        from_first_rank(lambda: self.start(function, run.stack))

    def start(self, function: str, stack: contextlib.ExitStack) -> None:
        """Start the process, until `stack` closes."""
        path, _, name = function.rpartition(":")
        ours = "(.*_)?(RANK|WORLD_SIZE)|(MASTER|TORCHELASTIC)_.*"  # what torchrun says of our ranks
        environment = {key: value for key, value in os.environ.items() if not re.fullmatch(ours, key)}
        self.remove_weights()  # of a run that was killed
        stack.callback(self.remove_weights)
        command = shlex.split(os.environ.get("HUMANLINE_SAMPLER_COMMAND", ""))
        advice = "HUMANLINE_SAMPLER_COMMAND starts a Python that has it"
        with explained(self.name, f"see {self.log}", ModuleNotFoundError=advice):
            self.process = FunctionProcess(path, name, SECONDS, command, environment, self.log)
        stack.callback(lambda: self.process.end())  # the present one: it may have been started anew

    def forget_weights(self, *_) -> None:
        self.weights = None

    def remove_weights(self) -> None:
        if humanline.RANK == 0:  # another rank might be late
            shutil.rmtree(self.folder, ignore_errors=True)

    def write_weights(self, dtype: torch.dtype) -> None:
        """The policy as it is, as an ordinary Hugging Face folder or a peft one, under a new name, without those before
        it, which nothing reads any more."""
        weights = humanline.final_weights(self.policy, self.config)
        for name, value in weights.items():
            if value.is_floating_point():
                weights[name] = value.to(dtype)
        self.remove_weights()
        self.weights = self.folder / f"{time.time_ns()}"

        def write() -> None:
            with explained(f"{self.weights}: cannot write the weights for --sampler", "make room there"):
                self.policy.save_pretrained(self.weights, state_dict=weights)
                self.tokenizer.save_pretrained(self.weights)

        from_first_rank(write)

    def __call__(self, prompts: list, count: int, step: int, greedy: bool) -> list[tuple[list[int], list[float]]]:
        """Where the process dies, hangs or answers something else, it is started anew and asked again; raises UserError
        if that fails, too. The request holds all that the completions depend on."""
        is_fp32 = self.policy.dtype == torch.float32 and not self.config.is_mixed
        dtype = "float32" if is_fp32 else "bfloat16"
        settings = {
            "temperature": 0.0 if greedy else self.config.temperature,
            "top_p": 1.0 if greedy else self.config.top_p,
            "stop_ids": self.stops,
            "max_new_tokens": self.config.max_new_tokens,
            "dtype": dtype,
        }
        if self.weights is None:
            self.write_weights(getattr(torch, dtype))
        ids = [group.prompt for group in prompts]
        seed = humanline.seed_for(self.config.seed, "draw", step)

        def attempt() -> list:
            answer = self.process(ids, settings, count, seed, str(self.weights))
            lengths = [len(group) for group in answer] if isinstance(answer, list) else []
            if lengths != [count] * len(prompts):
                due = f"{count} completions for each of {len(prompts)} prompts"
                raise RuntimeError(f"it returned {answer!r:.80}, not {due}")
            return self.checked(list(itertools.chain(*answer)), sum(lengths))

        def attempt_twice() -> list:
            try:
                return attempt()
            except (RuntimeError, OSError, TypeError, ValueError) as error:
                warn(f"{self.name}: {error}; starting it anew")
            with explained(f"{self.name}, started anew", f"see {self.log}; then --resume latest"):
                self.process.end()
                return attempt()

        return from_first_rank(attempt_twice)
