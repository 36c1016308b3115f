"""Stage 04: right, resumable, on one process or several."""

import json
import os
import re
import resource
import shutil
import signal
import sys
import time

import pytest
import torch

from drafter import config, contracts, files, locks, stage
from drafter.target import eagle3_folder
from drafter.train import checkpoint, examples, loop
from drafter.train import stage as train
from tests import captured, tiny_models

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_models.make_tiny_mla(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def warm_start(target, tmp_path_factory):
    return tiny_models.make_drafter(target, tmp_path_factory.mktemp("drafter"))


def folder(path):
    return path.parent / "runs/run/04_train"


def last(path):
    return checkpoint.complete_steps(folder(path))[-1]


def everything(path):
    """All that a run leaves: weights, moments, state, records."""
    step = last(path)
    state = checkpoint.read_state(step)
    state.pop("seconds_per_step")
    return checkpoint.read_draft(step)[0], checkpoint.read_moments(step), state, captured.metrics(path)


def assert_same(one, other):
    for ours, theirs in zip(one[:2], other[:2], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name
    assert one[2:] == other[2:]


@pytest.fixture(scope="module")
def undisturbed(target, warm_start, tmp_path_factory):
    """A run from beginning to end, and all it left."""
    torch.set_num_threads(1)
    path = captured.write_run(tmp_path_factory.mktemp("whole"), target, warm_start=warm_start)
    code, summary = captured.train(path)
    assert code == 0, summary
    return path, summary, everything(path)


def test_a_run_learns_and_says_so(undisturbed):
    path, summary, _ = undisturbed
    records = captured.metrics(path)
    steps = len(records)
    assert [r["step"] for r in records] == list(range(1, steps + 1))
    assert records[-1]["loss_total"] < records[0]["loss_total"]
    validations = captured.metrics(path, "validation")
    assert [v["step"] for v in validations] == [0, *[s for s in range(1, steps + 1) if s % 4 == 0 or s == steps]]
    assert summary["in"] == summary["out"] == 24 and summary["pending"] == 0
    facts = summary["facts"]
    assert facts["best"] == checkpoint.best_step(folder(path)).name
    assert facts["last_step"] == facts["steps"] == steps
    assert facts["rows_train"] + facts["rows_validation"] == 24
    assert facts["tokens_per_second"] > 0
    assert 0 < facts["out_of_vocabulary_share"] < 1 and 0 < facts["supervised_share"] < 1
    assert len(checkpoint.complete_steps(folder(path))) <= 3


def test_a_finished_run_does_nothing(undisturbed):
    path, _, before = undisturbed
    stamp = (last(path) / checkpoint.WEIGHTS).stat().st_mtime_ns
    code, summary = captured.train(path)
    assert code == 0 and summary["facts"]["best"]
    assert (last(path) / checkpoint.WEIGHTS).stat().st_mtime_ns == stamp
    assert_same(everything(path), before)


def test_the_dry_run_counts_steps(undisturbed, tmp_path, target):
    from drafter import stage

    def pending(path):
        args = stage.parser("").parse_args(["--dry-run", "--config", str(path)])
        return train.dry_run(stage.Stage("04_train", config.load(path), args))

    assert pending(undisturbed[0])["pending"] == 0
    fresh = pending(captured.write_run(tmp_path, target))
    assert fresh["pending"] > 0 and fresh["findings"] == []
    (tmp_path / "empty").mkdir()
    nothing = pending(captured.write_config(tmp_path / "empty", target))
    assert "no hidden states" in nothing["findings"][0]
    (states := tmp_path / "empty/runs/run/02_hidden_states").mkdir(parents=True)
    captured.write_stage(states, [])  # 02 has failed at its first row
    assert "to learn from" in pending(tmp_path / "empty/config.yaml")["findings"][0]


# Resuming


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_stopping_and_resuming_changes_nothing(undisturbed, target, warm_start, tmp_path, monkeypatch, stop):
    """T12: losses, learning rates, order, weights and moments are bit for bit those of the undisturbed run."""
    path = captured.write_run(tmp_path, target, warm_start=warm_start)
    original = loop.Training._step

    def step(self, planned):
        if planned.number == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, planned)

    monkeypatch.setattr(loop.Training, "_step", step)
    code, summary = captured.train(path)
    assert code == 143 and "SIGTERM" in summary["error"]
    assert checkpoint.step_number(last(path)) == stop
    monkeypatch.undo()
    code, resumed = captured.train(path)
    assert code == 0
    assert_same(everything(path), undisturbed[2])
    assert resumed["facts"] | {"tokens_per_second": 0} == undisturbed[1]["facts"] | {"tokens_per_second": 0}


@pytest.mark.parametrize("stop", [0, 4, 16])
def test_a_signal_waits_for_no_validation_which_is_made_up(
    undisturbed, target, warm_start, tmp_path, monkeypatch, stop
):
    """T12: validating a night's held-out rows takes as long as a save, and both together too long for a signal."""
    path, validate = captured.write_run(tmp_path, target, warm_start=warm_start), loop.Training._validate

    def struck(self):
        if self.position.step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return validate(self)

    monkeypatch.setattr(loop.Training, "_validate", struck)
    assert captured.train(path)[0] == 143
    assert [r["step"] for r in captured.metrics(path, "validation")] == list(range(0, stop, 4))
    monkeypatch.undo()
    if stop == 4:  # and killed as soon as it is noted there: the record must be on disk by then
        save_state = checkpoint.save_state

        def killed(*args):
            save_state(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(checkpoint, "save_state", killed)
        assert captured.wait(captured.forked(lambda: captured.train(path)[0])) == -signal.SIGKILL
        monkeypatch.undo()
    code, resumed = captured.train(path)
    assert code == 0
    assert_same(everything(path), undisturbed[2])
    assert captured.metrics(path, "validation") == captured.metrics(undisturbed[0], "validation")
    assert resumed["facts"]["best"] == undisturbed[1]["facts"]["best"]


def test_a_signal_while_saving_waits_for_that_save_alone(target, warm_start, tmp_path, monkeypatch):
    path, save = captured.write_run(tmp_path, target, warm_start=warm_start), checkpoint.save_step

    def struck(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        save(*args)

    monkeypatch.setattr(checkpoint, "save_step", struck)
    assert captured.train(path)[0] == 143
    assert [checkpoint.step_number(step) for step in checkpoint.complete_steps(folder(path))] == [4]
    assert len(captured.metrics(path)) == 4


def test_what_is_measured_before_the_first_step_is_never_lost(undisturbed, target, warm_start, tmp_path, monkeypatch):
    """A kill before the first checkpoint has it measured again, later ones find it there."""
    path = captured.write_run(tmp_path, target, warm_start=warm_start)
    original, measured = loop.Training._step, []

    def killed(at):
        def step(self, planned):
            if planned.number == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, planned)

        def work():
            monkeypatch.setattr(loop.Training, "_step", step)
            captured.train(path)

        return captured.wait(captured.forked(work))

    def losses(*_):
        measured.append(1)
        return {"2, 4, 5": 1.5, "3, 5, 6": 2.5}

    monkeypatch.setattr(loop.layer_convention, "losses_by_layer_ids", losses)
    assert [killed(1), killed(6)] == [-signal.SIGKILL] * 2
    code, summary = captured.train(path)
    assert code == 0 and not measured, "measured by the run that was killed"
    assert summary["facts"]["layer_losses"] == losses()
    assert summary["facts"]["expected_acceptance_before"] == undisturbed[1]["facts"]["expected_acceptance_before"]


def test_any_number_of_kills_changes_nothing(undisturbed, target, warm_start, tmp_path, monkeypatch):
    """T12, T13: SIGKILL after every second step, and once in the middle of a save."""
    path = captured.write_run(tmp_path, target, warm_start=warm_start)
    original, save = loop.Training._step, checkpoint.checkpoint_file.write_tensors

    def killed(at):
        def work():
            def step(self, planned):
                if planned.number == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(self, planned)

            monkeypatch.setattr(loop.Training, "_step", step)
            captured.train(path, "train.save_every=1")

        return captured.wait(captured.forked(work))

    def killed_saving():
        def work():
            def half(*args, **kwargs):
                save(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)

            monkeypatch.setattr(checkpoint.checkpoint_file, "write_tensors", half)
            captured.train(path)

        return captured.wait(captured.forked(work))

    steps = len(undisturbed[2][3])
    assert [killed(at) for at in range(2, steps, 2)] == [-signal.SIGKILL] * len(range(2, steps, 2))
    assert killed_saving() == -signal.SIGKILL
    assert captured.train(path, "train.save_every=1")[0] == 0
    ours, whole = everything(path), undisturbed[2]
    validation = ("best", "stale")  # it validates at every save, here more often
    states = [{k: v for k, v in run[2].items() if k not in validation} for run in (ours, whole)]
    assert_same((*ours[:2], states[0], ours[3]), (*whole[:2], states[1], whole[3]))
    assert not list(folder(path).glob("*.part"))


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_exits(target, warm_start, tmp_path, number, expected):
    path = captured.write_run(tmp_path, target, warm_start=warm_start, epochs=400)
    pid = captured.forked(lambda: captured.train(path)[0])
    wait_for_steps(path)
    os.kill(pid, number)
    assert captured.wait(pid) == expected
    step = checkpoint.step_number(last(path))
    assert step > 0 and captured.metrics(path)[-1]["step"] == step
    manifest = json.loads((folder(path) / "manifest.json").read_text())
    assert manifest["status"] == "interrupted" and step < manifest["facts"]["steps"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("struck", [[0, 1], [1]])
def test_a_signal_to_any_rank_stops_all_at_one_step(target, warm_start, tmp_path, struck):
    path = captured.write_run(tmp_path, target, warm_start=warm_start, epochs=400)
    pids = captured.start_on_ranks(2, path)
    wait_for_steps(path)
    for rank in struck:
        os.kill(pids[rank], signal.SIGTERM)
    assert [captured.wait(pid) for pid in pids] == [143, 143]
    assert captured.metrics(path)[-1]["step"] == checkpoint.step_number(last(path)) > 0


def wait_for_steps(path):
    """Until a run in another process has made its first steps."""
    journal = folder(path) / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not journal.exists() or journal.stat().st_size < 3000):
        time.sleep(0.05)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("world", "kind"), [(1, "ddp"), (2, "fsdp2")])
def test_a_full_disk_keeps_the_step_before_and_can_be_resumed(
    undisturbed, target, warm_start, tmp_path, monkeypatch, world, kind
):
    """T13: the kernel refuses to write, to rank 0 alone, while the others gather with it, and every rank ends."""
    settings = {"tokens_per_step": 64 * world, "parallel": kind}
    path = captured.write_run(tmp_path, target, warm_start=warm_start, **settings)
    original = loop.Training._step

    def step(self, planned):
        if planned.number == 5:  # enough for a line of metrics, not for a checkpoint
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        return original(self, planned)

    monkeypatch.setattr(loop.Training, "_step", step)
    assert captured.train_on_ranks(world, path) == [3] * world
    manifest = json.loads((folder(path) / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert re.fullmatch(
        r"step \d+ could not be saved \(.*File too large.*\); the last saved step is step-00000004", manifest["error"]
    )
    assert [step.name for step in checkpoint.complete_steps(folder(path))] == ["step-00000004"]
    monkeypatch.undo()
    assert captured.train_on_ranks(world, path) == [0] * world
    assert not list(folder(path).glob("*.part"))
    if world == 1:
        assert_same(everything(path), undisturbed[2])


def test_moments_come_back_by_name(undisturbed, warm_start):
    """T14: of every trainable tensor, stepped ones."""
    moments = checkpoint.read_moments(last(undisturbed[0]))
    trainable = {n for n in eagle3_folder.read_drafter(warm_start)[0] if n not in ("d2t", "t2d")}
    assert set(moments) == {f"{n}.{kind}" for n in trainable for kind in ("exp_avg", "exp_avg_sq")}
    assert all(t.abs().sum() > 0 for n, t in moments.items() if n.endswith("exp_avg_sq"))


# Changed questions


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("train.lr=0.5", "train.lr"),
        ("train.trainable=[fc]", "train.trainable"),  # T14
        ("train.ttt_steps=2", "train.ttt_steps"),
        ("train.warm_start=null", "train.warm_start"),
        ("run.seed=1", "run.seed"),
        ("train.tokens_per_step=128", "packs_per_step"),
    ],
)
def test_a_changed_question_is_refused_by_name(undisturbed, change, named):
    path = undisturbed[0]
    stamp = (folder(path) / "manifest.json").read_text()
    code, summary = captured.train(path, change, "train.epochs=3")
    assert code == 2 and named in summary["error"] and "another run.name" in summary["error"]
    (folder(path) / "manifest.json").write_text(stamp)


def test_other_rows_are_refused_by_name(undisturbed):
    path = undisturbed[0]
    stamp = (folder(path) / "manifest.json").read_text()
    code, summary = captured.train(path, limit=20)
    assert code == 2 and "rows (was" in summary["error"]
    assert (folder(path) / "manifest.json").read_text() == stamp, "a refusal leaves a finished run finished"


def planned(path, *more):
    args = stage.parser("").parse_args(["--dry-run", "--config", str(path), *more])
    return train.dry_run(stage.Stage("04_train", config.load(path), args))


def test_hidden_states_are_in_use_before_the_training_code_is_imported(target, tmp_path, monkeypatch):
    """Seam H2: `clean` freed them in the ten seconds that a training started manually needs to import torch."""
    path, seen = captured.write_run(tmp_path, target), []
    states = path.parent / "runs/run/02_hidden_states"

    class Watch:
        def find_spec(self, name, *_):
            if name == "drafter.train.loop":
                seen.append(locks.in_use(states, readers=True))
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "drafter.train.loop")
    monkeypatch.setattr(sys, "meta_path", [Watch(), *sys.meta_path])
    with pytest.raises(KeyboardInterrupt):
        captured.train(path)
    assert seen == [True] and not locks.in_use(states, readers=True)


