"""The run's schema: strict, frozen, one line for every mistake."""

import argparse
import json
from datetime import datetime

import pytest
import yaml

from drafter import cli, config, model_folder
from drafter.errors import LONGEST_MESSAGE, ConfigError
from drafter.extract import worklist
from drafter.pipeline import preflight
from drafter.serve import vllm_command

DEFAULT = config.ROOT / "configs/smollm2_cpu.yaml"


def kimi_folder(folder):
    inner = {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
    }
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": inner,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    return folder


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("generate.concurency=3", "concurrency"),
        ("servers.generate.knd=command", "kind"),
        ("prompts.0.turn=last", "turns"),
        ("trian.lr=1", "train"),
        ("train.learning_rate=1", "lr"),
        ("target.max_length=1", "max_seq_len"),
        ("generate.max_new_tokens=1", "max_tokens"),
        ("target.model_name_or_path=x", "model"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_valid_one(override, nearest):
    with pytest.raises(ConfigError, match=f"unknown key .*did you mean {nearest}\\?$") as caught:
        config.load(DEFAULT, [override])
    assert "\n" not in str(caught.value)


def test_an_unknown_key_that_is_like_no_other_names_all():
    with pytest.raises(ConfigError, match="unknown key nonsense, there are run, target, servers, prompts, generate"):
        config.load(DEFAULT, ["nonsense.key=1"])


@pytest.mark.parametrize("override", ["prompts.0.count=-5", "prompts.0.turns=never"])
def test_one_mistake_is_one_error(override):
    with pytest.raises(ConfigError, match=r": prompts\.0\.\w+: [^;]+$"):
        config.load(DEFAULT, [override])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("generate.temperature=null", "generate.temperature"),
        ("train.lr=fast", "train.lr"),
        ("target.layer_ids=[30, 2]", "ascending"),
        ("extract.concurrency=0", "greater than 0"),
        ("servers.extract.kind=systemd", "unit"),
        ("nonsense", "section.key=value"),
        ("prompts.7.count=1", "no such key"),
        ("run.name=../up", "run.name"),
        ("prompts=[", "is not YAML"),
        ("generate.temperature=.inf", "finite"),
        ("generate.top_p=0", "greater than 0"),
        ("train.betas=[2, 3]", "less than 1"),
        ("servers.generate.url=127.0.0.1:8000", "no http address"),
        ("servers.generate.url=http://127.0.0.1:port", "servers.generate.url"),
        ("servers.generate.url=http://127.0.0.1:8000/v1", "without /v1"),
        ("servers.generate.url=https://127.0.0.1:8000", "listens at http://HOST:PORT"),
        ("servers.generate.url=http://127.0.0.1:8000/kimi", "listens at http://HOST:PORT"),
        ("servers.generate.args={--max-model-len: 1024}", "servers.generate.args.--max-model-len"),
        ("servers.generate.args={served_model_name: x}", "follows from target.served_name"),
        ("servers.generate.systemctl=[]", "at least 1 item"),
        ("servers.generate.start_minutes=22000", "less than or equal to 10080"),
        ("servers.generate.gpus=[-1]", "greater than or equal to 0"),
        ("target.max_seq_len=1", "greater than or equal to 32"),
        ("target.think_end=-1", "greater than or equal to 0"),
        ("target.served_name=", "valid string"),
        ("target.served_name=''", "target.served_name: is blank"),
        ("run.on_event=' '", "run.on_event: is blank"),
        ("run.dir=''", "run.dir: is blank"),
        ("generate.temperature=900", "less than or equal to 2"),
        ("generate.temperature=-0.1", "greater than or equal to 0"),
        ("acceptance.cells=[{temperature: 3}]", "acceptance.cells.0.temperature"),
        ("generate.top_p=1.5", "less than or equal to 1"),
        ("generate.top_p=-1", "greater than 0"),
        ("generate.top_k=-2", "greater than or equal to -1"),
        ("generate.min_p=2", "less than or equal to 1"),
        ("generate.repetition_penalty=100", "less than or equal to 2"),
        ("generate.concurrency=200000", "less than or equal to 10000"),
        ("generate.max_tokens=true", "generate.max_tokens: Input should be a valid integer"),
        ("generate.temperature=true", "generate.temperature: Input should be a valid number"),
        ("generate.max_tokens=12:30", "generate.max_tokens: Input should be a valid integer"),
        ("generate.max_tokens=010", "generate.max_tokens: Input should be a valid integer"),
        ("extract.reserve_gb=1:30", "extract.reserve_gb: Input should be a valid number"),
        ("train.lr=2.0e5", "less than or equal to 1"),
        ("train.ttt_steps=300", "less than or equal to 64"),
        ("train.trainable=[]", "at least 1 item"),
        ("acceptance.cells=[]", "at least 1 item"),
        ("acceptance.drafters=[]", "at least 1 item"),
        ("prompts=[]", "at least 1 item"),
        ("prompts=[{name: a, path: x}, {name: a, path: y}]", "two sources are called a"),
        ('train.warm_start="a\\0b"', "has a NUL byte"),
        ('target.special_tokens={"\\ud800": 1}', "half a character"),
        ("servers.extract.env={'A=B': x}", "servers.extract.env.A=B"),
        ("servers.extract.env={'': x}", "servers.extract.env"),
        ("servers.extract.unit=a/b", "servers.extract.unit"),
        ("generate.max_tokens=!!int 12:30", "a tag in line 1"),
        ("generate.max_tokens=!!int", "a tag in line 1"),
        ("generate.temperature=!!bool x", "a tag in line 1"),
        ("train={lr: 0.1, epochs: 2, lr: 0.2}", "the key lr is given twice"),
    ],
)
def test_a_bad_value_is_one_line_that_names_its_place(override, said):
    """G23 for the sampling field: null is a config error."""
    with pytest.raises(ConfigError) as caught:
        config.load(DEFAULT, [override])
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\x7fELF\x00\xff", b"run: [", b"- a", b"[" * 5000])
def test_a_file_that_is_no_config_is_one_line(tmp_path, content):
    path = tmp_path / "file"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"[]", b"\xff", b"{}", b'{"text_config": 5}', b'{"num_hidden_layers": "many"}'])
