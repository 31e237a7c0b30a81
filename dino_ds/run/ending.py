"""The last lines of a run's log: where its teacher and its report are, and what its evaluations have found."""

from __future__ import annotations

from dino_ds.config.model import ModelSection
from dino_ds.run.run import Run


def closing_lines(run: Run, model: ModelSection) -> list[str]:
    """The lines of a run that has come to its last step."""
    path, steps = run.path, run.step.schedules.steps
    knows = model.spec().timm_model(model.backbone) is not None
    how = f"{path / 'teacher.json'} says how timm loads it" if knows else f"dino_ds.load({str(path)!r}) loads it"
    of, cut = f" of {steps}" if run.step.applied_steps < steps else "", run.options.last_step < steps  # --max_steps
    evaluations = run.evaluations
    return [
        f"done     step {run.step.applied_steps}{of}; the run is in {path}",
        *(["ended    " + evaluations.finished()] if evaluations and evaluations.finished() else []),
        f"teacher  {path / 'teacher.safetensors'}; {how}",
        f"report   dino-ds report {path}: curves, evaluations and pictures on one page",
        *([*evaluations.summary(cut), *evaluations.ending(path)] if evaluations else []),
    ]