def test_the_plan_refuses_other_rows_than_the_checkpoints_were_made_of(undisturbed, target, tmp_path):
    """Seam U4: it was refused only when training began, after the hours that the stages before take."""
    path = undisturbed[0]
    assert "refused" not in planned(path)
    plan = planned(path, "--limit", "20")
    assert "04_train was begun with other rows (was" in plan["refused"] and plan["refused"] in plan["findings"]
    assert str(folder(path)) in plan["refused"] and "another run.name" in plan["refused"]
    assert "refused" not in planned(captured.write_run(tmp_path, target), "--limit", "20"), "nothing is trained"


def test_training_records_which_rows_it_was_given(target, warm_start, tmp_path):
    """Seam U4: the identity that stage 02 records; none where an earlier version recorded none."""
    path = captured.write_run(tmp_path, target, warm_start=warm_start, epochs=1)
    assert captured.train(path, "train.max_steps=1")[0] == 0
    manifest = folder(path) / "manifest.json"
    assert json.loads(manifest.read_text())["facts"].get("row_set") is None
    upstream = path.parent / "runs/run/02_hidden_states/manifest.json"
    upstream.write_text(json.dumps(json.loads(upstream.read_text()) | {"facts": {"row_set": "abc"}}))
    for steps in (1, 2):  # finished, and with more to train
        assert captured.train(path, f"train.max_steps={steps}")[0] == 0
        assert json.loads(manifest.read_text())["facts"]["row_set"] == "abc"


