"""The cost of the compact format: a warm start's step-0 loss on bf16 states and on the same states compacted."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch

from drafter.config import Config
from drafter.contracts import Counts, IndexEntry
from drafter.extract import states
from drafter.target import eagle3_folder
from drafter.target.head import read_verifier
from drafter.train import draft_model, examples
from drafter.train.draft_model import STATS

TOKENS = 512  # tokens of a row: few, as the drafter runs on the CPU while the extract server has the GPU


class FirstLoss:
    """Sums losses over rows. Raises ConfigError or ContractError on a warm start that does not fit the target."""

    def __init__(self, config: Config):
        start, target = cast(Path, config.train.warm_start), config.target  # only a warm start has a first loss
        verifier = read_verifier(target.model)
        self.form = target.layer_ids, target.architecture.hidden_size, target.architecture.vocab_size
        self.drafter = draft_model.build_drafter(
            eagle3_folder.check_folder(start, target), eagle3_folder.read_config(start), verifier, target
        )
        self.drafter.prepare(verifier, torch.bfloat16 if config.train.precision == "bf16" else torch.float32, steps=1)
        self.scale = torch.ones(1)  # one step
        self.sums = torch.zeros(2, len(STATS))

    @torch.no_grad()
    def add(self, entry: IndexEntry, file: Path) -> None:
        """Add a row's bf16 file; a row without supervised tokens among its first ones adds nothing."""
        rows = examples.learnable_rows([entry], TOKENS, 1, Counts())
        if not rows:
            return
        with TemporaryDirectory() as folder:  # the reader expects the row's final file name
            path = Path(folder, entry.path)
            path.parent.mkdir()
            path.symlink_to(file)
            pack = examples.Reader(Path(folder), *self.form, 1, think_end=None, pin=False).read(rows)
        small = states.to_compact(pack.states)
        kept = replace(pack, states=small["final"], aux=small["aux"], aux_scale=small["aux_scale"])
        for number, one in enumerate((pack, kept)):
            self.sums[number] += self.drafter(one, self.scale)[1].sum(0)[0]

    def losses(self) -> dict[str, float] | None:
        """Loss a supervised token, by `extract.dtype`; None when no row had one."""
        count = self.sums[:, STATS.index("count")]
        if not count.all():
            return None
        plain, compact = (self.sums[:, STATS.index("loss")] / count).tolist()
        return {"bf16": plain, "fp8": compact}
