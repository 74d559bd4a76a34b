"""EngineConfig -> LLMEngine: read the config, plan the memory, load the weights, put the parts together."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import torch

from lastrow.config import EngineConfig, SpeculativeConfig
from lastrow.core.limits import SchedulerConfig
from lastrow.core.scheduler import Scheduler
from lastrow.engine.cache import EngineCache, make_kv_manager
from lastrow.engine.cuda_graphs import CUDAGraphs, GraphBuckets, attention_tile_rows
from lastrow.engine.draft_graphs import DraftGraphs
from lastrow.engine.engine import LLMEngine
from lastrow.engine.heap import keep_freed_memory
from lastrow.engine.invariance import check_invariance
from lastrow.engine.memory import MemoryForecast, forecast
from lastrow.engine.model_runner import ModelRunner
from lastrow.engine.proposers import AssistantProposer, Drafter, NgramProposer
from lastrow.engine.relaxed_acceptance import RelaxedAcceptance
from lastrow.engine.spec_decode import Speculator
from lastrow.engine.transfer import pin
from lastrow.kernels.dispatch import ReferenceOps
from lastrow.kernels.fixed_order_ops import FixedOrderReferenceOps
from lastrow.kernels.ops import Ops
from lastrow.kernels.triton_ops import TritonOps
from lastrow.kv.layout import DTYPE_BYTES
from lastrow.models import assistant_config
from lastrow.models.config import ConfigError, Gemma4Config, from_file
from lastrow.models.gemma4 import Gemma4Model
from lastrow.models.gemma4_assistant import Gemma4Assistant
from lastrow.models.shapes import named_shape
from lastrow.tokenizer import STOP_IDS, Tokenizer
from lastrow.weights.assistant import dummy_assistant_weights, load_assistant_weights
from lastrow.weights.assistant import expected_shapes as assistant_shapes
from lastrow.weights.dummy import dummy_weights
from lastrow.weights.loader import load_model_weights
from lastrow.weights.resolve import resolve_model

logger = logging.getLogger("lastrow")
DEFAULT_DRAFTS = 4


def build_engine(config: EngineConfig, model: Gemma4Model | None = None, buckets: GraphBuckets | None = None) -> LLMEngine:
    """A ready engine. model: weights that are there already, for several engines over one set of them. buckets: what is captured
    (default: all sizes up to the limits). Raises ConfigError, TokenizerError or WeightsError with the reason."""
    device = choose_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    config = config.for_device(device.type == "cuda")
    folder = None if config.shape else resolve_model(config.model, config.revision)
    shape = named_shape(config.shape) if config.shape else from_file(folder or "")
    dtype = choose_dtype(config.dtype, device)
    max_model_len = config.max_model_len or shape.max_position_embeddings
    if max_model_len > shape.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {max_model_len}: the model was made for {shape.max_position_embeddings} positions (max_position_embeddings)"
        )
    config = replace(config, batch_invariant=sums_in_fixed_order(config, shape, dtype, device))
    drafts = most_drafts(config.speculative)
    plan = forecast(config, shape, dtype, device, max_model_len, assistant_bytes(config.speculative, shape, dtype), drafts)
    logger.info("%s", plan.summary())
    tokenizer = Tokenizer(folder) if folder is not None else None
    model = model or load_model(config, shape, folder, getattr(torch, dtype), device, max_model_len)
    if config.batch_invariant:
        logger.info("batch_invariant: %d matmuls compared, all bits equal", check_invariance(model.ops, model.weights, shape))
    binder = PoolBinder(config, model, plan.max_num_batched_tokens, max_model_len, buckets)
    cache = EngineCache(shape, plan, device, binder)
    runner = ModelRunner(
        model, cache.new_pool(plan), vocab_size=shape.vocab_size, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len,
        block_size=plan.budget.block_size, device=device,
        encode=None if tokenizer is None else lambda text: tokenizer.encode(text, add_bos=False),
        attention_plans=("tiled", "rows") if config.batch_invariant else ("auto", "auto"),
        max_num_batched_tokens=plan.max_num_batched_tokens,
    )  # fmt: skip
    binder.capture(runner)
    stops = STOP_IDS if tokenizer is None else tokenizer.eos_token_ids
    if config.speculative is not None:
        runner.speculator = make_speculator(config.speculative, model, runner, binder)
        runner.speculator.grammars = runner.grammars
        runner.relaxed = make_relaxed(config.relaxed_acceptance, tokenizer)
    return LLMEngine(
        make_scheduler(config, plan, max_model_len), runner, tokenizer, vocab_size=shape.vocab_size,
        stop_token_ids=stops | frozenset(shape.eos_token_ids), seed=config.seed,
        priority_scheduling=config.scheduling_policy == "priority", cache=cache,
    )  # fmt: skip


class PoolBinder:
    """Makes what holds addresses of a runner's pool: the captured graphs, and those of the drafter over the same block tables."""

    def __init__(
        self, config: EngineConfig, model: Gemma4Model, step_tokens: int, max_model_len: int, buckets: GraphBuckets | None = None
    ) -> None:
        self.model = model
        self.captures = config.uses_graphs(model.weights.embed.device.type) and isinstance(model.ops, TritonOps)
        self.drafts = most_drafts(config.speculative)
        self.buckets = buckets or GraphBuckets.for_limits(config.max_num_seqs * (1 + self.drafts), step_tokens, max_model_len)
        self.assistant: Gemma4Assistant | None = None

    def __call__(self, runner: ModelRunner) -> None:
        """For a runner that has a new pool."""
        self.capture(runner)
        if runner.speculator is not None and isinstance(runner.speculator.proposer, AssistantProposer):
            runner.speculator.proposer.use_pool(self.drafter(runner), runner.pool)

    def capture(self, runner: ModelRunner) -> None:
        if isinstance(self.model.ops, TritonOps):
            runner.inputs.use_tiles(attention_tile_rows(self.model, runner.pool))
        if self.captures:
            graphs = CUDAGraphs(self.model, runner.pool, runner.inputs, self.buckets, verifies=self.drafts > 0)
            graphs.warm_up()
            runner.use_graphs(graphs)

    def drafter(self, runner: ModelRunner) -> Drafter:
        """`assistant`, its steps captured where the target's are."""
        assert self.assistant is not None, "an AssistantProposer was made from an assistant"
        if not self.captures:
            return self.assistant
        inputs = runner.inputs
        drafter = DraftGraphs(
            self.assistant, runner.pool, inputs.block_tables, inputs.null_slot, self.buckets.contexts, inputs.null_slot
        )  # fmt: skip
        drafter.warm_up()
        return drafter


