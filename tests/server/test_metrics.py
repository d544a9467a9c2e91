"""The counters of /metrics agree with the replies."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from onedraw.llm.llm import idle_stats
from onedraw.server.config import ServerOptions
from tests.server.running import fake_llm, serving, slowed

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
    "request_queue_time_seconds_count", "request_prefill_time_seconds_count", "request_decode_time_seconds_count",
    "request_inference_time_seconds_count", "request_time_per_output_token_seconds_count",
    "request_prompt_tokens_sum", "request_generation_tokens_sum",
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
        assert (grown["request_prompt_tokens_sum"], grown["request_generation_tokens_sum"]) == (120, 21)
        assert grown["request_time_per_output_token_seconds_count"] == 3
        for part in ("queue", "prefill", "decode", "inference"):
            assert grown[f"request_{part}_time_seconds_count"] == 3
        parts = [grown[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode")]
        assert 0 < sum(parts) <= grown["e2e_request_latency_seconds_sum"] + 1e-6


def test_time_in_the_queue_is_told_apart_from_the_prompt() -> None:
    """One lane: the second request waits until the first has ended."""
    with slowed(fake_llm(max_batch=1, prefix_cache=False), 0.02) as llm, serving(llm) as served:
        served.post("/v1/completions", prompt=["One", "Two"], max_tokens=10, ignore_eos=True)
        found = scrape(served)
        assert found["request_queue_time_seconds_sum"] >= 0.02 * 9


def test_a_prefix_is_part_of_every_name() -> None:
    with fake_llm() as llm, serving(llm, ServerOptions(metrics_prefix="vllm:")) as served:
        served.post("/v1/completions", prompt="a", max_tokens=2)
        text = served.get("/metrics").text
        names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
        assert all(name.startswith("vllm:") for name in names)
        assert {f"vllm:{name}" for name in NAMES} <= names


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
