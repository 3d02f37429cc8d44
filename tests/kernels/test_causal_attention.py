# SPDX-License-Identifier: Apache-2.0
"""`attend_causal` against float64."""

import pytest
import torch
from tolerances import TOLERANCES, assert_close

from tandemkv.kernels.causal_attention import attend_causal


@pytest.mark.parametrize(
    ("num_queries", "num_tokens"),
    [(0, 0), (0, 3), (1, 1), (1, 700), (5, 5), (513, 513), (600, 777), (1030, 1031)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_float64(num_queries: int, num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q = torch.randn(num_queries, 6, 16).to(dtype)
    k, v = torch.randn(2, num_tokens, 2, 16).to(dtype)
    logits = torch.einsum("tghd,ngd->ghtn", q.double().view(-1, 2, 3, 16), k.double()) * 0.3
    future = torch.arange(num_tokens) > torch.arange(num_tokens - num_queries, num_tokens)[:, None]
    probs = logits.masked_fill(future, float("-inf")).softmax(-1)
    want = torch.einsum("ghtn,ngd->tghd", probs, v.double()).flatten(1, 2)
    out = attend_causal(q, k, v, scale=0.3)
    assert out.dtype == dtype
    assert_close(out, want, TOLERANCES[dtype])


def test_bad_arguments() -> None:
    q, k = torch.zeros(3, 4, 8), torch.zeros(2, 2, 8)
    with pytest.raises(ValueError, match="num_queries=3: must be >= 0 and <= 2"):
        attend_causal(q, k, k, scale=1.0)
    with pytest.raises(ValueError, match=r"k\.dtype"):
        attend_causal(q[:2], k.half(), k, scale=1.0)
