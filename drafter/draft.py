"""The drafter: speculators' Eagle3DraftModel with the forward pass that serving implies.

Slot p of a row holds the target's state after token p and the embedding of token p + 1, at position p, exactly as
vLLM feeds it. An anchor is a slot at which the engine asks for guesses: the target wrote token p + 1 itself, step k
guesses token p + 2 + k. Everything that only anchors need (queries, feed-forward, heads, loss) runs on anchors only.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from torch import Tensor
from transformers import LlamaConfig

from drafter import native
from drafter.attention import Documents, attend
from drafter.config import Target
from drafter.errors import ConfigError, ContractError
from drafter.fuse import constant, fused, rows
from drafter.losses import linear_kl
from drafter.verifier import Verifier

REASONING, ANSWER = 0, 1
UNSUPPORTED = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "sliding_window")


@dataclass(slots=True)
class Pack:
    """Rows laid end to end. L slots, N anchors; each row's anchors are its last slots, in order."""

    states: Tensor  # [L, A + 1, H] the target's states, its last layer's last; the latter alone when aux is compact
    aux: Tensor | None  # [L, A, H] float8, with
    aux_scale: Tensor | None  # [L, A] its scales
    input_ids: Tensor  # [L] the token after each slot
    positions: Tensor  # [L]
    anchors: Tensor  # [N] slots
    labels: Tensor  # [N] the token that step 0 guesses
    depth: Tensor  # [N] how many steps are asked for at the anchor
    region: Tensor  # [N] REASONING or ANSWER
    documents: Documents

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by field name, those of `documents` among them."""
        own = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return own | {"cu_q": self.documents.cu_q, "cu_k": self.documents.cu_k}

    def map(self, function: Callable[[Tensor], Tensor]) -> "Pack":
        """The pack with `function` applied to every tensor."""
        new = {name: function(tensor) for name, tensor in self.tensors().items()}
        documents = replace(self.documents, cu_q=new.pop("cu_q"), cu_k=new.pop("cu_k"))
        return replace(self, documents=documents, **new)

    def drafter_input(self, dtype: torch.dtype) -> Tensor:
        """What `fc` reads: [L, A * H]."""
        if self.aux is None:
            return self.states[:, :-1].flatten(1).to(dtype)
        return (self.aux.float() * self.aux_scale.unsqueeze(-1)).to(dtype).flatten(1)

    def teacher_states(self, dtype: torch.dtype) -> Tensor:
        """The target's last state at the slot after each anchor, which is what step 0 should say: [N, H]."""
        final = self.states if self.aux is None else self.states.unsqueeze(1)
        after = (self.anchors + 1).clamp(max=len(self.input_ids) - 1)  # past the end only where nothing is asked
        return final[after, -1].to(dtype)


STATS = ("count", "loss", "correct", "prefix", "prefix_before")  # sums over anchors, by region and step


