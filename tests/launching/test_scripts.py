"""The scripts of launch/ are run with programs that only write down what they were given; manifests against schemas."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import yaml

from dino_ds.config.ds_config import load_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.options.commands import COMMANDS, TRAIN
from dino_ds.options.flags import parse_flags
from tests.run.harness import REPOSITORY

LAUNCHES = REPOSITORY / "launch"
SCRIPTS = sorted(LAUNCHES.glob("*.sh"))
PROGRAMS = ("dino-ds", "python", "mpirun", "srun", "scontrol", "deepspeed", "torchrun")


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Stand-ins on PATH: each writes its words to a file of its name, and runs a script of the test if there is one."""
    for name in PROGRAMS:
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/{name}.words\n'
            f"if [ {name} = scontrol ] && [ $1 = show ]; then printf 'first\\nsecond\\n'; exit; fi\n"
            f"if [ -e {tmp_path}/{name}.sh ]; then exec bash {tmp_path}/{name}.sh; fi\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(REPOSITORY))
    monkeypatch.setenv("SLURM_JOB_ID", "12345")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    return tmp_path


def _given(programs):
    """Program -> its words."""
    return {path.stem: path.read_text().splitlines() for path in programs.glob("*.words")}


def _accepted(given):
    """The words of `train` among those that a script gave to a program, checked as the command line checks them."""
    if "dino-ds" in given:
        assert given["dino-ds"][0] == "doctor" and parse_flags(COMMANDS["doctor"], given.pop("dino-ds")[1:])
    ((program, words),) = ((name, words) for name, words in given.items() if name != "scontrol")
    start = words.index("dino_ds/train.py" if program in ("torchrun", "deepspeed") else "train")
    train = parse_flags(TRAIN, words[start + 1 :])
    load_recipe(train.options["config"], train.recipe)
    load_ds_config(str(REPOSITORY / train.options.get("ds_config", "ds_configs/zero0_fp32.json")), train.ds)
    return train


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_start_what_they_say_with_options_that_exist(script, programs):
    shell = "bash" if script.name == "slurm.sh" else "sh"
    subprocess.run([shell, script, "--optimizer.lr", "0.001"], check=True)
    train = _accepted(_given(programs))
    assert train.recipe["optimizer.lr"] == "0.001" and train.options["resume"] == "auto"


def test_mpi_is_told_where_to_meet(programs):
    subprocess.run(["sh", LAUNCHES / "openmpi.sh"], check=True)
    assert {"MASTER_ADDR=node0", "MASTER_PORT=29500", "PATH"} <= set(_given(programs)["mpirun"])


@pytest.mark.parametrize(
    ("step", "code", "queued"),
    [("exit 75", 75, True), ("exit 0", 0, False), ("exit 3", 3, False), ("kill -9 $$", 137, False)],
)
def test_slurm_queues_a_job_again_that_has_saved(step, code, queued, programs):
    (programs / "srun.sh").write_text(step)
    done = subprocess.run(["bash", LAUNCHES / "slurm.sh"], check=False)
    assert done.returncode == code
    asked = _given(programs)["scontrol"]
    assert asked == (["requeue", "12345"] if queued else ["show", "hostnames", "n[1-2]"])


@pytest.mark.slow
def test_slurm_hands_the_warning_on_and_waits_until_the_ranks_have_saved(programs):
    step = "trap 'sleep 0.5; exit 75' USR1; touch started; while :; do sleep 0.05; done"
    (programs / "srun.sh").write_text(step.replace("started", f"{programs}/started"))
    job = subprocess.Popen(["bash", LAUNCHES / "slurm.sh"])
    while not (programs / "started").exists():
        assert job.poll() is None
    job.send_signal(10)  # SIGUSR1
    assert job.wait(120) == 75 and _given(programs)["scontrol"] == ["requeue", "12345"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing():
    others = [REPOSITORY / ".ci" / name for name in ("run", "setup")]
    subprocess.run(["shellcheck", *SCRIPTS, *others], check=True)


def _documents(name):
    return list(yaml.safe_load_all((LAUNCHES / name).read_text()))


def test_kubernetes_manifests_fit_their_schemas():
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for document in _documents("kubernetes.yaml"):
        validate.validate(document, validate.latest_version(), strict=True)


def test_kubernetes_pods_find_each_other_and_count_alike():
    service, job = _documents("kubernetes.yaml")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = container["command"]
    train = parse_flags(TRAIN, words[words.index("dino_ds/train.py") + 1 :])
    options = dict(word.removeprefix("--").split("=") for word in words[1 : words.index("dino_ds/train.py")])
    assert train.options["resume"] == "auto"
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name} and pod["subdomain"] == service["metadata"]["name"]
    assert options["rdzv_endpoint"] == f"{name}-0.{pod['subdomain']}:29500"
    assert spec["parallelism"] == spec["completions"] == int(options["nnodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options["nproc_per_node"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
