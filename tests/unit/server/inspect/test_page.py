# SPDX-License-Identifier: Apache-2.0
"""The page of `tandemkv inspect`, from recorded probe files."""

import base64
import json
from html.parser import HTMLParser
from importlib.resources import files

import pytest
import torch

from tandemkv.cache_rank.engine.selection_probe import selection_file
from tandemkv.cache_rank.protocol.bitmap import position_bits
from tandemkv.server.evaluation.inspect.recording import (
    RecordingError,
    make_page,
    read_recording,
)

LENGTHS, LAYERS, HEADS = (20, 21, 22), (2, 5), 2
TRICKY = "</script><script>alert(1)</script>"


def attention_line(length, layer, **changes):
    attended = [[0, 1, layer + head, length - 1] for head in range(HEADS)]
    return {
        "decode_step": length,
        "row": 1,
        "generation": 7,
        "layer": layer,
        "length": length,
        "mass": [0.5 + 0.01 * layer, 0.75],
        "oracle_mass": [0.9, 0.95],
        "attended_bits": [position_bits(torch.tensor(p), length) for p in attended],
    } | changes


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def probe_file(tmp_path):
    path = tmp_path / "probe.jsonl"
    write(path, [attention_line(n, layer) for n in LENGTHS for layer in LAYERS])
    chosen = [
        {
            "row": 1,
            "generation": 7,
            "layer": layer,
            "length": length,
            "selected_bits": [position_bits(torch.tensor([3, -1]), length)] * HEADS,
        }
        for length in LENGTHS[1:]  # nothing is chosen in the first step
        for layer in LAYERS
    ]
    write(selection_file(path), chosen)
    return path


class Parts(HTMLParser):
    """Elements, what they load, and the text of the data element."""

    def __init__(self):
        super().__init__()
        self.tags, self.loads, self.ids, self.data = [], [], [], ""
        self._in_data = False

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.ids.append(attributes.get("id"))
        self.loads += [attributes[k] for k in ("src", "href", "action", "data") if k in attributes]
        self._in_data = attributes.get("type") == "application/json"

    def handle_endtag(self, tag):
        self._in_data = False

    def handle_data(self, data):
        if self._in_data:
            self.data += data


def page_of(probe_file, tokens=None):
    recording = read_recording(probe_file, selection_file(probe_file))
    tokens = tokens or [f"t{i} " for i in range(21)] + [TRICKY]
    return make_page(recording, tokens=tokens, prompt_tokens=19, facts={"policy": "<look_ahead>"})


def test_position_bits():
    text = position_bits(torch.tensor([0, 9, -1], dtype=torch.int32), 11)
    assert base64.b64decode(text) == bytes([0b00000001, 0b00000010])


def test_what_was_recorded_is_in_the_page(probe_file):
    parts = Parts()
    parts.feed(page_of(probe_file))
    data = json.loads(parts.data)
    assert data["tokens"][-1] == TRICKY
    assert (data["prompt"], data["lengths"], data["layers"]) == (19, [20, 21, 22], [2, 5])
    assert data["heads"] == 2
    assert data["mass"] == [[[0.52, 0.75], [0.55, 0.75]]] * 3
    assert data["selected"][0] == [None, None]
    raw = base64.b64decode(data["selected"][2][1][0])
    assert [p for p in range(22) if raw[p // 8] >> (p % 8) & 1] == [3]
    raw = base64.b64decode(data["attended"][1][0][1])
    assert [p for p in range(21) if raw[p // 8] >> (p % 8) & 1] == [0, 1, 3, 20]
    assert data["facts"] == {"policy": "<look_ahead>"}


def test_the_page_is_one_file_that_loads_nothing(probe_file):
    html = page_of(probe_file)
    parts = Parts()
    parts.feed(html)
    assert parts.loads == []
    assert {"img", "link", "iframe", "object"} & set(parts.tags) == set()
    assert parts.tags.count("script") == 2  # a token's text opens none
    assert "default-src 'none'" in html
    for word in ("http:", "https:", "//cdn", "@import", "url(", "fetch(", "XMLHttpRequest"):
        assert word not in html.replace("http://www.w3.org/2000/svg", "")


def test_no_call_has_an_argument_for_each_token():
    """Browsers take some 125,000 arguments: a longer prompt would be shown without colours."""
    script = (files("tandemkv.server.evaluation.inspect") / "page.html").read_text()
    spread = {part.split(")")[0].split(",")[0] for part in script.split("...")[1:]}
    assert spread.isdisjoint({"value", "spans", "D.tokens"})


def test_every_part_that_the_script_draws_into_is_there(probe_file):
    parts = Parts()
    parts.feed(page_of(probe_file))
    script = (files("tandemkv.server.evaluation.inspect") / "page.html").read_text()
    wanted = {name.split('"')[0] for name in script.split('$("')[1:]} - {"cursor"}
    assert wanted <= set(parts.ids)
    assert {"cells", "layers", "map", "mass", "step", "text", "mode"} <= wanted


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "longer prompt"),
        ([attention_line(20, 2), attention_line(20, 2, row=2)], "more than one request"),
        ([attention_line(20, 2), attention_line(20, 5), attention_line(21, 2)], "lacks 1 steps"),
        (
            [{k: v for k, v in attention_line(20, 2).items() if k != "attended_bits"}],
            "TANDEMKV_PROBE_DETAIL",
        ),
    ],
)
def test_recordings_that_say_too_little(tmp_path, lines, message):
    path = tmp_path / "probe.jsonl"
    write(path, lines)
    with pytest.raises(RecordingError, match=message):
        read_recording(path, selection_file(path))


def test_too_few_tokens(probe_file):
    with pytest.raises(ValueError, match="21 tokens"):
        page_of(probe_file, tokens=["x"] * 21)
