"""Stage 05: a training checkpoint becomes a folder that vLLM serves as it is.

The native EAGLE-3 layout: `midlayer.*`, `fc`, `norm`, `lm_head`, `d2t` (offsets: target id = i + d2t[i]) and
`t2d`, with a `LlamaForCausalLMEagle3` config. A reference folder, where there is one, dictates names, shapes,
dtypes and config.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drafter import artifacts, checkpoint
from drafter.config import Config, Target
from drafter.errors import ConfigError, ContractError
from drafter.stage import Stage, read_manifest, say

QUESTION = ("target.model", "target.layer_ids")
ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS = "model.safetensors"

# What an export sets itself, whatever the reference says; any other difference is refused.
OURS = ("eagle_aux_hidden_state_layer_ids", "eagle_config", "rope_parameters", "max_position_embeddings", "dtype")

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I64": torch.int64, "I32": torch.int32}
DTYPES |= {"BOOL": torch.bool, "F64": torch.float64, "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16}

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # tensor name -> shape, dtype


def folder(config: Config) -> Path:
    """Where this run's drafter lies once exported."""
    return config.stage_dir("05_export") / "model"


def run(stage: Stage) -> dict:
    """Export the configured step (default: the best complete one), unless it is there already."""
    config = stage.config
    stage.require("04_train")
    steps = config.stage_dir("04_train")
    step = steps / f"step-{config.export.step:08d}" if config.export.step else checkpoint.best_step(steps)
    destination = folder(config)
    stage.counts.total = 1
    before = read_manifest(stage.folder)
    stage.begin(QUESTION)
    if before and before["facts"].get("step") == step.name and is_exported(destination, before["facts"], config):
        say("%s is exported already: %s", step.name, destination)
        stage.facts = before["facts"]
    else:
        weights, drafter_config = checkpoint.read_draft(step)
        write(destination, weights, drafter_config, config.target, reference(config))
        stage.facts = {"step": step.name, "folder": str(destination), "sha256": sha256(destination)}
        say("%s exported to %s", step.name, destination)
    stage.counts.done = 1
    return stage.finish()


def plan(stage: Stage) -> dict:
    """What `run` would do, and what is missing for it."""
    config, findings = stage.config, []
    steps = config.stage_dir("04_train")
    if not checkpoint.complete_steps(steps):
        findings.append(f"no complete checkpoint in {steps}")
    if (wanted := reference(config)) and not (wanted / "config.json").exists():
        findings.append(f"no reference drafter at {wanted}")
    pending = int(not (folder(config) / WEIGHTS).exists())
    return {"stage": stage.name, "dry_run": True, "pending": pending, "findings": findings}


def reference(config: Config) -> Path | None:
    """The folder whose form the export must have."""
    return config.export.reference or config.train.warm_start


def is_exported(destination: Path, facts: dict, config: Config) -> bool:
    """The folder is there, sound, and holds the bytes that the manifest recorded."""
    if not (destination / WEIGHTS).exists() or sha256(destination) != facts.get("sha256"):
        return False
    check_folder(destination, config.target)
    return True


def sha256(drafter: Path) -> str:
    """Identity of a drafter: its weights and its config, not its model card."""
    return artifacts.sha256_file(drafter / WEIGHTS)[:16] + artifacts.sha256_file(drafter / "config.json")[:16]


def write(
    destination: Path,
    weights: dict[str, torch.Tensor],
    drafter_config: dict[str, Any],
    target: Target,
    reference: Path | None = None,
) -> None:
    """`destination` is a whole, checked drafter folder afterwards, or untouched.

    `weights` are full tensors under native names. Raises ContractError naming the first tensor or config key that
    is missing, extra, of another shape or dtype than it must be, or not finite.
    """
    exported = final_config(drafter_config, target, reference)
    layout = read_layout(reference) if reference else native_layout(exported)
    if reference is None and "embed_tokens.weight" in weights:
        layout["embed_tokens.weight"] = ((exported["vocab_size"], exported["hidden_size"]), torch.bfloat16)
    cast = {
        name: tensor.to(layout[name][1]).contiguous()
        if name in layout and tensor.is_floating_point() and layout[name][1].is_floating_point
        else tensor.contiguous()
        for name, tensor in weights.items()
    }
    check_weights(cast, layout, exported)
    with artifacts.publish(destination) as part:
        part.mkdir()
        save_file(cast, part / WEIGHTS, metadata={"format": "pt"})
        (part / WEIGHTS).chmod(0o644)  # safetensors makes it private to the user
        (part / "config.json").write_text(json.dumps(exported, indent=2) + "\n")
        check_folder(part, target, cast)