def test_more_epochs_carry_on(target, warm_start, tmp_path):
    path = captured.write_run(tmp_path, target, warm_start=warm_start, epochs=1)
    assert captured.train(path)[0] == 0
    steps = checkpoint.step_number(last(path))
    assert captured.train(path, "train.epochs=2")[0] == 0
    assert checkpoint.step_number(last(path)) == 2 * steps
    assert [r["step"] for r in captured.metrics(path)] == list(range(1, 2 * steps + 1))
    code, summary = captured.train(path, "train.epochs=1")
    assert code == 2 and f"{2 * steps} steps are trained already, but only {steps} are asked for" in summary["error"]
    assert json.loads((folder(path) / "manifest.json").read_text())["status"] == "complete"


def test_the_warm_starts_vocabulary_wins(target, warm_start, tmp_path):
    """T10: the map is the checkpoint's, whatever the rows; another size is refused."""
    path = captured.write_run(tmp_path, target, warm_start=warm_start, max_steps=1)
    code, summary = captured.train(path, "train.draft_vocab_size=64")
    assert code == 2 and "the warm start has 128" in summary["error"]
    assert captured.train(path)[0] == 0
    weights, _ = checkpoint.read_draft(last(path))
    reference, _ = eagle3_folder.read_drafter(warm_start)
    assert torch.equal(weights["d2t"], reference["d2t"]) and torch.equal(weights["t2d"], reference["t2d"])


