"""Writes yesno.jsonl and chat.jsonl, the data of the two lm-eval tasks beside this file, into the current folder.

    cd $(mktemp -d) && python .../tools/lm_eval/make_data.py && cp .../tools/lm_eval/*.yaml .
    lm_eval run --model local-completions --model_args model=tiny-e,base_url=http://127.0.0.1:8000/v1/completions \\
        --tasks tiny_e_yesno --include_path .
    lm_eval run --model local-chat-completions --apply_chat_template \\
        --model_args model=tiny-e,base_url=http://127.0.0.1:8000/v1/chat/completions --tasks tiny_e_chat --include_path ."""

import json
from pathlib import Path

HELDOUT = Path(__file__).parents[2] / "src" / "lastrow" / "assets" / "tiny-e" / "heldout.jsonl"


def main() -> None:
    rows = [json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()]
    with open("yesno.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            answer = row["output"].removesuffix("<turn|>") if row["task"] == "yesno" else ""
            for choices in (["A", "B"], ["yes", "no"]):
                if answer in choices:
                    item = {"prompt": row["prompt"], "choices": choices, "gold": choices.index(answer)}
                    file.write(json.dumps(item) + "\n")
    with open("chat.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            messages = row["conversation"]["messages"] if row["task"] == "chat" else []
            if len(messages) == 1:
                answer = row["output"].removesuffix("<turn|>")
                file.write(json.dumps({"question": messages[0]["content"], "answer": answer}) + "\n")


if __name__ == "__main__":
    main()
