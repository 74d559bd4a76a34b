"""A file of questions, with the options that belong to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lastrow.decisions.questions import DecisionError


def read_question_file(path: Path, known: Sequence[str]) -> dict[str, Any]:
    """yaml (.yaml, .yml; needs pyyaml, the extra `data`) or json: a list of questions, or a mapping with `questions` and others of the keys
    `known`. A prompt template named there lies beside the file. Raises DecisionError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DecisionError(f"--questions {path}: not readable ({error})") from None
    parsed = _parse(path, text)
    value: Any = {"questions": parsed} if isinstance(parsed, list) else parsed
    if not isinstance(value, dict) or "questions" not in value:
        raise DecisionError(f"--questions {path}: a list of questions, or a mapping with the key questions, is needed")
    if unknown := [key for key in value if key not in known]:
        raise DecisionError(f"--questions {path}: the key {unknown[0]!r} is not known: one of {', '.join(known)} is needed")
    template = value.get("prompt_template")
    if isinstance(template, str) and "{" not in template:
        value["prompt_template"] = str(path.parent / template)
    return value


def _parse(path: Path, text: str) -> Any:
    if path.suffix.lower() == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise DecisionError(f"--questions {path}: no JSON ({error})") from None
    try:
        import yaml
    except ImportError:
        raise DecisionError(
            f"--questions {path}: yaml needs pyyaml: pip install 'lastrow[data]', or write the questions as .json"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DecisionError(f"--questions {path}: no YAML ({' '.join(str(error).split())})") from None
