# SPDX-License-Identifier: Apache-2.0
"""tests/acceptance/gpus.py: its table names what there is, and jobs share GPUs, fail and go on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import items
import pytest
from gpus import ROOT, Job, Machine, read_jobs, run, with_needed

from tandemkv.server.evaluation.bench.configurations import BUILT_IN

JOBS = read_jobs()


def started(jobs: dict[str, Job], out: Path, gpus: list[str]) -> list[str]:
    return run(jobs, list(jobs), Machine(gpus, out / "models", out), out)


def two_gpus() -> str:
    return " ".join(job.run for job in JOBS.values() if job.gpus == 2)


@pytest.mark.parametrize("name", JOBS)
def test_what_a_job_names_is_there(name: str) -> None:
    script = JOBS[name].run
    files = re.findall(r"\btests/[\w/]+\.py\b", script)
    assert all((ROOT / file).is_file() for file in files)
    assert set(re.findall(r"--config (\S+)", script)) <= set(BUILT_IN)
    assert set(re.findall(r"--only (\w+)", script)) <= set(items.ON_GPUS)
    assert set(re.findall(r"\$ALL/(\w+)", script)) <= set(with_needed(JOBS, [name]))
    subprocess.run(["bash", "-n", "-c", script], check=True)


def test_every_test_of_gpus_and_every_item_is_in_a_job() -> None:
    scripts = " ".join(job.run for job in JOBS.values())
    asked = set(re.findall(r"\btests/[\w/.]+", scripts))
    on_gpus = {
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.(multi_)?gpu\b", path.read_text(encoding="utf-8"))
    }
    assert on_gpus
    left = {str(path) for path in on_gpus if not asked & {str(path), str(path.parent)}}
    assert left == set()
    of_two = {str(path) for path in on_gpus if "mark.multi_gpu(2" in (ROOT / path).read_text()}
    assert of_two <= set(re.findall(r"tests/[\w/.]+", two_gpus()))
    assert [name for name in items.ON_GPUS if name not in scripts] == []


def test_servers_that_may_run_at_once_have_ports_of_their_own() -> None:
    ports = [port for job in JOBS.values() for port in re.findall(r"--port (\d+)", job.run)]
    assert len(ports) == len(set(ports)) > 0


def test_jobs_share_the_gpus_and_a_small_one_overtakes(tmp_path: Path) -> None:
    show = 'echo "$CUDA_VISIBLE_DEVICES" > "$OUT/gpus"; date +%s%N > "$OUT/began"; '
    jobs = {
        "first": Job(run=show + 'until [ -e "$ALL/small/passed" ]; do sleep 0.05; done'),
        "large": Job(run=show, gpus=2),
        "small": Job(run=show),
    }
    assert started(jobs, tmp_path, ["4", "7"]) == []
    seen = {name: (tmp_path / name / "gpus").read_text().strip() for name in jobs}
    assert seen == {"first": "4", "large": "4,7", "small": "7"}
    began = {name: int((tmp_path / name / "began").read_text()) for name in jobs}
    assert began["large"] > began["small"]


def test_a_failure_ends_what_comes_after_it_and_is_run_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs = {
        "wrong": Job(run='false; echo not reached; [ -e "$MODELS" ]'),
        "later": Job(run="true", after=("wrong",)),
        "right": Job(run='echo said; echo once >> "$OUT/runs"', gpus=0),
    }
    assert started(jobs, tmp_path, ["0"]) == ["wrong", "later"]
    assert (tmp_path / "wrong" / "log.txt").read_text() == ""
    assert (tmp_path / "right" / "log.txt").read_text() == "said\n"
    said = capfd.readouterr().out
    assert "wrong: FAILED with 1" in said
    assert "later: not started" in said
    mended = jobs | {"wrong": Job(run="true")}
    assert started(mended, tmp_path, ["0"]) == []
    assert (tmp_path / "right" / "runs").read_text() == "once\n"


def test_a_job_that_is_too_large_or_takes_too_long_fails(tmp_path: Path) -> None:
    jobs = {
        "large": Job(run="true", gpus=2),
        "slow": Job(run='sleep 60 & echo $! > "$OUT/pid"; wait', limit_s=4),
    }
    assert started(jobs, tmp_path, ["0"]) == ["slow", "large"]
    assert not Path(f"/proc/{(tmp_path / 'slow' / 'pid').read_text().strip()}").exists()


def test_a_server_that_ends_ends_the_wait_for_it(tmp_path: Path) -> None:
    jobs = {"http": Job(run="sleep 60 &\nsleep 0.1 &\nawait_servers 1\n", gpus=0, limit_s=30)}
    assert started(jobs, tmp_path, []) == ["http"]
    assert (tmp_path / "http" / "log.txt").read_text() == "a server has ended\n"


def test_what_a_job_comes_after_stands_before_it(tmp_path: Path) -> None:
    table = tmp_path / "jobs.yaml"
    table.write_text("a: {run: 'true', after: [b]}\nb: {run: 'true'}\n")
    with pytest.raises(ValueError, match="a: comes after b"):
        read_jobs(table)
    assert with_needed(JOBS, ["http-ours"]) == ["random-weights", "calibrated", "http-ours"]
    wanted = ["kernels", "random-weights", "http-stock", "samples"]
    assert with_needed(JOBS, ["kernels", "http-stock", "samples"]) == wanted
