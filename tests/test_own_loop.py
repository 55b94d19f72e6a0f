"""The training loop in the README gives the same weights as the program."""

import re

import torch
from conftest import ROOT
from safetensors.torch import load_file


def test_the_loop_in_the_readme_trains_to_the_weights_of_the_program(run, tiny, data_files):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.search(r"## A loop of your own\n.*?```python\n(.*?)```", readme, re.DOTALL)[1]
    assert len(code.splitlines()) <= 25
    ours = dict(model=tiny, data=(data_files["pairs"],), steps=6, batch_size=4, lr=1e-2)
    settings = re.search(r"Config\((.*)\)", code)[1]
    code = code.replace(settings, f"**(dict({settings}) | {ours!r})")
    names = {}
    exec(code, names)
    folder = run("--loss grpo --sync-k 2 --warmup 0", data="pairs")
    theirs = load_file(folder / "final" / "model.safetensors")
    weights = dict(names["policy"].named_parameters())
    assert len(weights) > 5 and weights.keys() == theirs.keys()
    assert all(torch.equal(weights[name], theirs[name]) for name in theirs)