def final_config(drafter_config: dict[str, Any], target: Target, reference: Path | None) -> dict[str, Any]:
    """The exported config.json: the reference's where there is one, and what every engine needs to see.

    Layer ids stand at top level and nested, since vLLM's two model runners read different places; rope in the
    spellings of transformers 4 and 5. Raises ContractError on any other difference from the reference.
    """
    result = dict(drafter_config)
    if reference:
        result = read_config(reference)
        for key in sorted(result.keys() & drafter_config.keys() - set(OURS)):
            if result[key] != drafter_config[key] and key not in ("torch_dtype", "transformers_version"):
                raise ContractError(
                    f"config.json: {key} is {drafter_config[key]!r} in the checkpoint, {result[key]!r} in {reference}"
                )
    ids = list(target.aux_layer_ids)
    result["eagle_aux_hidden_state_layer_ids"] = ids
    result["eagle_config"] = {
        "use_aux_hidden_state": True,
        **(result.get("eagle_config") or {}),
        "eagle_aux_hidden_state_layer_ids": ids,
    }
    result |= both_ropes(result)
    result["max_position_embeddings"] = max(
        result.get("max_position_embeddings", 0), target.architecture.max_position_embeddings
    )
    result["dtype"] = result.setdefault("torch_dtype", "bfloat16")
    return result


def both_ropes(config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_scaling (transformers 4) and rope_parameters (5), all saying the same.

    Raises ContractError when the config contradicts itself.
    """
    parameters = config.get("rope_parameters")
    if parameters is None:
        scaling = config.get("rope_scaling") or {"rope_type": "default"}
        parameters = {"rope_theta": config["rope_theta"], **scaling}
        parameters.setdefault("rope_type", parameters.pop("type", "default"))
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if config.get("rope_theta", theta) != theta:
        raise ContractError(f"config.json: rope_theta is {config['rope_theta']}, but {theta} in rope_parameters")
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": {"rope_theta": theta, **scaling},
    }


def native_layout(config: dict[str, Any]) -> Layout:
    """Names, shapes and dtypes that vLLM expects of a drafter with this config; the embedding is the target's."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    aux = len(config["eagle_aux_hidden_state_layer_ids"]) * config.get("target_hidden_size", hidden)
    vocab, draft_vocab = config["vocab_size"], config.get("draft_vocab_size") or config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "fc.weight": (hidden, aux),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }
    layout: Layout = {name: (shape, torch.bfloat16) for name, shape in shapes.items()}
    if draft_vocab != vocab:
        layout |= {"d2t": ((draft_vocab,), torch.int64), "t2d": ((vocab,), torch.bool)}
    return layout


def read_layout(drafter: Path) -> Layout:
    """Names, shapes and dtypes in a folder's safetensors headers. Raises ConfigError when there are none."""
    layout: Layout = {}
    for file in open_weights(drafter):
        for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            piece = file.get_slice(name)
            layout[name] = (tuple(piece.get_shape()), DTYPES[piece.get_dtype()])
    return layout


def open_weights(drafter: Path) -> Iterator[safe_open]:
    """Handles of a folder's safetensors files. Raises ConfigError without one, ContractError on a broken one."""
    paths = sorted(drafter.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"no drafter at {drafter}: it has no .safetensors file")
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                yield file
        except SafetensorError as error:
            raise ContractError(f"{path} is broken: {error}") from None


