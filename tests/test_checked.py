"""Every file between stages, damaged: its reader takes it, or refuses it in one line that names the file."""

import json
import random
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import pytest

from drafter import config, model_folder, stage
from drafter.acceptance import comparison, model_card, prompt_sets
from drafter.acceptance import stage as acceptance
from drafter.errors import LONGEST_MESSAGE, StageError
from drafter.export import stage as export
from drafter.extract import worklist
from drafter.generate import mix, prompts
from drafter.generate.prompts import Requests
from drafter.pipeline import engine_check, status
from drafter.pipeline.report import page as report
from drafter.serve import smoke_record
from drafter.serve.decoding import Decoded
from drafter.target import eagle3_folder
from drafter.train import checkpoint, examples, new_drafter
from tests import test_run_files, tiny_models
from tests.captured import row_id
from tests.conftest import CPU_CONFIG
from tests.test_contracts import row

DEEP = "@deep@"  # stands for more brackets than a parser takes
ODD = (None, True, 0, -1, 1.5, 2**70, float("inf"), "", "x", "\udcff", "x" * 100_000, [], [1], ["a"], {})
ODD += (DEEP,)
WHOLES = (b"", b"\n", b"\0" * 64, b"[" * 100_000, b"null\n", b"[]\n", b"{}\n", b'"x"\n', b"\xff\xfe\n")
CASES = 150


def damaged(content: bytes, generator: random.Random) -> bytes:
    """One line of JSON with one thing wrong: a value, a key, an end, a byte."""
    how = generator.choice(("value", "value", "value", "key", "cut", "byte", "all"))
    if how == "cut":
        return content[: generator.randrange(len(content))] + b"\n"
    if how == "byte":
        place = generator.randrange(len(content))
        return content[:place] + bytes([generator.choice((0, 10, 34, 92, 255))]) + content[place + 1 :]
    if how == "all":
        return generator.choice(
            (b"", b"\n", b"\0" * 64, b"[" * 100_000, b"null\n", b"[]\n", b"{}\n", b'"x"\n', b"\xff\xfe\n")
        )
    tree = json.loads(content)
    node, key = generator.choice(list(places(tree)))
    if how == "key" and isinstance(node, dict):
        value = node.pop(key)
        if generator.random() < 0.5:
            node[generator.choice(("", "extra", "k" * 5000))] = value
    else:
        node[key] = generator.choice(ODD)
    return compact(tree).decode().replace(f'"{DEEP}"', "[" * 9000 + "]" * 9000).encode()


def compact(tree) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode() + b"\n"


def places(tree):
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


class Lab(NamedTuple):
    config: config.Config
    folder: Path  # of the run
    target: Path
    drafter: Path


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    target = tiny_models.make_tiny_mla(folder / "target")
    drafter = tiny_models.make_drafter(target, folder / "drafter")
    layers = list(tiny_models.LAYER_IDS)
    loaded = config.load(
        CPU_CONFIG,
        [f"run.dir={folder}", "run.name=r", f"target.model={target}", f"target.layer_ids={layers}",
         "target.max_seq_len=64", "target.special_tokens={}", f"train.warm_start={drafter}",
         "train.draft_vocab_size=null", "train.draft_intermediate_size=null"],
    )  # fmt: skip
    return Lab(loaded, folder / "r", target, drafter)


def the_row(**changes) -> dict:
    return row(row_id=row_id(0), **changes)


def entry() -> dict:
    return {
        "row_id": row_id(0), "conv_id": "c", "source": "s", "tokens": 9, "row_tokens": 12,
        "supervised": [[3, 6], [7, 9]], "think_end": 4, "bytes": 4096, "digest": "0" * 16,
    }  # fmt: skip


PROMPT = {"conv_id": "c", "source": "s", "messages": [{"role": "user", "content": "Why?"}], "tools": None}
UNIT = comparison.Measurement("run", "held_out", 8, 3, 0.7, "9a")
REPLY = {
    "conv_id": "c", "token_ids": [1, 2, 3], "chunks": [1, 2], "finish_reason": "stop", "seconds": 0.5,
    "first_token_seconds": 0.1, "thinks": False,
}  # fmt: skip
DECODED = {
    "replies": [REPLY], "seconds": 1.0, "refused": {"d": "too long"}, "skipped": 0,
    "counters": {"drafts": 1, "draft_tokens": 3, "accepted": 1, "accepted_per_position": [1, 0, 0]},
}  # fmt: skip
ACCEPTANCE = json.loads(json.dumps(comparison.summarise_results([UNIT], {UNIT: Decoded.from_record(DECODED)}, 2, 0)))
REJECTED = {"row_id": row_id(1), "source": "s", "reason": "failed", "detail": "", "at": "reply"}
REQUEST = {
    "row_id": row_id(1), "parent": None, "conv_id": "c", "source": "s", "turn": 0, "mode": "regenerate",
    "messages": [{"role": "user", "content": "Why?"}], "tools": None,
}  # fmt: skip
TABLE = {"conversations": 3, "requests": 2, "rejected": {"held_out": 1}}
META = {"key": "k", "sha256": "s", "sources": {"s": TABLE}, "read": {"s": "so"}, "held_out": {"s": 1}}
SMOKE = {"length": 1.5, "tallies": [[3] + [1] * smoke_record.DRAFT_TOKENS]}
STATE = {"step": 4, "validated": 4, "expected_acceptance": 1.5}
MANIFEST = {
    "stage": "04_train", "status": "complete", "in": 3, "out": 3, "rejected": {}, "pending": 0, "seconds": 9.5,
    "question": {"schema": 1}, "facts": {"step": "step-00000004", "identity": "ab"}, "versions": {"torch": "2"},
}  # fmt: skip