def test_a_model_folder_without_a_models_config_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        model_folder.read_architecture(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="no model at"):
        model_folder.read_architecture(tmp_path / "config.json")


def test_resolved_config_reads_back_equal(tmp_path):
    resolved = config.load(DEFAULT, ["train.lr=0.0002", "prompts.0.count=3", "target.max_seq_len=77"])
    (tmp_path / "config.yaml").write_text(resolved.dump())
    assert config.load(tmp_path / "config.yaml") == resolved


def test_overrides_are_yaml_values():
    resolved = config.load(DEFAULT, ["target.chat_template_kwargs={thinking: false}", "train.warm_start=null"])
    assert resolved.target.chat_template_kwargs == {"thinking": False}
    assert resolved.train.warm_start is None


def test_a_key_that_is_there_twice_is_refused_with_both_its_lines(tmp_path):
    """The later one once won in silence; what an alias brings may still be changed."""
    (path := tmp_path / "config.yaml").write_text(DEFAULT.read_text() + "run:\n  name: other\n")
    line = len(path.read_text().splitlines()) - 1
    with pytest.raises(ConfigError, match=f"the key run is given twice, in line 2 and line {line}: remove one$"):
        config.load(path)
    assert config.load(config.ROOT / "configs/smollm2_gpu.yaml").servers.extract.url == "http://127.0.0.1:8102"


def test_numbers_are_what_they_look_like_and_everything_else_is_text(tmp_path):
    written = ["1e-3", "2026-11-30", "12:30", "010", "0x10", "1_000", "5", "yes"]
    said = "{" + ", ".join(f"{key}: {value}" for key, value in zip("abcdefgh", written, strict=True)) + "}"
    resolved = config.load(DEFAULT, ["train.lr=1e-3", "run.name=2026-11-30", f"target.chat_template_kwargs={said}"])
    assert (resolved.train.lr, resolved.run.name) == (0.001, "2026-11-30")
    kwargs = resolved.target.chat_template_kwargs
    assert list(kwargs.values()) == [0.001, "2026-11-30", "12:30", "010", "0x10", 1000, 5, True]
    texts = {key: repr(value) for key, value in zip("abcdefgh", written, strict=True)}
    resolved = config.load(DEFAULT, [f"servers.extract.env={{{', '.join(f'{k}: {v}' for k, v in texts.items())}}}"])
    assert list(resolved.servers.extract.env.values()) == written
    (tmp_path / "config.yaml").write_text(resolved.dump())
    assert config.load(tmp_path / "config.yaml") == resolved


def test_a_learning_rate_of_zero_is_allowed():
    """A warm start that is not to change is how the whole path is proved."""
    assert config.load(DEFAULT, ["train.lr=0"]).train.lr == 0


