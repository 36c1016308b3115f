"""The model card: fit to be published, and about the run that made the drafter."""

import json

import pytest
import yaml
from huggingface_hub import ModelCardData

from drafter import config, files, run_files
from drafter.acceptance import model_card
from drafter.errors import ConfigError
from drafter.export import stage as export
from drafter.target import eagle3_folder
from tests import captured, tiny_models


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_models.make_tiny_mla(tmp_path_factory.mktemp("target") / "tiny-target")


def make_run(folder, target, *overrides) -> config.Config:
    """A run with an export, beside a warm start and a rival of the same folder name."""
    warm = tiny_models.make_drafter(target, folder / "warm/model")
    tiny_models.make_drafter(target, folder / "rival/model", seed=2)
    run = config.load(captured.write_config(folder, target, warm), overrides)
    weights, settings = eagle3_folder.read_drafter(warm)
    export.write_drafter(export.drafter_folder(run), weights, settings, run.target, warm)
    return run


def text(run) -> str:
    model_card.write_card(run)
    return (export.drafter_folder(run) / model_card.NAME).read_text()


def measured(drafter, prompt_set="s"):
    return {
        "drafter": drafter, "prompt_set": prompt_set, "prompts": 24, "concurrency": 8, "num_speculative_tokens": 3,
        "temperature": 0.0, "acceptance_length": 2.0, "low": 1.9, "high": 2.1, "tokens_per_second": 9.0,
        "seconds": 3.0, "output_tokens": 27,
        "speed_up": None, "streams_agree": True, "per_position": [0.5, 0.3, 0.2],
    }  # fmt: skip


def test_a_card_names_no_local_path(target, tmp_path):
    """Seam L12: a card that is published named the folders of the machine that made it."""
    run = make_run(tmp_path, target)
    rivals = [str(tmp_path / "rival/model"), str(tmp_path / "warm/model")]
    headline = dict.fromkeys(run_files.Headline.__annotations__) | {
        "drafter": "run",
        "verdict": "worse",
        "low": 1.9,
        "high": 2.1,
    }
    report = {
        "headline": headline | {"baseline": rivals[0], "recommended": rivals[0]},
        "comparisons": [],
        "measurements": [measured("run"), *(measured(rival) for rival in rivals)],
        "left_out": [{"prompts_skipped": 3, **measured(rivals[1])}],
        "drafters": {"run": "a", rivals[0]: "b", rivals[1]: "c"},
    }
    path = run.stage_dir("06_acceptance") / "acceptance.json"
    path.parent.mkdir(parents=True)
    files.write_json(path, report)
    found = text(run)
    assert str(tmp_path) not in found and str(target.parent) not in found
    assert "against `model`" in found and "--model tiny-target" in found
    assert "| model (2) | s (24)" in found, "two folders of one name are distinguished"


@pytest.mark.parametrize("taken", [("02_hidden_states",), ("04_train",), ("01b_synthetic", "02_hidden_states")])
def test_a_card_names_the_sources_of_the_run_that_its_stages_were_taken_from(target, tmp_path, taken):
    """Seam U7: with run.take the card named the prompts of a run that had made none of the rows."""
    sources = [{"name": name, "path": f"/data/{name}.jsonl"} for name in ("cooking", "law")]
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = make_run(tmp_path / "first", target, f"prompts={json.dumps(sources[:1])}", "train.lr=0.5")
    for number, stage in enumerate(("01b_synthetic", "02_hidden_states", "04_train")):
        place = first.stage_dir(stage)
        place.mkdir(parents=True)
        files.write_text(place / "config.yaml", first.dump())
        facts = {"stage": stage, "status": "complete", "question": {}, "facts": {}, "out": 70 + number}
        files.write_json(place / "manifest.json", facts)
    take = json.dumps({stage: str(first.stage_dir(stage)) for stage in taken})
    second = make_run(tmp_path / "second", target, f"prompts={json.dumps(sources[1:])}", f"run.take={take}")
    found = text(second)
    assert "source cooking: cooking.jsonl" in found and "law" not in found
    assert "rows answered: 70" in found and "rows read back: 71" in found
    assert ("learning rate: 0.5" in found) == ("04_train" in taken)
    assert "law" in text(make_run(tmp_path / "second", target, f"prompts={json.dumps(sources[1:])}", "run.name=own"))


def test_an_export_taken_from_another_run_keeps_that_runs_card(target, tmp_path):
    """06 wrote its own results into the card of the run that it had taken the drafter from."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = make_run(tmp_path / "first", target)
    before = text(first)
    warm = tmp_path / "first/warm/model"
    take = f"run.take={{05_export: {first.stage_dir('05_export')}}}"
    second = config.load(captured.write_config(tmp_path / "second", target, warm), ["run.name=second", take])
    assert export.drafter_folder(second) == export.drafter_folder(first)
    model_card.write_card(second)
    assert (export.drafter_folder(first) / model_card.NAME).read_text() == before


def metadata(run) -> dict:
    return yaml.safe_load(text(run).split("---")[1])


def test_the_cards_metadata_is_what_the_hub_reads(target, tmp_path):
    hub = {"name": "open", "hub": "mlabonne/open-perfectblend", "revision": "a1"}
    sources = [{"name": "mine", "path": "/data/mine.jsonl"}, hub]
    settings = ["target.hub=moonshotai/Kimi-K2.5", "export.license=mit", f"prompts={json.dumps(sources)}"]
    run = make_run(tmp_path, target, *settings)
    assert "model-index" not in metadata(run), "nothing is measured yet"
    names = ("verdict", "baseline", "recommended")
    headline = dict.fromkeys(run_files.Headline.__annotations__) | dict.fromkeys(names, "worse") | {"drafter": "run"}
    report = {"headline": headline, "comparisons": [], "measurements": [measured("none"), measured("run")]}
    (path := run.stage_dir("06_acceptance")).mkdir(parents=True)
    files.write_json(path / "acceptance.json", report | {"left_out": [], "drafters": {"none": None, "run": "a"}})
    found = metadata(run)
    assert (found["base_model"], found["license"]) == ("moonshotai/Kimi-K2.5", "mit")
    assert found["datasets"] == ["mlabonne/open-perfectblend"]
    [index] = ModelCardData(**found).to_dict()["model-index"]
    [result] = index["results"]
    assert result["metrics"][0] | {"name": ""} == {"type": "acceptance_length", "value": 2.0, "name": ""}


def test_a_card_without_hub_id_and_licence_says_what_to_set_and_claims_nothing(target, tmp_path, caplog):
    with caplog.at_level("INFO", "drafter"):
        found = metadata(make_run(tmp_path, target))
    assert "lacks target.hub and export.license" in caplog.text
    assert not {"base_model", "license", "datasets"} & found.keys()


def test_what_is_no_hub_id_is_refused(target, tmp_path):
    with pytest.raises(ConfigError, match="target.hub"):
        make_run(tmp_path, target, "target.hub=/data/models/Kimi-K2.5")
