# SPDX-License-Identifier: Apache-2.0
"""What an administrator may ask of profiles and logs: a mistake must not cost any request."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from edge_world import ADMIN_KEY, World, make_limits, make_world

from tandemkv.inference_rank.edge import administration
from tandemkv.inference_rank.edge.keys import Keys

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
PROFILE, LOGGING = "/start_profile", "/configure_logging"


@pytest.fixture
def world() -> World:
    return make_world(keys=Keys(admin=ADMIN_KEY))


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        # These ended SGLang's scheduler: at once, in the next pass, or when the profile is written.
        (PROFILE, {"activities": ["GPU"]}, "CPU among them, for this server has no GPU"),
        (PROFILE, {"activities": ["CPU", "MEM"]}, "activities[1]='MEM'"),
        (PROFILE, {"activities": ["CPU", "RPD"]}, "activities[1]='RPD'"),
        (PROFILE, {"profile_by_stage": True}, "num_steps: profile_by_stage=true needs it"),
        (PROFILE, {"profile_by_stage": True, "num_steps": 0}, "num_steps=0"),
        (PROFILE, {"num_steps": "0"}, "num_steps=0: an integer from 1"),
        (PROFILE, {"num_steps": "-1"}, "num_steps='-1'"),
        (PROFILE, {"start_step": "9" * 5000}, "start_step="),
        (PROFILE, {"output_dir": "/proc/none"}, "output_dir='/proc/none': the absolute path of a"),
        (PROFILE, {"output_dir": "~nobody-of-this-name/x"}, "absolute path"),
        (PROFILE, {"output_dir": "/tmp/\0"}, "absolute path"),
        (PROFILE, {"profile_id": "no/such"}, "profile_id='no/such'"),
        (PROFILE, {"profile_prefix": "../x"}, "profile_prefix='../x'"),
        (PROFILE, {"profile_id": "x" * 65}, "profile_id has 65 bytes"),
        (PROFILE, {"activities": []}, "a list of 1 to 4"),
        (PROFILE, {"req_type": 2}, "req_type: this server has no such field"),
        # After these every request failed.
        (LOGGING, {"log_requests": True, "log_requests_level": 99}, "log_requests_level=99"),
        (LOGGING, {"log_requests": True, "log_requests_level": -1}, "log_requests_level=-1"),
        (LOGGING, {"log_level": "loud"}, "log_level='loud'"),
        (LOGGING, {"log_requests_format": "xml"}, "log_requests_format='xml'"),
        (LOGGING, {"dump_requests_folder": "/proc/none"}, "dump_requests_folder='/proc/none'"),
        (LOGGING, {"crash_dump_folder": "relative"}, "crash_dump_folder='relative'"),
    ],
)
def test_is_refused(world: World, path: str, body: dict[str, Any], text: str) -> None:
    reply = world.post(path, body, **ADMIN)
    assert reply.status_code == 400, reply.text
    assert text in reply.json()["error"]["message"]
    assert not world.behind.seen


def test_is_passed_on(world: World, tmp_path: Path) -> None:
    folder = str(tmp_path / "made" / "here")
    bodies: list[tuple[str, Any]] = [
        (PROFILE, {}),
        (PROFILE, {"activities": ["CPU", "GPU"], "output_dir": folder, "num_steps": 3}),
        (PROFILE, {"profile_by_stage": True, "num_steps": 1, "profile_prefix": "a-1.b"}),
        (PROFILE, {"num_steps": "5", "start_step": "3"}),  # as SGLang's own clients send them
        (PROFILE, {"profile_stages": ["decode"]}),
        (LOGGING, {"log_requests": True, "log_requests_level": 3, "log_level": "debug"}),
        (LOGGING, {"log_level": "INFO"}),  # SGLang takes it in capitals
        (LOGGING, {"dump_requests_folder": folder, "crash_dump_folder": ""}),
    ]
    for path, body in bodies:
        assert world.post(path, body, **ADMIN).status_code == 200
        assert json.loads(world.behind.seen[-1]["body"]) == body
    assert Path(folder).is_dir()
    assert world.post(PROFILE, {"profile_stages": None}, **ADMIN).status_code == 200


def test_a_gpu_has_more_to_record() -> None:
    limits = dataclasses.replace(make_limits(), has_gpu=True)
    for activities in (["GPU"], ["MEM"], ["CPU", "GPU", "CUDA_PROFILER"]):
        administration.check_profile({"activities": activities}, limits)


def test_the_folder_that_sglang_takes_by_itself_is_checked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", "/proc/none")
    for body in (None, {}):
        assert world.post(PROFILE, body, **ADMIN).status_code == 400
    assert world.post(PROFILE, {"output_dir": "/tmp"}, **ADMIN).status_code == 200


def test_sglang_has_these_fields() -> None:
    io_struct = pytest.importorskip("sglang.srt.managers.io_struct")
    assert set(administration._PROFILE) <= set(io_struct.ProfileReq.__struct_fields__)
    assert set(administration._LOGGING) <= set(io_struct.ConfigureLoggingReq.__struct_fields__)
