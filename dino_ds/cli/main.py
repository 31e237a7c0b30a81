"""`dino-ds`: checks every flag and file first, then fire dispatches to the command's function, whose module is imported
only then: help and checks import neither torch nor deepspeed. Also restores what a run changes in a Python program."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import re
import select
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dino_ds import __version__, errors
from dino_ds.basics.machine import check_ranks, has_accelerator_files, speaks_for_its_machine
from dino_ds.basics.names import as_written, did_you_mean, suggestion, weights_elsewhere, words_elsewhere
from dino_ds.basics.own_code import check_allowed
from dino_ds.config.ds_config import check_ds_config
from dino_ds.config.loading import write_recipe
from dino_ds.config.recipe import Recipe
from dino_ds.config.stages import Request, TrainOptions, check_may_begin, holds_run, missing_model
from dino_ds.errors import CheckpointError, ConfigError, UserError, one_line
from dino_ds.health.processes import RunLock, starters
from dino_ds.method.specs.base import StepImages
from dino_ds.method.specs.own import check_images_together, code_of
from dino_ds.models.specs.backbones import FROM_SOURCE
from dino_ds.options.commands import COMMANDS, TRAIN, find_command, help_text
from dino_ds.options.definition import Command, Result
from dino_ds.options.flags import drop_local_rank, parse_flags, read


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore this process's environment and sys.path afterwards. Raises ConfigError if it is one of several ranks."""
    before, path = dict(os.environ), sys.path[:]
    try:
        adopt_ranks(os.environ)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            how = "call this in one process, or give the launcher the command in place of this program"
            raise ConfigError(f"this process is one of several that a launcher has started: {how}")
        yield
    finally:
        sys.path[:] = path
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def restored_torch() -> Iterator[None]:
    """Restore the process, torch's settings and random generators after a block, and leave a process group of its own.
    Inside, gradients, autocast and the default dtype are as in the process of a command."""
    import torch
    import torch.distributed as dist

    from dino_ds.engine.process import leave, release_memory
    from dino_ds.evals.features import keep_generators

    cuda, joined, threads = torch.cuda.is_initialized(), dist.is_initialized(), torch.get_num_threads()
    dtype, tf32 = torch.get_default_dtype(), torch.backends.cudnn.allow_tf32
    exact = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # a run's peak begins at the memory in use, not the last peak
    with (
        restored_process(),
        keep_generators(*(torch.device("cuda", i) for i in range(torch.cuda.device_count() if cuda else 0))),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        try:
            torch.set_default_dtype(torch.float32)
            yield
        except BaseException as error:
            # Free the variables in the frames: a notebook keeps the last error, and the next cell needs the memory.
            part: BaseException | None = error
            while part is not None:
                traceback.clear_frames(part.__traceback__)
                part = part.__cause__ or part.__context__
            raise
        finally:
            torch.set_default_dtype(dtype)
            if not joined:
                leave()
            release_memory()
            torch.set_num_threads(threads)
            torch.backends.cudnn.allow_tf32 = tf32
            torch.use_deterministic_algorithms(exact[0], warn_only=exact[1])


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Exits with a code of `dino_ds.errors.EXIT_CODES`, after one line that says why."""
    words, run_dir = drop_local_rank(sys.argv[1:] if argv is None else argv), None
    debug = any(word in ("--debug", "--debug=true") for word in words)
    try:
        if not words or {"-h", "--help"} & set(words) or words[0] == "help":
            asked = words[1:] if words[:1] == ["help"] else words
            if asked and not asked[0].startswith("-") and not any(name.split()[0] == asked[0] for name in COMMANDS):
                raise ConfigError(_no_command(asked))
            print(help_text(asked))
        elif words in (["--version"], ["version"]):
            print(f"dino_ds {__version__}")
        else:
            command, request = parse(words)
            options, files = prepare(command, request)
            if command is TRAIN and options.print is not None:
                write_recipe(options.print, request.config, request.recipe)
                config = shlex.quote(options.print)
                print(f"{options.print} has the recipe: edit it, then dino-ds train --config {config}")
            else:
                run_dir = Path(options.run_dir) if command is TRAIN else None
                _dispatch(command, options, files)
        sys.stdout.flush()
    except SystemExit as stop:
        _exit(stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and "RANK" not in os.environ:
            poll = select.poll()
            poll.register(1, select.POLLOUT)  # is it standard output that has broken?
            if any(event & select.POLLERR for _, event in poll.poll(0)):
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other programs end in `dino-ds ... | head -1`
                os.kill(os.getpid(), signal.SIGPIPE)
        if debug:
            traceback.print_exc()
        code = _say(error, run_dir, debug)
        if speaks_for_its_machine(os.environ) and not isinstance(error, KeyboardInterrupt):
            from dino_ds.engine.process import tell_other_machines

            tell_other_machines(one_line(error))
        _exit(code)


def _say(error: BaseException, run_dir: Path | None, debug: bool) -> int:
    if isinstance(error, UserError):
        _say_error(str(error), error.said_by_me, debug=debug)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        _say_error("interrupted", pause=False)
        return errors.INTERRUPTED
    first_line = next(iter(str(error).splitlines()), "")
    if errors.is_out_of_memory(error):
        from dino_ds.engine.process import free_memory

        cure = f"{free_memory()}. Take fewer or smaller images at once, or fewer workers"
        _say_error(f"out of memory: {(first_line or type(error).__name__)[:200]}; {cure}", said_by_me=True)
        return errors.OutOfMemory.exit_code
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG) and error.filename:
        path = one_line(os.fsdecode(error.filename), 60)
        _say_error(f"{path}: {(error.strerror or 'denied').lower()}; name another place", True, debug=debug)
        return ConfigError.exit_code
    rank, where = os.environ.get("RANK", "0"), "the traceback is above" if debug else "--debug shows the traceback"
    if not debug and run_dir is not None and os.path.exists(run_dir / "config.yaml"):
        record = run_dir / f"error-{rank}.txt"
        with contextlib.suppress(OSError):
            record.write_text("".join(traceback.format_exception(error)))
            where = f"the traceback is in {record}"
    # All ranks print, not only rank 0: their errors differ, and another rank's may be the cause of this one.
    prefix = f"rank {rank}: " if "RANK" in os.environ else ""
    print(f"dino_ds: error: {prefix}{type(error).__name__}: {first_line} ({where})", file=sys.stderr, flush=True)
    return 1


def parse(words: list[str]) -> tuple[Command, Request]:
    """The command that `words` begin with, and what they ask of it. Raises ConfigError."""
    if (named := find_command(words)) is None:
        raise ConfigError(_no_command(words))
    return named[0], parse_flags(*named)


def prepare(command: Command, request: Request) -> tuple[Any, dict[str, Any]]:
    """A command's options, and the other arguments of its function. Raises UserError for mistakes that show at once."""
    if command is TRAIN:
        adopt_ranks(os.environ)
        check_ranks(os.environ)
        starters()  # found now, before these processes may end
    options, files = read(command, request)
    model = getattr(options, "model", None)
    # timm's names have no slash.
    if isinstance(model, str) and "/" in model and not os.path.lexists(os.path.expanduser(model)):
        raise missing_model(model)
    if command.loads_torch and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print(f"dino_ds: {command.name}: loading PyTorch takes some seconds", file=sys.stderr, flush=True)
    if (recipe := files.get("recipe")) is not None:
        if recipe.model.backbone == FROM_SOURCE:
            from dino_ds.weights.start import as_source

            recipe = as_source(recipe, getattr(options, "run_dir", None), request.notes)
        if recipe.data.root is not None or recipe.data.mixture:
            from dino_ds.data.root import with_own_images

            recipe = with_own_images(recipe, request.recipe, request.notes)
        files["recipe"] = recipe
        if command is not TRAIN and os.environ.get("RANK", "0") == "0":  # `train` writes them into its log
            for note in request.notes:
                print(f"dino_ds: note: {note}", file=sys.stderr, flush=True)
    if command is TRAIN and options.print is None:
        check_start(files["recipe"], options, files)
    return options, files


def _no_command(words: list[str]) -> str:
    longer = [name for name in COMMANDS if re.match(rf"{re.escape(words[0])}[- ]", name)]
    near = f"dino-ds --help lists them.{suggestion(longer) or did_you_mean(words[0], COMMANDS)}"
    return f"{as_written(words[0])} is not a command: {words_elsewhere('commands').get(words[0]) or near}"


def check_software(command: Command, options: Any) -> None:
    """Raises UserError where torch does not load, or for wrong options that a command checks before it loads torch."""
    # torch's warnings about a lost rank are pages of C++ frames; our errors say which rank is gone, and why.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if command.name == "embed":
        from dino_ds.commands.embed import check as check_embed

        check_embed(options)
    elif command.name == "curate":
        from dino_ds.commands.curate import check as check_curate

        check_curate(options)
    elif command.name == "export":
        from dino_ds.commands.export import check as check_export

        check_export(options)
    elif command.name == "find":
        from dino_ds.commands.embed import check_queries

        check_queries(options.features, options.images)
    if (root := getattr(options, "root", None)) and getattr(options, "source", None) in (None, "folder"):
        from dino_ds.data.root import check_root

        check_root(root)
    if command.loads_torch:
        check_torchvision()


def call(command: Command, options: Any, files: dict[str, Any]) -> Result | None:
    check_software(command, options)
    return function_of(command.name)(options, **files)


def _dispatch(command: Command, options: Any, files: dict[str, Any]) -> None:
    import fire

    def show() -> None:  # returns nothing: fire would apply further words to a result
        if (result := call(command, options, files)) is not None:
            result.show(getattr(options, "json", False))

    # fire gets only the command's name: it would parse the values again, "1e3" as a number.
    fire.Fire({command.name: show}, command=[command.name], name="dino-ds")
    if "dino_ds.engine.process" in sys.modules:
        from dino_ds.engine.process import leave

        faulthandler.dump_traceback_later(60.0, exit=True, file=2)
        leave()
        faulthandler.cancel_dump_traceback_later()


def _say_error(message: str, said_by_me: bool | None = None, pause: bool = True, debug: bool = False) -> None:
    """Print an error on the rank that failed first, or, if that is unknown, on the first rank of each node."""
    first, local_first = (os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))
    host = "" if first or said_by_me is not None else f"{socket.gethostname()}: "
    if local_first if said_by_me is None else said_by_me:
        for line in errors.lines_for_people(message, all_of_them=debug):
            print(f"dino_ds: {host}error: {line}", file=sys.stderr, flush=True)
    elif pause and said_by_me is None:
        time.sleep(3.0)  # launchers stop all ranks when one ends: rank 0 must have printed its error before


