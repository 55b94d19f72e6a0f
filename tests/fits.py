"""On which GPUs does a config fit, and how much work is it? A dry run on a CPU, without weights, data
or a network.

  python tests/fits.py                                         # every file of configs/
  python tests/fits.py configs/llama3-8b-dpo-humanline.toml    # one of them: about a minute
  python tests/fits.py configs/llama3-8b-dpo-humanline.toml --dtype mixed --microbatch-tokens 4096
  python tests/fits.py --store                                 # also write claims/results/fits.jsonl
  python tests/fits.py --table configs/llama3-8b-*.toml        # rows of a Markdown table, from that file
  python tests/fits.py --measure configs/smollm2-135m-grpo-online.toml --max-new-tokens 448 \\
                               --microbatch-tokens 1024

Other flags are those of humanline.py and apply to every config. The model has its full size, but its tensors
are fake: they have a shape and no contents. The first of 1, 2, 4 or 8 ranks, with --shard if there are
several, takes two steps of humanline.py on the longest sequences that the config allows. Without --shard
every rank needs as much as one does.

Columns, in GiB per rank at the peak of the second step:

  weights       this rank's share of the parameters
  gathered      parameters that FSDP has gathered from all ranks
  gradients     this rank's share of the gradients
  moments       those of AdamW, by arithmetic: two for each trained parameter
  activations   other tensors allocated in the forward pass
  temporaries   other tensors allocated in the backward pass, such as recomputed activations
  reward        weights of the reward model of configs/model_reward.py, which runs on the same GPU
  training      the sum of these
  drawing       by arithmetic: weights, moments, reward, the key-value cache for --sample-tokens, and a
                copy of all parameters if they are gathered from several ranks or cast by autocast

A config fits if the larger of training and drawing is at most 85% of the GPU; above that it is tight. The
margin is for what is not counted: the CUDA context, fragmentation in the allocator, workspaces of kernels and
NCCL, and activations of `generate` and the reward model. Sequences of other lengths may fill
--microbatch-tokens better, by less than one sequence. torch.compile, on by default on a GPU, needs less
memory than the eager layers that are counted here.

--measure also takes the steps with real tensors, in a new process, and prints the error of the dry run. On a
GPU the measured number is torch's peak; on a CPU (Linux only) it is the growth of the process, with an
allocator that returns freed memory at once. The default allocator of glibc returns less.
"""

import ast
import contextlib
import dataclasses
import gc
import json
import math
import os
import re
import resource
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import humanline
from humanline import LOSSES, Batch, Config, Sequence, UserError, require

# The sizes of the configs' models, from their config.json. Other models: a folder, or a name if the hub can
# be reached.
MODELS = {
    "meta-llama/Meta-Llama-3-8B-Instruct": dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8),
    "google/gemma-2-27b-it": dict(
        model_type="gemma2", vocab_size=256000, hidden_size=4608, intermediate_size=36864,
        num_hidden_layers=46, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        query_pre_attn_scalar=144),
    "Qwen/Qwen2.5-1.5B-Instruct": dict(
        model_type="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
        num_attention_heads=12, num_key_value_heads=2, tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM2-135M-Instruct": dict(
        model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
}
REWARD_MODEL = 2 * 7_504_924_672  # bytes: ArmoRM is Llama-3-8B without its output head, in bf16
RESPONSES = 5  # per prompt, in the UltraFeedback-ArmoRM data sets
PROMPT = 64  # tokens, where a config sets no --max-prompt-length
RANKS = {1: "one GPU", 2: "two GPUs", 4: "four GPUs", 8: "eight GPUs"}
GPUS = 24, 80, 141  # GiB
LIMIT = 0.85  # of a GPU; more is tight
RESULTS = ROOT / "tests" / "claims" / "results" / "fits.jsonl"
# The settings that change the memory of a run; see `memory_settings`.
SETTINGS = ("loss model lora dtype attn checkpoint_activations batch_size group_size max_length "
            "max_prompt_length max_new_tokens microbatch_tokens sample_tokens").split()
GIB = 2**30
COLUMNS = "weights gathered gradients moments activations temporaries reward training drawing".split()
H100 = 989e12  # FLOP/s in bf16, dense
DEMO = ROOT / "configs" / "demo" / "model"  # its tokenizer stands in for every model's
ALLOCATOR = dict(MALLOC_MMAP_THRESHOLD_="262144", MALLOC_ARENA_MAX="1", OMP_NUM_THREADS="1")