def choose_device(name: str) -> torch.device:
    """auto: a GPU when there is one. Raises ConfigError for a GPU that is not there."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("device is 'cuda': torch sees no GPU here; use device=cpu or install a CUDA build of torch")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


def choose_dtype(name: str, device: torch.device) -> str:
    """auto: float32 on a CPU, bfloat16 on a GPU."""
    return name if name != "auto" else "bfloat16" if device.type == "cuda" else "float32"


def sums_in_fixed_order(config: EngineConfig, shape: Gemma4Config, dtype: str, device: torch.device) -> bool:
    """batch_invariant where the user did not say: on with drafts in bfloat16, because a verified row is one of several and must get the
    token that it would get alone. In float32 the order of a sum moves a logit by a millionth, and no answer of 480 parted; there a fixed
    order would cost a CPU more than drafts bring. Raises ConfigError where it is needed and cannot be had."""
    if config.batch_invariant and shape.is_moe:
        raise ConfigError("batch_invariant: the experts of a mixture are not computed in a fixed order; run without it")
    if config.batch_invariant is not None:
        return config.batch_invariant
    if config.speculative is None or dtype == "float32":
        return False
    kernels = device.type == "cuda" and config.backend != "reference"  # no library's bf16 matmuls keep an order by themselves
    if shape.is_moe or not kernels:
        what = "a mixture of experts" if shape.is_moe else f"the reference backend on {device.type}"
        raise ConfigError(
            f"speculative_config: in bfloat16 {what} rounds a verified row otherwise than one alone, and answers may part from plain "
            "decoding's; use dtype float32, or accept it with batch_invariant=False (--no-batch-invariant)"
        )
    return True


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, batch_invariant: bool) -> Ops:
    """auto: triton on a GPU, else reference. Raises ConfigError where the named one does not run."""
    if name == "auto":
        name = "triton" if device.type == "cuda" else "reference"
    logger.info("backend %s on %s", name, device)
    if name == "reference":
        return FixedOrderReferenceOps() if batch_invariant else ReferenceOps()
    try:
        return TritonOps(batch_invariant, device, dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def load_model(
    config: EngineConfig, shape: Gemma4Config, folder: Path | None, dtype: torch.dtype, device: torch.device, max_positions: int
) -> Gemma4Model:
    ops = choose_backend(config.backend, device, dtype, bool(config.batch_invariant))
    on_host = config.embed_weights == "host"
    if on_host and not shape.has_ple:
        raise ConfigError(f"embed_weights is 'host': {shape.name or 'the model'} has no per-layer embeddings; leave it at device")
    ple_device = "cpu" if on_host else device
    if config.load_format == "dummy" or folder is None:
        weights = dummy_weights(shape, ops.pack_gate_up, dtype, device, config.seed % 2**63, ple_device)
    else:
        weights = load_model_weights(folder, shape, ops.pack_gate_up, dtype, device, ple_device)
    if on_host and device.type == "cuda" and weights.ple_table is not None:
        weights.ple_table = pin(weights.ple_table.to(dtype))
    return Gemma4Model(shape, weights, ops, max_positions)


def make_speculator(config: SpeculativeConfig, model: Gemma4Model, runner: ModelRunner, binder: PoolBinder) -> Speculator:
    """The proposer that `config` asks for. Raises ConfigError or WeightsError where the assistant does not fit the model."""
    if config.model is None:
        proposer = NgramProposer(*config.prompt_lookup)
    else:
        binder.assistant = load_assistant(config.model, model)
        proposer = AssistantProposer(binder.drafter(runner), runner.pool, runner.inputs)
    return Speculator(proposer, binder.drafts, runner.inputs, config.adaptive, config.simulated_acceptance)


def most_drafts(config: SpeculativeConfig | None) -> int:
    """Most drafts of one step: what is asked for, else what the assistant's checkpoint advises; 0 without drafts."""
    if config is None:
        return 0
    advice = None
    if config.model not in (None, "dummy"):
        advice = assistant_config.from_folder(resolve_model(config.model)).num_draft_tokens
    return config.num_speculative_tokens or advice or DEFAULT_DRAFTS


