"""Stage 05: export a training checkpoint as a folder that vLLM serves.

A reference folder, if there is one, determines names, shapes, dtypes and config.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from drafter import files, run_files
from drafter.config import Config, Target
from drafter.contracts import IndexEntry
from drafter.errors import ContractError, StageError
from drafter.extract import states
from drafter.stage import Stage, read_manifest, say
from drafter.target import eagle3_folder, head
from drafter.target.eagle3_folder import CONFIG, EMBEDDING, LAYER_IDS, WEIGHTS, Tensors
from drafter.train import checkpoint

QUESTION = ("target.model", "target.layer_ids")

# Config keys that an export sets itself. Any other difference from the reference is refused.
EXPORT_KEYS = {LAYER_IDS, "eagle_config", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"}
EXPORT_KEYS |= {"dtype", "torch_dtype", "tie_word_embeddings", "transformers_version"}

COMPARED_ROWS = 2  # rows whose logits are computed from the checkpoint and from the export
COMPARED_TOKENS = 256


def drafter_folder(config: Config) -> Path:
    """The folder of this run's exported drafter."""
    return config.stage_dir("05_export") / "model"


def reference_folder(config: Config) -> Path | None:
    """The folder whose format the export must have; None without one."""
    return config.export.reference or config.train.warm_start


def run(stage: Stage) -> dict:
    """Export the configured step (default: the best complete one), unless it is exported already."""
    config = stage.config
    stage.require("04_train")
    step = _step(config)
    stage.counts.total = 1
    before = read_manifest(stage.folder)
    stage.begin(QUESTION)
    if before and _is_exported(config, before["facts"], step):
        say("%s is exported already: %s", step.name, drafter_folder(config))
        stage.facts = before["facts"]
    else:
        weights, drafter_config = checkpoint.read_draft(step)
        rows = real_rows(config)
        write_drafter(drafter_folder(config), weights, drafter_config, config.target, reference_folder(config), rows)
        stage.facts = {
            "step": step.name,
            "folder": str(drafter_folder(config)),
            "identity": eagle3_folder.fingerprint(drafter_folder(config)),
            "rows_compared": len(rows),
            "min_engine": eagle3_folder.MIN_ENGINE,
        }
        say("%s exported to %s", step.name, drafter_folder(config))
    stage.counts.done = 1
    return stage.finish()


def dry_run(stage: Stage) -> dict:
    """What `run` would do, and what is missing."""
    config, findings, pending = stage.config, [], 1
    if not is_trained(config):
        findings.append(f"no complete checkpoint in {config.stage_dir('04_train')}")
    elif before := read_manifest(stage.folder):
        pending = int(not _is_exported(config, before["facts"], _step(config)))
    if wanted := reference_folder(config):
        try:
            eagle3_folder.read_config(wanted)
        except StageError as error:
            findings.append(str(error))
    return {"stage": stage.name, "dry_run": True, "pending": pending, "findings": findings}


def is_trained(config: Config) -> bool:
    return bool(checkpoint.complete_steps(config.stage_dir("04_train")))


def _step(config: Config) -> Path:
    steps = config.stage_dir("04_train")
    return checkpoint.step_path(steps, config.export.step) if config.export.step else checkpoint.best_step(steps)


def _is_exported(config: Config, facts: dict, step: Path) -> bool:
    """Whether the folder holds the export of this step that the manifest recorded."""
    if facts.get("step") != step.name or not all(
        (drafter_folder(config) / name).is_file() for name in (WEIGHTS, CONFIG)
    ):
        return False
    return eagle3_folder.fingerprint(drafter_folder(config)) == facts.get("identity")


def check_exported(config: Config) -> None:
    """Raises ContractError unless the folder holds exactly the drafter that stage 05 recorded."""
    manifest = read_manifest(config.stage_dir("05_export")) or {"facts": {}}
    recorded = manifest["facts"].get("identity")
    if eagle3_folder.fingerprint(drafter_folder(config)) != recorded:
        raise ContractError(
            f"{drafter_folder(config)} is not the drafter that stage 05 exported (content "
            f"{eagle3_folder.fingerprint(drafter_folder(config))}, "
            f"recorded {recorded}); 05_export_checkpoint.py exports it again"
        )


