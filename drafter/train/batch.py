"""A pack: rows of hidden states laid end to end, the input of the drafter's forward pass."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from drafter.train.attention import Documents

REASONING, ANSWER = 0, 1


@dataclass(slots=True)
class Pack:
    """L slots, N anchors; each row's anchors are its last slots, in order."""

    states: Tensor  # [L, A + 1, H] aux layers and final layer; [L, H] final layer alone in the compact format
    aux: Tensor | None  # [L, A, H] float8, in the compact format
    aux_scale: Tensor | None  # [L, A] its scales
    input_ids: Tensor  # [L] the token after each slot
    positions: Tensor  # [L]
    anchors: Tensor  # [N] slots
    labels: Tensor  # [N] the token that step 0 guesses
    depth: Tensor  # [N] number of guesses at the anchor
    region: Tensor  # [N] REASONING or ANSWER
    documents: Documents

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by field name, including those of `documents`."""
        own = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        return own | {"cu_q": self.documents.cu_q, "cu_k": self.documents.cu_k}

    def map(self, function: Callable[[Tensor], Tensor]) -> "Pack":
        """The pack with `function` applied to every tensor."""
        new = {name: function(tensor) for name, tensor in self.tensors().items()}
        documents = replace(self.documents, cu_q=new.pop("cu_q"), cu_k=new.pop("cu_k"))
        return replace(self, documents=documents, **new)

    def drafter_input(self, dtype: torch.dtype) -> Tensor:
        """The input of `fc`: [L, A * H]."""
        if self.aux is None or self.aux_scale is None:
            return self.states[:, :-1].flatten(1).to(dtype)
        return (self.aux.float() * self.aux_scale.unsqueeze(-1)).to(dtype).flatten(1)

    def teacher_states(self, dtype: torch.dtype) -> Tensor:
        """The target's final state at the slot after each anchor, from which step 0 learns: [N, H]."""
        final = self.states if self.aux is None else self.states.unsqueeze(1)
        after = (self.anchors + 1).clamp(max=len(self.input_ids) - 1)  # past the end only where there is no loss
        return final[after, -1].to(dtype)
