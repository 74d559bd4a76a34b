"""`lastrow info`: what a model is, what it costs and what computing only the wanted rows saves. From the config alone, no torch.

`describe` makes the JSON document (its keys are stable); `render` writes it as text; `info_plot` draws it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from lastrow.kv.layout import DTYPE_BYTES, KV_CACHE_DTYPES, KVLayout, divide_budget
from lastrow.models.config import Gemma4Config
from lastrow.weights.names import global_shapes, layer_shapes

SEQUENCE_LENGTHS = (1024, 8192, 32_768, 131_072)


def describe(
    config: Gemma4Config,
    dtype: str = "bfloat16",
    memory: int | None = None,
    gpu_memory_utilization: float = 0.9,
    kv_cache_memory_bytes: int | None = None,
    block_size: int = 16,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
) -> dict[str, Any]:
    """The document of `lastrow info --json`.

    memory: bytes of the card (or host); of them gpu_memory_utilization is used, weights first, K/V with the rest. Working
    memory of a step is not modelled here. kv_cache_memory_bytes: bytes of the K/V pool itself, in place of `memory`."""
    parameters = parameters_by_part(config)
    weight_bytes = parameters["total"] * DTYPE_BYTES[dtype]
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
        "readers": {str(owner): readers for owner, readers in _readers(config).items()},
        "layer_table": [layer_facts(config, i) for i in range(config.num_hidden_layers)],
        "parameters": parameters,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": {
            form: {"full": layout.full_bytes_per_token, "sliding": layout.sliding_bytes_per_token}
            for form, layout in _layouts(config, dtype).items()
        },
        "work_per_prompt_token": work_per_prompt_token(config),
    }
    kv_bytes = kv_cache_memory_bytes
    if kv_bytes is None and memory is not None:
        kv_bytes = int(memory * gpu_memory_utilization) - weight_bytes
    if kv_bytes is not None:
        document["capacity"] = {
            "memory": memory,
            "gpu_memory_utilization": gpu_memory_utilization if kv_cache_memory_bytes is None else None,
            "kv_cache_memory_bytes": kv_bytes,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "formats": {
                form: capacity(config, layout, kv_bytes, block_size, max_num_seqs, max_num_batched_tokens)
                for form, layout in _layouts(config, dtype).items()
            },
        }
    return document


def _layouts(config: Gemma4Config, dtype: str) -> dict[str, KVLayout]:
    return {dtype if form == "auto" else form: KVLayout.of(config, form, dtype) for form in KV_CACHE_DTYPES}


def _readers(config: Gemma4Config) -> dict[int, list[int]]:
    readers = {owner: [] for owner in config.owners}
    for layer, source in enumerate(config.kv_source):
        if layer != source:
            readers[source].append(layer)
    return readers


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


def capacity(
    config: Gemma4Config, layout: KVLayout, kv_bytes: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
) -> dict[str, Any]:
    """What a K/V pool of `kv_bytes` holds: tokens of each group, and sequences by length (limited by memory, not by max_num_seqs)."""
    try:
        budget = divide_budget(layout, kv_bytes, block_size, max_num_seqs, max_num_batched_tokens)
    except ValueError:
        return {"fits": False, "full_tokens": 0, "sliding_tokens": 0, "sequences": {}}
    sequences = {}
    for tokens in (n for n in SEQUENCE_LENGTHS if n <= config.max_position_embeddings):
        full, sliding = layout.sequence_blocks(tokens, block_size)
        pools = ((budget.num_full_blocks, full), (budget.num_sliding_blocks, sliding))
        sequences[str(tokens)] = min((blocks - 1) // need for blocks, need in pools if need)
    return {"fits": True, "full_tokens": budget.full_tokens, "sliding_tokens": budget.sliding_tokens, "sequences": sequences}


# -------------------------------------------------------------------------------------------------- text
def render(document: dict[str, Any]) -> str:
    """The document as text of up to 100 columns."""
    return "\n".join(_head(document) + _layer_lines(document) + _cost_lines(document) + _work_lines(document) + _capacity_lines(document))


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


def _capacity_lines(d: dict[str, Any]) -> list[str]:
    if "capacity" not in d:
        return []
    c = d["capacity"]
    of = f"of {size(c['memory'])} at {c['gpu_memory_utilization']:.0%}, " if c["gpu_memory_utilization"] and c["memory"] else ""
    if c["kv_cache_memory_bytes"] <= 0:
        return ["", f"capacity: {of}the weights alone need {size(d['weight_bytes'])}: nothing is left for K/V"]
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
