"""The last lines of a run's log: where its teacher and its report are, and what its evaluations have found."""

from __future__ import annotations

from dino_ds.config.model import ModelSection
from dino_ds.run.run import Run


def closing_lines(run: Run, model: ModelSection) -> list[str]:
    """The lines of a run that has come to its last step."""
    path, steps = run.path, run.step.schedules.steps
    knows = model.spec().timm_model(model.backbone) is not None
    how = f"{path / 'teacher.json'} says how timm loads it" if knows else f"dino_ds.load({str(path)!r}) loads it"
    of = f" of {steps}" if run.options.last_step < steps else ""  # --max_steps
    return [
        f"done     step {run.step.applied_steps}{of}; the run is in {path}",
        f"teacher  {path / 'teacher.safetensors'}; {how}",
        f"report   dino-ds report {path}: curves, evaluations and pictures on one page",
        *(run.evaluations.summary(cut=bool(of)) if run.evaluations else []),
    ]
