"""`lastrow info`: what a model is, what it costs and what computing only the wanted rows saves. From the config alone, no torch.

`describe` makes the JSON document (its keys are stable); `render` writes it as text; `info_plot` draws it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

from lastrow.engine.footprint import GRAPH_BYTES, activation_bytes, kv_bytes_of_card, ple_table_bytes, weight_bytes
from lastrow.kv.layout import KVBudget, KVLayout, divide_budget, layouts_by_format, readers
from lastrow.models.config import Gemma4Config
from lastrow.weights.names import global_shapes, layer_shapes

SEQUENCE_LENGTHS = (1024, 8192, 32_768, 131_072)
CARDS = (8, 24, 80, 141)  # GB (10^9) of the cards that the document has a row for
CARD_SEQUENCE = 32_768


@dataclass(frozen=True)
class EngineLimits:
    """The engine options that memory depends on."""

    gpu_memory_utilization: float = 0.9
    block_size: int = 64
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    embed_weights: str = "device"


def describe(
    config: Gemma4Config,
    dtype: str = "bfloat16",
    memory: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    limits: EngineLimits | None = None,
) -> dict[str, Any]:
    """The document of `lastrow info --json`.

    memory: bytes of a card that nobody else uses. K/V gets what the engine's own plan gives it: gpu_memory_utilization of it less
    weights, one step's activations and what CUDA takes. kv_cache_memory_bytes: bytes of the K/V pool itself, in place of `memory`."""
    limits = limits or EngineLimits()
    parameters = parameters_by_part(config)
    document = {
        "model": config.name,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "sliding_window": config.sliding_window,
        "max_position_embeddings": config.max_position_embeddings,
        "dtype": dtype,
        "owners": list(config.owners),
        "cut": config.cut,
        "kv_source": list(config.kv_source),
        "readers": {str(owner): others for owner, others in readers(config).items()},
        "layer_table": [layer_facts(config, i) for i in range(config.num_hidden_layers)],
        "parameters": parameters,
        "weight_bytes": weight_bytes(config, dtype),
        "ple_table_bytes": ple_table_bytes(config, dtype),
        "kv_bytes_per_token": {
            form: {"full": layout.full_bytes_per_token, "sliding": layout.sliding_bytes_per_token}
            for form, layout in layouts_by_format(config, dtype).items()
        },
        "work_per_prompt_token": work_per_prompt_token(config),
        "step_tokens": limits.max_num_batched_tokens,
        "cards": cards(config, dtype, limits),
    }
    kv_bytes = kv_cache_memory_bytes
    if kv_bytes is None and memory is not None:
        kv_bytes = kv_bytes_on_card(config, dtype, memory, limits)
    if kv_bytes is not None:
        utilization = limits.gpu_memory_utilization if kv_cache_memory_bytes is None else None
        document["capacity"] = {
            "memory": memory,
            **asdict(limits),
            "gpu_memory_utilization": utilization,
            "weight_bytes": weight_bytes(config, dtype, limits.embed_weights),
            "activation_bytes": activation_bytes(config, dtype, limits.max_num_batched_tokens, limits.max_num_seqs),
            "runtime_bytes": GRAPH_BYTES,
            "kv_cache_memory_bytes": kv_bytes,
            "formats": {form: capacity(config, layout, kv_bytes, limits) for form, layout in layouts_by_format(config, dtype).items()},
        }
    return document


def kv_bytes_on_card(config: Gemma4Config, dtype: str, memory: int, limits: EngineLimits) -> int:
    """Bytes left for K/V on a card of `memory` bytes, as engine/memory.py plans it; not positive where the model does not fit."""
    weights = weight_bytes(config, dtype, limits.embed_weights)
    activations = activation_bytes(config, dtype, limits.max_num_batched_tokens, limits.max_num_seqs)
    return kv_bytes_of_card(memory, limits.gpu_memory_utilization, 0, weights, activations)