def test_relative_paths_are_taken_from_the_project_root(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    resolved = config.load(DEFAULT)
    assert resolved.run.dir == config.ROOT / "runs"
    assert resolved.prompts[0].path == config.ROOT / "configs/prompts_sample.jsonl"


def test_sections_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        config.load(DEFAULT).run.seed = 5


def test_a_stage_taken_from_another_run_is_read_there(tmp_path):
    resolved = config.load(DEFAULT, [f"run.take={{01b_synthetic: {tmp_path}}}"])
    assert resolved.stage_dir("01b_synthetic") == tmp_path
    assert resolved.stage_dir("04_train") == resolved.run_dir / "04_train"


def test_missing_and_broken_config_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no config file"):
        config.load(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("run: [")
    with pytest.raises(ConfigError, match="not YAML"):
        config.load(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="mapping"):
        config.load(tmp_path / "list.yaml")


def test_nested_target_config_is_unwrapped(tmp_path):
    found = model_folder.read_architecture(kimi_folder(tmp_path))
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (61, 7168, 163840)
    assert found.rms_norm_eps == 1e-5 and found.name == "KimiK25ForConditionalGeneration"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["target.layer_ids=[2, 30, 58, 60]"], "last id must be 61"),
        (["target.layer_ids=[2, 30, 58, 61]", "target.max_seq_len=300000"], "262144 positions"),
    ],
)
def test_settings_the_model_cannot_honour_are_refused(tmp_path, overrides, said):
    resolved = config.load(DEFAULT, [f"target.model={kimi_folder(tmp_path)}", *overrides])
    with pytest.raises(ConfigError, match=said):
        resolved.check_against_model()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", {"added_tokens": [{"id": 5, "content": "<think>"}, {"id": 6, "content": "</think>"}]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "<think>"}}}),
    ],
)
def test_special_tokens_are_those_of_the_model_folders_tokenizer(tmp_path, file, content):
    """G16: a tokenizer of another model beside the weights, or a wrong id in the config, is known before a server."""
    folder = kimi_folder(tmp_path)
    (folder / file).write_text(json.dumps(content))

    def check(tokens: str, *more: str) -> None:
        settings = [f"target.model={folder}", "target.layer_ids=[2, 30, 58, 61]", f"target.special_tokens={tokens}"]
        config.load(DEFAULT, [*settings, *more]).check_against_model()

    check('{"<think>": 5, "a word": 9}')
    with pytest.raises(ConfigError, match="'<think>' as 5, not as 163606"):
        check('{"<think>": 163606}')
    check("{}", "target.think_end=6")
    if file == "tokenizer.json":
        with pytest.raises(ConfigError, match="target.think_end: .* has '</think>' as 6, not as 5"):
            check("{}", "target.think_end=5")
    (folder / file).write_text('{"added_tokens": [5], "added_tokens_decoder": 7}')
    with pytest.raises(ConfigError, match=f"{file} is no tokenizer's file"):
        check('{"<think>": 5}')


def test_missing_model_folder_is_named(tmp_path):
    resolved = config.load(DEFAULT, [f"target.model={tmp_path / 'nowhere'}"])
    with pytest.raises(ConfigError, match="target.model: no model at .*nowhere"):
        resolved.check_against_model()


def test_default_config_states_every_sampling_field():
    """G23: nothing is left to the server's generation_config."""
    tree = yaml.safe_load(config.load(DEFAULT).dump())["generate"]
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    assert all(tree[name] is not None for name in ("temperature", "top_p", "top_k", "min_p", *penalties))


@pytest.mark.parametrize(
    "aliases",
    [
        "a: &a [*a]",
        "a0: &a0 [x]\n" + "\n".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(9)),
    ],
)
def test_a_config_that_its_aliases_make_endless_is_refused(tmp_path, aliases):
    last = aliases.rpartition("\n")[2].partition(":")[0]
    path = tmp_path / "many.yaml"
    kwargs = f"target:\n  chat_template_kwargs: {{many: *{last}}}\n"
    path.write_text(aliases + "\n" + DEFAULT.read_text().replace("target:\n", kwargs, 1))
    with pytest.raises(ConfigError, match="more than 1,000,000 values"):
        config.load(path)


# Secrets


SECRETS = {"HF_TOKEN": "hf_abc123", "MY_API_KEY": "k-456", "DbPassword": "pw-789", "CLIENT_SECRET": "s-000"}


def with_secrets(tmp_path, more=None) -> config.Config:
    tree = yaml.safe_load(DEFAULT.read_text())
    tree["servers"]["generate"]["env"] = SECRETS | (more or {})
    path = tmp_path / "secret.yaml"
    path.write_text(yaml.safe_dump(tree))
    return config.load(path, [f"run.dir={tmp_path}"])


