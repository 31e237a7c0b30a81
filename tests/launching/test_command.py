"""The command of a launch: the right words for DeepSpeed's launcher, and nothing that ssh or a shell would act on."""

from __future__ import annotations

import argparse
import re
import subprocess

import pytest

from dino_ds.cli.main import main
from dino_ds.errors import ConfigError
from dino_ds.launching.launch import _without_resume
from dino_ds.launching.plan import (
    build_command,
    build_plan,
    quote_for_pdsh,
    read_hostfile,
)
from dino_ds.options.commands import LaunchOptions

WORDS = ("--data.root", "/images")


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("w1 slots=4\nw2 slots=2\n")
    return str(path)


def _plan(**options):
    return build_plan(LaunchOptions(**options))


def _deepspeed(plan):
    """The command as DeepSpeed's launcher parses it."""
    from deepspeed.launcher.runner import parse_args

    command = build_command(plan, WORDS)
    assert command[1:3] == ["-m", "deepspeed.launcher.runner"]
    return parse_args(command[3:])


def test_one_machine(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    args = _deepspeed(_plan(ranks=2))
    assert args.num_gpus == 2 and args.user_args == list(WORDS) and args.user_script.endswith("dino_ds/train.py")
    assert 1024 < args.master_port < 65536
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert _deepspeed(_plan(ranks=2)).include == "localhost:2,3"
    for devices, says in (("GPU-8932f937", "torchrun --nproc_per_node 2 dino_ds/train.py"), ("1", "shows 1 GPUs")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        with pytest.raises(ConfigError, match=says):
            _plan(ranks=2)


def test_a_run_that_is_started_again_resumes():
    assert _without_resume(("--resume", "1000", "--seed", "1", "--resume=auto", "--resume")) == ["--seed", "1"]


def test_machines_of_a_hostfile(hostfile):
    plan = _plan(hostfile=hostfile, master_addr="10.0.0.1", master_port=2345)
    args = _deepspeed(plan)
    assert (args.hostfile, args.force_multi) == (hostfile, True)
    assert (args.master_addr, args.master_port, plan.ranks) == ("10.0.0.1", 2345, 6)


def test_the_launcher_chooses_the_run_folder_for_all_ranks(tmp_path, capsys, monkeypatch):
    """One that is named goes on as it is; each rank would look for a free one by itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    (tmp_path / "runs/quickstart/config.yaml").touch()
    for words, folder in (([], "runs/quickstart-2"), (["--run_dir", "mine"], "mine"), (["--run_dir=mine"], "mine")):
        main(["launch", "--ranks=2", "--dry_run", "--", "--config", "quickstart", *words])
        *_, command = capsys.readouterr().out.splitlines()
        assert command.count("--run_dir") == 1 and command.replace("=", " ").endswith(f"--run_dir {folder}")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"master_addr": "w1"}, "for several machines"),
        ({"hostfile": "HOSTS", "ranks": 3}, "says how many: NAME slots=N"),
        ({"hostfile": "HOSTS", "master_addr": "-oX"}, "--master_addr '-oX' is not a machine's name"),
        ({"ranks": 1, "master_port": 70000}, "1 to 65535"),
    ],
)
def test_flags_that_contradict_each_other(options, says, hostfile):
    options = {key: hostfile if value == "HOSTS" else value for key, value in options.items()}
    with pytest.raises(ConfigError) as error:
        _plan(**options)
    assert says in str(error.value)


HOSTILE = ["/plain/path", "train-{000..146}.tar", "a b $(id) `id` \"q\" 'q' \\ \\\\ $HOME ; | & > x", "it's", '"']
HOSTILE += ["; touch x", "| touch x", "&& touch x", "> x", "\\$(id)", '"; id; "', "'; id; '", "a\\", "$IFS", "%h;id"]
HOSTILE += ["\\", "*?[a]~#!", "50%h of %n %% %u", " ", "-", "ü日本", "a  b", "\\$ \\`"]


def _through_pdsh(words):
    """The words that arrive when DeepSpeed's launcher and pdsh hand them to a remote shell, here the local one."""
    from deepspeed.launcher.multinode_runner import PDSHRunner

    args = argparse.Namespace(user_args=[quote_for_pdsh(word) for word in words], user_script="")
    line = " ".join(PDSHRunner(args, "").user_arguments)
    line = re.sub("%(.)", lambda found: {"%": "%", "h": "HOST", "n": "0", "u": "USER"}.get(found[1], found[0]), line)
    done = subprocess.run(["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_words_reach_a_remote_shell_as_they_are():
    assert _through_pdsh(HOSTILE) == HOSTILE


def test_characters_that_cannot_be_forwarded_are_named():
    for character in ("\n", "\r", "\0", "\x1b"):
        with pytest.raises(ConfigError) as error:
            quote_for_pdsh(f"a{character}b")
        assert f"it contains {character!r}" in str(error.value)


def test_a_working_folder_that_shells_would_act_on_is_refused(hostfile, tmp_path, monkeypatch):
    (tmp_path / "a;id").mkdir()
    monkeypatch.chdir(tmp_path / "a;id")
    with pytest.raises(ConfigError, match=r"the working folder '.*' contains ';'"):
        build_command(_plan(hostfile=hostfile), WORDS)


def test_machines_come_in_the_order_of_the_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# cluster\n\nw1 slots=4\r\n  gpu_node-2.example.org\tslots=2  # new\n10.0.0.3 slots=1")
    assert [(host.name, host.slots) for host in read_hostfile(path)] == [
        ("w1", 4),
        ("gpu_node-2.example.org", 2),
        ("10.0.0.3", 1),
    ]


BROKEN = ["root@w1 slots=1", "w[1-4] slots=1", "w1,w2 slots=1", "w1:22 slots=1", "fe80::1 slots=1", "w1", "slots=1 w1"]
BROKEN += ["w1 slots=0", "w1 slots=1025", "w1 slots=99999999999999", "w1 slots=2x", "w1 slots=-1", "w1 slots=1 extra"]
BROKEN += ["w1 slots = 1", "w1 slots=\u00b2", "w1 slots=1;touch canary", "w1 slots=0x7fffffff", "w" * 300 + " slots=1"]
# Options and commands for ssh and for a shell.
BROKEN += ["w1\x0bslots=1", "-oProxyCommand=touch${IFS}canary slots=1", "--help slots=1", "w1\u202e slots=1"]
BROKEN += ["w1;touch$IFS/canary slots=1", "$(touch${IFS}canary) slots=1", "`touch${IFS}canary` slots=1"]
BROKEN += ["w1|touch${IFS}canary slots=1", "w1&&touch slots=1", "../../etc slots=1", "w\u00e9 slots=1"]


def test_every_other_line_is_named_with_what_to_write(tmp_path):
    path = tmp_path / "hosts"
    for line in BROKEN:
        path.write_text(f"w0 slots=1\n{line}\n")
        with pytest.raises(ConfigError, match=r'is not "name slots=N": .* as in node1') as error:
            read_hostfile(path)
        assert str(error.value).startswith(f"hostfile {path}:2: '") and "\n" not in str(error.value)
        assert len(str(error.value)) < 350 + len(str(path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"w1 slots=1\nw1 slots=2\n", ":2: w1 is named twice"),
        (b"# none\n\n", "names no machine"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"w1 slots=1\n" * 100_001, "bytes, 262144 are allowed"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_hostfile(content, says, tmp_path):
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_hostfile(path)