def cards(config: Gemma4Config, dtype: str, limits: EngineLimits) -> list[dict[str, Any]]:
    """For every card size, with the per-layer table on the card and off it, by format: how many sequences of CARD_SEQUENCE tokens
    (or the model's longest) fit at once when max_num_seqs is that number, and the tokens of full attention then."""
    length = min(CARD_SEQUENCE, config.max_position_embeddings)
    rows = []
    for gigabytes in CARDS:
        for place in ("device", "host") if config.has_ple else ("device",):
            of_card = replace(limits, embed_weights=place)
            formats = {
                form: _most_sequences(config, dtype, layout, gigabytes * 10**9, of_card, length)
                for form, layout in layouts_by_format(config, dtype).items()
            }
            rows.append({"memory": gigabytes * 10**9, "embed_weights": place, "sequence_tokens": length, "formats": formats})
    return rows


def _most_sequences(
    config: Gemma4Config, dtype: str, layout: KVLayout, memory: int, limits: EngineLimits, length: int
) -> dict[str, int]:  # fmt: skip
    """The largest n that fits with max_num_seqs=n, by bisection: more sequences need more of everything."""

    def held(n: int) -> KVBudget | None:
        of_n = replace(limits, max_num_seqs=n)
        try:
            kv_bytes = kv_bytes_on_card(config, dtype, memory, of_n)
            budget = divide_budget(layout, kv_bytes, limits.block_size, n, max(n, limits.max_num_batched_tokens))
        except ValueError:
            return None
        return budget if budget.num_sequences(layout, length) >= n else None

    low, high = 0, 1
    while held(high) is not None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if held(middle) is not None else (low, middle)
    budget = held(low) if low else None
    return {"sequences": low, "full_tokens": budget.full_tokens if budget is not None else 0}


def layer_facts(config: Gemma4Config, layer: int) -> dict[str, Any]:
    """One row of the layer table; macs are multiply-accumulates per row."""
    return {
        "layer": layer,
        "type": "full" if config.is_full(layer) else "sliding",
        "kv_source": config.kv_source[layer],
        "head_dim": config.layer_head_dim(layer),
        "kv_heads": config.layer_kv_heads(layer),
        "intermediate_size": config.layer_intermediate_size(layer),
        "macs": layer_macs(config, layer),
    }


def parameters_by_part(config: Gemma4Config) -> dict[str, int]:
    """Parameters the engine reads, by part; the parts add up to `total`. The tied head is counted once, as the token table."""
    parts: dict[str, int] = defaultdict(int)
    for name, shape in global_shapes(config).items():
        parts[_part(name)] += math.prod(shape)
    for layer in range(config.num_hidden_layers):
        for name, shape in layer_shapes(config, layer).items():
            parts[_part(name)] += math.prod(shape)
    names = ("token_table", "ple_table", "ple_projections", "attention", "mlp", "experts", "norms_and_scalars")
    return {name: parts[name] for name in names if parts[name]} | {"total": sum(parts.values())}


def _part(name: str) -> str:
    if name.startswith("embed_tokens."):
        return "token_table"
    if name.startswith("embed_tokens_per_layer."):
        return "ple_table"
    if name.endswith("_proj.weight") and name.startswith(("self_attn.", "mlp.")):
        return "attention" if name.startswith("self_attn.") else "mlp"
    if name in ("per_layer_model_projection.weight", "per_layer_input_gate.weight", "per_layer_projection.weight"):
        return "ple_projections"
    return "experts" if name.startswith(("experts.", "router.proj")) else "norms_and_scalars"


