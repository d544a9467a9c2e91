"""The Prometheus metrics of `/metrics`. A metric that vLLM also has goes by vLLM's name.

A row is the work of one sequence in one engine step; a draft is kept if it equals the sampled token. The engine's Stats are read
at every scrape; latencies are measured from the pieces of the replies as they pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onedraw.engine.stats import DraftingEstimates, Stats
from onedraw.server.limits import Accounts
from onedraw.types import Piece, Usage

MetricFamily = GaugeMetricFamily | CounterMetricFamily

# Upper ends of histogram buckets: seconds between tokens, numbers of tokens, and seconds of whole requests.
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)

# Each entry is the metric's name, its help text, and the function that reads its value from Stats.
_GAUGES: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("num_requests_running", "Sequences in the batch.", lambda s: s.running),
    ("num_requests_waiting", "Requests in the queue.", lambda s: s.waiting),
    ("kv_cache_usage_perc", "Share of KV pages in use, from 0 to 1.", lambda s: s.pages_used / max(s.pages_total, 1)),
    ("prompt_checkpoints", "Prompt checkpoints in memory.", lambda s: s.checkpoints_used),
    ("replicas", "Engines that serve requests.", lambda s: s.replicas),
    (
        "replicas_wanted",
        "Engines that there should be: those that serve and those that are being started.",
        lambda s: s.replicas_wanted,
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_hits),
    ("prompt_tokens", "Prompt tokens computed.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens sampled.", lambda s: s.completion_tokens),
    ("num_preemptions", "Preemptions: sequences whose pages were released, to be computed again.", lambda s: s.preemptions),
    ("num_turn_preemptions", "Preemptions that gave another caller or request its turn.", lambda s: s.turn_preemptions),
    (
        "steps_out_of_memory",
        "Steps that the device had no memory for; their rows were preempted.",
        lambda s: s.out_of_memory_steps,
    ),
    ("engine_state_losses", "Times that the backend lost the state of all sequences and was restored.", lambda s: s.state_losses),
    ("prompt_checkpoints_saved", "Prompt checkpoints saved.", lambda s: s.checkpoints_saved),
    ("prompt_checkpoints_evicted", "Prompt checkpoints evicted.", lambda s: s.checkpoints_evicted),
    ("prompt_checkpoints_restored", "Rows that started from a checkpoint.", lambda s: s.restores),
    ("prompt_checkpoints_whole", "Prompts restored from a checkpoint with nothing left to compute.", lambda s: s.whole_prompts),
    ("prompt_snapshots_saved", "Prompt checkpoints written to disk.", lambda s: s.snapshots_saved),
    ("prompt_snapshots_restored", "Prompts restored from a snapshot on disk.", lambda s: s.snapshots_restored),
    ("sliding_pages_let_go", "Pages of sliding-window layers released behind the window.", lambda s: s.window_pages_freed),
    ("spec_decode_num_drafts", "Rows with drafts.", lambda s: s.drafts),
    ("spec_decode_num_draft_tokens", "Tokens drafted.", lambda s: s.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were kept.", lambda s: s.accepted_tokens),
    ("engine_turns", "Engine steps.", lambda s: s.steps),
    ("spec_decode_drafter_steps", "Generating steps after which the model's own drafter drafted.", lambda s: s.drafter_steps),
    ("spec_decode_drafter_seconds", "Time that the model's own drafter took in generating steps.", lambda s: s.drafter_seconds),
    ("spec_decode_probe_seconds", "Estimated time of drafts that were only tried.", lambda s: s.probe_seconds),
    ("spec_decode_host_seconds", "Time spent in proposers and drafting decisions on the host.", lambda s: s.propose_seconds),
    ("replicas_lost", "Replicas that died.", lambda s: s.replicas_lost),
    ("requests_moved", "Requests continued on another replica.", lambda s: s.moved_requests),
)


class EngineCollector(Collector):
    """Prometheus collector that reads the engine's Stats at every scrape, so the engine pays nothing between scrapes."""

    def __init__(self, stats: Callable[[], Stats], model: str) -> None:
        self._stats = stats
        self._model = model

    def collect(self) -> Iterator[MetricFamily]:
        stats = self._stats()
        for name, help_text, read in _GAUGES:
            gauge = GaugeMetricFamily(name, help_text, labels=["model_name"])
            gauge.add_metric([self._model], read(stats))
            yield gauge
        for name, help_text, read in _COUNTERS:
            counter = CounterMetricFamily(name, help_text, labels=["model_name"])
            counter.add_metric([self._model], read(stats))
            yield counter
        yield self._per_position(stats)
        yield from self._estimates(stats.drafting)

    def _estimates(self, drafting: DraftingEstimates) -> Iterator[MetricFamily]:
        """Yield the estimates of step cost and acceptance by which the number of drafts is chosen."""
        labels = ["model_name", "of", "per"]
        costs = GaugeMetricFamily("spec_decode_cost_seconds", "Estimated cost of a step and of the drafter.", labels=labels)
        for of, cost in (("step", drafting.step_cost), ("drafter", drafting.drafter_cost)):
            for per, seconds in zip(("step", "row", "token"), cost, strict=True):
                costs.add_metric([self._model, of, per], seconds)
        labels = ["model_name", "source", "temperature"]
        rates = GaugeMetricFamily("spec_decode_acceptance", "Estimated probability that a draft is kept.", labels=labels)
        for source, temperature, rate in drafting.acceptance:
            rates.add_metric([self._model, source, f"{temperature:g}"], rate)
        yield from (costs, rates)

    def _per_position(self, stats: Stats) -> MetricFamily:
        """Count kept drafts by position; 0 is the first draft of a row. Divided by the rows with drafts it is a rate."""
        help_text = "Drafted tokens that were kept, by their position in the draft."
        family = CounterMetricFamily("spec_decode_num_accepted_tokens_per_pos", help_text, labels=["model_name", "position"])
        for position, kept in enumerate(stats.accepted_per_position):
            family.add_metric([self._model, str(position)], kept)
        return family