# ---------- Memory ------------------------------------------------------------------------------------------

@dataclass
class Storage:
    bytes: int
    kind: str

class Memory(TorchDispatchMode):
    """Tracks the storages of all live tensors by kind, and their sizes at the peak.

    Under a FakeTensorMode integers and booleans stay real, because token ids, labels and masks determine the
    sizes of other tensors. Where the program asks for the value of a fake tensor, it is 1, or True."""

    def __init__(self, fake_mode: FakeTensorMode | None):
        super().__init__()
        self.fake_mode = fake_mode
        self.live: dict[int, Storage] = {}
        self.total = self.peak = 0
        self.at_peak: list[tuple[Storage, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # which dispatches again, with this rank's part
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if active_fake_mode() is not self.fake_mode:  # DTensor is only computing a shape
            return func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if is_fake and func in (torch.ops.aten.allclose.default, torch.ops.aten._local_scalar_dense.default):
            return 1
        with contextlib.nullcontext() if is_fake or not inputs else unset_fake_temporarily():
            out = func(*args, **kwargs)
        if not inputs and isinstance(out, FakeTensor) and not out.is_floating_point():
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        return out

    def note(self, tensor: Tensor, kind: str | None = None) -> None:
        """Count a tensor's storage once. Without `kind`, the current pass decides: forward or backward."""
        storage = local(tensor).untyped_storage()
        key = storage._cdata
        if key not in self.live:
            in_backward = torch._C._current_graph_task_id() != -1
            self.live[key] = Storage(0, "temporaries" if in_backward else "activations")
            self.resize(key, storage.nbytes())
            weakref.finalize(storage, self.forget, key)
        if kind:
            self.live[key].kind = kind

    def resize(self, key: int, size: int) -> None:
        self.total += size - self.live[key].bytes
        self.live[key].bytes = size
        if self.total > self.peak:
            self.peak = self.total
            self.at_peak = [(storage, storage.bytes) for storage in self.live.values()]

    def forget(self, key: int) -> None:
        self.total -= self.live.pop(key).bytes

    @contextlib.contextmanager
    def follow_fsdp(self):
        """FSDP frees and refills gathered parameters by resizing their storages, which no operation shows."""
        resize = torch.UntypedStorage.resize_

        def resize_gathered(storage, size):
            resize(storage, size)
            if storage._cdata in self.live:
                self.live[storage._cdata].kind = "gathered"
                self.resize(storage._cdata, size)

        with mock.patch.object(torch.UntypedStorage, "resize_", resize_gathered):
            yield

    def by_kind(self) -> Counter:
        """Bytes at the peak."""
        sums = Counter()
        for storage, size in self.at_peak:
            sums[storage.kind] += size
        return sums

def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

def bytes_of(tensors) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)

# ---------- The two steps -----------------------------------------------------------------------------------

def read(file: str, flags: list[str]) -> Config:
    """A config as it is on a GPU. Raises UserError if it names something that does not exist."""
    config = humanline.parse_config(["--config", file, *flags])
    if config.dtype == "auto":
        return read(file, [*flags, "--dtype", "mixed"])
    for flag, spec in {"--reward": config.reward, "--sampler": config.sampler}.items():
        path, _, name = humanline.find_file(spec).rpartition(":")
        if path:
            require(Path(path).is_file(), f"{file}: {flag} {spec}: there is no file {path}")
            body = ast.parse(Path(path).read_text(encoding="utf-8")).body
            names = [getattr(statement, "name", None) for statement in body]
            require(name in names, f"{file}: {flag} {spec}: {path} defines no {name}")
    return config

def architecture(name: str):
    """A model's configuration."""
    if name in MODELS:
        return AutoConfig.for_model(**MODELS[name])
    with humanline.explained(f"--model {name}", "name a folder, or add its sizes to MODELS in tests/fits.py"):
        return AutoConfig.from_pretrained(name).get_text_config()

@contextlib.contextmanager
def first_of(ranks: int):
    """Make this process the first of several ranks, without the others."""

    def gather(values, value):
        values[:] = [value] * ranks

    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with (mock.patch.object(humanline, "WORLD_SIZE", ranks),
              mock.patch.object(dist, "all_gather_object", gather)):
            yield
    finally:
        dist.destroy_process_group()

def load(file: str, flags: list[str], ranks: int = 1) -> tuple[Module, Config]:
    """The policy as humanline.py prepares it, with random weights, and its config."""
    sizes = architecture(read(file, flags).model)
    is_fake = active_fake_mode() is not None

    def from_pretrained(name, *, dtype, attn_implementation, **_):
        with device:  # a GPU draws weights faster
            model = AutoModelForCausalLM.from_config(
                sizes, dtype=dtype, attn_implementation=attn_implementation)
        return model, dict(unexpected_keys=[], missing_keys=[])

    sharding = "--shard" if ranks > 1 else "--no-shard"
    config = read(file, [*flags, "--model", str(DEMO), "--no-compile", sharding])
    device = torch.device("cuda" if torch.cuda.is_available() and not is_fake else "cpu")
    # torch cannot move a fake parameter, not even to its own device.
    move = (lambda module, *_, **__: module) if is_fake else Module.to
    with (mock.patch.object(AutoModelForCausalLM, "from_pretrained", from_pretrained),
          mock.patch.object(Module, "to", move)):
        policy, _ = humanline.load_policy(config, device)
    return policy, config

def longest(config: Config) -> tuple[int, int, int, int]:
    """Lengths of the longest prompt and completion, sequences per prompt in a batch, sequences per step."""
    prompt = config.max_prompt_length or PROMPT
    completion = config.max_new_tokens
    if config.max_length:
        room = config.max_length - prompt
        completion = min(completion, room) if config.sample_every else room
    unit = LOSSES[config.loss].unit
    per_prompt = config.group_size
    if "armorm" in config.data[0] and not config.sample_every:
        per_prompt = RESPONSES
    if unit == "pair":
        per_prompt = 2
    elif unit == "example" and not config.sample_every:
        per_prompt = 1
    per_step = config.batch_size if unit == "example" else config.batch_size * per_prompt
    return prompt, completion, per_prompt, per_step

def longest_batch(config: Config, step: int, ranks: int) -> Batch:
    """Sequences for a microbatch per rank in the first step, and for three in the second if possible."""
    prompt, completion, per_prompt, per_step = longest(config)
    count = math.ceil(config.microbatch_tokens / (prompt + completion)) * ranks * (1 if step == 1 else 3)
    count = min(count + count % 2, per_step)
    sequences = []
    for i in range(count):
        logps = torch.zeros(completion)
        sequences.append(Sequence(
            prompt=[i // per_prompt + 1] * prompt, completion=[1] * completion,
            advantage=1.0 - i % 2 * 2, ref_logps=logps, old_logps=logps, sampler_logps=logps))
    return Batch(step, sequences, sequences[:2], 0.0)

def two_steps(file: str, flags: list[str], ranks: int, memory: Memory) -> Module:
    """Take two steps under `memory`; returns the policy."""
    with first_of(ranks), memory.follow_fsdp(), memory.fake_mode or contextlib.nullcontext(), memory:
        policy, config = load(file, flags, ranks)
        gc.collect()
        for tensor in [*policy.parameters(), *policy.buffers()]:
            memory.note(tensor, "weights")
        for step in 1, 2:
            policy.zero_grad()
            memory.peak = 0
            humanline.forward_backward(policy, longest_batch(config, step, ranks), config)
        for p in humanline.trained(policy).values():
            memory.note(p.grad, "gradients")
    return policy

def dry_run(file: str, flags: list[str], ranks: int) -> tuple[Counter, Module]:
    """Bytes per rank at the peak, by kind, and the policy."""
    memory = Memory(FakeTensorMode(allow_non_fake_inputs=True))
    policy = two_steps(file, flags, ranks, memory)
    kinds = memory.by_kind()
    kinds["moments"] = 2 * bytes_of(humanline.trained(policy).values())
    return kinds, policy

def real_run(file: str, flags: list[str]) -> int:
    """Bytes that two steps and their updates take in this process, at the peak."""
    policy, config = load(file, flags)
    optimizer = torch.optim.AdamW(humanline.trained(policy).values(), fused=True)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    others = resident - bytes_of(policy.parameters())
    for step in 1, 2:
        humanline.forward_backward(policy, longest_batch(config, step, 1), config)
        optimizer.step()
        optimizer.zero_grad()
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - others

# ---------- Results -----------------------------------------------------------------------------------------

def memory_settings(config: Config) -> dict:
    """Configs with the same ones need the same memory."""
    settings = {name: getattr(config, name) for name in SETTINGS}
    return settings | dict(data=config.data[0], is_online=config.sample_every > 0,
                           has_reward_model="model_reward" in config.reward)

def gib_by_ranks(file: str, flags: list[str]) -> tuple[int, dict]:
    """Number of parameters, and for each number of ranks the GiB of every column."""
    config = read(file, flags)
    table = {}
    for ranks in RANKS:
        kinds, policy = dry_run(file, flags, ranks)
        if ranks == 1:
            parameters = sum(p.numel() for p in policy.parameters())
        kinds["reward"] = REWARD_MODEL if "model_reward" in config.reward else 0
        kinds["training"] = sum(kinds.values())
        if config.sample_every:
            width = 4 if config.dtype == "float32" else 2
            is_copied = ranks > 1 or (config.dtype == "mixed" and not config.lora)
            kinds["drawing"] = kinds["weights"] + kinds["moments"] + kinds["reward"]
            kinds["drawing"] += width * (cached(config) + is_copied * parameters)
        table[str(ranks)] = {name: round(kinds[name] / GIB, 2) for name in COLUMNS}
    return parameters, table

def cached(config: Config) -> int:
    """How many numbers the cache of keys and values holds for --sample-tokens."""
    sizes = architecture(config.model)
    head_dim = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    return 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * head_dim * config.sample_tokens

def peak(gib: dict) -> float:
    return max(gib["training"], gib["drawing"])

def verdict(gib: dict, size: int) -> str:
    if peak(gib) > size:
        return "no"
    if peak(gib) > LIMIT * size:
        return "tight"
    return "fits"

def smallest(result: dict) -> list[tuple[int, int, float]]:
    """Where a config fits, fewest GPUs first: their number, size and the GiB that it takes on each."""
    smallest_machines = []
    fewest = math.inf
    for size in GPUS:
        for ranks, gib in result["gib"].items():
            # larger GPUs only where fewer are enough
            if verdict(gib, size) == "fits" and int(ranks) < fewest:
                fewest = int(ranks)
                smallest_machines.insert(0, (fewest, size, peak(gib)))
    return smallest_machines

def machines(result: dict) -> str:
    """The same in words: "one GPU of 80 GB (67 GiB of 80) or two GPUs of 24 GB (19 GiB of 24)"."""
    names = [f"{RANKS[ranks]} of {size} GB ({used:.0f} GiB of {size})"
             for ranks, size, used in smallest(result)]
    return " or ".join(names) or "more than eight GPUs of 141 GB"

def show(file: str, flags: list[str], result: dict) -> None:
    """Print a config's memory by number of ranks, where it fits, and its work."""
    config = read(file, flags)
    print(file, *flags)
    print("ranks" + "".join(f"{name:>12}" for name in COLUMNS) + "".join(f"{size:>8} GiB" for size in GPUS))
    for ranks, gib in result["gib"].items():
        print(f"{ranks:>5}" + "".join(f"{gib[name]:12.1f}" for name in COLUMNS)
              + "".join(f"{verdict(gib, size):>12}" for size in GPUS))
    print(f"Needs {machines(result)}.")
    trained = result["gib"]["1"]["moments"] / 2
    is_put_aside = config.sample_every > 0 and config.has_reference
    aside = f"{trained:.1f} GiB of host memory" if is_put_aside else "no memory"
    print(f"{result['parameters'] / 1e9:.2f} B parameters. A reference put aside takes {aside}; "
          "a checkpoint takes "
          f"{(3 + is_put_aside) * trained:.1f} GiB on disk, and in host memory while it is written.")
    print(*work(config, result["parameters"]), "", sep="\n", flush=True)

def flops_factor(config: Config) -> int:
    """FLOPs per parameter and token: 6 for training (4 with frozen weights), 2 per other forward pass."""
    passes = config.has_reference + (config.ratio_to == "old policy" and config.sample_every > 1)
    if LOSSES[config.loss].needs_mismatched and passes:  # for z0, the same passes and one of the policy
        passes = 2 * passes + 1
    return (4 if config.lora else 6) + 2 * passes

def work(config: Config, parameters: int) -> list[str]:
    """What a run does if all its sequences are the longest, in sentences."""
    prompt, completion, per_prompt, per_step = longest(config)
    steps = config.steps or 1
    sequences = steps * per_step
    drawn = sequences // per_prompt * config.group_size
    prompts = min(sequences // per_prompt, config.limit or sequences)
    per_factor = parameters * sequences * (prompt + completion)
    factor = flops_factor(config)
    hours = factor * per_factor / (0.4 * H100) / 3600
    lines = [f"{steps:,} steps, at most {prompts:,} prompts, {sequences:,} sequences of at most {prompt} + "
             f"{completion} tokens: {sequences * completion:,} tokens to train on. "
             f"{factor} x parameters x tokens = "
             f"{factor * per_factor:.2g} FLOPs, {hours:.2g} hours at 40% of an H100's bf16 rate."]
    if config.sample_every:
        drawing = 2 * parameters * drawn * (prompt + completion)
        lines += [f"{drawn:,} completions drawn, however seldom it draws: {drawing:.2g} FLOPs."]
    if config.sample_every > 1:
        online = flops_factor(dataclasses.replace(config, humanline=False, sample_every=1))
        share = 1 - online / (6 * factor)  # Amdahl
        seconds = (6 * factor - online) * per_factor / (0.4 * H100)
        rate = drawn * completion / seconds
        lines += ["Even if its own drawing cost nothing, it is 6 times faster than drawing at every step "
                  "only where that "
                  f"takes {share:.1%} of a step: {rate:,.0f} tokens/s on an H100, or fewer."]
    return lines

def row(file: str, flags: list[str], result: dict) -> str:
    """A config as a row of a table: model, loss, how, GPUs and the GiB that it takes on each."""
    config = read(file, flags)
    how = {0: "offline", 1: "online"}.get(config.sample_every, f"drawn every {config.sample_every} steps")
    how = f"{dict(mixed='mixed', bfloat16='bf16', float32='fp32')[config.dtype]}, {how}"
    if config.lora:
        how = f"LoRA {config.lora}, {how}"
    if "model_reward" in config.reward:
        how = f"{how}, reward model"
    name = re.sub("^.*/(Meta-)?|-Instruct$|-it$", "", config.model)
    gpus = ", ".join(f"{ranks} × {size} GB ({used:.0f})" for ranks, size, used in smallest(result)[:2])
    return f"| {name} | {humanline.in_words(config)} | {how} | {gpus} |"

def stored() -> dict[tuple[str, str], dict]:
    """The stored results, by config and flags."""
    results = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines()) if RESULTS.exists() else []
    return {(result["config"], result["flags"]): result for result in results}

def store(result: dict) -> None:
    results = stored() | {(result["config"], result["flags"]): result}
    lines = [json.dumps(results[key]) + "\n" for key in sorted(results)]
    RESULTS.write_text("".join(lines), encoding="utf-8")

def compare(file: str, flags: list[str]) -> dict:
    """The dry run's sum beside the real peak of a process of its own."""
    dry = sum(dry_run(file, flags, 1)[0].values())
    command = [sys.executable, __file__, "--real", file, *flags]
    real = int(subprocess.check_output(command, env=os.environ | ALLOCATOR))
    device = "GPU" if torch.cuda.is_available() else "CPU"
    print(f"{file} {' '.join(flags)}: dry {dry / GIB:.2f} GiB, measured {real / GIB:.2f} GiB on a {device}, "
          f"error {dry / real - 1:+.1%}", flush=True)
    return dict(device=device, dry=round(dry / GIB, 3), measured=round(real / GIB, 3))

def main(argv: list[str]) -> int:
    files = [word for word in argv if word.endswith(".toml")]
    own = {"--measure", "--real", "--store", "--table"} & set(argv)
    flags = [word for word in argv if word not in {*own, *files}]
    estimates = {}  # by the settings that change memory
    try:
        for file in files or sorted(map(str, (ROOT / "configs").glob("*.toml"))):
            name = dict(config=Path(file).stem, flags=" ".join(flags))
            if "--real" in own:
                print(real_run(file, flags))
                continue
            if "--table" in own:
                print(row(file, flags, stored()[name["config"], name["flags"]]))
                continue
            if "--measure" in own:
                name["flags"] = f"--measure {name['flags']}"
                result = name | compare(file, flags)
            else:
                settings = memory_settings(read(file, flags))
                key = json.dumps(settings)
                if key not in estimates:
                    estimates[key] = gib_by_ranks(file, flags)
                parameters, gib = estimates[key]
                result = name | dict(settings=settings, parameters=parameters, gib=gib)
                show(file, flags, result)
            if "--store" in own:
                store(result)
    except UserError as error:
        print(f"fits.py: error: {error}", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
