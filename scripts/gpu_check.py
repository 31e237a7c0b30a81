"""The first quarter of an hour on a GPU: `make gpu-check`, or `python -m scripts.gpu_check --out FOLDER --only REGEX`.

Does it train in every precision and with each kind of recipe; is it deterministic, does it resume; do fast paths equal
their plain forms on this card; how fast is it, beside the planner's numbers and a plain step. Each part is a process
with a limit of its own. FOLDER (gpu_check/) has page.md, result.json and what the parts printed. The exit code is 0 if
every part has passed. `--dry_run`, without a GPU: command lines are parsed, what is measured runs in small on the CPU.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fire
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_ds.basics.files import read_object
from dino_ds.basics.formatting import markdown_table
from dino_ds.cli.main import parse, prepare
from dino_ds.config.ds_config import CHECKOUT, load_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.costs.memory import estimate_memory
from dino_ds.costs.step_costs import mean_flops, model_flops, student_facts
from dino_ds.engine.process import init_distributed
from dino_ds.errors import UserError, one_line
from dino_ds.method.build import build_network, build_objective
from dino_ds.method.fast_paths import EVERY, FAST_PATHS, Case
from dino_ds.planning.fit import REACHED
from dino_ds.planning.measure import build_trial, matmul_tflops, resolve, time_interleaved
from scripts.gpu_counts import count

SECONDS, STEPS = 880, 6
"""Seconds of all parts together, after which none has passed; steps of a run."""
_DS = "ds_configs/zero1_bf16.json"
_QUIET = ("--eval.every", "0 steps", "--eval.pictures_every", "0 steps", "--log_every", "1")
_PHOTOS = ("--data.source", "photos", "--data.global_batch", "16")
KINDS: dict[str, tuple[str, ...]] = {
    "quickstart_dinov2": (), "quickstart_dinov3": (), "vits16": _PHOTOS, "dinov2_vits14": _PHOTOS,
    "dinov3_vits16": _PHOTOS, "resnet18": (*_PHOTOS, "--optimizer.kind", "lars"), "convnext_tiny": _PHOTOS,
}  # fmt: skip
OPTIONS = {
    "compiled": ("--ds.dino_ds.compile", "default"), "captured": ("--ds.dino_ds.compile", "reduce-overhead"),
    "varlen": ("--ds.dino_ds.attention", "varlen"), "plain": ("--ds.dino_ds.fast_paths", "false"),
    "adapters": ("--model.train", "lora", "--optimizer.kind", "adamw"),
}  # fmt: skip
COMPARED = {"vits16": 64, "dinov2_vits14": 32, "dinov3_vits16": 32, "resnet18": 32}
SPEEDS = {"vits16": 64, "dinov2_vitl14": 64, "dinov3_vitl16": 32}
"""Recipes whose fast paths are compared, and that are timed, and the images of a step; halved until they fit."""
_OWN_HEADS = "dinov2_vitl14", "dinov3_vitl16", "dinov3_vits16"  # of iBOT
_SMALL = {"model.depth": "1", "model.width": "64", "model.heads": "2", "head.hidden": "64", "head.prototypes": "64"}


@dataclass
class Part:
    """Commands that run one after the other, each in a process of its own, and what is looked at then.

    look: returns what was found as plain JSON, with a text "problem" if it is wrong; alone: nothing runs beside it.
    """

    name: str
    seconds: int
    commands: list[list[str]]
    look: Callable[[], dict[str, Any]]
    alone: bool = False
    needs_bf16: bool = True
    result: dict[str, Any] = field(default_factory=dict)


def main(out: str = "gpu_check", only: str = "", dry_run: bool = False, part: str = "") -> None:
    """Run the parts whose names match the regular expression `only`, and write the page. `part`: measure one here."""
    folder = Path(out).absolute()
    if part:
        (folder / f"{part}.json").write_text(json.dumps(measure(part)))
        return
    if not dry_run and not torch.cuda.is_available():
        sys.exit("gpu-check: no GPU is found (--dry_run tries the check itself on the CPU)")
    parts = [each for each in all_parts(folder) if re.search(only, each.name)]
    if dry_run:
        problems = [line for each in parts for line in dry(each)]
        print("\n".join([*problems, f"{len(parts)} parts, {len(problems)} problems"]))
        sys.exit(1 if problems else 0)
    if (folder / "runs").exists():
        sys.exit(f"gpu-check: {folder} has results of an earlier check: remove it, or name another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    passed = run_all(parts, folder)
    if passed and not only and describe_card()["bf16"]:  # later starts on this card need not compare
        init_distributed()
        resolved = resolve(load_recipe("quickstart", {}), load_ds_config(_DS, {}), _DS, 64)
        with contextlib.suppress(OSError):  # without a cache, each start compares
            Case(*resolved, torch.device("cuda", 0), build_network).proof(EVERY).touch()
    print((folder / "page.md").read_text())
    sys.exit(0 if passed else 1)


def all_parts(folder: Path) -> Iterator[Part]:
    """Yield every part; runs lie in `folder`/runs."""

    def train(name: str, recipe: str, *options: str, ds: str = _DS, steps: int = STEPS) -> list[str]:
        words = ["train", "--config", recipe, "--ds_config", ds, "--run_dir", str(folder / "runs" / name)]
        return [*words, "--max_steps", str(steps), *_QUIET, *options]

    def trained(name: str, seconds: int, *commands: list[str], look: Any = look_at_runs) -> Part:
        runs = [Path(words[words.index("--run_dir") + 1]) for words in commands]
        low = any("bf16" in word for words in commands for word in words)
        programs = [[sys.executable, "-m", "dino_ds", *words] for words in commands]
        return Part(name, seconds, programs, functools.partial(look, runs), needs_bf16=low)

    for kind, recipes, alone in (("speed", SPEEDS, True), ("paths", COMPARED, False)):
        for name in (f"{kind}_{recipe}" for recipe in recipes):
            words = [sys.executable, "-m", "scripts.gpu_check", "--part", name, "--out", str(folder)]
            yield Part(name, 200, [words], functools.partial(read_object, folder / f"{name}.json"), alone)
    for file in sorted((CHECKOUT / "ds_configs").glob("*.json")):
        yield trained(f"config_{file.stem}", 120, train(file.stem, "quickstart", ds=f"ds_configs/{file.name}"))
    for recipe, options in KINDS.items():
        yield trained(f"recipe_{recipe}", 150, train(recipe, recipe, *options))
    for name, options in OPTIONS.items():
        yield trained(f"option_{name}", 180, train(name, "quickstart", *options))
    first, gram = train("dinov3", "quickstart_dinov3"), train("gram", "quickstart_gram")
    highres = [*train("highres", "quickstart_highres"), "--from", str(folder / "runs/gram")]
    yield trained("recipe_stages", 240, first, [*gram, "--from", str(folder / "runs/dinov3")], highres)
    student = [*train("distill", "quickstart_distill"), "--teacher.source", str(folder / "runs/teacher")]
    yield trained("recipe_distillation", 180, train("teacher", "quickstart"), student)
    same = "--ds.dino_ds.deterministic", "true"
    whole, again = (train(name, "quickstart", *same, steps=2 * STEPS) for name in ("whole", "again"))
    half, rest = (train("halves", "quickstart", *same, steps=steps) for steps in (STEPS, 2 * STEPS))
    yield trained("twice_and_resumed_equal", 300, whole, again, half, [*rest, "--resume"], look=look_at_equals)
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    yield Part("tests_marked_gpu", 240, [tests], dict)


def run_all(parts: list[Part], folder: Path) -> bool:
    """Run the parts, first and alone those that are timed; keep each result as it comes. Returns whether all passed."""
    end, card, lock = time.monotonic() + SECONDS, describe_card(), threading.Lock()
    width = max(1, min(4, (os.cpu_count() or 2) // 2, int(card["gib"] // 6)))

    def run(part: Part) -> None:
        runs_here = card["bf16"] or not part.needs_bf16
        part.result = run_part(part, folder, end) if runs_here else {"skipped": "this card has no bf16"}
        print(f"{part.name}: {part.result.get('problem') or part.result.get('skipped') or 'passed'}", flush=True)
        results = {each.name: each.result or {"problem": "not run yet"} for each in parts}
        passed = not any("problem" in result for result in results.values())
        with lock:
            (folder / "result.json").write_text(json.dumps({**card, "passed": passed, "parts": results}, indent=1))
            (folder / "page.md").write_text(page(results, card, passed))

    for part in (part for part in parts if part.alone):
        run(part)
    with concurrent.futures.ThreadPoolExecutor(width) as pool:
        list(pool.map(run, [part for part in parts if not part.alone]))
    return all("problem" not in part.result for part in parts)


def run_part(part: Part, folder: Path, end: float) -> dict[str, Any]:
    """Run a part's commands until one fails, then look at what they left."""
    begin, log = time.monotonic(), folder / f"{part.name}.txt"
    with log.open("w") as output:
        for words in part.commands:
            left = min(part.seconds - (time.monotonic() - begin), end - time.monotonic())
            if left < 5:
                return {"problem": "no time was left"}
            process = subprocess.Popen(words, cwd=CHECKOUT, stdout=output, stderr=output, start_new_session=True)
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                return {"problem": f"not done after {left:.0f} s"}
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if code:
                lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                return {"problem": f"exit code {code}: {lines[-1][:200] if lines else 'it printed nothing'}"}
    try:
        found = part.look()
    except (OSError, ValueError, LookupError) as error:
        return {"problem": f"no result: {one_line(error)}"}
    slower = sorted(set(re.findall(r"slower: .*", log.read_text(errors="replace"))))
    return {"slower": slower, "seconds": round(time.monotonic() - begin)} | found