def _exit(code: int) -> None:
    """End the process, also if its process group has lost a rank: at a normal exit it would wait for that rank."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def function_of(command: str) -> Callable[..., Result | None]:
    """The function of a command, whose module alone is imported; it returns None where it has printed what it does."""
    run: Callable[..., Result | None]
    match command:
        case "train":
            from dino_ds.train import train as run
        case "report":
            from dino_ds.report.single_run import run
        case "pictures":
            from dino_ds.report.pictures import run
        case "advise":
            from dino_ds.planning.advise import run
        case "doctor":
            from dino_ds.planning.doctor import run
        case "plan":
            from dino_ds.planning.command import run
        case "bench step":
            from dino_ds.planning.bench.step import run
        case "bench ladder":
            from dino_ds.planning.bench.step import run_ladder as run
        case "bench tune":
            from dino_ds.commands.tune import run
        case "bench inference":
            from dino_ds.planning.bench.inference import run
        case "look-data":
            from dino_ds.commands.look_data import run
        case "shard":
            from dino_ds.commands.shard import run
        case "eval":
            from dino_ds.commands.evaluate import run
        case "embed":
            from dino_ds.commands.embed import run
        case "find":
            from dino_ds.commands.find import run
        case "curate":
            from dino_ds.commands.curate import run
        case "export":
            from dino_ds.commands.export import run
    return run


_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_RANK_VARIABLES = {  # the same variables as they are named by programs that start ranks without setting ours
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def adopt_ranks(environment: MutableMapping[str, str]) -> None:
    """Set variables of torch's launchers by those of `mpirun` or `srun`. Raises ConfigError without MASTER_ADDR."""
    if "RANK" in environment:
        return
    for program, names in _RANK_VARIABLES.items():
        if int(environment.get(names[1], "1")) == 1:
            continue
        if "MASTER_ADDR" not in environment:
            how = "export MASTER_ADDR, the first machine's name, and MASTER_PORT to them, as in launch/"
            started = f"{program} has started {environment[names[1]]} processes"
            raise ConfigError(f"{started}, and MASTER_ADDR is not set: {how}")
        environment.setdefault("MASTER_PORT", "29500")
        for ours, launchers in zip(_OURS, names, strict=True):
            if launchers in environment:
                environment[ours] = environment[launchers].partition("(")[0].partition(",")[0]  # srun's "8(x2),4"
        return


