# SPDX-License-Identifier: Apache-2.0
"""`tandemkv calibrate`: each measure by hand, the corpus, and a whole run on a tiny model."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_calibrated import make_tiny_model
from tiny_models import write_model
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from tandemkv.cache_rank.calibration.format import (
    CalibrationError,
    KascadeCalibration,
    read_calibration,
)
from tandemkv.cache_rank.calibration.resolve import resolve_calibration
from tandemkv.cache_rank.policies.registry import find_policy
from tandemkv.cache_rank.protocol.errors import SettingsError
from tandemkv.cache_rank.protocol.models.model_spec import read_model_spec
from tandemkv.cache_rank.protocol.settings.rank_settings import SelectionSettings
from tandemkv.server.cli.commands import app
from tandemkv.server.evaluation.calibrate import command
from tandemkv.server.evaluation.calibrate.attention import (
    AttentionRecorder,
    TextAttention,
    max_of_group,
    mean_of_group,
)
from tandemkv.server.evaluation.calibrate.command import Request, choose_heads
from tandemkv.server.evaluation.calibrate.kascade import (
    KascadeMeasurement,
    choose_anchors,
    head_map,
    recovered_mass,
    top_sets,
)
from tandemkv.server.evaluation.calibrate.sync_kv import (
    SyncKVMeasurement,
    cluster_heads,
    head_overlap,
)
from tandemkv.server.evaluation.corpus import cut_texts

A = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.0, 0.1, 0.3, 0.6]], dtype=torch.float64)
B = torch.tensor([[0.4, 0.1, 0.1, 0.4], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
"""Two heads on one token with four keys, of layers a and b."""


def test_similarity_by_hand() -> None:
    """Eq. 3 with k = 2: sets {0,1} and {2,3} of a; {0,3} and {2,3} of b."""
    numerator = recovered_mass(top_sets(A[:, None], 2), B[:, None])
    own = recovered_mass(top_sets(B[:, None], 2), B[:, None]).diagonal().t()
    want = torch.tensor([[0.5, 0.5], [0.3, 0.7]], dtype=torch.float64)
    torch.testing.assert_close(numerator[:, :, 0], want)
    torch.testing.assert_close(own[:, 0], torch.tensor([0.8, 0.7], dtype=torch.float64))
    assert head_map(numerator[:, :, 0] / own) == (0, 1)


def test_many_heads_may_map_to_one() -> None:
    assert head_map(torch.tensor([[0.1, 0.9], [0.2, 0.3]])) == (1, 1)


def measured(texts: list[TextAttention], top_k: int, num_anchors: int) -> KascadeCalibration:
    measure = KascadeMeasurement(top_k)
    for text in texts:
        measure.add(text)
    for text in texts:
        measure.weigh(text)
    return measure.result(num_anchors)


def test_layers_are_weighed_by_their_worst_token_and_their_importance() -> None:
    """Two layers, one head, two tokens, k = 1, then two texts.

    Token 0 of both layers prefers key 0: ratio 1. Token 1 prefers key 0 in layer 0 and key 1, with
    .75 against .25, in layer 1: ratio 1/3. The minimum is 1/3, times importance 1/2.
    """
    first = torch.tensor([[[1.0, 0.0], [0.6, 0.4]]])
    second = torch.tensor([[[1.0, 0.0], [0.25, 0.75]]])
    texts = [TextAttention([first, second], [1.0, 0.5])]
    assert measured(texts, 1, 1).similarity == ((1.0, pytest.approx(0.5 / 3, abs=1e-6)), (0.0, 0.5))
    # A second text in which the layers agree, with importance 3/2 in layer 1: means 2/3 and 1.
    texts.append(TextAttention([first, first], [1.0, 1.5]))
    found = measured(texts, 1, 2)
    assert found.importance == (1.0, 1.0)
    assert found.similarity[0][1] == pytest.approx(2 / 3, abs=1e-6)
    assert found.anchors == (0, 1)


def random_text(seed: int) -> TextAttention:
    """Three layers of two heads, twelve tokens."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(3, 2, 12, 12, generator=generator, dtype=torch.float64)
    hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)
    return TextAttention([*scores.masked_fill(hidden, -torch.inf).softmax(-1)], [1.0, 0.5, 0.25])


