"""Expected goodput: formula against simulation, and what the command prints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dino_ds.basics.goodput import Costs, expected_goodput, simulate_goodput
from dino_ds.cli import main as cli
from dino_ds.commands.simulate_goodput import run
from dino_ds.config.loading import dump_recipe, load_recipe
from dino_ds.errors import ConfigError
from dino_ds.options.run import SimulateGoodputOptions
from dino_ds.run.intervals import young_interval

DAY = 86400.0
CASES = [
    # mtbf, save, detect, restart, interval: goodput, lost per failure, of an independent event-by-event simulation
    (DAY, 10, 60, 120, 1315, 0.982, 672),
    (10000, 10, 60, 120, 447, 0.940, 226),
    (10000, 60, 1800, 600, 1095, 0.721, 564),
    (DAY, 10, 60, 120, 60, 0.855, None),
    (DAY, 10, 60, 120, 21600, 0.879, None),
]


@pytest.mark.parametrize(("mtbf", "save", "detect", "restart", "interval", "goodput", "lost"), CASES)
def test_formula_and_simulation_agree(mtbf, save, detect, restart, interval, goodput, lost):
    """Within 1.5 points of each other and of the other simulation; lost work within a tenth."""
    costs = Costs(mtbf, save, save, detect, restart)
    exact, drawn = expected_goodput(interval, costs), simulate_goodput(interval, costs)
    assert abs(exact.fraction - drawn.fraction) < 0.005  # 10,000 failures
    assert abs(exact.fraction - goodput) < 0.015
    assert exact.lost == pytest.approx(drawn.lost, rel=0.05)
    assert lost is None or exact.lost == pytest.approx(lost, rel=0.1)


@pytest.mark.parametrize("mtbf", [3600.0, 10000.0, DAY])
def test_young_s_interval_is_as_good_as_the_best(mtbf):
    costs = Costs(mtbf, 10, 10, 60, 120)
    best = max(expected_goodput(seconds, costs).fraction for seconds in range(20, 10000, 10))
    assert best - expected_goodput(young_interval(10, mtbf), costs).fraction < 0.002


def test_a_save_in_the_background_costs_less_and_commits_later():
    blocking, late = Costs(DAY, 60, 60, 60, 120), Costs(DAY, 1, 60, 60, 120)
    assert expected_goodput(600, late).fraction > expected_goodput(600, blocking).fraction + 0.05
    assert expected_goodput(600, late).lost == pytest.approx(simulate_goodput(600, late).lost, rel=0.05)
    assert expected_goodput(600, late).lost > expected_goodput(600, Costs(DAY, 1, 1, 60, 120)).lost + 50


def _json(capsys, *flags):
    cli.main(["simulate-goodput", "--json", *flags])
    return json.loads(capsys.readouterr().out)


def test_failures_of_nodes_add_up(capsys):
    one = _json(capsys, "--mtbf_hours", "2")
    many = _json(capsys, "--mtbf_hours", "2000", "--nodes", "1000")
    assert one["intervals"] == many["intervals"]


def test_a_run_s_own_figures_are_taken(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(dump_recipe(load_recipe(None, {"expected_hours_between_failures": "3"})))
    lines = [{"step": s, "images_per_second": 256.0, "save_seconds": 20.0, "save_stall_seconds": 0.5} for s in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"st')
    (tmp_path / "restarts.jsonl").write_text('{"restart_seconds": 44}\n{"code": 6}\n')
    found = _json(capsys, "--run", str(tmp_path), "--detect_seconds", "5")
    assert found["seconds"] == {"mtbf": 10800, "stall": 0.5, "save": 20, "detect": 5, "restart": 44}
    assert "measured" in found["origins"]["save_seconds"] and found["origins"]["detect_seconds"] == "given"
    assert {row["seconds"] / row["steps"] for row in found["intervals"] if row["seconds"] % 60 == 0} == {2.0}


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        run(SimulateGoodputOptions(run=str(tmp_path)))


@pytest.mark.slow
def test_page_and_picture_without_torch(tmp_path):
    picture = tmp_path / "goodput.png"
    code = "import sys; from dino_ds.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    flags = ["simulate-goodput", "--mtbf_hours", "24", "--save_every_minutes", "60", "--out", str(picture)]
    page = subprocess.run([sys.executable, "-c", code, *flags], check=True, capture_output=True, text=True).stdout
    assert "given" in page and "best" in page and "97.5 %" in page
    assert picture.read_bytes().startswith(b"\x89PNG")
