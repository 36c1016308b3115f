"""The drafter: speculators' Eagle3DraftModel with a forward pass that matches serving.

Slot p of a row holds the target's state after token p and the embedding of token p + 1, at position p, exactly as
vLLM feeds it. An anchor is a slot where the engine drafts: the target wrote token p + 1 itself, and step k guesses
token p + 2 + k. Queries, feed-forward, heads and loss are computed at anchors only.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from torch import Tensor
from transformers import LlamaConfig

from drafter.config import Target
from drafter.errors import ContractError
from drafter.target import eagle3_folder
from drafter.target.head import Verifier
from drafter.train.attention import attend
from drafter.train.batch import Pack
from drafter.train.losses import linear_kl
from drafter.train.pointwise import rms_norm, rotate, swiglu

STATS = ("count", "loss", "correct", "prefix", "prefix_before")  # sums over anchors, by region and step


class Drafter(Eagle3DraftModel):
    """speculators' parameters and config with the forward pass of this module."""

    def prepare(self, verifier: Verifier, compute: torch.dtype, steps: int) -> None:
        """Set what the forward pass needs besides parameters: the teacher's norm, the precision, the TTT steps."""
        self.teacher_eps = verifier.eps
        self.compute = compute
        self.steps = steps
        for frozen in (self.embed_tokens, self.verifier_lm_head):
            frozen.to(compute)

    def forward(self, pack: Pack, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and statistics. `scale` [K] is the weight of one anchor's loss at each step.

        Returns the scaled sum of losses and sums [2, K, 5] by region, step and STATS.
        """
        hidden = self._draft(pack)
        teacher = rms_norm(pack.teacher_states(self.compute), self.verifier_norm.weight, self.teacher_eps)
        # Row k, column n: the state that guesses label n; it comes from the anchor k places before.
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
        """The states after the final norm, [N, H] for each step."""
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
        """Sums [2, K, 5]. A guess is correct if it is the token that the target wrote, which serving would accept.

        A token outside the draft vocabulary counts as a miss.
        """
        guessed = drafted if self.d2t is None else drafted + self.d2t[drafted]
        right = (guessed == pack.labels) & asked
        sums = []
        regions = F.one_hot(pack.region, 2).T.float()  # [2, N]
        before = pack.depth > 0
        for k in range(self.steps):
            # From labels back to the anchors where the drafts begin.
            here, right_here, loss = asked[k].roll(-k), right[k].roll(-k), losses[k].roll(-k)
            before = before & here
            prefix = before & right_here
            sums.append(regions @ torch.stack([here, loss * here, right_here, prefix, before], 1).float())
            before = prefix
        return torch.stack(sums, 1)


# Construction


def build_drafter(weights: dict[str, Tensor], config: dict[str, Any], verifier: Verifier, target: Target) -> Drafter:
    """A drafter with fp32 masters, from tensors under native names.

    Raises ContractError when a tensor is missing, unknown or has another shape, ConfigError on a form that the
    forward pass does not support.
    """
    eagle3_folder.check_form(config, target)
    try:
        with torch.device("meta"):
            drafter = Drafter(_speculators_config(config))
        drafter.rotary_emb = type(drafter.rotary_emb)(drafter.rotary_emb.config)  # its table must be real
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ContractError(f"{eagle3_folder.CONFIG} is not a drafter's config: {reason}") from None
    state = {_to_speculators(name): tensor for name, tensor in weights.items()}
    state = {name: t.float() if t.is_floating_point() else t for name, t in state.items()}
    if drafter.t2d is not None and "t2d" not in weights:
        raise ContractError("the drafter's tensors do not fit its config: t2d is missing")
    kept = slice(None) if drafter.t2d is None else weights["t2d"]
    state.setdefault(eagle3_folder.EMBEDDING, verifier.embed)
    state |= {"verifier_lm_head.weight": verifier.head[kept], "verifier_norm.weight": verifier.norm}
    try:
        drafter.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise ContractError(f"the drafter's tensors do not fit its config: {' '.join(str(error).split())}") from None
    return drafter


def freeze_all_but(drafter: Drafter, groups: Iterable[str]) -> dict[str, torch.nn.Parameter]:
    """Freeze all parameters but those in `groups`; returns the trainable ones by native name."""
    groups = set(groups)
    chosen = {}
    for name, parameter in drafter.named_parameters():
        native = _to_native(name)
        parameter.requires_grad_(train_group(native) in groups)
        if parameter.requires_grad:
            chosen[native] = parameter
    return chosen


def train_group(native: str) -> str | None:
    """The `train.trainable` group of a tensor; None for the target's tensors."""
    if native in ("norm.weight",) or (native.startswith("midlayer.") and native.endswith("norm.weight")):
        return "norms"
    if native.startswith("midlayer."):
        return "layer"
    return native.removesuffix(".weight") if native in ("fc.weight", "lm_head.weight") else None


def native_weights(drafter: Drafter, keep_embedding: bool) -> dict[str, Tensor]:
    """The drafter's own tensors under native names; sharded ones stay sharded."""
    own = {_to_native(name): t for name, t in drafter.state_dict().items() if not name.startswith("verifier_")}
    if not keep_embedding:
        del own[eagle3_folder.EMBEDDING]
    return own


def _to_native(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _to_speculators(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def _speculators_config(config: dict[str, Any]) -> Eagle3SpeculatorConfig:
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
        rope_parameters=eagle3_folder.both_ropes(config)["rope_parameters"],
        pad_token_id=None,
        attn_implementation="eager",
    )
    return Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        eagle_aux_hidden_state_layer_ids=eagle3_folder.layer_ids(config),
    )
