"""Options shared by the commands: MODEL, the engine's flags (made from EngineConfig) and the sampling flags."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Collection
from typing import Any

from lastrow.config import EngineConfig, parse_size
from lastrow.core.sampling_params import SamplingParams
from lastrow.models.config import ConfigError

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop")


def size(text: str) -> int:
    """argparse type of a size; argparse shows the message of ArgumentTypeError only."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder, hub id (owner/name) or tiny-e (default)")


def add_engine_flags(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """One flag per field of EngineConfig (all but `model`, or those named in `only`). A flag not given stays out of the namespace,
    so that the defaults are EngineConfig's alone."""
    group = parser.add_argument_group("engine")
    hints = typing.get_type_hints(EngineConfig)
    for item in dataclasses.fields(EngineConfig):
        if item.name == "model" or (only is not None and item.name not in only):
            continue
        add_flag(group, item.name, hints[item.name], item.default, item.metadata)


def add_flag(group: Any, name: str, hint: Any, default: Any, metadata: Any) -> None:
    kinds = [t for t in (typing.get_args(hint) or (hint,)) if t is not type(None)]
    kind = str if len(kinds) > 1 else kinds[0]  # several types: the command line brings the text form
    flag, text = "--" + name.replace("_", "-"), metadata["help"]
    if kind is bool:
        if default is not None:
            text += f" (default: {'on' if default else 'off'})"
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    if default is not None:
        text += f" (default: {default})"
    options: dict[str, Any] = {"type": size if metadata["size"] else kind, "help": text.replace("%", "%%")}
    if metadata["choices"]:
        options |= {"choices": metadata["choices"], "metavar": "|".join(metadata["choices"])}
    else:
        options["metavar"] = "SIZE" if metadata["size"] else "N" if kind in (int, float) else "NAME"
    group.add_argument(flag, default=argparse.SUPPRESS, **options)


def engine_options(args: argparse.Namespace, text: bool = False) -> dict[str, Any]:
    """The engine flags that were given, as keyword arguments of EngineConfig and LLM; --shape implies --load-format dummy.

    text: the command needs a tokenizer. Raises ConfigError at once, before torch is imported and a model is loaded."""
    options = {item.name: getattr(args, item.name) for item in dataclasses.fields(EngineConfig) if hasattr(args, item.name)}
    if args.model is None:
        del options["model"]
    if options.get("shape"):
        options.setdefault("load_format", "dummy")
        if text:
            raise ConfigError(f"shape {options['shape']!r} has dummy weights and no tokenizer: give a checkpoint folder or hub id as MODEL")
        if args.model is not None:
            raise ConfigError(f"MODEL is {args.model!r}, and --shape {options['shape']} is a model without files: give one of the two")
    EngineConfig(**options)
    return options


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the model's generation_config.json)")
    group.add_argument("--temperature", type=float, metavar="N", help="0 takes the most likely token")
    group.add_argument("--top-p", type=float, metavar="N", help="keep the most likely tokens that together reach this probability")
    group.add_argument("--top-k", type=int, metavar="N", help="keep this many tokens; 0: all")
    group.add_argument("--min-p", type=float, metavar="N", help="drop tokens below this share of the best one's probability")
    group.add_argument("--max-tokens", type=size, metavar="SIZE", help="longest answer in tokens (default: 512)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; may be given several times")


def sampling_params(args: argparse.Namespace, defaults: SamplingParams, **fixed: Any) -> SamplingParams:
    """Flags over the model's defaults. --seed makes the sampling repeatable as well. Raises ValueError naming the field."""
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if hasattr(args, "seed"):
        given["seed"] = args.seed
    return dataclasses.replace(defaults, **{"max_tokens": 512, **given, **fixed})