def check_start(recipe: Recipe, options: TrainOptions, files: Mapping[str, Any]) -> None:
    """Check values and paths that would otherwise stop the start half a minute later. Raises UserError."""
    from dino_ds.data.mixture import roots_of
    from dino_ds.data.root import check_photos, check_root, check_split

    for key, path in code_of(recipe):
        check_allowed(key, path)
    check_photos(recipe.data.source, recipe.data.root)
    recipe.check_learning_rates()
    check_images_together(recipe, StepImages(recipe.data.global_batch, 1, 1))
    recipe.check_teacher()
    ranks, run_dir = int(os.environ.get("WORLD_SIZE", 1)), Path(options.run_dir)
    check_ds_config(files["ds"], files["ds_path"], recipe.data.global_batch, ranks, not _surely_lacks_fp16())
    for key, name in (("model.init_from", recipe.model.init_from), ("teacher.source", recipe.teacher.source)):
        if name is not None and (answer := weights_elsewhere(name)):
            raise CheckpointError(f"{key} {name} does not exist; {answer}")
    # Ranks of other machines check later, with all ranks: if one failed here, the first machine would wait for it.
    if os.environ.get("RANK", "0") == os.environ.get("LOCAL_RANK", "0"):
        if recipe.data.source == "folder":
            for root in roots_of(recipe.data):
                check_root(root)
                if not holds_run(run_dir):  # a run continues with the images it began with
                    check_split(root)
            for key, other in {"eval.root": recipe.eval.root, "eval.val_root": recipe.eval.val_root}.items():
                if other is not None and recipe.eval.every.value:
                    check_root(other, key)
        check_may_begin(run_dir, options.resume)
    RunLock(run_dir).check_free(int(os.environ.get("RANK", 0)))


def _surely_lacks_fp16() -> bool:
    """Whether there is no accelerator, and an x86 CPU without fp16; where torch is loaded, it is asked later."""
    if "torch" in sys.modules or has_accelerator_files():
        return False
    with contextlib.suppress(OSError):
        flags = set(Path("/proc/cpuinfo").read_text().split())
        return "sse2" in flags and not flags & {"avx512_fp16", "amx_fp16", "avx_ne_convert"}
    return False


def check_torchvision() -> None:
    """Raises ConfigError if torchvision was built for another torch, which would be a cryptic error when it loads."""
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install torch torchvision") from None
    except (RuntimeError, ImportError, OSError) as error:
        why, how = " ".join(str(error).split())[:160], "install builds that match, both from the same index"
        raise ConfigError(f"torch and torchvision do not load together ({why}): {how}") from None
