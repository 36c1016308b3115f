"""What the compact format costs a warm start, before a compact file is written."""

import pytest

from drafter import config, contracts
from drafter.train import examples, fp8_cost
from tests import captured, tiny_models


def test_the_predicted_loss_is_the_loss_on_the_compact_file(tmp_path):
    target = tiny_models.make_tiny_mla(tmp_path / "target")
    drafter = tiny_models.make_drafter(target, tmp_path / "drafter")
    run_config = config.load(captured.write_config(tmp_path, target, drafter))
    scored, silent = fp8_cost.FirstLoss(run_config), fp8_cost.FirstLoss(run_config)
    entries = [captured.write_row(tmp_path / "bf16", i, 30, [[5, 30]]) for i in range(3)]
    for entry in entries:
        scored.add(entry, tmp_path / "bf16" / entry.path)
        captured.write_row(tmp_path / "fp8", entries.index(entry), 30, [[5, 30]], dtype="fp8")
    losses = scored.losses()
    for dtype, loss in losses.items():
        reader = examples.Reader(tmp_path / dtype, *captured.FORM, 1, think_end=None, pin=False)
        pack = reader.read(examples.learnable_rows(entries, 64, 1, contracts.Counts()))
        sums = scored.drafter(pack, scored.scale)[1].sum(0)[0]
        assert loss == pytest.approx(float(sums[1] / sums[0]), rel=1e-5)
    assert losses["bf16"] != losses["fp8"]
    silent.add(captured.write_row(tmp_path / "late", 9, 30, [[29, 30]]), tmp_path / "late")
    assert silent.losses() is None