def test_what_is_added_up_is_what_all_texts_together_give() -> None:
    texts = [random_text(seed) for seed in range(4)]
    found = measured(texts, 3, 2)
    for a, b in itertools.combinations_with_replacement(range(3), 2):
        masses = [recovered_mass(top_sets(x.weights[a], 3), x.weights[b]).double() for x in texts]
        owns = [x.weights[b].topk(3).values.sum(-1) for x in texts]
        ratios = [(mass / own[:, None]).amin(-1) for mass, own in zip(masses, owns, strict=True)]
        heads = list(head_map(torch.stack(ratios).mean(0)))
        worst = [
            (mass[range(2), heads].sum(0) / own.sum(0)).amin()
            for mass, own in zip(masses, owns, strict=True)
        ]
        want = float(torch.stack(worst).mean()) * found.importance[b]
        assert found.similarity[a][b] == pytest.approx(want, abs=1e-6)
        if a == max(anchor for anchor in found.anchors if anchor <= b):
            assert list(found.head_maps[b]) == heads


def test_a_text_that_was_added_leaves_sums_alone() -> None:
    """Of 32 texts and 36 layers the masses of all tokens would be gigabytes."""
    measure, sizes = KascadeMeasurement(top_k=3), set[int]()
    for seed in range(3):
        measure.add(random_text(seed))
        kept = tree_leaves(vars(measure))
        sizes.add(sum(each.numel() for each in kept if isinstance(each, torch.Tensor)))
    assert len(sizes) == 1


def score_of(anchors: tuple[int, ...], similarity: torch.Tensor) -> float:
    return sum(
        float(similarity[max(a for a in anchors if a <= layer), layer])
        for layer in range(len(similarity))
    )


def test_anchors_by_hand() -> None:
    """Of four layers, 2 and 3 are far from 0 but near to 2: the second anchor is 2."""
    similarity = torch.tensor(
        [[1, 0.9, 0.1, 0.1], [0, 1, 0.2, 0.2], [0, 0, 1, 0.9], [0, 0, 0, 1.0]]
    )
    assert choose_anchors(similarity, 1) == (0,)
    assert choose_anchors(similarity, 2) == (0, 2)
    assert choose_anchors(similarity, 4) == (0, 1, 2, 3)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_anchors_are_better(seed: int) -> None:
    similarity = torch.rand(7, 7, generator=torch.Generator().manual_seed(seed))
    for count in range(1, 8):
        chosen = choose_anchors(similarity, count)
        others = [(0, *rest) for rest in itertools.combinations(range(1, 7), count - 1)]
        best = max(score_of(anchors, similarity) for anchors in others)
        assert score_of(chosen, similarity) == pytest.approx(best)
        assert len(chosen) == count


def test_overlap_by_hand() -> None:
    """k = 1; tokens that see fewer than two keys do not count. Heads agree in 1 of 2 others."""
    weights = torch.zeros(2, 3, 3)
    weights[:, 0, 0] = 1
    weights[0, 1, :2] = torch.tensor([0.6, 0.4])
    weights[1, 1, :2] = torch.tensor([0.4, 0.6])
    weights[:, 2] = torch.tensor([0.2, 0.7, 0.1])
    want = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    assert torch.equal(head_overlap(weights, 1), want)


def test_clusters_of_four_heads() -> None:
    similarity = torch.eye(4, dtype=torch.float64)
    similarity[0, 2] = similarity[2, 0] = 0.9
    similarity[1, 3] = similarity[3, 1] = 0.8
    clusters, leaders = cluster_heads(similarity, 2)
    assert clusters == (0, 1, 0, 1)
    assert [clusters[head] for head in leaders] == [0, 1]
    assert cluster_heads(similarity, 1)[0] == (0, 0, 0, 0)
    assert cluster_heads(similarity, 4) == ((0, 1, 2, 3), (0, 1, 2, 3))


def test_the_representative_is_closest_to_the_centre() -> None:
    """Of three heads on a line, the middle one."""
    similarity = torch.tensor([[1.0, 0.8, 0.4], [0.8, 1.0, 0.8], [0.4, 0.8, 1.0]])
    assert cluster_heads(similarity, 1) == ((0, 0, 0), (1,))


