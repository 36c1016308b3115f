"""The stages in the order of a run, with the server that each one needs."""

from dataclasses import dataclass

from drafter.config import Role, StageName


@dataclass(frozen=True)
class Step:
    number: str
    stage: StageName
    script: str
    role: Role | None = None  # the server it sends requests to
    machine: bool = True  # needs the GPUs, so every other role is stopped


STEPS = (
    Step("01b", "01b_synthetic", "01b_generate_synthetic.py", role="generate"),
    Step("02", "02_hidden_states", "02_extract_hidden_states.py", role="extract"),
    Step("04", "04_train", "04_train.py"),
    Step("05", "05_export", "05_export_checkpoint.py", machine=False),
    Step("06", "06_acceptance", "06_measure_acceptance.py"),  # starts `evaluate` itself, once for each drafter
)