def _losses(run: Path) -> dict[int, float]:
    """The losses of a run folder, by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def look_at_runs(runs: list[Path]) -> dict[str, Any]:
    """Whether every run has taken its steps, each with a finite loss."""
    losses = [_losses(run) for run in runs]
    every = [loss for run in losses for loss in run.values()]
    found: dict[str, Any] = {"losses": [round(every[0], 3), round(every[-1], 3)]}
    if not all(map(math.isfinite, every)):
        found["problem"] = "a loss is not finite"
    elif any(max(run) < STEPS for run in losses):
        found["problem"] = f"fewer than {STEPS} steps were taken"
    return found


def look_at_equals(runs: list[Path]) -> dict[str, Any]:
    """Whether the second run, and the one that was stopped and resumed, equal the first to the bit."""
    whole, again, _, halves = runs
    found = look_at_runs([whole, again, halves])
    for name, run in (("the second run", again), ("the resumed run", halves)):
        weights = [(each / "teacher.safetensors").read_bytes() for each in (whole, run)]
        if _losses(whole) != _losses(run) or weights[0] != weights[1]:
            found["problem"] = f"{name} is not equal to the first"
    return found


def measure(part: str, small: bool = False) -> dict[str, Any]:
    """Compare the fast paths of a recipe, or time it, in this process. small: in a dry run."""
    kind, _, name = part.partition("_")
    init_distributed()
    patch, changes = 14 if name.endswith("14") else 16, {}
    if small:
        changes = {"crops.global_size": str(4 * patch), "crops.local_size": str(2 * patch), "crops.num_local": "1"}
        changes |= {} if "resnet" in name else _SMALL
        changes |= {f"ibot_{key}": value for key, value in _SMALL.items() if name in _OWN_HEADS and "head." in key}
    where = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    run, images = (compare_paths, COMPARED) if kind == "paths" else (time_step, SPEEDS)
    return run(load_recipe(name, changes), 2 if small else images[name], where)


def compare_paths(recipe: Recipe, images: int, where: torch.device) -> dict[str, Any]:
    """The difference of each fast path of a recipe from its plain form; a CPU has no kernels for most."""
    rows, ours = [], recipe.model.backbone.startswith("vit")
    for path, mode in (*((path, "default") for path in FAST_PATHS), (FAST_PATHS[-1], "reduce-overhead")):
        if (path.name == "varlen" and not ours) or (where.type == "cpu" and path.name != "fused"):
            continue
        options = {"dino_ds.compile": mode} | ({"dino_ds.attention": "varlen"} if ours else {})
        resolved, config = resolve(recipe, load_ds_config(_DS, options), _DS, images)
        build = functools.partial(build_network, objective=build_objective(resolved, torch.device("cpu")))
        title = "captured blocks (CUDA graphs)" if mode == "reduce-overhead" else path.where
        row: dict[str, Any] = {"path": title, "tolerance": path.tolerance, "right": False}
        try:
            difference = path.compare(Case(resolved, config, where, build), path.name)
            row |= {"difference": f"{difference:.1e}", "right": difference <= path.tolerance}
        except Exception as error:  # whatever a card, a compiler or a driver does: the other rows are to come
            row["difference"] = one_line(error)
        rows.append(row)
    wrong = ", ".join(row["path"] for row in rows if not row["right"])
    return {"paths": rows} | ({"problem": f"not equal: {wrong}"} if wrong else {})


def time_step(recipe: Recipe, images: int, where: torch.device) -> dict[str, Any]:
    """Speed, memory and kernel launches of a recipe's step, the planner's numbers, and a plain step's speed."""
    on_gpu = where.type == "cuda"
    memory = torch.cuda.get_device_properties(where).total_memory / 2**30 if on_gpu else math.inf
    for size in (images, images // 2, images // 4, images // 8):
        resolved, config = resolve(recipe, load_ds_config(_DS, {}), _DS, max(size, 1))
        predicted, images = estimate_memory(resolved, config, 1, on_gpu).gib, config.micro_batch
        if predicted < 0.85 * memory:
            break
    trial, (repeats, warmup) = build_trial(resolved, config), (12, 5) if on_gpu else (1, 1)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ours = time_interleaved({"ours": trial.run}, repeats, warmup, where)["ours"]
    executed = sum(mean_flops(resolved, config, True).values()) + student_facts(resolved).optimizer_flops
    credited, peak = sum(model_flops(resolved).values()) * images, matmul_tflops(where, torch.bfloat16) if on_gpu else 1
    planned = count(recipe, images)["launches"]
    found: dict[str, Any] = {
        "images": images, "images_per_second": images / ours.seconds, "mfu": credited / ours.seconds / 1e12 / peak,
        "ms": 1000 * ours.seconds, "predicted_ms": [executed / (part * peak * 1e9) for part in reversed(REACHED)],
        "launches": count_launches(trial.run) if on_gpu else 0, "matmul_tflops": peak,
        "predicted_launches": sum(planned.values()) - planned["prototypes"], "predicted_gib": predicted,
        "gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "slower": trial.step.engine.config.notes,
    }  # fmt: skip
    if recipe.model.backbone == "vit_small_patch16_224":  # the other recipes' steps do more than a plain one
        steps: dict[str, Callable[[], Tensor]] = {"ours": trial.run, "plain": plain_step(recipe, images, where)}
        timed = time_interleaved(steps, repeats, warmup, where)
        found["ratio_to_plain"] = timed["plain"].seconds / timed["ours"].seconds
    return found | ({} if math.isfinite(float(trial.run())) else {"problem": "the loss is not finite"})


def count_launches(step: Callable[[], object]) -> int:
    """The kernels that one step launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    rows = [row for row in profiler.key_averages() if row.device_type.name == "CUDA"]
    return sum(row.count for row in rows if not row.key.startswith(("Memcpy", "Memset")))


def plain_step(recipe: Recipe, images: int, where: torch.device) -> Callable[[], Tensor]:
    """DINO's step as one writes it: timm's ViT (SDPA), bf16 autocast, fused AdamW, a loop for the EMA teacher."""
    import timm

    spec: Any = recipe.model.spec()
    sizes = recipe.head.hidden, recipe.head.bottleneck, recipe.head.prototypes

    def network(drop_path: float) -> Any:
        like: dict[str, Any] = {"embed_dim": spec.width, "depth": spec.depth, "num_heads": spec.heads}
        like |= {"num_classes": 0, "dynamic_img_size": True, "drop_path_rate": drop_path}
        vit: Any = timm.create_model(recipe.model.backbone, **like)
        layers = [nn.Linear(vit.num_features, sizes[0]), nn.Linear(sizes[0], sizes[0]), nn.Linear(*sizes[:2])]
        head = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])
        last = nn.utils.parametrizations.weight_norm(nn.Linear(*sizes[1:], bias=False))
        return nn.ModuleList([vit, head, last]).to(where)

    def logits(net: Any, crops: list[Tensor]) -> Any:
        return net[2](F.normalize(net[1](torch.cat([net[0](crop) for crop in crops])), dim=-1)).float()

    student, teacher = network(recipe.model.drop_path), network(0.0).requires_grad_(False)
    teacher.load_state_dict(student.state_dict())
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)
    crops = [torch.randn(g.count * images, 3, g.size, g.size, device=where) for g in recipe.groups]
    center, views = torch.zeros(sizes[2], device=where), sum(group.count for group in recipe.groups)

    def step() -> Tensor:
        with torch.autocast(where.type, torch.bfloat16):
            seen, own = logits(teacher, crops[:1]), logits(student, crops)
        targets = ((seen - center) / 0.04).softmax(-1).chunk(2)
        predicted = (own / 0.1).log_softmax(-1).chunk(views)
        pairs = [-(t * p).sum(-1).mean() for i, t in enumerate(targets) for j, p in enumerate(predicted) if i != j]
        loss = torch.stack(pairs).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        optimizer.step()
        center.lerp_(seen.mean(0), 0.1)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.004)
        return loss.detach()

    return step


def dry(part: Part) -> list[str]:
    """What is wrong with a part's command lines, or with its measurement in small on the CPU."""
    try:
        for words in (words[3:] for words in part.commands if words[2] == "dino_ds"):
            command, request = parse(words)
            if not {"--from", "--resume", "--teacher.source"} & set(words):  # these name runs that are not there
                prepare(command, request)
        problem = measure(part.name, small=True).get("problem") if part.name.startswith(("paths", "speed")) else None
    except UserError as error:
        problem = one_line(error)
    return [f"{part.name}: {problem}"] if problem else []


def describe_card() -> dict[str, Any]:
    """The card, its driver and the versions."""
    driver, about = Path("/proc/driver/nvidia/version"), torch.cuda.get_device_properties(0)
    return {
        "card": about.name, "gib": round(about.total_memory / 2**30, 1), "torch": torch.__version__,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "unknown",
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False), "python": sys.version.split()[0],
    }  # fmt: skip