class KeyCollector(Collector):
    """Reads what each API key has in flight at every scrape."""

    def __init__(self, keys: frozenset[str], accounts: Accounts, model: str) -> None:
        self._keys, self._accounts, self._model = keys, accounts, model

    def collect(self) -> Iterator[MetricFamily]:
        labels = ["model_name", "key"]
        requests = GaugeMetricFamily("key_requests_in_flight", "Requests of an API key, running and waiting.", labels=labels)
        tokens = GaugeMetricFamily("key_tokens_in_flight", "Their prompt tokens and max_tokens.", labels=labels)
        for caller, count, size in self._accounts.in_flight():
            if caller in self._keys:
                requests.add_metric([self._model, caller], count)
                tokens.add_metric([self._model, caller], size)
        yield from (requests, tokens)


class PrefixedRegistry(CollectorRegistry):
    """A registry whose metrics have a prefix, so that dashboards of other servers find them."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.name = self._prefix + family.name
            family.samples = [sample._replace(name=self._prefix + sample.name) for sample in family.samples]
            yield family


class Meters:
    """The metrics of one app, in a registry of their own, so that several apps can run in one process."""

    def __init__(self, stats: Callable[[], Stats], model: str, *, prefix: str = "") -> None:
        self._registry = PrefixedRegistry(prefix)
        self._registry.register(EngineCollector(stats, model))
        self._model = model
        self.first = self._histogram("time_to_first_token_seconds", "From a request's arrival to a choice's first token.", _SLOW)
        self.between = self._histogram("inter_token_latency_seconds", "From one token of a choice to its next.", _FAST)
        self.whole = self._histogram("e2e_request_latency_seconds", "From a request's arrival to a choice's end.", _SLOW)
        self.queue = self._histogram("request_queue_time_seconds", "From the engine's queue to a choice's first step.", _SLOW)
        self.prefill = self._histogram("request_prefill_time_seconds", "From a choice's first step to its first token.", _SLOW)
        self.decode = self._histogram("request_decode_time_seconds", "From a choice's first token to its end.", _SLOW)
        self.inference = self._histogram("request_inference_time_seconds", "From a choice's first step to its end.", _SLOW)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between the tokens of a choice.", _FAST
        )
        self.prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a choice.", _COUNTS)
        self.completion = self._histogram("request_generation_tokens", "Tokens sampled for a choice.", _COUNTS)
        self._ended = Counter(
            "request_success", "Choices that ended, by reason.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._keys: frozenset[str] = frozenset()
        self._limited = Counter(
            "requests_limited",
            "Requests refused because of a limit per caller.",
            ["model_name", "key", "limit"],
            registry=self._registry,
        )

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, help_text, ["model_name"], buckets=buckets, registry=self._registry)
        return family.labels(self._model)

    def limited(self, caller: str, limit: str) -> None:
        """Count a request that was refused because of a limit for each caller. Only names of API keys become labels: there may be
        any number of client addresses."""
        self._limited.labels(self._model, caller if caller in self._keys else "", limit).inc()

    def show_keys(self, keys: Sequence[str], accounts: Accounts) -> None:
        """Add metrics of the requests and tokens that each API key has in flight."""
        self._keys = frozenset(keys)
        self._registry.register(KeyCollector(self._keys, accounts, self._model))

    def ended(self, reason: str) -> None:
        self._ended.labels(self._model, reason).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


@dataclass(frozen=True, slots=True)
class ChoiceTimes:
    """The durations of the parts of a choice, in seconds. `first_token` and `whole` are measured from the request's arrival."""

    queue: float
    prefill: float
    decode: float
    first_token: float
    whole: float


