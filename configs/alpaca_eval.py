"""Convert the pairs written by `eval.py winrate` into the two files that AlpacaEval reads.

  # alpaca_eval.json is in the data set tatsu-lab/alpaca_eval
  jq -c '.[] | {prompt: .instruction}' alpaca_eval.json > prompts.jsonl
  python eval.py winrate --model RUN --against BASE --data prompts.jsonl --reward REWARD \\
      --out pairs.jsonl
  python configs/alpaca_eval.py pairs.jsonl
  alpaca_eval evaluate --model_outputs pairs-output.json --reference_outputs pairs-against.json

AlpacaEval joins the two files by `instruction`, which is the last message of each prompt here. To compare
with AlpacaEval's own reference outputs, evaluate without --prompt-template.
"""

import json
import sys
from pathlib import Path


def main(path: Path) -> None:
    pairs = [json.loads(line) for line in path.open("rb")]
    for side in ("output", "against"):
        source = {"generator": side, "dataset": path.stem}
        outputs = [
            {"instruction": pair["prompt"][-1]["content"], "output": pair[side], **source} for pair in pairs
        ]
        text = json.dumps(outputs, indent=2, ensure_ascii=False)
        path.with_name(f"{path.stem}-{side}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
