# SPDX-License-Identifier: Apache-2.0
"""The whole service, driven by a scripted inference rank over a data plane in memory."""

import pytest

NEXT_STEP = ("async_spade", "last_query", "mean_query")
SELECTING = ("look_ahead", "oracle", *NEXT_STEP)


@pytest.mark.parametrize("policy", SELECTING)
def test_sparse_rows_keep_their_invariants(serve, settings_of, policy):
    served = serve(settings_of(policy=policy))
    rank = served.connect()
    long, short = rank.new_request(1, 120), rank.new_request(3, 20)
    rank.extend(long, short)
    for _ in range(30):  # `short` turns from dense to sparse on the way
        rank.decode(long, short)
    values = served.counters
    assert values.stale_reads_total == values.protocol_errors_total == 0
    assert values.selections_total > 0
    assert values.fetched_rows_total == rank.num_fetched > 0
    assert values.resident_hits_total + values.resident_misses_total == (
        values.selected_tokens_total
    )
    assert values.withheld_packs_total == 0
    assert values.staleness_steps == (1 if policy in NEXT_STEP else 0)
    assert values.rows_live == 2
    assert values.slots_live == len(long.slots) + len(short.slots)


@pytest.mark.parametrize("policy", SELECTING)
def test_what_fits_is_resident_when_it_goes_through_selection(serve, settings_of, policy):
    served = serve(settings_of(policy=policy, dense_while_fits=False))
    rank = served.connect()
    request = rank.new_request(2, 5)
    rank.extend(request)
    for _ in range(20):  # from fewer tokens than the ring on; checked after each pack
        rank.decode(request)
    assert served.counters.selections_total > 0
    assert served.counters.evictions_total == 0