def make_relaxed(share: float | None, tokenizer: Tokenizer | None) -> RelaxedAcceptance | None:
    """Raises ConfigError where the model has no thoughts to relax in."""
    if share is None:
        return None
    marks = {} if tokenizer is None else tokenizer.special_ids
    if "channel_start" not in marks or "channel_end" not in marks:
        raise ConfigError(f"relaxed_acceptance is {share}: this model's tokenizer has no <|channel> to mark a thought")
    return RelaxedAcceptance(share, marks["channel_start"], marks["channel_end"])


def load_assistant(name: str, model: Gemma4Model) -> Gemma4Assistant:
    """The drafter in folder or hub repository `name`, or, named dummy, random weights of the published shape."""
    pack, embed = model.ops.pack_gate_up, model.weights.embed
    if name == "dummy":
        shape = assistant_config.published_shape(model.config)
        weights = dummy_assistant_weights(shape, pack, embed.dtype, embed.device)
    else:
        folder = resolve_model(name)
        shape = assistant_config.from_folder(folder)
        shape.target_layers(model.config)  # a misfit is named before anything is loaded
        weights = load_assistant_weights(folder, shape, pack, embed.dtype, embed.device)
    # What stands does not depend on how drafts are summed, and a fixed order costs a drafter five times its time (16 sequences, a CPU).
    return Gemma4Assistant(shape, weights, model, ReferenceOps() if isinstance(model.ops, FixedOrderReferenceOps) else None)


def assistant_bytes(config: SpeculativeConfig | None, shape: Gemma4Config, dtype: str) -> int:
    """Weights of the drafter, 0 without one."""
    if config is None or config.model is None:
        return 0
    dummy = config.model == "dummy"
    drafter = assistant_config.published_shape(shape) if dummy else assistant_config.from_folder(resolve_model(config.model))
    return DTYPE_BYTES[dtype] * sum(math.prod(shape) for shape in assistant_shapes(drafter).values())


def make_scheduler(config: EngineConfig, plan: MemoryForecast, max_model_len: int) -> Scheduler:
    """The scheduler over the blocks that `plan` bought."""
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_prefill_seqs=config.max_prefill_seqs,
        max_prefill_tokens_while_decoding=config.max_prefill_tokens_while_decoding,
    )
    return Scheduler(limits, make_kv_manager(plan, config.enable_prefix_caching))