def test_a_vocabulary_of_other_tokens_is_refused(target, warm_start, tmp_path, monkeypatch):
    """T04: accuracy would stay 0 for the whole run."""
    path = captured.write_run(tmp_path, target, warm_start=warm_start)
    counts = torch.where(
        eagle3_folder.read_drafter(warm_start)[0]["t2d"], 0, 1
    )  # what was written is all of the others
    monkeypatch.setattr(examples, "token_counts", lambda *_: counts)
    code, summary = captured.train(path)
    assert code == 2 and "none of the tokens that the target wrote" in summary["error"]


def test_another_draft_vocabulary_in_the_same_folder_is_refused(target, tmp_path):
    """T10"""
    path = captured.write_run(tmp_path, target, max_steps=1)
    assert captured.train(path)[0] == 0
    code, summary = captured.train(path, "train.draft_vocab_size=64")
    assert code == 2 and "train.draft_vocab_size" in summary["error"]


# Right


def test_no_learning_rate_no_change(target, warm_start, tmp_path):
    path = captured.write_run(tmp_path, target, warm_start=warm_start, lr=0.0, max_steps=3)
    assert captured.train(path)[0] == 0
    weights, _ = checkpoint.read_draft(last(path))
    for name, tensor in eagle3_folder.read_drafter(warm_start)[0].items():
        assert torch.equal(weights[name].to(tensor.dtype), tensor), name


