"""The simulator of many replicas: it is repeatable, routing beats its rivals in it, and a death loses no request."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bench.cluster_cache import CONVERSATIONS, planned, play, read_conversations
from bench.cluster_sim import Front, Traffic, play_trace, simulate
from bench.front_cost import measure
from onedraw.build.llm import build_llm
from onedraw.cluster.replica_set import ReplicaSet
from onedraw.llm.llm import LLM
from onedraw.settings import Settings


def test_four_replicas_keep_the_cache_hits_of_one_server_on_recorded_conversations() -> None:
    for pages in (64, 128, 512):
        found = play_trace(read_conversations(), replicas=4, pages=pages)
        assert found.requests == sum(len(one.turns) for one in read_conversations())
        assert found.kept >= 0.95, found
    least = play_trace(read_conversations(), replicas=4, pages=128, policy="turns")
    assert least.kept < 0.75, "the trace must tell good routing from bad"


def test_a_simulation_is_repeatable_and_routing_by_prefix_wins() -> None:
    found = simulate(replicas=8, seconds=40.0)
    assert replace(simulate(replicas=8, seconds=40.0), route_seconds=found.route_seconds) == found
    assert found.requests > 100
    assert found.whole_rate > 0.5
    assert found.hit_rate > 2 * simulate(replicas=8, seconds=40.0, policy="least").hit_rate


def test_routing_that_forgets_what_it_sent_is_seen() -> None:
    """A planted fault: the table has room for the pages of one prompt only."""
    good = simulate(replicas=8, seconds=40.0)
    bad = simulate(replicas=8, seconds=40.0, table=8)
    assert bad.kept < 0.8 * good.kept


def test_requests_of_replicas_that_die_are_answered_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[int] = []
    plain = Front.choose

    def choose(self: Front, job: object) -> int | None:
        chosen = plain(self, job)  # type: ignore[arg-type]
        if chosen is None:
            lost.append(1)
        return chosen

    monkeypatch.setattr(Front, "choose", choose)
    calm = Traffic(turns=1.0, agents=0.0)
    found = simulate(replicas=8, seconds=120.0, load=0.3, lifetime=60.0, traffic=calm)
    assert found.deaths >= 5
    assert found.pause_median > 0.5, "a death is noticed late"
    assert found.pause_p99 < 60
    assert not lost, "some replica was always there"


def test_fronts_that_share_nothing_keep_their_own_conversations_together() -> None:
    one, several = (simulate(replicas=8, seconds=40.0, fronts=fronts) for fronts in (1, 4))
    assert several.hit_rate > 0.85 * one.hit_rate


def test_the_recorded_conversations_are_those_that_were_planned() -> None:
    plans, recorded = planned(40, 0), read_conversations(CONVERSATIONS)
    assert [system for system, _ in plans] == [one.system for one in recorded]
    for (_, said), one in zip(plans, recorded, strict=True):
        assert said == [(turn.at, turn.user) for turn in one.turns]
        assert all(turn.reply for turn in one.turns)


def test_conversations_are_played_against_real_replicas() -> None:
    settings = Settings(model="fake", backend="fake", max_context=4096, kv_memory=4096)
    conversations = [replace(one, turns=one.turns[:3]) for one in read_conversations() if len(one.turns) > 2][:4]
    rates = []
    for engines in (1, 2):
        built = [build_llm(settings) for _ in range(engines)]
        replicas = ReplicaSet("one")
        for number, one in enumerate(built):
            replicas.add(f"r{number}", one.service, fingerprint="one")
        whole = built[0]
        llm = LLM(
            service=replicas, tokenizer=whole.tokenizer, template=whole.template, card=whole.card, constraints=whole.constraints
        )
        requests, prompt, cached = asyncio.run(play(llm, conversations, at_once=2, new_tokens=1))
        assert requests == 12
        rates.append(cached / prompt)
        replicas.close()
        for one in built:
            one.close()
    assert rates[0] > 0.3
    assert rates[1] > 0.7 * rates[0]


def test_the_cost_of_a_front_has_every_part() -> None:
    found = measure([2, 8], [1, 4], 64, entries=1000)
    assert len(found) == 9
    assert all(cost > 0 for cost in found.values())
