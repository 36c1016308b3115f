"""Whether 04 would go on with the rows that the stages before it are about to make."""

import pytest

from drafter import config, files
from drafter.pipeline import other_rows
from drafter.train import checkpoint
from tests.conftest import CPU_CONFIG


@pytest.fixture
def run(tmp_path, model):
    """A run whose 04 has a checkpoint of the rows `first`."""
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    folder = run.stage_dir("04_train")
    files.write_json(folder / "manifest.json", {"status": "complete", "facts": {"row_set": "first"}})
    (folder / "step-00000004").mkdir()
    for name in checkpoint.FILES:
        (folder / "step-00000004" / name).touch()
    return run


def plan(stage: str = "01b_synthetic", pending: int = 1, **more) -> dict:
    return {"stage": stage, "pending": pending, "findings": [], "row_set": "other"} | more


def test_other_rows_are_refused_whether_they_are_there_or_to_be_made(run):
    """Seam U4: the two ways on are named."""
    for planned in (plan(), plan(pending=0, stale="of other prompts"), plan("02_hidden_states")):
        refusal = other_rows.refused(run, planned, None)
        assert refusal.startswith("04_train was begun with other rows than these prompts give")
        assert "use another run.name" in refusal and f"delete {run.stage_dir('04_train')}" in refusal
    assert other_rows.refused(run, plan(row_set="first"), None) is None


def test_a_changed_amount_before_training_has_a_checkpoint_is_no_reason_to_stop(run):
    """Seam U4"""
    (run.stage_dir("04_train") / "step-00000004" / checkpoint.STATE).unlink()
    assert other_rows.refused(run, plan(), None) is None


def test_what_no_manifest_records_is_left_to_04(run):
    """Seam U4: an earlier version's manifest, and prompts that only the hub knows."""
    unknown = plan()
    del unknown["row_set"]
    assert other_rows.refused(run, unknown, None) is None
    files.write_json(run.stage_dir("04_train") / "manifest.json", {"status": "complete", "facts": {}})
    assert other_rows.refused(run, plan(), None) is None
    (run.stage_dir("04_train") / "manifest.json").unlink()
    assert other_rows.refused(run, plan(), None) is None


def test_with_a_limit_01b_is_judged_only_when_it_asks_for_new_rows(run):
    """Seam U4: of more rows than the limit, 02 takes the first of the shards and 01b the first asked for."""
    assert other_rows.refused(run, plan(pending=0), 16) is None
    assert other_rows.refused(run, plan(), 16) and other_rows.refused(run, plan("02_hidden_states", 0), 16)


@pytest.mark.parametrize("taken", ["02_hidden_states", "04_train"])
def test_rows_that_04_does_not_read_are_not_judged(run, tmp_path, taken):
    """Seam U4"""
    run.run.take[taken] = tmp_path
    assert other_rows.refused(run, plan(), None) is None
