"""The model card of an export: what it is, what it was made from, and what it has been measured to be worth."""

import json
from pathlib import Path
from typing import Any

from drafter import checked, files, run_files
from drafter.acceptance.comparison import RUN
from drafter.acceptance.wording import caveats, recommendation
from drafter.config import Config, StageName, load
from drafter.export import stage as export
from drafter.stage import read_manifest
from drafter.target import eagle3_folder

NAME = "README.md"


def write_card(config: Config) -> None:
    """Write the card beside the exported weights, from the manifests of the run as they are now.

    An export that is taken from another run keeps the card of that run; without an export there is none.
    """
    folder, trained = export.drafter_folder(config), _settings(config, "04_train")
    if "05_export" in config.run.take or not folder.exists():
        return
    exported = read_manifest(config.stage_dir("05_export")) or {"facts": {}}
    sections = [
        _head(config),
        _serving(config),
        _acceptance(config),
        _data(_settings(trained, "02_hidden_states")),
        _recipe(trained, exported["facts"]),
        _form(eagle3_folder.read_config(folder)),
        "## Versions\n\n" + _table(exported.get("versions", {})),
    ]
    files.write_text(folder / NAME, "\n\n".join(sections) + "\n")


def _settings(config: Config, stage: StageName) -> Config:
    """What a stage of this run was made with: the settings in its folder, which `run.take` may place elsewhere."""
    path = config.stage_dir(stage) / "config.yaml"
    return load(path) if stage in config.run.take and path.exists() else config


def _head(config: Config) -> str:
    target = config.target.model.name
    return (
        f"---\nlibrary_name: vllm\nbase_model: {target}\ntags: [eagle3, speculative-decoding]\n---\n\n"
        f"# EAGLE-3 drafter for {target}\n\n"
        f"Trained on text that {config.target.served_name} wrote itself, in run `{config.run.name}`."
    )


def _serving(config: Config) -> str:
    speculative = {"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": _first_cell(config)}
    return (
        f"## Serving\n\nvLLM {eagle3_folder.MIN_ENGINE} or newer, with the paths of this folder and of the "
        "target:\n\n"
        f"```\npython -m vllm.entrypoints.openai.api_server --model {config.target.model.name} "
        f"--speculative-config '{json.dumps(speculative)}'\n```"
    )


def _first_cell(config: Config) -> int:
    return config.acceptance.cells[0].num_speculative_tokens


def _acceptance(config: Config) -> str:
    path = config.stage_dir("06_acceptance") / "acceptance.json"
    if not path.exists():
        return "## Acceptance\n\nNot measured yet."
    remedy = "06_measure_acceptance.py writes it anew once it is removed"
    report = _without_paths(checked.load(path, run_files.Results, remedy=remedy))
    headline = report["headline"]
    against = f" against `{headline['baseline']}`" if headline["baseline"] else ""
    lines = [
        f"## Acceptance\n\nVerdict{against}: **{headline['verdict']}**; {recommendation(headline)}.\n",
        "| drafter | prompts | requests | draft tokens | temperature | acceptance length | 95% | tok/s | speed-up |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for m in report["measurements"]:
        interval = "" if m["low"] is None else f"{m['low']:.3f} to {m['high']:.3f}"
        cells = (
            "this one" if m["drafter"] == RUN else m["drafter"],
            f"{m['prompt_set']} ({m['prompts']})",
            m["concurrency"],
            m["num_speculative_tokens"],
            m["temperature"],
            _number(m["acceptance_length"]),
            interval,
            f"{m['tokens_per_second']:.1f}",
            _number(m["speed_up"]),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines.append("\nPooled over all decoding steps of a prompt set: 1 + accepted / drafts, from vLLM's counters.\n")
    return "\n".join([*lines, *(f"- {sentence}" for sentence in caveats(report))]).rstrip()


def _without_paths(report: dict[str, Any]) -> dict[str, Any]:
    """The report with each drafter's folder under its last name, numbered where two have the same."""
    names: dict[str, str] = {}
    for label in report.get("drafters", {}):
        name = Path(label).name
        names[label] = f"{name} ({len(names)})" if name in names.values() else name

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return names.get(value, value) if isinstance(value, str) else value

    return renamed(report)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _data(config: Config) -> str:
    """`config`: of the run that extracted the states; its rows may be another run's again."""
    states = read_manifest(config.stage_dir("02_hidden_states")) or {}
    config = _settings(config, "01b_synthetic")
    rows = read_manifest(config.stage_dir("01b_synthetic")) or {}
    facts = {"rows answered": rows.get("out"), "rows read back": states.get("out")}
    for source in config.prompts:
        place = f"{source.hub}@{source.revision}" if source.hub else source.path.name
        facts[f"source {source.name}"] = f"{place}, {source.mode}"
    names = ("temperature", "top_p", "max_tokens")
    facts |= {name: getattr(config.generate, name) for name in names}
    facts["longest row, tokens"] = config.target.max_seq_len
    return "## Data\n\n" + _table(facts)


def _recipe(config: Config, exported: dict[str, Any]) -> str:
    train = config.train
    facts = {
        "warm start": train.warm_start.name if train.warm_start else "none, from scratch",
        "step": exported.get("step"),
        "learning rate": train.lr,
        "epochs, at most": train.epochs,
        "steps, at most": train.max_steps,
        "trained": ", ".join(train.trainable),
        "guesses a position": train.ttt_steps,
        "seed": config.run.seed,
    }
    return "## Recipe\n\n" + _table(facts)


def _form(config: dict[str, Any]) -> str:
    facts = {
        "layers read from the target (vLLM's ids)": ", ".join(map(str, eagle3_folder.layer_ids(config))),
        "draft vocabulary": f"{config.get('draft_vocab_size') or config['vocab_size']} of {config['vocab_size']}",
        "longest position": config["max_position_embeddings"],
        "rope": json.dumps(config["rope_parameters"]),
        "sliding window": config.get("sliding_window"),
    }
    return "## Form\n\n" + _table(facts)


def _table(facts: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items() if value is not None)