def stage_of(lab: Lab, name: str) -> stage.Stage:
    return stage.Stage(name, lab.config, Namespace(limit=None, dry_run=False))


def step_folder(lab: Lab) -> Path:
    folder = lab.folder / "04_train/step-00000004"
    folder.mkdir(parents=True, exist_ok=True)
    for name in checkpoint.FILES:
        (folder / name).touch()
    return folder


def read_card(lab: Lab, _path: Path) -> None:
    before = stage.read_manifest(lab.folder / "05_export")
    if before:
        export._is_exported(lab.config, before["facts"], Path("step-00000004"))


def in_folder(name: str):
    return lambda lab: lab.folder / name


FORMATS = {
    "row": (in_folder("01b_synthetic/shard-00000.jsonl"), the_row(), lambda lab, _: worklist.read_items(lab.config)),
    "index": (in_folder("02_hidden_states/index.jsonl"), entry(), lambda lab, path: examples.read_index(path.parent)),
    "held_out": (
        in_folder("01b_synthetic/held_out.jsonl"), PROMPT, lambda lab, _: prompt_sets.read_prompt_sets(lab.config)
    ),
    "unit": (
        in_folder("06_acceptance/units/9a.json"), DECODED,
        lambda lab, _: comparison.summarise_results(
            [UNIT], {UNIT: acceptance.read_result(stage_of(lab, "06_acceptance"), UNIT)}, 2, 0
        ),
    ),
    "manifest": (
        in_folder("04_train/manifest.json"), MANIFEST, lambda lab, _: stage_of(lab, "05_export").require("04_train")
    ),
    "manifest of 05": (in_folder("05_export/manifest.json"), MANIFEST, read_card),
    "state": (
        lambda lab: step_folder(lab) / "state.json", STATE, lambda lab, path: checkpoint.read_state(path.parent)
    ),
    "target": (
        lambda lab: lab.target / "config.json", tiny_models._text_config(),
        lambda lab, path: (
            model_folder.read_architecture.cache_clear(),
            lab.config.check_against_model(),
            new_drafter.first_config(lab.config.target, None, None),
        ),
    ),
    "drafter": (
        lambda lab: lab.drafter / "config.json", None,
        lambda lab, path: (eagle3_folder.check_settings(lab.config), eagle3_folder.check_folder(path.parent,
        lab.config.target)),
    ),
    "acceptance": (
        in_folder("06_acceptance/acceptance.json"), ACCEPTANCE, lambda lab, _: model_card._acceptance(lab.config)
    ),
    "rejected": (
        in_folder("01b_synthetic/rejected.jsonl"), REJECTED, lambda lab, path: prompts.read_rejections(path.parent)
    ),
    "requests": (
        in_folder("01b_synthetic/prompts.jsonl"), REQUEST,
        lambda lab, path: [read[0] for read in [Requests(path)] if len(read)],
    ),
}  # fmt: skip
# Files that their readers do without, or make anew, when they are broken
OPTIONAL = {
    "prompts.json": (
        in_folder("01b_synthetic/prompts.json"), META, lambda lab, path: mix.current_meta(lab.config, path.parent)
    ),
    "journal of 02": (
        in_folder("02_hidden_states/.journal/1of1.jsonl"), entry(),
        lambda lab, path: worklist.extracted_rows(path.parents[1], []),
    ),
    "engine.json": (
        in_folder("../engine.json"), {"k": {"eagle3": True, "refused": {}}},
        lambda lab, _: engine_check._kept(lab.config)
    ),
    "smoke.json": (
        in_folder("../smoke.json"),
        lambda lab: {"k": dict(zip(("drafter", "target"), smoke_record._models(lab.config), strict=True)) | SMOKE},
        lambda lab, _: smoke_record.find(lab.config),
    ),
    "config.yaml": (
        in_folder("04_train/config.yaml"), {"run": {"keep": []}, "target": {"model": "m"}},
        lambda lab, path: stage.read_resolved(path.parent),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_taken_or_refused_in_one_line_that_names_it(name, lab):
    """Seam L3: twenty damaged or wrongly typed files between stages ended in a traceback and "our bug"."""
    place, content, read = FORMATS[name]
    path = place(lab)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else None
    whole = compact(content if content else json.loads(before))
    generator, refused = random.Random(name), 0
    try:
        path.write_bytes(whole)
        read(lab, path)  # undamaged it is taken
        for _ in range(CASES):
            path.write_bytes(broken := damaged(whole, generator))
            try:
                read(lab, path)
            except StageError as error:
                message = str(error)
                refused += 1
                assert "\n" not in message and len(message) <= LONGEST_MESSAGE, broken[:300]
                assert path.name in message or path.parent.name in message, (message, broken[:300])
            except Exception as error:
                pytest.fail(f"{error!r} from {broken[:500]!r}")
    finally:
        path.write_bytes(before) if before is not None else path.unlink()
        model_folder.read_architecture.cache_clear()
    assert refused > CASES / 4, "the damage is seen"


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_damaged_file_that_can_be_done_without_is_no_traceback(name, lab):
    """Seam L2, L3."""
    place, content, read = OPTIONAL[name]
    path = place(lab)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content(lab) if callable(content) else content
    generator = random.Random(name)
    for _ in range(CASES):
        path.write_bytes(broken := damaged(compact(content), generator))
        try:
            read(lab, path)
        except StageError as error:
            assert "\n" not in str(error) and path.name in str(error), broken[:300]
        except Exception as error:
            pytest.fail(f"{error!r} from {broken[:500]!r}")
    path.unlink()


@pytest.mark.parametrize("name", sorted(test_run_files.FILES))
def test_the_pages_of_a_run_are_made_whatever_its_files_hold(name, tmp_path, model):
    """Seam L3, for pipeline.json, plan.json and all that `status` and the report read."""
    run = config.load(CPU_CONFIG, [f"run.dir={tmp_path}"])
    files = test_run_files.the_files(run)
    test_run_files.pages(run, files)
    path, generator = run.run_dir / test_run_files.FILES[name], random.Random(name)
    for _ in range(CASES // 5):
        path.write_bytes(broken := damaged(compact(files[name]), generator))
        try:
            status.lines(run)
            report.write(run)
        except Exception as error:
            pytest.fail(f"{error!r} from {broken[:500]!r}")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("row", {"input_ids": None}, "input_ids: Input should be a valid list"),
        ("row", {"input_ids": 5}, "input_ids: Input should be a valid list"),
        ("row", {"input_ids": ["a", "b"]}, "input_ids.0: Input should be a valid integer"),
        ("row", {"supervised": ["ab"]}, "supervised.0: Input should be a valid list"),
        ("row", {"supervised": [[4.0, 10.5]]}, "supervised.0.0: Input should be a valid integer"),
        ("row", {"row_id": 7}, "row_id: Input should be a valid string"),
        ("row", {"row_id": "../../x"}, "row_id: String should match"),
        ("index", {"row_id": 7}, "row_id: Input should be a valid string"),
        ("index", {"tokens": "9"}, "tokens: Input should be a valid integer"),
        ("index", {"tokens": 20, "row_tokens": 19}, "20 tokens of a row of 19"),
        ("held_out", {"messages": None}, "messages: Input should be a valid list"),
        ("held_out", {"messages": [5]}, "messages.0: Input should be a valid dictionary"),
        ("unit", {"replies": [REPLY | {"chunks": None}]}, "replies.0.chunks: Input should be a valid list"),
        ("unit", {"counters": 5}, "counters: Input should be a valid dictionary"),
        ("manifest", {"question": None}, "question"),
        ("manifest", {"facts": {"steps": "x"}}, "facts.steps: Input should be a valid integer"),
        ("state", {"step": None}, "step"),
        ("target", {"num_attention_heads": 0}, "num_attention_heads: Input should be greater than 0"),
        ("target", {"hidden_size": "64"}, "hidden_size: Input should be a valid integer"),
    ],
)  # fmt: skip
def test_a_refusal_names_file_field_and_what_is_wanted(name, changes, said, lab):
    """Seam L3: one line, exit code 1 for a file of ours and 2 for the user's."""
    place, content, read = FORMATS[name]
    path = place(lab)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else None
    try:
        path.write_text(json.dumps(content | changes) + "\n")
        with pytest.raises(StageError) as caught:
            read(lab, path)
    finally:
        path.write_bytes(before) if before is not None else path.unlink()
        model_folder.read_architecture.cache_clear()
    assert said in str(caught.value) and path.name in str(caught.value)
    assert caught.value.exit_code == (2 if name == "target" else 1)