def page(results: Mapping[str, dict[str, Any]], card: Mapping[str, Any], passed: bool) -> str:
    """What was found, as Markdown."""
    speeds = [
        (name[6:], found["images"], f"{found['images_per_second']:.0f}", f"{100 * found['mfu']:.0f} %",
         f"{found['ms']:.0f} ({found['predicted_ms'][0]:.0f} to {found['predicted_ms'][1]:.0f})",
         f"{found['launches']} ({found['predicted_launches']})", f"{found['gib']:.1f} ({found['predicted_gib']:.1f})",
         f"{found['ratio_to_plain']:.2f}" if "ratio_to_plain" in found else "")
        for name, found in results.items() if "mfu" in found
    ]  # fmt: skip
    paths = [
        (name[6:], row["path"], row["difference"], row["tolerance"], "" if row["right"] else "NOT EQUAL")
        for name, found in results.items() for row in found.get("paths", ())
    ]  # fmt: skip
    states = [
        (name, found.get("problem") or found.get("skipped") or "passed", found.get("seconds", ""),
         "; ".join([" to ".join(map(str, found.get("losses", ()))), *found.get("slower", ())]))
        for name, found in sorted(results.items(), key=lambda pair: "problem" not in pair[1])
    ]  # fmt: skip
    columns = ("recipe", "images", "images/s", "MFU", "ms (planned)", "launches (planned)", "GiB (planned)", "x plain")
    tables: list[tuple[str, tuple[str, ...], list[Any]]] = [
        ("Speed", columns, speeds),
        ("Fast paths beside their plain forms", ("recipe", "fast path", "difference", "tolerance", ""), paths),
        ("Parts", ("part", "result", "s", "losses, and what was slower"), states),
    ]
    shown = [f"## {title}\n\n{markdown_table(head, [[*map(str, r)] for r in rows])}" for title, head, rows in tables]
    head = f"# gpu-check: {'passed' if passed else 'NOT PASSED'}", ", ".join(f"{k} {v}" for k, v in card.items())
    send = "Please send result.json beside this page, also if all is well. MFU is of this card's best matrix product."
    return "\n\n".join([*head, send, *shown, ""])


if __name__ == "__main__":
    fire.Fire(main)
