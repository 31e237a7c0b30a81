"""A launcher and its ranks as small processes without torch, to be ended in every way.

python fake_launch.py train.py RUN PLAN: PLAN is JSON, for each start and each rank a list of what it does.
Ranks write heartbeats as the real ones do. "die 9" is a signal to itself, "exit 3" a code, "work" works until a signal
has come to all ranks and then ends with 75, "deaf" hears none, "step 7" has done 7 steps, "child" starts a process that
stays. "watched" waits until the supervisor watches this rank, "after 1" until it has seen the end of rank 1, "noted
WORD" until the word is in the restarts that it writes down. The launcher ends with the first rank that fails, as
DeepSpeed's does, and with a code of its own for ["launcher 0"].
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from dino_ds.health.records import Heartbeat, Heartbeats


def watched() -> set[int]:
    """The processes whose end the supervisor waits for; -1 stands for one that has ended, which it has not seen yet."""
    found = []
    for descriptor in Path(f"/proc/{os.environ['DINO_DS_SUPERVISOR'].partition('.')[0]}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found += descriptor.read_text().splitlines()
    return {int(line.removeprefix("Pid:")) for line in found if line.startswith("Pid:")}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _has_been_seen_to_end(process: Path) -> bool:
    return not process.exists() and -1 not in watched()


def _is_noted(run_dir: Path, word: str) -> bool:
    return word in (run_dir / "restarts.jsonl").read_text()


def rank_main(run_dir: Path, words: list[str]) -> None:
    rank, beats = int(os.environ["RANK"]), Heartbeats(run_dir)
    step, seen, phase = 0, [], "start"

    def beat(ended: str = "", code: int = 0) -> None:
        now = time.time()
        beats.publish(
            Heartbeat(rank, "here", os.getpid(), now, now, step, phase, phase, 0, 0.0, False, ended, code, "")
        )

    (run_dir / f"pid{rank}.new").write_text(str(os.getpid()))
    (run_dir / f"pid{rank}.new").rename(run_dir / f"pid{rank}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda n, _: seen.append(n))
    for word in words:
        verb, _, value = word.partition(" ")
        if verb == "step":
            step, phase = int(value), "step"
            beat()
        elif verb == "watched":
            wait_for(lambda: os.getpid() in watched())
        elif verb == "after":
            wait_for((run_dir / f"pid{value}").exists)
            other = Path("/proc", (run_dir / f"pid{value}").read_text())
            wait_for(partial(_has_been_seen_to_end, other))
        elif verb == "noted":
            wait_for(partial(_is_noted, run_dir, value))
        elif verb == "child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        elif verb == "die":
            os.kill(os.getpid(), int(value))
            time.sleep(10)
        elif verb == "exit":
            beat("done" if value == "0" else "error", int(value))
            sys.exit(int(value))
        elif verb == "work":
            (run_dir / f"ready{rank}").touch()
            wait_for(lambda: bool(seen))
            (run_dir / f"signals{rank}").write_text(str(seen[0]))
            wait_for(lambda: len(list(run_dir.glob("signals*"))) == int(os.environ["WORLD_SIZE"]))  # saving, together
            beat("stopped", 75)
            sys.exit(75)
        elif verb == "deaf":
            (run_dir / f"ready{rank}").touch()
            wait_for(lambda: bool(seen))
            (run_dir / f"signals{rank}").write_text(str(seen[0]))
            time.sleep(1000)


def launcher_main(run_dir: Path, plan: list[list[list[str]]], train_words: list[str]) -> int:
    starts = run_dir / "starts"
    number = len(starts.read_text().splitlines()) if starts.exists() else 0
    with starts.open("a") as file:
        file.write(" ".join(train_words) + "\n")
    ranks = plan[min(number, len(plan) - 1)]
    own = ranks.pop() if ranks[-1][0].startswith("launcher") else []
    Heartbeats(run_dir).prepare()
    time.sleep(2.5 if own and own[0].endswith("late") else 0)
    processes = []
    for rank, words in enumerate(ranks):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": str(len(ranks))}
        command = [sys.executable, __file__, "rank", str(run_dir), json.dumps(words)]
        processes.append(subprocess.Popen(command, env={**os.environ, **environment}))
    (run_dir / "launcher.pid").write_text(str(os.getpid()))
    while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
        time.sleep(0.5)
    for process in processes:
        process.terminate()
    codes = [p.wait() for p in processes]
    return int(own[0].split()[1]) if own else next((code % 256 for code in codes if code), 0)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank_main(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        sys.exit(launcher_main(Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:]))