class RequestTimer:
    """Measures the latencies of one request by the times at which its pieces arrive. Times are in seconds of time.monotonic."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self.arrival = time.monotonic()
        self.submitted = self.arrival  # when the engine got the request
        self.choices: list[ChoiceTimes] = []  # durations of the choices that have ended
        self._first: dict[int, float] = {}  # choice → the time at which its first tokens arrived
        self._last: dict[int, float] = {}  # choice → the time at which its latest tokens arrived

    @property
    def first_token(self) -> float | None:
        """The time of the first token of any choice."""
        return min(self._first.values(), default=None)

    def submit(self) -> None:
        self.submitted = time.monotonic()

    def see(self, piece: Piece) -> None:
        now = time.monotonic()
        if piece.tokens:
            self._tokens(piece.index, len(piece.tokens), now)
        if piece.finish is not None:
            self._end(piece.index, piece.usage or Usage(), now)
            self._meters.ended(piece.finish)

    def _tokens(self, choice: int, count: int, now: float) -> None:
        """Observe the time of each of these tokens. Tokens of one engine step arrive together, so each counts an equal share of
        the time since the step before."""
        if choice in self._last:
            for _ in range(count):
                self._meters.between.observe((now - self._last[choice]) / count)
        else:
            self._meters.first.observe(now - self.arrival)
            self._first[choice] = now
        self._last[choice] = now

    def _end(self, choice: int, usage: Usage, now: float) -> None:
        meters, first = self._meters, self._first.get(choice, now)
        times = ChoiceTimes(
            queue=usage.queued,
            prefill=max(first - self.submitted - usage.queued, 0.0),
            decode=now - first,
            first_token=first - self.arrival,
            whole=now - self.arrival,
        )
        self.choices.append(times)
        meters.whole.observe(times.whole)
        meters.queue.observe(times.queue)
        meters.prefill.observe(times.prefill)
        meters.decode.observe(times.decode)
        meters.inference.observe(times.prefill + times.decode)
        meters.prompt.observe(usage.prompt)
        meters.completion.observe(usage.completion)
        if usage.completion > 1:
            meters.per_token.observe(times.decode / (usage.completion - 1))