def write_drafter(
    destination: Path,
    weights: Tensors,
    drafter_config: dict[str, Any],
    target: Target,
    reference: Path | None = None,
    rows: list[states.States] | None = None,
) -> None:
    """Write a complete, checked drafter folder to `destination`, or leave it unchanged.

    `weights` are whole tensors under native names. Raises ContractError naming the first tensor or config key that is
    missing, extra, of a wrong shape or dtype, not finite, or different after reopening.
    """
    exported = final_config(drafter_config, target, reference)
    layout = eagle3_folder.read_layout(reference) if reference else eagle3_folder.layout_of(exported)
    if not reference and EMBEDDING in weights:
        layout[EMBEDDING] = ((exported["vocab_size"], exported["hidden_size"]), torch.bfloat16)
    exported["dtype"] = exported["torch_dtype"] = _dtype_of(layout)
    cast = {name: _cast(tensor, layout.get(name)) for name, tensor in weights.items()}
    eagle3_folder.check_tensors(cast, layout)
    with files.publish(destination) as part:
        part.mkdir()
        save_file(cast, part / WEIGHTS, metadata={"format": "pt"})
        (part / WEIGHTS).chmod(0o644)  # safetensors makes it private to the user
        (part / CONFIG).write_text(json.dumps(exported, indent=2) + "\n")
        check_reopened(part, cast, drafter_config, target, rows or [])


def _dtype_of(layout: eagle3_folder.Layout) -> str:
    """The tensors' dtype. The reference's config may name another one, to which an engine would cast them."""
    floats = {str(dtype).removeprefix("torch.") for _shape, dtype in layout.values() if dtype.is_floating_point}
    if len(floats) != 1:
        raise ContractError(f"the reference's tensors have several dtypes ({', '.join(sorted(floats))})")
    return floats.pop()


def _cast(tensor: torch.Tensor, wanted: tuple[Any, torch.dtype] | None) -> torch.Tensor:
    """Cast floats to the export's dtype; anything else is left for the check that follows."""
    if wanted and tensor.is_floating_point() and wanted[1].is_floating_point:
        tensor = tensor.to(wanted[1])
    return tensor.contiguous()


def check_reopened(
    written: Path, weights: Tensors, drafter_config: dict[str, Any], target: Target, rows: list[states.States]
) -> None:
    """Raises ContractError unless the folder is valid, equals `weights` bit for bit, and gives the same logits."""
    reopened = eagle3_folder.check_folder(written, target)
    for name, tensor in weights.items():
        if not torch.equal(tensor, reopened[name]):
            raise ContractError(f"{name} in {written} differs from the checkpoint's")
    if not rows:
        return
    embedding = head.read_verifier(target.model).embed
    for row in rows:
        ours = logits(weights, drafter_config, embedding, row)
        theirs = logits(reopened, eagle3_folder.read_config(written), embedding, row)
        if not torch.equal(ours, theirs):
            raise ContractError(f"the export gives other logits than the checkpoint on row {row.metadata['row_id']}")