def test_a_decay_of_zero_learns_from_the_first_guess_alone(target, warm_start, tmp_path):
    weights = []
    for name, settings in (("decayed", {"ttt_decay": 0.0}), ("one", {"ttt_steps": 1}), ("three", {})):
        (tmp_path / name).mkdir()
        path = captured.write_run(tmp_path / name, target, rows=6, warm_start=warm_start, max_steps=1, **settings)
        assert captured.train(path)[0] == 0
        weights.append(checkpoint.read_moments(last(path))["fc.weight.exp_avg"])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-9)
    assert not torch.allclose(weights[0], weights[2], rtol=1e-1, atol=1e-9)


@pytest.mark.parametrize("groups", [["fc"], ["layer", "norms"], ["lm_head"]])
def test_what_is_frozen_stays(target, warm_start, tmp_path, groups):
    from drafter.train.draft_model import train_group

    path = captured.write_run(tmp_path, target, warm_start=warm_start, trainable=groups, max_steps=2)
    assert captured.train(path)[0] == 0
    weights, _ = checkpoint.read_draft(last(path))
    for name, tensor in eagle3_folder.read_drafter(warm_start)[0].items():
        same = torch.equal(weights[name].to(torch.float32), tensor.to(torch.float32))
        assert same == (train_group(name) not in groups), name


def test_masters_keep_what_bf16_would_lose(target, warm_start, tmp_path):
    path = captured.write_run(tmp_path, target, warm_start=warm_start, lr=1e-6, max_steps=2, precision="bf16")
    assert captured.train(path)[0] == 0
    before, after = (
        eagle3_folder.read_drafter(warm_start)[0]["fc.weight"].float(),
        checkpoint.read_draft(last(path))[0]["fc.weight"],
    )
    moved = (before != after).float().mean()
    assert moved > 0.9
    assert (after.bfloat16().float() == before).float().mean() > 0.9


def test_the_pull_towards_the_warm_start(target, warm_start, tmp_path):
    """With a pull as strong as one over the learning rate, every step ends where it began."""
    path = captured.write_run(
        tmp_path, target, warm_start=warm_start, max_steps=1, l2_sp=1e3, lr=1e-3, warmup_share=0
    )
    assert captured.train(path)[0] == 0
    weights, _ = checkpoint.read_draft(last(path))
    for name, tensor in eagle3_folder.read_drafter(warm_start)[0].items():
        torch.testing.assert_close(weights[name].float(), tensor.float(), rtol=0, atol=1e-6)


def test_a_pull_without_a_warm_start_is_refused(target, tmp_path):
    code, summary = captured.train(captured.write_run(tmp_path, target, l2_sp=0.1))
    assert code == 2 and "train.l2_sp" in summary["error"]


def test_a_number_that_is_not_finite_stops_before_the_update(target, warm_start, tmp_path):
    path = captured.write_run(tmp_path, target, rows=12, warm_start=warm_start, save_every=1)
    stage_folder = path.parent / "runs/run/02_hidden_states"
    entries = [
        captured.write_row(stage_folder, i, 30, [[5, 30]], fill=float("nan") if i == 3 else None) for i in range(12)
    ]
    captured.write_stage(stage_folder, entries)
    code, summary = captured.train(path, "train.validation_share=0.01", "train.tokens_per_step=64")
    assert code == 1 and "not finite" in summary["error"] and entries[3].row_id in summary["error"]
    for step in checkpoint.complete_steps(folder(path)):
        assert all(t.isfinite().all() for t in checkpoint.read_draft(step)[0].values() if t.is_floating_point())


def test_a_held_out_number_that_is_not_finite_stops_the_run(target, tmp_path):
    """A drafter must not be chosen by a figure that is none."""
    path = captured.write_run(tmp_path, target, rows=12)
    run = config.load(path)
    index = examples.read_index(run.stage_dir("02_hidden_states"))
    rows = examples.learnable_rows(index, 64, 3, contracts.Counts(total=12))
    held = {row.entry.row_id for row in examples.split_rows(rows, run.train.validation_share)[1]}
    number = next(i for i in range(12) if captured.row_id(i) in held)
    tokens = next(row.entry.tokens for row in rows if row.entry.row_id == captured.row_id(number))
    captured.write_row(run.stage_dir("02_hidden_states"), number, tokens, [], fill=float("nan"))
    code, summary = captured.train(path)
    assert code == 1 and "step 0: the loss on held-out rows is not finite" in summary["error"]