def layer_macs(config: Gemma4Config, layer: int) -> dict[str, int]:
    """Multiply-accumulates of the layer's matmuls with weights, per row. kv is the part of attention that writes K/V.

    ple: gate, projection and the layer's share of the model projection. Attention scores depend on the context and are not in."""
    size = {name: math.prod(shape) for name, shape in layer_shapes(config, layer).items()}
    kv = size.get("self_attn.k_proj.weight", 0) + size.get("self_attn.v_proj.weight", 0)
    mlp = sum(size[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    if config.is_moe:
        experts = size["experts.gate_up_proj"] + size["experts.down_proj"]
        mlp += size["router.proj.weight"] + experts * config.top_k_experts // config.num_experts
    ple = 3 * config.hidden_size * config.hidden_size_per_layer_input
    return {"kv": kv, "attention": kv + size["self_attn.q_proj.weight"] + size["self_attn.o_proj.weight"], "mlp": mlp, "ple": ple}


def work_per_prompt_token(config: Gemma4Config) -> dict[str, Any]:
    """Multiply-accumulates per prompt token, without and with the per-layer embeddings' matmuls.

    total: every layer on every row. layer_border: what remains per row when layers that share K/V run on wanted rows only.
    with_cut: when the last owner's queries, MLP and PLE do so too, as this engine works. ceiling_*: total divided by that, the
    largest possible gain of a long prompt's matmuls."""

    def account(ple: bool) -> dict[str, Any]:
        macs = [layer_macs(config, i) for i in range(config.num_hidden_layers)]
        layers = [m["attention"] + m["mlp"] + (m["ple"] if ple else 0) for m in macs]
        owners = sum(layers[i] for i in config.owners)
        cut = sum(layers[i] for i in config.owners if i != config.cut) + macs[config.cut]["kv"]
        total = sum(layers)
        return {
            "owner_layers": owners,
            "sharing_layers": total - owners,
            "total": total,
            "layer_border": owners,
            "with_cut": cut,
            "ceiling_layer_border": round(total / owners, 4),
            "ceiling_with_cut": round(total / cut, 4),
        }

    return {"projections": account(ple=False), "projections_and_ple": account(ple=True)}


def capacity(config: Gemma4Config, layout: KVLayout, kv_bytes: int, limits: EngineLimits) -> dict[str, Any]:
    """What a K/V pool of `kv_bytes` holds: tokens of each group, and sequences by length (limited by memory, not by max_num_seqs)."""
    try:
        budget = divide_budget(layout, kv_bytes, limits.block_size, limits.max_num_seqs, limits.max_num_batched_tokens)
    except ValueError:
        return {"fits": False, "full_tokens": 0, "sliding_tokens": 0, "sequences": {}}
    lengths = sorted({min(n, config.max_position_embeddings) for n in SEQUENCE_LENGTHS})
    sequences = {str(n): budget.num_sequences(layout, n) for n in lengths}
    return {"fits": True, "full_tokens": budget.full_tokens, "sliding_tokens": budget.sliding_tokens, "sequences": sequences}


# -------------------------------------------------------------------------------------------------- text
def render(document: dict[str, Any]) -> str:
    """The document as text of up to 100 columns."""
    parts = (_head, _layer_lines, _cost_lines, _work_lines, _card_lines, _capacity_lines)
    return "\n".join(line for part in parts for line in part(document))


def _head(d: dict[str, Any]) -> list[str]:
    return [
        f"{d['model']}: {d['layers']} layers, hidden {d['hidden_size']}, vocabulary {d['vocab_size']:,}, window {d['sliding_window']}, "
        f"up to {d['max_position_embeddings']:,} tokens",
        f"K/V is written by {len(d['owners'])} layers and read by all {d['layers']}; after layer {d['cut']} has written its K/V, only "
        "wanted rows go on",
        "",
    ]


def _layer_lines(d: dict[str, Any]) -> list[str]:
    lines = [f"{'layer':>5}  {'type':<8}{'head dim':>9}{'kv heads':>9}  {'keys and values':<46}{'MLP':>6}{'million MACs':>14}"]
    for row in d["layer_table"]:
        i, source, macs = row["layer"], row["kv_source"], row["macs"]
        readers = d["readers"].get(str(i), [])
        kv = f"reads layer {source}" if source != i else "writes" + (f", read by {ranges(readers)}" if readers else "")
        work = (macs["attention"] + macs["mlp"] + macs["ple"]) / 1e6
        lines.append(
            f"{i:>5}  {row['type']:<8}{row['head_dim']:>9}{row['kv_heads']:>9}  {kv:<46}{row['intermediate_size']:>6}{work:>14.2f}"
            + ("  <- cut" if i == d["cut"] else "")
        )
    return [*lines, ""]


def ranges(numbers: list[int]) -> str:
    """[15, 16, 17, 20] -> '15-17, 20'."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _cost_lines(d: dict[str, Any]) -> list[str]:
    total = d["parameters"]["total"]
    lines = [f"parameters {total:,} ({size(d['weight_bytes'])} in {d['dtype']})"]
    for name, count in d["parameters"].items():
        if name != "total":
            lines.append(f"  {name.replace('_', ' '):<22}{count:>16,}{count / total:>8.1%}")
    lines += ["", f"K/V bytes per token{'full group':>21}{'sliding group (last ' + str(d['sliding_window']) + ' tokens)':>38}"]
    for form, cost in d["kv_bytes_per_token"].items():
        lines.append(f"  {form:<24}{cost['full']:>14,}{cost['sliding']:>38,}")
    return [*lines, ""]


def _work_lines(d: dict[str, Any]) -> list[str]:
    plain, ple = d["work_per_prompt_token"]["projections"], d["work_per_prompt_token"]["projections_and_ple"]
    lines = [
        "work per prompt token (multiply-accumulates of attention and MLP projections)",
        f"  layers that own K/V      {plain['owner_layers']:>16,}",
        f"  layers that share K/V    {plain['sharing_layers']:>16,}",
        f"  every row, every layer   {plain['total']:>16,}",
        f"  cut at the layer border  {plain['layer_border']:>16,}   at most {plain['ceiling_layer_border']:.2f}x",
        f"  cut inside layer {d['cut']:<8}{plain['with_cut']:>16,}   at most {plain['ceiling_with_cut']:.2f}x",
    ]
    if ple["total"] != plain["total"]:
        lines.append(
            f"  with the matmuls of per-layer embeddings: at most {ple['ceiling_layer_border']:.2f}x at the border, "
            f"{ple['ceiling_with_cut']:.2f}x with the cut"
        )
    return lines


def _card_lines(d: dict[str, Any]) -> list[str]:
    rows = d["cards"]
    forms = list(rows[0]["formats"])
    title = f"sequences of {rows[0]['sequence_tokens']:,} tokens that fit at once, with max_num_seqs set to as many"
    lines = ["", f"{title} and steps of {d['step_tokens']:,} tokens"]
    lines.append(f"  {'card':<10}{'per-layer table':<18}" + "".join(f"{form:>22}" for form in forms))
    for row in rows:
        place = f"on the {row['embed_weights']}" if d["ple_table_bytes"] else "none"
        counts = "".join(f"{row['formats'][form]['sequences']:>22,}" for form in forms)
        lines.append(f"  {row['memory'] // 10**9:>4} GB   {place:<18}{counts}")
    return lines


def _capacity_lines(d: dict[str, Any]) -> list[str]:
    if "capacity" not in d:
        return []
    c = d["capacity"]
    of = f"of {size(c['memory'])} at {c['gpu_memory_utilization']:.0%}, " if c["gpu_memory_utilization"] and c["memory"] else ""
    if c["kv_cache_memory_bytes"] <= 0:
        need = f"weights {size(c['weight_bytes'])}, a step {size(c['activation_bytes'])} and CUDA {size(c['runtime_bytes'])}"
        return ["", f"capacity: {of}{need}: nothing is left for K/V"]
    lines = ["", f"capacity: {of}{size(c['kv_cache_memory_bytes'])} for K/V in blocks of {c['block_size']} tokens"]
    lengths = sorted({int(n) for form in c["formats"].values() for n in form["sequences"]})
    lines.append(f"  {'format':<22}{'tokens full':>13}{'sliding':>10}" + "".join(f"{f'of {n:,}':>12}" for n in lengths))
    for form, held in c["formats"].items():
        counts = "".join(f"{held['sequences'].get(str(n), 0):>12,}" for n in lengths)
        lines.append(
            f"  {form:<22}{held['full_tokens']:>13,}{held['sliding_tokens']:>10,}{counts}" if held["fits"] else f"  {form:<22} nothing fits"
        )
    return [*lines, "  (last columns: sequences of that many tokens that fit at once)"]


def size(count: int) -> str:
    """Bytes for people, in powers of 1024."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
