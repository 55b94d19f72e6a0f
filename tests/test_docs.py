"""The documentation agrees with the files, the flags and the metrics."""

import re
import subprocess

import pytest
from conftest import ROOT, metrics

import eval as evaluation
import humanline

TEXTS = [ROOT / "README.md", *sorted((ROOT / "tests" / "claims").glob("*.md")), ROOT / "configs" / "trl.md"]
README = (ROOT / "README.md").read_text()
METRICS = (ROOT / "tests" / "claims" / "metrics.md").read_text()


def prose(text: str) -> str:
    """A Markdown text without its code."""
    return re.sub(r"`[^`]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_link_has_a_target(path):
    targets = re.findall(r"\]\(([^)]+)\)", path.read_text())
    files = [target.partition("#")[0] for target in targets if not target.startswith("http")]
    assert [file for file in files if not (path.parent / file).exists()] == []


def test_every_path_in_the_readme_exists():
    paths = re.findall(r"(?:configs|tests)/[\w./-]*\w", README)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "tests" / "claims" / "metrics.md"], ids=lambda path: path.name)
def test_every_flag_in_the_documentation_exists(path):
    flags = {name.replace("_", "-") for name in humanline.Config.__dataclass_fields__}
    flags |= {f"no-{name}" for name in flags}
    of_other_programs = {"nproc_per_node", "shutdown-timeout", "help", "real", "rounds", "train-steps"}
    used = set(re.findall(r"--([a-z][\w-]*)", path.read_text()))
    assert used - flags - of_other_programs == set()
    assert path.name != "README.md" or of_other_programs <= used


def test_every_eval_command_in_the_readme_and_the_configs_exists():
    commands = set(re.findall(r"python eval\.py (\w+)", evaluation.__doc__))
    assert len(commands) == len(evaluation.COMMANDS)
    for path in [ROOT / "README.md", *(ROOT / "configs").rglob("*.toml"), *(ROOT / "configs").glob("*.py")]:
        assert set(re.findall(r"\beval\.py (\w+)", path.read_text())) <= commands, path.name


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_commit_in_the_documentation_exists(path):
    git = lambda *line: subprocess.run(["git", "-C", str(ROOT), *line], capture_output=True, text=True)
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("not a whole clone")
    named = set(re.findall(r"\b(?=[0-9]*[a-f])[0-9a-f]{7}\b", path.read_text()))
    assert [name for name in named if git("merge-base", "--is-ancestor", name, "HEAD").returncode] == []


def test_the_readme_can_be_read_in_five_minutes():
    assert len(README.split()) <= 1500
    without_tables = "\n".join(line for line in README.splitlines() if not line.startswith("|"))
    assert len(re.findall(r"\d+(?:[.,]\d+)*", prose(without_tables))) <= 60
    assert [line for line in without_tables.splitlines() if len(line) > 100] == []


def test_every_metric_is_documented_and_every_documented_metric_exists(run, tmp_path, data_files):
    runs = [run("--loss kto --taper --eval-every 3 --eval-data " + data_files["prompts"]),
            run("--loss grpo --taper --sample-every 2", data="prompts"), run("--loss dpo --no-humanline", data="pairs")]
    logged = {name for folder in runs for line in metrics(folder) for name in line}
    rows = [row for row in METRICS.splitlines() if row.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert logged <= listed
    source = (ROOT / "humanline.py").read_text()
    assert [name for name in listed - logged if name.rpartition("NAME")[0] not in source and f'"{name}"' not in source] == []