def test_a_best_step_that_lost_a_file_is_made_again(undisturbed, tmp_path):
    """T13: a finished run is one whose best step is whole."""
    whole = undisturbed[0].parent
    shutil.copytree(whole, tmp_path / "copy")
    path = tmp_path / "copy/config.yaml"
    path.write_text(path.read_text().replace(str(whole), str(path.parent)))
    best = checkpoint.best_step(folder(path))
    (best / checkpoint.OPTIMIZER).unlink()
    code, summary = captured.train(path)
    assert code == 0 and not checkpoint.missing_files(folder(path) / summary["facts"]["best"])


@pytest.mark.parametrize(("tokens", "spans"), [(20, [[19, 20]]), (2, [[1, 2]]), (90, [[70, 80]])])
def test_nothing_to_learn_is_said_before_the_first_step(target, tmp_path, tokens, spans):
    """T01, T02, T04, T06"""
    path = captured.write_config(tmp_path, target)
    stage_folder = path.parent / "runs/run/02_hidden_states"
    captured.write_stage(stage_folder, [captured.write_row(stage_folder, i, tokens, spans) for i in range(3)])
    code, summary = captured.train(path)
    assert code == 1 and "to learn from" in summary["error"]


def test_rows_without_supervision_are_left_out_with_a_count(target, tmp_path, caplog):
    """T01, T04"""
    caplog.set_level("INFO")
    path = captured.write_config(tmp_path, target, max_steps=2)
    stage_folder = path.parent / "runs/run/02_hidden_states"
    spans = [[[5, 30]], [[7, 8]], [[29, 30]], [[3, 30]], [[10, 30]]]
    entries = [captured.write_row(stage_folder, i, 30, s) for i, s in enumerate(spans)]
    entries.append(captured.write_row(stage_folder, 9, 2, [[1, 2]]))
    captured.write_stage(stage_folder, entries)
    code, summary = captured.train(path)
    assert code == 0
    assert summary["rejected"] == {"no_supervised_tokens": 2, "too_short": 1}
    assert (summary["in"], summary["out"], summary["pending"]) == (6, 3, 0)
    assert "86.2% learned" in caplog.text


def test_early_stop_takes_the_best_step(target, warm_start, tmp_path, monkeypatch):
    path = captured.write_run(
        tmp_path, target, warm_start=warm_start, epochs=50, validate_every=1, save_every=1, patience=3
    )
    original = loop.region_figures
    scores = iter([1.0, 1.1, 1.5, 1.4, 1.3, 1.2, 9.9])

    monkeypatch.setattr(loop, "region_figures", lambda sums: original(sums) | {"expected_acceptance": next(scores)})
    code, summary = captured.train(path)
    assert code == 0
    assert summary["facts"]["last_step"] == 5 and summary["facts"]["best"] == "step-00000002"
    monkeypatch.undo()
    assert captured.train(path)[1]["facts"]["last_step"] == 5  # and a rerun leaves it at that
    manifest = folder(path) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"status": "failed", "facts": {}}))
    assert captured.train(path)[1]["facts"]["last_step"] == 5, "also one that was killed before it could say so"


def test_two_trainings_never_share_a_folder(target, tmp_path):
    path = captured.write_run(tmp_path, target)
    with locks.locked(folder(path)):
        code, summary = captured.train(path)
    assert (code, "another process is working" in summary["error"]) == (2, True)


@pytest.mark.parametrize("file", ["state.json", "config.json", "drafter.safetensors", "optimizer.safetensors"])
def test_a_checkpoint_that_lacks_something_is_one_clear_line(undisturbed, tmp_path, file):
    """Every kind of hole: a key, a tensor."""
    whole = undisturbed[0].parent
    shutil.copytree(whole, tmp_path / "copy")
    path = tmp_path / "copy/config.yaml"
    path.write_text(path.read_text().replace(str(whole), str(path.parent)))
    manifest = folder(path) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"facts": {}}))
    broken = last(path) / file
    if file.endswith("json"):
        holes = ("stale", "tokens") if file == "state.json" else ("intermediate_size", "rms_norm_eps")
        content = json.loads(broken.read_text())
        damaged = [{key: content[key] for key in content if key != hole} for hole in holes]
        damaged = [json.dumps(each).encode() for each in damaged]
    else:
        content = broken.read_bytes()
        names = (b'"t2d"', b'"fc.weight') if file == "drafter.safetensors" else (b'"fc.weight.exp_avg"',)
        damaged = [content.replace(name, name[:1] + b"x" + name[2:], 1) for name in names]
    for each in damaged:
        broken.write_bytes(each)
        code, summary = captured.train(path)
        assert code == 1 and "our bug" not in summary["error"], summary


