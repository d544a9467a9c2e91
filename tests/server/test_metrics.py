"""The counters of /metrics agree with the replies."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from onedraw.llm.llm import idle_stats
from tests.server.running import fake_llm, serving

NAMES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total",
    "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total", "num_turn_preemptions_total",
    "steps_out_of_memory_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total", "time_to_first_token_seconds_count",
    "prompt_checkpoints", "prompt_checkpoints_saved_total", "prompt_checkpoints_evicted_total", "sliding_pages_let_go_total",
    "prompt_checkpoints_restored_total", "prompt_checkpoints_whole_total",
    "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
}  # fmt: skip


def scrape(served) -> dict[str, float]:
    idle_stats(served.llm)  # the counters are updated after the last event of a step
    answer = served.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    assert all(sample.labels["model_name"] == served.model for sample in samples)
    return {sample.name: sample.value for sample in samples if not {"le", "finished_reason", "position"} & set(sample.labels)}


def test_the_usual_metric_names_exist(fake):
    assert set(scrape(fake)) >= NAMES


def test_tokens_and_times_are_counted_per_choice():
    with fake_llm() as llm, serving(llm) as served:
        before = scrape(served)
        served.post("/v1/completions", prompt=[5] * 40, max_tokens=7, n=2, ignore_eos=True)
        served.chunks("/v1/completions", prompt=[5] * 40, max_tokens=7, ignore_eos=True)
        grown = {name: value - before.get(name, 0.0) for name, value in scrape(served).items()}
        assert grown["generation_tokens_total"] == 21
        assert grown["time_to_first_token_seconds_count"] == 3
        assert grown["inter_token_latency_seconds_count"] == 3 * 6
        assert grown["e2e_request_latency_seconds_count"] == 3
        assert grown["prefix_cache_hits_total"] > 0
        assert grown["num_requests_running"] == 0


def test_two_apps_have_their_own_metrics():
    with fake_llm() as one, fake_llm() as other, serving(one) as first, serving(other) as second:
        first.post("/v1/completions", prompt="a", max_tokens=3, ignore_eos=True)
        assert scrape(first)["generation_tokens_total"] == 3
        assert scrape(second)["e2e_request_latency_seconds_count"] == 0


def test_kept_drafts_are_counted_by_position():
    with fake_llm(draft=("prediction",), draft_tokens=4) as llm, serving(llm) as served:
        asked = {"prompt": [5] * 40, "max_tokens": 11, "ignore_eos": True, "seed": 3, "return_token_ids": True}
        said = served.post("/v1/completions", **asked).json()["choices"][0]["token_ids"]
        text = llm.tokenizer.decode(said, skip_special=False)
        again = served.post("/v1/completions", **asked, prediction={"type": "content", "content": text}).json()
        assert again["choices"][0]["token_ids"] == said
        counted = scrape(served)
        families = text_string_to_metric_families(served.get("/metrics").text)
        (family,) = (f for f in families if f.name == "spec_decode_num_accepted_tokens_per_pos")
        places = {int(sample.labels["position"]): sample.value for sample in family.samples}
        assert counted["spec_decode_num_drafts_total"] >= places[0] > 0
        assert sum(places.values()) == counted["spec_decode_num_accepted_tokens_total"]
        assert places[4] == 0  # each row had four drafts
        assert sorted(places.values(), reverse=True) == [places[i] for i in range(len(places))]