def final_config(drafter_config: dict[str, Any], target: Target, reference: Path | None) -> dict[str, Any]:
    """The exported config.json: the reference's or the checkpoint's, with the fields that engines need.

    Layer ids are at top level and nested, the rope is in the spellings of transformers 4 and 5. Raises ContractError
    when the checkpoint differs from the reference in any other field.
    """
    result = dict(drafter_config)
    if reference:
        result = eagle3_folder.read_config(reference)
        ropes = eagle3_folder.both_ropes(result), eagle3_folder.both_ropes(drafter_config)
        if ropes[0] != ropes[1]:
            raise ContractError(f"{CONFIG}: rope is {ropes[1]} in the checkpoint, {ropes[0]} in {reference}")
        for key in sorted(drafter_config.keys() - EXPORT_KEYS):
            ours, theirs = drafter_config[key], result[key] if key in result else _default(key, result)
            if ours != theirs and (key in result or ours):
                raise ContractError(f"{CONFIG}: {key} is {ours!r} in the checkpoint, {theirs!r} in {reference}")
    ids = list(target.aux_layer_ids)
    result[LAYER_IDS] = ids
    result["eagle_config"] = {"use_aux_hidden_state": True} | (result.get("eagle_config") or {}) | {LAYER_IDS: ids}
    result |= eagle3_folder.both_ropes(result)
    eagle3_folder.check_positions(result, target)
    positions = result.get("max_position_embeddings", 0)
    result["max_position_embeddings"] = max(positions, target.architecture.max_position_embeddings)
    result["tie_word_embeddings"] = False  # the head is a separate tensor
    result["dtype"] = result["torch_dtype"] = result.get("dtype") or result.get("torch_dtype") or "bfloat16"
    return result


def _default(key: str, config: dict[str, Any]) -> Any:
    """The value that an engine uses for a key that is missing from a drafter's config."""
    from transformers import LlamaConfig

    return getattr(
        LlamaConfig(**{name: value for name, value in config.items() if name not in EXPORT_KEYS}), key, None
    )


def real_rows(config: Config) -> list[states.States]:
    """A few captured rows, cut to COMPARED_TOKENS; empty if their files are gone."""
    place = config.stage_dir("02_hidden_states")
    if not (place / run_files.INDEX).exists():
        return []
    rows = []
    for record in files.read_jsonl(place / run_files.INDEX):
        path = place / IndexEntry.from_record(record).path
        if path.exists():
            row = states.read_states(path)
            cut = slice(0, COMPARED_TOKENS)
            rows.append(states.States(row.token_ids[cut], row.aux[cut], row.final[cut], row.metadata))
        if len(rows) == COMPARED_ROWS:
            break
    return rows


@torch.no_grad()
def logits(weights: Tensors, config: dict[str, Any], embedding: torch.Tensor, row: states.States) -> torch.Tensor:
    """The logits of the first guess at every slot of a row, as an engine computes them: [T - 1, D] fp32.

    Written independently of the training code, so that the two can be compared. Slot p has the target's states after
    token p and the embedding of token p + 1.
    """
    w = {name: tensor.float() for name, tensor in weights.items() if tensor.is_floating_point()}
    eps, heads, kv_heads = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    count = len(row.token_ids) - 1

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name], eps)

    embedded = w.get(EMBEDDING, embedding)
    embedded = norm(embedded[row.token_ids[1:]].float(), "midlayer.input_layernorm.weight")
    residual = row.aux[:count].float().flatten(1) @ w["fc.weight"].T
    both = torch.cat([embedded, norm(residual, "midlayer.hidden_norm.weight")], -1)

    def project(name: str, number: int) -> torch.Tensor:
        return (both @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(count, number, head_dim).transpose(0, 1)

    q, k = (_rotate(project(*part), config) for part in (("q", heads), ("k", kv_heads)))
    attended = F.scaled_dot_product_attention(q, k, project("v", kv_heads), is_causal=True, enable_gqa=True)
    residual = residual + attended.transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
    x = norm(residual, "midlayer.post_attention_layernorm.weight")
    gate, up = (x @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    residual = residual + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    return norm(residual, "norm.weight") @ w["lm_head.weight"].T


def _rotate(x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Rotary embedding of [heads, T, d] at positions 0..T-1."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    shape = {name: config[name] for name in fields if name in config}
    rope = LlamaRotaryEmbedding(
        LlamaConfig(**shape, rope_parameters=eagle3_folder.both_ropes(config)["rope_parameters"])
    )
    cos, sin = rope(x, torch.arange(x.shape[1]).unsqueeze(0))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