# Several ranks


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_rank_whose_peer_is_killed_ends_as_one_to_run_again(target, tmp_path, kind):
    """It was a traceback, called our bug."""
    path = captured.write_run(tmp_path, target, epochs=400, tokens_per_step=256, parallel=kind)
    killed, other = captured.start_on_ranks(2, path)
    while not checkpoint.complete_steps(folder(path)):
        time.sleep(0.05)
    os.kill(killed, signal.SIGKILL)
    assert (captured.wait(killed), captured.wait(other)) == (-signal.SIGKILL, 3)


def test_a_changed_question_ends_every_rank_with_the_same_code(target, tmp_path):
    path = captured.write_run(tmp_path, target, max_steps=1, tokens_per_step=256)
    assert captured.train(path)[0] == 0
    assert captured.train_on_ranks(2, path, "train.lr=0.5") == [2, 2]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_learn_what_one_learns(target, warm_start, tmp_path, kind):
    runs = []
    for world in (1, 2):
        own = tmp_path / str(world)
        own.mkdir()
        path = captured.write_run(own, target, warm_start=warm_start, parallel=kind, tokens_per_step=256)
        codes = captured.train_on_ranks(world, path)
        assert codes == [0] * world
        runs.append((captured.metrics(path), checkpoint.read_draft(last(path))[0]))
    (one, weights), (two, others) = runs
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a["loss_total"] == pytest.approx(b["loss_total"], rel=1e-5)
        assert (a["lr"], a["tokens"], a["guesses"]) == (b["lr"], b["tokens"], b["guesses"])
    for name in weights:
        torch.testing.assert_close(weights[name], others[name], rtol=1e-4, atol=1e-5)


def test_ranks_that_see_other_steps_resume_from_rank_0s(target, warm_start, tmp_path, monkeypatch):
    """Seam M8: with one rank at the last step and one at step 0, weights were mixed or collectives never met."""
    settings = {"parallel": "ddp", "tokens_per_step": 256, "warm_start": warm_start, "epochs": 1}
    path = captured.write_run(tmp_path, target, **settings)
    assert captured.train_on_ranks(2, path) == [0, 0]
    steps, seen = checkpoint.step_number(last(path)), checkpoint.complete_steps

    def stale(folder):
        return [] if os.environ.get("RANK") == "1" else seen(folder)

    monkeypatch.setattr(checkpoint, "complete_steps", stale)
    assert captured.train_on_ranks(2, path, "train.epochs=2") == [0, 0]
    assert [r["step"] for r in captured.metrics(path)] == list(range(1, 2 * steps + 1))


def test_ranks_that_read_other_rows_stop_together(target, tmp_path, monkeypatch):
    """Seam M8: the plan of one host's older index has other steps."""
    path, read = captured.write_run(tmp_path, target, tokens_per_step=256), examples.read_index

    def older(place):
        return read(place)[: -1 if os.environ.get("RANK") == "1" else None]

    monkeypatch.setattr(examples, "read_index", older)
    assert captured.train_on_ranks(2, path) == [3, 3]


