"""`lastrow info`: needs config.json or a named shape, nothing else."""

from __future__ import annotations

import argparse
import json

from lastrow.cli.options import add_engine_flags, add_model, engine_options, size
from lastrow.config import EngineConfig
from lastrow.models.config import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="memory of the card, 24G for instance: say what fits beside the weights"
    )
    parser.add_argument("--json", action="store_true", help="the whole document, with stable keys")
    parser.add_argument("--plot", metavar="FILE", help="draw layers, owners, readers, cut and work to an .svg, .png or .pdf file")
    used = ("device", "revision", "shape", "dtype", "gpu_memory_utilization", "kv_cache_memory_bytes", "block_size", "max_num_seqs")
    add_engine_flags(parser, only=(*used, "max_num_batched_tokens", "embed_weights"))


def run(args: argparse.Namespace) -> None:
    from lastrow.harness.info import EngineLimits, describe, render
    from lastrow.models.config import from_file
    from lastrow.models.shapes import named_shape
    from lastrow.weights.resolve import resolve_model

    engine = EngineConfig(**engine_options(args))
    if args.memory is not None and args.memory <= 0:
        raise ConfigError(f"memory is {args.memory}: a positive size is needed")
    engine = engine.for_device(on_gpu=engine.device != "cpu")  # memory is that of a card unless --device cpu says otherwise
    config = named_shape(engine.shape) if engine.shape else from_file(resolve_model(engine.model, engine.revision, config_only=True))
    document = describe(
        config,
        dtype=config.dtype if engine.dtype == "auto" else engine.dtype,
        memory=args.memory,
        kv_cache_memory_bytes=engine.kv_cache_memory_bytes,
        limits=EngineLimits(
            engine.gpu_memory_utilization,
            engine.block_size or 0,
            engine.max_num_seqs,
            engine.max_num_batched_tokens or 0,
            engine.embed_weights,
        ),
    )
    if args.plot:
        from lastrow.harness.info_plot import plot

        try:
            plot(document, args.plot)
        except OSError as error:
            raise ConfigError(f"--plot {args.plot}: cannot be written ({error.strerror or error})") from None
    print(json.dumps(document, indent=1) if args.json else render(document))