def test_missing_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.cluster", None)
    with pytest.raises(CalibrationError, match=r"pip install 'tandemkv\[calibration\]'"):
        cluster_heads(torch.eye(2), 1)


class Letters:
    """A tokenizer of characters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]


def test_texts_are_cut_evenly_and_the_same_each_time(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("aabbccddeef")
    texts = cut_texts([path], Letters(), num_texts=3, num_tokens=2)
    assert ["".join(map(chr, text)) for text in texts.tokens] == ["aa", "bb", "dd"]
    assert texts.sources == ("a.txt",)
    assert len(cut_texts([path], Letters(), num_texts=9, num_tokens=2).tokens) == 5


def test_the_built_in_text_is_long_and_its_licence_is_named() -> None:
    texts = cut_texts([], Letters(), num_texts=1, num_tokens=300_000)
    assert len(texts.tokens) == 1
    assert "PSF-2.0" in texts.sources[0]
    assert cut_texts([], Letters(), num_texts=1, num_tokens=300_000) == texts


@pytest.mark.parametrize(
    ("given", "device", "want"),
    [("auto", "cuda", "bfloat16"), ("auto", "cpu", "float32"), ("float32", "cuda", "float32")],
)
def test_a_gpu_computes_in_half_the_memory(
    given: str, device: str, want: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "_calibrate", lambda _, request, __: asked.append(request) or [])
    arguments = ["calibrate", str(tiny_model), "--dtype", given, "--device", device]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [request.dtype for request in asked] == [want]


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text("")
    short.write_text("abc")
    with pytest.raises(CalibrationError, match=r"empty\.txt: no text of 8 tokens.*has 0"):
        cut_texts([empty], Letters(), num_texts=1, num_tokens=8)
    with pytest.raises(CalibrationError, match="the longest has 3"):
        cut_texts([empty, short], Letters(), num_texts=1, num_tokens=8)
    with pytest.raises(SettingsError, match="cannot be read"):
        cut_texts([tmp_path / "missing"], Letters(), num_texts=1, num_tokens=8)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("pool", [mean_of_group, max_of_group])
def test_the_recorder_sees_what_the_model_computes(tiny_model: Path, pool) -> None:
    from transformers import AutoModelForCausalLM

    spec = read_model_spec(tiny_model, dtype="float32")
    seen = AttentionRecorder(tiny_model, spec, dtype="float32", pool=pool).read(range(1, 30))
    network = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32, attn_implementation="eager"
    )
    want = network(torch.arange(1, 30)[None], output_attentions=True)
    for ours, theirs in zip(seen.weights, want.attentions, strict=True):
        grouped = theirs[0].detach().view(3, 2, 29, 29)
        torch.testing.assert_close(
            ours, grouped.mean(1) if pool is mean_of_group else grouped.amax(1)
        )
    assert len(seen.importance) == 4
    embedded = network.model.embed_tokens(torch.arange(1, 30))
    layer = network.model.layers[0]
    rope = network.model.rotary_emb(embedded[None], torch.arange(29)[None])
    mask = torch.full((29, 29), float("-inf")).triu(1)[None, None]
    added = layer.self_attn(layer.input_layernorm(embedded[None]), rope, mask)[0][0]
    cosine = torch.cosine_similarity(embedded, embedded + added, dim=-1).mean()
    assert seen.importance[0] == pytest.approx(1 - float(cosine), abs=1e-5)


def test_a_model_with_linear_attention_is_refused(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 4096, "intermediate_size": 64, "vocab_size": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for policy, instead in (("kascade", "--anchors"), ("look_ahead", "without look_ahead.predict")):
        request = Request(model=str(tmp_path), policy=policy, out=tmp_path / "out.json")
        message = f"3 of 4 are linear attention; use `tandemkv serve` {instead}"
        with pytest.raises(CalibrationError, match=message):
            choose_heads(tmp_path, request, tmp_path / "out.json", Console())


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("qwen3", "post_attention_layernorm"),
        ("granite", "post_attention_layernorm"),  # a factor
        ("phi-4", "post_attention_layernorm"),  # dropout
        ("olmo2", "mlp"),  # a norm of what attention returned
        ("glm4", "post_attention_layernorm"),
        ("gemma3", "pre_feedforward_layernorm"),
    ],
)
def test_importance_is_of_the_stream_that_attention_left(
    name: str, given: str, tmp_path: Path
) -> None:
    write_model(name, tmp_path)
    spec = read_model_spec(tmp_path, dtype="float32")
    recorder = AttentionRecorder(tmp_path, spec, dtype="float32", pool=mean_of_group)
    streams: list[torch.Tensor] = []
    for layer in recorder._network.model.layers:
        layer.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
        layer.get_submodule(given).register_forward_pre_hook(
            lambda _, args: streams.append(args[0])
        )
    found = recorder.read(range(1, 20)).importance
    pairs = zip(streams[::2], streams[1::2], strict=True)
    want = [1.0 - float(torch.cosine_similarity(a, b, dim=-1).mean()) for a, b in pairs]
    assert found == pytest.approx(want, abs=1e-6)
    assert len(found) == len(recorder._network.model.layers)


@pytest.mark.parametrize("policy", ["kascade", "sync_kv"])
def test_a_whole_run_writes_a_file_that_serves(
    tiny_model: Path, tmp_path: Path, policy: str
) -> None:
    out = tmp_path / "out [fp8].json"
    arguments = ["calibrate", str(tiny_model), "--policy", policy, "--out", str(out)]
    sizes = ["--texts", "2", "--tokens", "40", "--top-k", "4"]
    sizes += ["--num-anchors", "2"] if policy == "kascade" else []
    result = CliRunner().invoke(app, [*arguments, *sizes])
    assert result.exit_code == 0, result.output
    assert f"ok  {out}: " in result.output
    found = read_calibration(out)
    assert found.source == "measured"
    assert found.corpus is not None
    assert found.corpus.num_tokens == 80
    spec = read_model_spec(tiny_model, dtype="float32")
    selection = SelectionSettings(policy=policy, calibration=str(out))
    resolved = resolve_calibration(selection, spec, find_policy(policy).capabilities)
    assert (resolved.share is None) == (policy == "sync_kv")
    assert (resolved.clusters is None) == (policy == "kascade")
    again = tmp_path / "again.json"
    arguments[-1] = str(again)
    assert CliRunner().invoke(app, [*arguments, *sizes]).exit_code == 0
    assert json.loads(again.read_text()) == json.loads(out.read_text())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (["--policy", "quest"], "'quest' is not one of 'kascade', 'sync_kv', 'look_ahead'"),
        (["--top-k", "20"], "more than twice"),
        (["--tokens", "300"], "the model takes 256"),
        (["--device", "gpu"], "'gpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["--device", "cuda"], "device=cuda: torch sees no CUDA device; use --device cpu"),
        (["--text", "/nonexistent"], "cannot be read"),
        (["--num-clusters", "3"], "clusters=3 is not read"),
        (["--distance", "2"], "leave it out, or give --policy look_ahead"),
    ],
)
def test_bad_input_is_told_with_exit_code_two(
    tiny_model: Path,
    tmp_path: Path,
    changes: list[str],
    match: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["calibrate", str(tiny_model), "--policy", "kascade", "--out", str(tmp_path / "x")]
    sizes = ["--tokens", "40", "--top-k", "4"]
    result = CliRunner().invoke(app, [*arguments, *sizes, *changes])
    assert result.exit_code == 2
    assert match in " ".join(result.output.replace("│", " ").split())  # typer draws a box
    assert not (tmp_path / "x").exists()


def test_sync_kv_measures_the_mean_over_texts() -> None:
    measure = SyncKVMeasurement(top_k=1)
    same = torch.tensor([[[1.0, 0.0], [0.9, 0.1]]] * 3)
    other = same.clone()
    other[2, 1] = torch.tensor([0.1, 0.9])
    measure.add(TextAttention([other]))
    measure.add(TextAttention([other]))
    found = measure.result(2)
    assert found.clusters == ((0, 0, 1),)
    assert found.representatives[0][1] == 2


def test_a_folder_that_is_not_there_is_named_before_the_model_runs(tmp_path: Path) -> None:
    out = tmp_path / "new" / "file.json"
    with pytest.raises(SettingsError, match=f"there is no folder {out.parent}; make it"):
        Request(model="smollm2", policy="kascade", out=out)
