"""A launcher and its ranks as small processes without torch, with real monitor processes, to be ended in every way.

python fake_launch.py train.py RUN PLAN: PLAN is JSON, for each start and each rank a list of what it does: "step 7" has
done 7 steps, "die 9" is a signal to itself, "work" works until a request to stop has come to all ranks and then ends
with 75, "deaf" hears none, "child" starts a process that stays. The launcher ends with the first rank that fails, as
DeepSpeed's does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from dino_ds.health.records import Heartbeats
from dino_ds.health.watchdog import Failures, Watchdog


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def rank_main(run_dir: Path, words: list[str]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with Watchdog(run_dir, rank, world, 0.0) as dog:
        beat = dog.beat
        beat.listed = True
        with Failures(run_dir, rank, world, beat).reported():
            for word in words:
                verb, _, value = word.partition(" ")
                if verb == "step":
                    beat.enter("step", int(value))
                elif verb == "child":
                    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
                else:
                    wait_for(lambda: len(Heartbeats(run_dir).read()) == world)
                    if verb == "die":
                        os.kill(os.getpid(), int(value))
                    (run_dir / f"ready{rank}").touch()
                    wait_for(lambda: beat.stop_reason)
                    (run_dir / f"asked{rank}").write_text(beat.stop_reason)
                    time.sleep(1000 if verb == "deaf" else 0)
                    wait_for(lambda: len(list(run_dir.glob("asked*"))) == world)  # saving, together
                    sys.exit(75)


def launcher_main(run_dir: Path, plan: list[list[list[str]]], train_words: list[str]) -> int:
    with (run_dir / "starts").open("a+") as starts:
        starts.seek(0)
        number = len(starts.readlines())
        starts.write(" ".join(train_words) + "\n")
    Heartbeats(run_dir).prepare()
    processes = []
    for rank, words in enumerate(plan[number]):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(plan[number]))}
        command = [sys.executable, __file__, "rank", str(run_dir), json.dumps(words)]
        processes.append(subprocess.Popen(command, env=environment))
    (run_dir / "launcher.pid").write_text(str(os.getpid()))
    while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
        time.sleep(0.2)
    for process in processes:
        process.terminate()
    return next((code % 256 for code in [p.wait() for p in processes] if code), 0)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank_main(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        sys.exit(launcher_main(Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:]))