def test_secrets_never_reach_a_written_config_and_the_written_one_says_where_they_come_from(tmp_path, monkeypatch):
    """Seam M12: servers.*.env went verbatim into every config.yaml and into the report."""
    loaded = with_secrets(tmp_path, {"TOKENIZERS_PARALLELISM": "false"})
    assert loaded.servers.generate.environment()["HF_TOKEN"] == "hf_abc123"
    written = loaded.dump() + json.dumps(loaded.value("servers")) + str(loaded.model_dump())
    assert not [value for value in SECRETS.values() if value in written]
    assert loaded.value("servers.generate.env")["TOKENIZERS_PARALLELISM"] == "false"

    (tmp_path / "config.yaml").write_text(loaded.dump())
    server = config.load(tmp_path / "config.yaml").servers.generate
    with pytest.raises(ConfigError, match=r"env\.(\w+) is a secret, which this config does not hold: export \1$"):
        server.environment()
    assert any("export CLIENT_SECRET" in line for line in preflight.servers(config.load(tmp_path / "config.yaml")))
    for name in SECRETS:
        monkeypatch.setenv(name, f"exported {name}")
    assert vllm_command.environment(server)["HF_TOKEN"] == "exported HF_TOKEN"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("servers.generate.env.HF_TOKEN=hf_abc123", "servers.generate.env.HF_TOKEN: export HF_TOKEN"),
        ("servers.generate.env={HF_TOKEN: hf_abc123}", "servers.generate.env.HF_TOKEN: export HF_TOKEN"),
        ("servers.generate.args={api-key: hf_abc123}", "name its variable with api_key_env"),
        ("servers.generate.args.api_key=hf_abc123", "name its variable with api_key_env"),
        ("servers.generate.args.hf-token=hf_abc123", "export HF_TOKEN"),
        ("servers.generate.url=http://me:hf_abc123@127.0.0.1:8000", "holds a password"),
    ],
)
def test_a_secret_that_others_would_see_is_refused_without_repeating_it(override, said):
    """Seam M12: in `ps`, in servers/*.json and in the commands that a report repeats."""
    with pytest.raises(ConfigError, match=said) as caught:
        config.load(DEFAULT, [override])
    assert "hf_abc123" not in str(caught.value)


# Paths and words as a user types them


def test_a_tilde_is_the_home_folder_in_every_path_of_a_config(tmp_path, monkeypatch):
    """Seam L11, B20."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(DEFAULT.read_text())
    (tmp_path / "lr").write_text("0.01")
    paths = {
        "run.dir": "~/runs", "run.take.01b_synthetic": "~/old", "target.model": "~/model",
        "train.warm_start": "~/drafter", "export.reference": "~/reference", "servers.extract.link": "~/link",
        "servers.extract.python": "~/python",
    }  # fmt: skip
    sets = [f"{key}={value}" for key, value in paths.items()] + ["prompts.0.path=~/p.jsonl"]
    loaded = config.load("~/mine.yaml", [*sets, "acceptance.drafters=[none, ~/drafter]", "train.lr=@~/lr"])
    for key, value in paths.items():
        assert loaded.value(key) == str(tmp_path / value[2:]), key
    assert loaded.prompts[0].path == tmp_path / "p.jsonl"
    assert loaded.acceptance.drafters == ("none", str(tmp_path / "drafter")) and loaded.train.lr == 0.01
    with pytest.raises(ConfigError, match="run.dir: ~nobody-here/x: that user has no home folder"):
        config.load(DEFAULT, ["run.dir=~nobody-here/x"])


@pytest.mark.parametrize("override", ["run.name=" + "x " * 50_000, "x" * 100_000 + "=1", "prompts=" + "[" * 100_000])
def test_a_message_does_not_repeat_a_hundred_thousand_letters(override):
    with pytest.raises(ConfigError) as caught:
        config.load(DEFAULT, [override])
    assert len(str(caught.value)) <= LONGEST_MESSAGE and "\n" not in str(caught.value)


def test_a_shortened_message_says_how_much_is_missing():
    message = str(ConfigError(f"no config file {'a' * 1000}, did you mean status?"))
    assert message.startswith("no config file aaa") and message.endswith(", did you mean status?")
    assert "...(751 more characters)..." in message


@pytest.mark.parametrize("text", ["\u0663", "\u00b2", "\u0661\u0662", "0", "-1", "+1", "1_0", " 1", "9" * 5000, ""])
def test_a_count_is_written_in_ascii_digits(text):
    with pytest.raises(argparse.ArgumentTypeError):
        cli.positive(text)
    for refused in (f"prompts.{text}.count=1", f"prompts.{text}.name=x"):
        if text != "0":
            with pytest.raises(ConfigError):
                config.load(DEFAULT, [refused])
    with pytest.raises(ConfigError):
        worklist.Share.parse(f"{text}/4")


def test_a_time_is_written_in_ascii_digits():
    with pytest.raises(ConfigError, match="HH:MM"):
        cli.next_time("\u0660\u0667:\u0660\u0660", datetime(2026, 11, 29))


@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_name_of_a_config_is_refused(blank):
    """It ran the default config."""
    with pytest.raises(ConfigError, match="blank"):
        cli.parse([blank])
    with pytest.raises(ConfigError, match="blank"):
        config.load(blank)
