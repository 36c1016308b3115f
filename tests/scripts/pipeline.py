"""The pipeline over scripted stages: FAKES is the folder that holds one link a stage.

Without PREFLIGHT in the environment the preflight is skipped: it has tests of its own and imports torch.
"""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import drafter
from drafter import locks
from drafter.pipeline import command
from drafter.pipeline import run as pipeline

locks.CLAIMS = Path(os.environ["FAKES"])  # of this test alone
if not os.environ.get("PREFLIGHT"):
    drafter.pipeline.preflight = SimpleNamespace(refuse_findings=lambda *_: None)
fakes = Path(os.environ["FAKES"])
pipeline.STEPS = tuple(replace(step, script=str(fakes / f"{step.stage}.py")) for step in pipeline.STEPS)
raise SystemExit(command.main())
