"""The documentation agrees with the files, the flags and the metrics."""

import re
import shlex
import subprocess

import bench
import demo
import pytest
from conftest import ROOT, metrics

import eval as evaluation
import humanline

CLAIMS = ROOT / "tests" / "claims"
CONFIGS = ROOT / "configs"
TEXTS = [ROOT / "README.md", CONFIGS / "README.md", *sorted(CLAIMS.glob("*.md"))]
README = (ROOT / "README.md").read_text()
METRICS = (CLAIMS / "metrics.md").read_text()


def prose(text: str) -> str:
    """A Markdown text without its code."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`]*`", "", text)


def name_of(path) -> str:
    return path.name


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_link_has_a_target(path):
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if not target.startswith("http"):
            file = target.partition("#")[0]
            assert (path.parent / file).exists(), target


def test_every_path_in_the_readme_exists():
    paths = re.findall(r"(?:configs|tests)/[\w./-]*\w", README)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("path", [ROOT / "README.md", CLAIMS / "metrics.md"], ids=name_of)
def test_every_flag_in_the_documentation_exists(path):
    fields = humanline.Config.__dataclass_fields__
    flags = {name.replace("_", "-") for name in fields}
    flags |= {f"no-{name}" for name in flags}
    of_other_programs = {"nproc_per_node", "rounds", "train-steps", "compact"}
    used = set(re.findall(r"--([a-z][\w-]*)", path.read_text()))
    assert used <= flags | of_other_programs
    if path.name == "README.md":
        assert of_other_programs <= used


def test_every_eval_command_in_the_readme_and_the_configs_exists():
    commands = set(re.findall(r"python eval\.py (\w+)", evaluation.__doc__))
    assert len(commands) == len(evaluation.COMMANDS)
    paths = [ROOT / "README.md", *CONFIGS.rglob("*.toml"), *CONFIGS.glob("*.py")]
    for path in paths:
        used = set(re.findall(r"\beval\.py (\w+)", path.read_text()))
        assert used <= commands, path.name


def test_every_command_in_the_readme_is_a_valid_configuration(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"^(?:python|torchrun .*) humanline\.py (--.*)", README.replace("\\\n", ""), re.M)
    assert len(commands) == 3
    for command in commands:
        humanline.parse_config(shlex.split(command))


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_commit_in_the_documentation_exists(path):
    def git(*line):
        line = ["git", "-C", str(ROOT), *line]
        return subprocess.run(line, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("not a whole clone")
    for commit in set(re.findall(r"\b(?=[0-9]*[a-f])[0-9a-f]{7}\b", path.read_text())):
        assert git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0, commit


def test_the_readme_can_be_read_in_five_minutes():
    assert len(README.split()) <= 1300
    lines = README.splitlines()
    assert max(len(line) for line in lines if not line.startswith("|")) <= 100
    # Numbers count outside of code blocks and of the tables of what fits and how fast it is.
    fit_and_speed = README.partition("## Larger models")[2].partition("\n## ")[0]
    counted = [line for line in lines if not (line.startswith("|") and line in fit_and_speed)]
    assert len(re.findall(r"\d+(?:[.,]\d+)*", prose("\n".join(counted)))) <= 60


def test_the_readme_gives_four_or_five_verdicts():
    rows = re.findall(r"^\| .* \| \*\*(?:held|partly|not here|undecided)\*\* \| .*", README, re.M)
    assert len(rows) in (4, 5)  # test_claims.py holds them to the stored runs


def test_the_readme_says_how_long_the_files_are():
    said = re.findall(r"\(([\w/]+\.py)\)[^.\d]*?\b(?:has|in) (\d[\d,]+)", README)
    assert len(said) == 2
    for name, lines in said:
        counted = len((ROOT / name).read_text().splitlines())
        assert int(lines.replace(",", "")) == pytest.approx(counted, rel=0.02)


def test_the_readme_shows_what_the_demo_printed():
    shown = re.search(r"```text\n(prompt .*?)```", README, re.DOTALL)[1]
    timeless = lambda text: re.sub(r"in \d+ s|runs/[\w-]+", "", " ".join(text.split()))
    assert timeless(shown) == timeless(" ".join(demo.read()[""]["printed"]))


def test_the_readme_says_how_fast_it_is_as_in_the_stored_results():
    for row in bench.readme_table():
        assert row in README.splitlines(), "python tests/bench.py --what table"


def test_every_metric_is_documented_and_every_documented_metric_exists(run, tmp_path, data_files):
    runs = [
        run("--loss kto --positive-only --eval-every 3 --eval-data " + data_files["prompts"]),
        run("--loss grpo --positive-only --sample-every 2", data="prompts"),
        run("--loss dpo --no-humanline", data="pairs"),
    ]
    logged = set()
    for folder in runs:
        logged = logged.union(*metrics(folder))
    documented = set()
    for row in METRICS.splitlines():
        if row.startswith("| `"):
            documented |= set(re.findall(r"`(\w+)`", row.split("|")[1]))
    assert logged <= documented
    source = (ROOT / "humanline.py").read_text()
    for name in documented - logged:
        assert f'"{name}"' in source, name