def read_config(drafter: Path) -> dict[str, Any]:
    """Raises ConfigError when the folder has no config.json."""
    try:
        return json.loads((drafter / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"no drafter at {drafter}: it has no config.json") from None
    except json.JSONDecodeError as error:
        raise ContractError(f"{drafter / 'config.json'} is not JSON: {error}") from None


def check_folder(drafter: Path, target: Target, source: dict[str, torch.Tensor] | None = None) -> None:
    """The door that every drafter passes before it is served.

    With `source`, each tensor must also be equal to it, bit for bit. Raises ContractError naming what is wrong.
    """
    config = read_config(drafter)
    check_config(config, target, drafter)
    layout = native_layout(config | {"eagle_aux_hidden_state_layer_ids": layer_ids(config)})
    weights = {name: file.get_tensor(name) for file in open_weights(drafter) for name in file.keys()}  # noqa: SIM118
    if "embed_tokens.weight" in weights:
        layout["embed_tokens.weight"] = ((config["vocab_size"], config["hidden_size"]), torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in weights.items() if tensor.is_floating_point()}
    layout = {name: (shape, dtypes.get(name, dtype)) for name, (shape, dtype) in layout.items()}
    check_weights(weights, layout, config)
    for name, tensor in (source or {}).items():
        if not torch.equal(tensor, weights[name]):
            raise ContractError(f"{name} in {drafter} is not the checkpoint's")


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return config.get("eagle_aux_hidden_state_layer_ids") or nested


def check_config(config: dict[str, Any], target: Target, drafter: Path) -> None:
    """What a drafter's config must say to draft for this target. Raises ContractError."""
    architecture = target.architecture
    wanted = {
        "architectures": [ARCHITECTURE],
        "hidden_size": architecture.hidden_size,
        "vocab_size": architecture.vocab_size,
        "num_hidden_layers": 1,
    }
    for key, value in wanted.items():
        if config.get(key) != value:
            raise ContractError(f"{drafter / 'config.json'}: {key} is {config.get(key)!r}, must be {value!r}")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    for where, ids in (("top level", config.get("eagle_aux_hidden_state_layer_ids")), ("eagle_config", nested)):
        if ids is not None and tuple(ids) != target.aux_layer_ids:
            raise ContractError(
                f"{drafter / 'config.json'}: layer ids {ids} ({where}), the target is read at "
                f"{list(target.aux_layer_ids)}"
            )
    if layer_ids(config) is None:
        raise ContractError(f"{drafter / 'config.json'} has no eagle_aux_hidden_state_layer_ids")


def check_weights(weights: dict[str, torch.Tensor], layout: Layout, config: dict[str, Any]) -> None:
    """Raises ContractError naming the first tensor that is not as `layout` says, or the vocabulary map's fault."""
    if missing := sorted(layout.keys() - weights.keys()):
        raise ContractError(f"{missing[0]} is missing")
    if extra := sorted(weights.keys() - layout.keys()):
        raise ContractError(f"{extra[0]} does not belong in this drafter")
    for name, (shape, dtype) in layout.items():
        tensor = weights[name]
        if tuple(tensor.shape) != shape:
            raise ContractError(f"{name} has shape {list(tensor.shape)}, must be {list(shape)}")
        if tensor.dtype != dtype:
            raise ContractError(f"{name} is {tensor.dtype}, must be {dtype}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ContractError(f"{name} has values that are not finite")
    if "d2t" in weights:
        check_vocabulary_map(weights["d2t"], weights["t2d"])


def check_vocabulary_map(d2t: torch.Tensor, t2d: torch.Tensor) -> None:
    """`d2t` [D] int64 holds offsets (target id = i + d2t[i]), `t2d` [V] bool marks the drafted ids.

    Raises ContractError, one message for each way a map has been wrong.
    """
    ids = torch.arange(len(d2t)) + d2t
    marked = t2d.nonzero().flatten()
    if torch.equal(d2t, marked) and d2t.any():
        raise ContractError("d2t holds absolute ids, must hold offsets (target id minus draft id)")
    if (d2t < 0).any():
        raise ContractError(f"d2t is negative at {int((d2t < 0).nonzero()[0])}; offsets never are")
    if ids.max() >= len(t2d):
        raise ContractError(f"d2t leads to token {int(ids.max())}, the vocabulary has {len(t2d)}")
    if len(ids.unique()) != len(ids):
        raise ContractError("d2t leads to the same token twice")
    if (ids.diff() < 0).any():
        raise ContractError("d2t is not in ascending order of target ids")
    if not torch.equal(ids, marked):
        raise ContractError(f"t2d marks {len(marked)} tokens, not the {len(ids)} that d2t leads to")