class Drafter(Eagle3DraftModel):
    """speculators' parameters and config, our forward pass."""

    def prepare(self, verifier: Verifier, compute: torch.dtype, steps: int) -> None:
        """What the forward pass needs beside the parameters: the teacher's norm, the precision, the TTT steps."""
        self.teacher_eps = verifier.eps
        self.compute = compute
        self.steps = steps
        for frozen in (self.embed_tokens, self.verifier_lm_head):
            frozen.to(compute)

    def forward(self, pack: Pack, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and its statistics. `scale` [K] is what one anchor's loss counts at each step.

        Returns the scaled sum of losses and sums [2, K, 5] by region, step and STATS.
        """
        hidden = self._draft(pack)
        teacher = rms_norm(pack.teacher_states(self.compute), self.verifier_norm.weight, self.teacher_eps)
        # Row k, column n: the state that guesses label n, which comes from the anchor k places before.
        aligned = torch.stack([h.roll(k, 0) for k, h in enumerate(hidden)])
        step = torch.arange(self.steps, device=pack.depth.device).unsqueeze(1)
        asked = (
            torch.stack([pack.depth.roll(k) for k in range(self.steps)]) > step
        )  # never wraps: a row ends at depth 1
        total, losses, drafted = linear_kl(
            aligned, self._cast(self.lm_head), teacher, self.verifier_lm_head.weight, asked * scale.unsqueeze(1)
        )
        return total, self._statistics(pack, asked, losses, drafted)

    def _draft(self, pack: Pack) -> list[Tensor]:
        """Normed states [N, H] of each step."""
        layer, attention = self.layers[0], self.layers[0].self_attn
        projections = [
            self._cast(p).split(self.hidden_size, 1) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        out_proj = self._cast(attention.o_proj)
        gate, up, down = (self._cast(p) for p in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj))

        # A token's share of q, k and v is the same in every step, so it is computed once and shifted.
        embedded = rms_norm(
            F.embedding(pack.input_ids, self.embed_tokens.weight),
            layer.input_layernorm.weight,
            layer.input_layernorm.variance_epsilon,
        )
        token_q, token_k, token_v = (embedded @ w.T for w, _ in projections)
        state_q, state_k, state_v = (w.T for _, w in projections)

        anchors, last = pack.anchors, len(pack.input_ids) - 1
        cos, sin = self.rotary_emb(embedded, pack.positions.unsqueeze(0))
        hidden = pack.drafter_input(self.compute) @ self._cast(self.fc).T
        normed = rms_norm(hidden, layer.hidden_norm.weight, layer.hidden_norm.variance_epsilon)
        k0 = rotate(self._heads(torch.addmm(token_k, normed, state_k)), cos[0], sin[0])
        v0 = self._heads(torch.addmm(token_v, normed, state_v))

        results: list[Tensor] = []
        diagonals: list[tuple[Tensor, Tensor]] = []
        hidden, normed = hidden[anchors], normed[anchors]
        for step in range(self.steps):
            ahead = (anchors + step).clamp(max=last)
            cos, sin = (part[0] for part in self.rotary_emb(embedded, (pack.positions[anchors] + step).unsqueeze(0)))
            q = rotate(self._heads(torch.addmm(token_q[ahead], normed, state_q)), cos, sin)
            if step:
                k = rotate(self._heads(torch.addmm(token_k[ahead], normed, state_k)), cos, sin)
                v = self._heads(torch.addmm(token_v[ahead], normed, state_v))
                diagonals.append((k, v))
            attended = attend(q, k0, v0, diagonals, pack.documents)
            hidden = torch.addmm(hidden, attended.flatten(1), out_proj.T)
            normed = rms_norm(
                hidden, layer.post_attention_layernorm.weight, layer.post_attention_layernorm.variance_epsilon
            )
            hidden = torch.addmm(hidden, swiglu(normed @ gate.T, normed @ up.T), down.T)
            results.append(rms_norm(hidden, self.norm.weight, self.norm.variance_epsilon))
            if step + 1 < self.steps:
                normed = rms_norm(hidden, layer.hidden_norm.weight, layer.hidden_norm.variance_epsilon)
        return results

    def _cast(self, linear: torch.nn.Linear) -> Tensor:
        return linear.weight.to(self.compute)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.layers[0].self_attn.head_dim))

    @torch.no_grad()
    def _statistics(self, pack: Pack, asked: Tensor, losses: Tensor, drafted: Tensor) -> Tensor:
        """Sums [2, K, 5]. A guess is right when it is the token that the target wrote: what serving accepts.

        A token outside the draft vocabulary can never be guessed, so it counts as a miss.
        """
        guessed = drafted if self.d2t is None else drafted + self.d2t[drafted]
        right = (guessed == pack.labels) & asked
        sums = torch.zeros(2, self.steps, len(STATS), device=losses.device)
        before = pack.depth > 0
        for k in range(self.steps):
            # Back from labels to anchors, where a draft begins.
            here, right_here, loss = asked[k].roll(-k), right[k].roll(-k), losses[k].roll(-k)
            before = before & here
            prefix = before & right_here
            columns = torch.stack([here, loss * here, right_here, prefix, before], 1).float()
            sums[:, k].index_add_(0, pack.region, columns)
            before = prefix
        return sums


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return fused(_rms_norm, x.device)(rows(x), weight, constant(eps, x.device))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return fused(_swiglu, gate.device)(rows(gate), rows(up))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `x` [N, heads, d] with `cos`, `sin` [N, d]."""
    return fused(_rotate, x.device)(rows(x), rows(cos), rows(sin))


def _rms_norm(x, weight, eps):
    wide = x.float()
    return (weight.float() * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def _swiglu(gate, up):
    return F.silu(gate) * up


def _rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)


# Building one


def build(weights: dict[str, Tensor], config: dict[str, Any], verifier: Verifier, target: Target) -> Drafter:
    """A drafter with fp32 masters from tensors under native names.

    Raises ContractError when a tensor is missing, unknown or of another shape, ConfigError on a form that the
    forward pass does not have.
    """
    check_form(config, target)
    with torch.device("meta"):
        drafter = Drafter(_speculators_config(config))
    drafter.rotary_emb = type(drafter.rotary_emb)(drafter.rotary_emb.config)  # its table must be real
    state = {_to_speculators(name): tensor for name, tensor in weights.items()}
    state = {name: t.float() if t.is_floating_point() else t for name, t in state.items()}
    kept = slice(None) if drafter.t2d is None else weights["t2d"]
    state.setdefault(native.EMBEDDING, verifier.embed)
    state |= {"verifier_lm_head.weight": verifier.head[kept], "verifier_norm.weight": verifier.norm}
    try:
        drafter.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise ContractError(f"the drafter's tensors do not fit its config: {' '.join(str(error).split())}") from None
    return drafter


def check_form(config: dict[str, Any], target: Target) -> None:
    """Raises ContractError on a drafter for another target, ConfigError on one that this forward pass has not."""
    native.check_config(config, target)
    nested = config.get("eagle_config") or {}
    for key in UNSUPPORTED:
        if config.get(key) or nested.get(key):
            raise ConfigError(f"train.warm_start: a drafter with {key} cannot be trained here")


def trainable(drafter: Drafter, groups: Iterable[str]) -> dict[str, torch.nn.Parameter]:
    """Freeze everything but `groups`; what trains, by native name."""
    groups = set(groups)
    chosen = {}
    for name, parameter in drafter.named_parameters():
        native = _to_native(name)
        parameter.requires_grad_(group_of(native) in groups)
        if parameter.requires_grad:
            chosen[native] = parameter
    return chosen


def group_of(native: str) -> str | None:
    """The `train.trainable` group of a tensor; None for what belongs to the target."""
    if native in ("norm.weight",) or (native.startswith("midlayer.") and native.endswith("norm.weight")):
        return "norms"
    if native.startswith("midlayer."):
        return "layer"
    return native.removesuffix(".weight") if native in ("fc.weight", "lm_head.weight") else None


def native_weights(drafter: Drafter, keep_embedding: bool) -> dict[str, Tensor]:
    """The drafter's own tensors under native names, as they are (sharded ones stay sharded)."""
    own = {_to_native(name): t for name, t in drafter.state_dict().items() if not name.startswith("verifier_")}
    if not keep_embedding:
        del own[native.EMBEDDING]
    return own


def _to_native(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _to_speculators(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def _speculators_config(config: dict[str, Any]) -> Eagle3SpeculatorConfig:
    rope = config.get("rope_parameters")
    if rope is None:
        rope = {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
        rope.setdefault("rope_type", rope.pop("type", "default"))
    layer = LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=1,
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters=rope,
        pad_token_id=None,
        attn_implementation="eager",
    )
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        eagle_aux_hidden_state_layer_ids=native.layer_ids(config),
    )


# Made from nothing


def scratch_config(target: Target, draft_vocab_size: int | None, intermediate_size: int | None) -> dict[str, Any]:
    """The native config of a drafter with the target's own shape of layer."""
    outer = json.loads((target.model / "config.json").read_text())
    inner = outer.get("text_config", outer)
    hidden, heads = inner["hidden_size"], inner["num_attention_heads"]
    ids = list(target.aux_layer_ids)
    rope = inner.get("rope_parameters") or {"rope_theta": inner.get("rope_theta", 10000.0), "rope_type": "default"}
    return {
        "architectures": [native.ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or inner["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": inner.get("num_key_value_heads", heads),
        "head_dim": inner.get("head_dim") or hidden // heads,
        "vocab_size": inner["vocab_size"],
        "draft_vocab_size": draft_vocab_size or inner["vocab_size"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": rope["rope_theta"], "rope_type": "default"},
        "max_position_embeddings": inner["max_position_embeddings"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": inner.get("bos_token_id"),
        "eos_token_id": inner.get("eos_token_id"),
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    }


def scratch_weights(
    config: dict[str, Any],
    verifier: Verifier,
    vocabulary: Tensor | None,
    seed: int,
    last_layer: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """First weights of a drafter made from nothing: the target's last layer, norm and head, on the last aux state.

    States of a trained model have a few huge components, so a random `fc` would begin far off any sensible scale.
    Where `last_layer` has another form than a drafter's (MLA, experts), the layer begins as the identity.

    `vocabulary` [D] holds the drafted token ids in ascending order; None drafts the whole vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    aux = len(config["eagle_aux_hidden_state_layer_ids"])

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.02

    weights = {
        "midlayer.self_attn.q_proj.weight": normal(heads, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": normal(kv_heads, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": normal(kv_heads, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": torch.zeros(hidden, heads),
        "midlayer.mlp.gate_proj.weight": normal(inner, hidden),
        "midlayer.mlp.up_proj.weight": normal(inner, hidden),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, inner),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "fc.weight": torch.cat([torch.zeros(hidden, (aux - 1) * hidden), torch.eye(hidden)], 1),
        "norm.weight": verifier.norm.float(),
    }
    if last_layer:
        weights |= _layer_of_target(weights, last_layer, hidden)
    if vocabulary is None:
        return weights | {"lm_head.weight": verifier.head.float()}
    kept = torch.zeros(config["vocab_size"], dtype=torch.bool)
    kept[vocabulary] = True
    offsets = vocabulary - torch.arange(len(vocabulary))
    return weights | {"lm_head.weight": verifier.head[vocabulary].float(), "d2t": offsets, "t2d": kept}


def _layer_of_target(weights: dict[str, Tensor], layer: dict[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """The target's layer as a drafter's, which reads its state beside the token; empty when their forms differ."""
    taken = {}
    for name, own in weights.items():
        if not name.startswith("midlayer.") or name == "midlayer.input_layernorm.weight":
            continue
        source = layer.get(name.removeprefix("midlayer.").replace("hidden_norm", "input_layernorm"))
        token_half = own[:, :hidden] if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else None
        if source is not None and token_half is not None and len(source) == len(own):
            source = torch.cat([token_half, source.float()], 1)
        if source is None or source.shape != own.shape:
            return {}
        taken[name] = source.float()
    return taken


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent token ids [size], ascending; unseen low ids fill up when fewer are known.

    `counts` [V]. Raises ConfigError when the vocabulary is smaller than that.
    """
    if size > len(counts):
        raise ConfigError(f"train.draft_vocab_size: {size} is more than the target's {len(counts)} tokens")
    order = counts.sort(descending=True, stable=True).indices
    return order[:size].sort().values