@pytest.mark.timeout(60)
def test_uneven_rows_do_not_hang_the_ranks(target, tmp_path):
    """T03: an odd number of packs, seven validation rows, unsupervised rows among them."""
    path = captured.write_config(tmp_path, target, epochs=1, validation_share=0.3, tokens_per_step=128)
    stage_folder = path.parent / "runs/run/02_hidden_states"
    entries = [captured.write_row(stage_folder, i, 50, [[49, 50]] if i == 1 else [[5, 50]]) for i in range(23)]
    captured.write_stage(stage_folder, entries)
    assert captured.train_on_ranks(2, path) == [0, 0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_another_number_of_ranks_carries_on(target, warm_start, tmp_path, kind):
    """With the global batch fixed, two ranks finish what one began, and the other way round."""
    settings = {"parallel": kind, "tokens_per_step": 256, "warm_start": warm_start}
    for name, first, second in (("grow", 1, 2), ("shrink", 2, 1), ("same", 2, 2), ("straight", 1, 1)):
        (tmp_path / name).mkdir()
        path = captured.write_run(tmp_path / name, target, **settings, epochs=1)
        assert captured.train_on_ranks(first, path) == [0] * first
        assert captured.train_on_ranks(second, path, "train.epochs=2") == [0] * second
    losses = {
        name: [r["loss_total"] for r in captured.metrics(tmp_path / name / "config.yaml")]
        for name in ("grow", "shrink", "same", "straight")
    }
    assert losses["grow"] == pytest.approx(losses["straight"], rel=1e-5)
    assert losses["shrink"] == pytest.approx(losses["straight"], rel=1e-5)
    assert losses["same"] == pytest.approx(losses["straight"], rel=1e-5)


@pytest.mark.parametrize(("ranks", "expected"), [(1, "fsdp2"), (2, "ddp")])
def test_auto_keeps_what_it_chose_on_as_many_ranks(target, tmp_path, ranks, expected):
    """T12: another kind adds the same numbers in another order."""
    path = captured.write_run(tmp_path, target, parallel="auto")
    assert captured.train(path, "train.max_steps=1")[0] == 0
    before = checkpoint.read_state(last(path))
    assert before["parallel"] == "ddp"
    checkpoint.save_state(last(path), before | {"parallel": "fsdp2", "ranks": ranks})
    code, summary = captured.train(path, "train.max_steps=2")
    assert code == 0 and summary["facts"]["parallel"] == expected


def test_another_number_of_ranks_with_another_batch_is_refused_by_name(target, warm_start, tmp_path):
    path = captured.write_run(tmp_path, target, warm_start=warm_start, epochs=1)
    assert captured.train_on_ranks(1, path) == [0]
    assert captured.train_on_ranks(2, path, "train.epochs=2") == [2, 2]


# What stage 02 counted


def test_an_index_that_its_manifest_contradicts_is_refused_and_pending_rows_are_said(target, tmp_path, caplog):
    """Seam M2: 04 by hand trained on whatever the index listed, whatever 02 said of itself."""
    from drafter import stage

    caplog.set_level("INFO")
    path = captured.write_run(tmp_path, target, max_steps=1, rows=12)
    manifest_path = path.parent / "runs/run/02_hidden_states/manifest.json"
    manifest = json.loads(manifest_path.read_text())

    def counted(status: str, out: int, pending: int) -> tuple[int, dict]:
        counts = {"status": status, "in": out + pending, "out": out, "rejected": {}, "pending": pending}
        manifest_path.write_text(json.dumps(manifest | counts))
        return captured.train(path)

    for status, out in (("complete", 14), ("complete", 10), ("running", 0)):
        code, summary = counted(status, out, 0)
        assert code == 1 and "02_extract_hidden_states.py" in summary["error"]
        assert f"lists 12 rows, manifest.json counts {out} (out; status {status})" in summary["error"]
        assert not (path.parent / "runs/run/04_train/manifest.json").exists()
    index = manifest_path.with_name("index.jsonl")
    manifest_path.write_text(json.dumps(manifest | {"facts": {"index_sha256": files.sha256_file(index)}}))
    first, *others = map(json.loads, index.read_text().splitlines())
    first["supervised"] = [[span[0] + 1, span[1]] for span in first["supervised"]]  # another loss mask, as many rows
    files.write_jsonl(index, [first, *others])
    code, summary = captured.train(path)
    assert code == 1 and f"{index} was changed" in summary["error"]
    assert "02_extract_hidden_states.py" in summary["error"]
    manifest_path.write_text(json.dumps(manifest | {"status": "running", "out": 0}))
    args = stage.parser("").parse_args(["--dry-run", "--config", str(path)])
    assert "counts 0 (out" in train.dry_run(stage.Stage("04_train", config.load(path), args))["findings"][0]
    code, _summary = counted("partial", 12, 3)
    assert code == 0 and "not complete (status partial): 12 rows train, 3 are pending" in caplog.text
    assert counted("complete", 12, 0)[0] == 0


@pytest.mark.parametrize(("few", "lines"), [(20, 1), (0, 0)])
def test_a_choice_of_the_best_step_by_few_validation_rows_gets_one_line(
    target, tmp_path, monkeypatch, caplog, few, lines
):
    monkeypatch.setattr(loop, "FEW_VALIDATION_ROWS", few)
    path = captured.write_run(tmp_path, target, rows=12, epochs=1, max_steps=1)
    with caplog.at_level("INFO", "drafter"):
        assert captured.train(path)[0] == 0
    assert sum("partly chance" in message for message in caplog.messages) == lines
    assert any("train on one process" in message for message in caplog.messages)
