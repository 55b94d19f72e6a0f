"""External samplers: an inference engine on other GPUs, or servers on other machines.

  python humanline.py ... --sample-every 64 --sampler configs/external.py:vllm       # see sampler_vllm.py
  python humanline.py ... --sample-every 64 --sampler configs/external.py:servers    # see sampler_server.py

`--sampler FILE.py:NAME` calls NAME(run) once on every rank, with the trainer's Run. It returns a function
that is called as draw(prompts, count, step, greedy) whenever rollouts are needed, and returns `count`
completions per prompt, in the order of the prompts, on every rank. A prompt is a humanline.Group: `prompt`
has its token ids, and `row` is an index into run.rows, or into run.eval_rows where step >=
humanline.EVALUATION. A completion is a list of token ids, up to and including the stop token, and a list of
their log-probs. Here, the first rank requests completions from a separate process, which reads the weights
from a folder. Copy this file to add another sampler. Two environment variables configure it:

  HUMANLINE_SAMPLER_COMMAND    the command that starts the process's Python, for example
                               env CUDA_VISIBLE_DEVICES=6,7 vllm/bin/python. Default: this Python
  HUMANLINE_SAMPLER_WEIGHTS    the folder to write weights into; servers must be able to read it.
                               Default: inside --out
"""

import contextlib
import hashlib
import itertools
import os
import re
import shlex
import shutil
import time
from pathlib import Path

import torch

import humanline
from humanline import FunctionProcess, explained, from_first_rank, warn

HERE = Path(__file__).resolve().parent
SECONDS = 3600  # time limit for one request


def vllm(run: "humanline.Run") -> "External":
    return External(run, f"{HERE}/sampler_vllm.py:sample")


def servers(run: "humanline.Run") -> "External":
    return External(run, f"{HERE}/sampler_server.py:sample")


class External:
    """Samples with `function`, FILE.py:NAME, in a process started by the first rank, and broadcasts the
    completions to all ranks."""

    def __init__(self, run: "humanline.Run", function: str):
        self.policy, self.tokenizer, self.config = run.policy, run.sampler.tokenizer, run.config
        self.stop_ids = run.sampler.stop_ids
        self.check_completions = run.sampler.check_completions
        self.name = f"--sampler {run.config.sampler}"
        self.log = run.out / "sampler.log"
        key = hashlib.sha256(str(run.out.resolve()).encode()).hexdigest()[:12]  # several runs may share it
        self.folder = Path(os.environ.get("HUMANLINE_SAMPLER_WEIGHTS", run.out)).resolve() / f"weights-{key}"
        self.weights = None  # the folder of the current weights; None if they have changed since
        run.optimizer.register_step_post_hook(self.forget_weights)
        from_first_rank(lambda: self.start(function, run.stack))

    def start(self, function: str, stack: contextlib.ExitStack) -> None:
        """Start the process, and end it when `stack` closes."""
        path, _, name = function.rpartition(":")
        # torchrun's variables describe our ranks, not the new process.
        torchrun = "(.*_)?(RANK|WORLD_SIZE)|(MASTER|TORCHELASTIC)_.*"
        environment = {key: value for key, value in os.environ.items() if not re.fullmatch(torchrun, key)}
        self.remove_weights()  # left over from a run that was killed
        stack.callback(self.remove_weights)
        command = shlex.split(os.environ.get("HUMANLINE_SAMPLER_COMMAND", ""))
        advice = "set HUMANLINE_SAMPLER_COMMAND to a Python that has it installed"
        with explained(self.name, f"see {self.log}", ModuleNotFoundError=advice):
            log = stack.enter_context(open(self.log, "ab"))
            self.process = FunctionProcess(path, name, SECONDS, {}, command, env=environment, stderr=log)
        stack.callback(lambda: self.process.end())  # looked up late: the process may have been restarted

    def forget_weights(self, *_) -> None:
        self.weights = None

    def remove_weights(self) -> None:
        if humanline.RANK == 0:  # a slower rank would delete the new weights
            shutil.rmtree(self.folder, ignore_errors=True)

    def write_weights(self, dtype: torch.dtype) -> None:
        """Write the current policy to a new Hugging Face or peft folder, and delete the earlier ones, which
        are no longer read."""
        weights = humanline.final_weights(self.policy, self.config)
        for name, value in weights.items():
            if value.is_floating_point():
                weights[name] = value.to(dtype)
        self.remove_weights()
        self.weights = self.folder / f"{time.time_ns()}"

        def write() -> None:
            with explained(f"{self.weights}: cannot write the weights for --sampler", "free some disk space"):
                self.policy.save_pretrained(self.weights, state_dict=weights)
                self.tokenizer.save_pretrained(self.weights)

        from_first_rank(write)

    def __call__(
        self, prompts: list, count: int, step: int, greedy: bool
    ) -> list[tuple[list[int], list[float]]]:
        """Sample completions. If the process dies, hangs or returns something invalid, it is restarted and
        asked once more; raises UserError if that fails, too. The request contains everything that the
        completions depend on, so they can be reproduced."""
        is_fp32 = self.policy.dtype == torch.float32 and not self.policy.is_mixed
        dtype = "float32" if is_fp32 else "bfloat16"
        settings = {
            "temperature": 0.0 if greedy else self.config.temperature,
            "top_p": 1.0 if greedy else self.config.top_p,
            "stop_ids": self.stop_ids,
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
                expected = f"{count} completions for each of {len(prompts)} prompts"
                raise RuntimeError(f"it returned {answer!r:.80}, not {expected}")
            return self.check_completions(list(itertools.chain(*answer)), sum(lengths))

        def attempt_twice() -> list:
            try:
                return attempt()
            except (RuntimeError, OSError, TypeError, ValueError) as error:
                warn(f"{self.name}: {error}; restarting it")
            with explained(f"{self.name}, after a restart", f"see {self.log}, then use --resume latest"):
                self.process.end()
                return attempt()

        return from_first_rank(attempt_twice)
