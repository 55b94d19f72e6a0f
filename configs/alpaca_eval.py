"""The pairs that `eval.py winrate` wrote, as the two files that AlpacaEval reads.

  jq -c '.[] | {prompt: .instruction}' alpaca_eval.json > prompts.jsonl  # from the data set tatsu-lab/alpaca_eval
  python eval.py winrate --model RUN --against BASE --data prompts.jsonl --reward REWARD --out pairs.jsonl
  python configs/alpaca_eval.py pairs.jsonl
  alpaca_eval evaluate --model_outputs pairs-output.json --reference_outputs pairs-against.json

AlpacaEval joins the two files by `instruction`, here the last message of each prompt; so ask without --prompt-template
where the other file is one of AlpacaEval's own.
"""

import json
import sys
from pathlib import Path


def main(path: Path) -> None:
    pairs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for side in ("output", "against"):
        about = {"generator": side, "dataset": path.stem}
        outputs = [{"instruction": pair["prompt"][-1]["content"], "output": pair[side], **about} for pair in pairs]
        to = path.with_name(f"{path.stem}-{side}.json")
        to.write_text(json.dumps(outputs, indent=2, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
