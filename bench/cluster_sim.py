"""Simulate many replicas behind the real routing: what it keeps of the prefix cache's hits, and what tail latency it gives.

    python -m bench.cluster_sim fleet [--replicas 4,64,1024] [--seconds 200] [--policies onedraw,least,caller] [--fronts 1]
                                      [--table 262144] [--lifetime HOURS] [--load 0.6] [--seed 0] [--json]
    python -m bench.cluster_sim trace [--replicas 4] [--pages 64,128,256,512] [--json]

`fleet` draws conversations (`Traffic`), and `trace` plays the recorded ones of bench/prompts/conversations.jsonl. A request goes
to the replica that `onedraw/cluster/routing.py` names. A replica (`ReplicaSizes`) computes one prompt after the other, decodes
all its replies together, and forgets the pages that were not used for longest. Hit rate: the share of all prompt tokens that the
replica's cache has. It is compared with one server that has the memory of all replicas.

What is left out: prompts do not slow decoding down, the network takes no time, and a front knows the loads of what it sent.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from bench.cluster_cache import Conversation, read_conversations
from onedraw.cluster.routing import MAX_PAGES_SENT, Loads, SentPages, choose_replica, page_hashes

PAGE = 64  # tokens per page in the simulation, which only makes it faster than pages of 16 would
POLICIES = ("onedraw", "least", "caller", "turns")


@dataclass(frozen=True, slots=True)
class Traffic:
    """How requests come. Lengths are tokens with log-normal distributions, given by their median; the arrivals of conversations
    are a Poisson process whose rate follows a day and has bursts."""

    day_seconds: float = 200.0  # the length of a day; short, so that a run sees a whole one
    day_swing: float = 0.4  # the rate goes from 1 - swing to 1 + swing times its mean
    burst_rate: float = 2.5  # in a burst, times the usual rate
    burst_seconds: float = 5.0  # mean length of a burst
    quiet_seconds: float = 40.0  # mean time between bursts
    applications: int = 400  # each with a system prompt
    popularity: float = 1.1  # exponent of the Zipf distribution of applications
    system_tokens: float = 700.0
    user_tokens: float = 60.0
    reply_tokens: float = 300.0
    spread: float = 0.9  # sigma of the three lengths above
    turns: float = 4.0  # mean number of requests of a chat
    think_seconds: float = 8.0  # median time from a reply to the next request of a chat
    agents: float = 0.15  # share of conversations that are agents: many requests, long results of tools, no thinking time
    agent_turns: float = 12.0
    agent_tool_tokens: float = 500.0
    agent_seconds: float = 1.5


@dataclass(frozen=True, slots=True)
class ReplicaSizes:
    """What a replica can do. The defaults are those of a large model on one server."""

    pages: int = 2048
    lanes: int = 24
    prompt_rate: float = 8000.0  # tokens per second
    step_seconds: float = 0.020  # a decode step of one row
    row_seconds: float = 0.0004  # more for each further row
    restart_seconds: float = 45.0
    notice_seconds: float = 0.5  # until a death is noticed


USUAL, LARGE = Traffic(), ReplicaSizes()


class Prefix:
    """The conversation as its next request sends it: number of tokens, and names of its full pages. Owner: the conversation."""

    def __init__(self, system: Sequence[bytes], tokens: int, names: Callable[[], bytes]) -> None:
        self.tokens, self.pages, self._names = tokens, list(system[: tokens // PAGE]), names

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        while len(self.pages) < self.tokens // PAGE:
            self.pages.append(self._names())

    @property
    def prompt_pages(self) -> tuple[bytes, ...]:
        """The pages that routing hashes: not the one that the last token fills."""
        return tuple(self.pages[: max(self.tokens - 1, 0) // PAGE])


class LruPages:
    """The pages of a cache, the least recently used first. Owner: a replica."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pages: OrderedDict[bytes, None] = OrderedDict()

    def leading(self, pages: Sequence[bytes]) -> int:
        """How many of the first pages are there without a gap."""
        return next((count for count, page in enumerate(pages) if page not in self._pages), len(pages))

    def use(self, pages: Sequence[bytes]) -> None:
        """Add pages or note that they are used. The first pages are forgotten last."""
        for page in reversed(pages):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)


@dataclass(slots=True, eq=False)
class Job:
    """A request and what is known of it. Owner: the simulation."""

    prefix: Prefix
    caller: int  # number of its conversation
    reply: int  # tokens
    arrived: float
    after: Callable[[float], None]  # called when the reply is complete
    given: int = 0  # reply tokens that a replica generated before it died
    first: float | None = None  # when the first token came
    waits_since: float | None = None  # since its replica died


class Replica:
    """A replica in the simulation. Owner: the simulation."""

    def __init__(self, number: int, sizes: ReplicaSizes) -> None:
        self.number, self._sizes = number, sizes
        self.cache = LruPages(sizes.pages)
        self.waiting: deque[Job] = deque()
        self.computing: list[Job] = []  # whose prompts are computed
        self.decoding: list[tuple[float, int, Job]] = []  # (pace at its end, number, job), a heap
        self._numbers = 0
        self.prompts_done = 0.0  # when the last prompt that was begun is computed
        self._pace, self._at = 0.0, 0.0  # tokens that each reply has got since the start, and when
        self.version = 0  # goes up when the next end of a reply changes
        self.dead = False

    @property
    def rate(self) -> float:
        """Tokens per second of each reply."""
        return 1 / (self._sizes.step_seconds + self._sizes.row_seconds * max(len(self.decoding) - 1, 0))

    @property
    def running(self) -> int:
        return len(self.computing) + len(self.decoding)

    def advance(self, now: float) -> None:
        self._pace += (now - self._at) * self.rate
        self._at = now

    def begin_decoding(self, job: Job, now: float) -> None:
        self.advance(now)
        self.computing.remove(job)
        self._numbers += 1
        heapq.heappush(self.decoding, (self._pace + job.reply - job.given, self._numbers, job))
        self.version += 1

    def end_decoding(self, now: float) -> Job:
        self.advance(now)
        self.version += 1
        return heapq.heappop(self.decoding)[2]

    def next_end(self) -> float | None:
        return self._at + max(self.decoding[0][0] - self._pace, 0.0) / self.rate if self.decoding else None

    def die(self, now: float) -> list[Job]:
        """Return the jobs, each with the tokens that it has got."""
        self.advance(now)
        for end, _, job in self.decoding:
            job.given = min(max(job.reply - math.ceil(end - self._pace), job.given), job.reply - 1)
        left = [*self.waiting, *self.computing, *(job for _, _, job in self.decoding)]
        self.waiting.clear()
        self.computing.clear()
        self.decoding.clear()
        self.version += 1
        self.dead = True
        return left


class Front:
    """A front with its own knowledge of what it sent where. Owner: the simulation."""

    def __init__(self, replicas: Iterable[int], *, lanes: int, table: int, policy: str) -> None:
        self.sent: SentPages[int] = SentPages(table)
        self.loads: Loads[int] = Loads()
        self._lanes, self._policy, self._next = lanes, policy, 0
        for replica in replicas:
            self.loads.add(replica)

    def choose(self, job: Job) -> int | None:
        if not len(self.loads):
            return None
        match self._policy:
            case "onedraw":
                pages = job.prefix.prompt_pages
                chosen = choose_replica(self.sent.matches(pages), self.loads, page_size=PAGE, lanes=self._lanes)
                assert chosen is not None
                self.sent.add(pages, chosen)
                return chosen
            case "least":
                return next(iter(self.loads.ascending()))
            case "caller":  # a hash of the conversation, as load balancers with sticky sessions do it
                replicas = list(self.loads)
                return replicas[job.caller * 0x9E3779B97F4A7C15 % 2**64 * len(replicas) >> 64]
            case "turns":
                self._next += 1
                replicas = list(self.loads)
                return replicas[self._next % len(replicas)]
            case policy:
                raise ValueError(f"no policy {policy!r}; one of {', '.join(POLICIES)}")


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulation saw. Times in seconds, from the arrival of a request."""

    replicas: int
    policy: str
    requests: int
    hit_rate: float
    whole_rate: float  # of one server with the memory of all replicas
    first_median: float
    first_p99: float
    total_p99: float
    deaths: int
    pause_median: float  # from a death to the next token of a request
    pause_p99: float
    route_seconds: float  # CPU time that the routing took here, per request
    seconds: float = field(compare=False, default=0.0)  # time that the simulation took

    @property
    def kept(self) -> float:
        return self.hit_rate / self.whole_rate if self.whole_rate else 1.0


class Fleet:
    """The simulation: replicas, fronts, and a queue of events in the order of time."""

    def __init__(
        self,
        *,
        replicas: int,
        sizes: ReplicaSizes,
        policy: str,
        fronts: int,
        table: int,
        lifetime: float | None,
        draw: random.Random,
    ) -> None:
        """`lifetime`: mean seconds until a replica dies; None: it never does."""
        self._sizes, self._policy, self._lifetime, self._draw = sizes, policy, lifetime, draw
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._replicas = {number: Replica(number, sizes) for number in range(replicas)}
        self._numbers = replicas  # the last number; a replica that restarts gets a new one
        # Each front learns of the replicas in an order of its own; else all of them would begin with the same replicas.
        orders = [draw.sample(range(replicas), replicas) for _ in range(fronts)]
        self._fronts = [Front(order, lanes=sizes.lanes, table=table, policy=policy) for order in orders]
        self._front_of: dict[Job, tuple[Front, int]] = {}
        self._homeless: deque[Job] = deque()
        self._whole = LruPages(replicas * sizes.pages)
        self._prompt = self._cached = self._whole_cached = self._requests = self._deaths = 0
        self._first: list[float] = []
        self._total: list[float] = []
        self._pauses: list[float] = []
        self._route = 0.0
        for number in list(self._replicas):
            self._plan_death(number)

    # ------------------------------------------------------------------ events

    def at(self, moment: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (moment, self._order, action))

    def run(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def arrive(self, job: Job) -> None:
        self._requests += 1
        pages = job.prefix.prompt_pages
        self._prompt += job.prefix.tokens
        self._whole_cached += self._whole.leading(pages) * PAGE
        self._whole.use(pages)
        self._send(job)

    def _send(self, job: Job) -> None:
        front = self._fronts[job.caller * 0x9E3779B1 % len(self._fronts)]
        begin = time.thread_time()
        number = front.choose(job)
        self._route += time.thread_time() - begin
        if number is None:
            self._homeless.append(job)
            return
        front.loads.change(number, 1)
        self._front_of[job] = front, number
        replica = self._replicas[number]
        replica.waiting.append(job)
        self._admit(replica)

    def _admit(self, replica: Replica) -> None:
        while replica.waiting and replica.running < self._sizes.lanes and not replica.dead:
            job = replica.waiting.popleft()
            pages = job.prefix.prompt_pages
            cached = replica.cache.leading(pages) * PAGE
            replica.cache.use(pages)
            if not job.given and job.waits_since is None:
                self._cached += cached
            rest = job.prefix.tokens + job.given - cached
            replica.prompts_done = max(replica.prompts_done, self.now) + rest / self._sizes.prompt_rate
            replica.computing.append(job)
            self.at(replica.prompts_done, lambda job=job: self._computed(replica, job))  # type: ignore[misc]

    def _computed(self, replica: Replica, job: Job) -> None:
        if job not in replica.computing:
            return  # The replica died.
        if job.first is None:
            job.first = self.now
            self._first.append(self.now - job.arrived)
        if job.waits_since is not None:
            self._pauses.append(self.now - job.waits_since)
            job.waits_since = None
        replica.begin_decoding(job, self.now)
        self._expect_end(replica)

    def _expect_end(self, replica: Replica) -> None:
        moment, version = replica.next_end(), replica.version
        if moment is not None:
            self.at(moment, lambda: self._ended(replica, version))

    def _ended(self, replica: Replica, version: int) -> None:
        if replica.version != version:
            return
        job = replica.end_decoding(self.now)
        job.prefix.grow(job.reply)
        replica.cache.use(job.prefix.pages)
        self._whole.use(job.prefix.pages)
        self._total.append(self.now - job.arrived)
        front, number = self._front_of.pop(job)
        front.loads.change(number, -1)
        job.after(self.now)
        self._admit(replica)
        self._expect_end(replica)

    # ------------------------------------------------------------------ deaths

    def _plan_death(self, number: int) -> None:
        if self._lifetime is not None:
            self.at(self.now + self._draw.expovariate(1 / self._lifetime), lambda: self._die(number))

    def _die(self, number: int) -> None:
        self._deaths += 1
        replica, died = self._replicas[number], self.now
        moved = replica.die(self.now)

        def noticed() -> None:
            for front in self._fronts:
                front.loads.remove(number)
            for job in (*moved, *replica.waiting):  # It was sent requests until its death was noticed.
                job.waits_since = job.waits_since or died
                self._front_of.pop(job)
                self._send(job)

        def restarted() -> None:
            del self._replicas[number]
            self._numbers += 1
            self._replicas[self._numbers] = Replica(self._numbers, self._sizes)
            for front in self._fronts:
                front.loads.add(self._numbers)
            self._plan_death(self._numbers)
            while self._homeless:
                self._send(self._homeless.popleft())

        self.at(self.now + self._sizes.notice_seconds, noticed)
        self.at(self.now + self._sizes.restart_seconds, restarted)

    # ------------------------------------------------------------------ result

    def result(self) -> Result:
        def at(values: list[float], share: float) -> float:
            return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0

        return Result(
            replicas=len(self._replicas),
            policy=self._policy,
            requests=self._requests,
            hit_rate=self._cached / max(self._prompt, 1),
            whole_rate=self._whole_cached / max(self._prompt, 1),
            first_median=at(self._first, 0.5),
            first_p99=at(self._first, 0.99),
            total_p99=at(self._total, 0.99),
            deaths=self._deaths,
            pause_median=at(self._pauses, 0.5),
            pause_p99=at(self._pauses, 0.99),
            route_seconds=self._route / max(self._requests, 1),
        )


# ---------------------------------------------------------------------- traffic that is drawn


class Callers:
    """Draws conversations and sends their requests to a fleet."""

    def __init__(self, fleet: Fleet, traffic: Traffic, *, rate: float, seconds: float, seed: int) -> None:
        """`rate`: conversations per second on average. What a conversation says does not depend on what else happens."""
        self._fleet, self._traffic, self._rate, self._seconds, self._seed = fleet, traffic, rate, seconds, seed
        self._draw = random.Random(seed)
        self._names, self._callers = 0, 0
        weights = [1 / (rank + 1) ** traffic.popularity for rank in range(traffic.applications)]
        self._applications = range(traffic.applications)
        self._weights = [sum(weights[: rank + 1]) for rank in self._applications]
        self._systems = []
        for _ in self._applications:
            tokens = self._length(traffic.system_tokens, self._draw)
            self._systems.append((tokens, [self._name() for _ in range(tokens // PAGE)]))
        self._bursting = False
        self._burst_ends = 0.0
        self._arrive()

    def _name(self) -> bytes:
        self._names += 1
        return self._names.to_bytes(8, "little")

    def _length(self, median: float, draw: random.Random) -> int:
        return max(int(median * math.exp(draw.gauss(0, self._traffic.spread))), 1)

    def _rate_now(self, now: float) -> float:
        traffic = self._traffic
        if now >= self._burst_ends:
            self._bursting = not self._bursting
            mean = traffic.burst_seconds if self._bursting else traffic.quiet_seconds
            self._burst_ends = now + self._draw.expovariate(1 / mean)
        day = 1 - traffic.day_swing * math.cos(2 * math.pi * now / traffic.day_seconds)
        share = traffic.burst_seconds / (traffic.burst_seconds + traffic.quiet_seconds)
        usual = self._rate / (1 + share * (traffic.burst_rate - 1))
        return usual * day * (traffic.burst_rate if self._bursting else 1.0)

    def _arrive(self) -> None:
        now = self._fleet.now
        if now > self._seconds:
            return
        self._begin()
        self._fleet.at(now + self._draw.expovariate(self._rate_now(now)), self._arrive)

    def _begin(self) -> None:
        self._callers += 1
        traffic, caller = self._traffic, self._callers
        draw = random.Random(self._seed * 2**32 + caller)
        [application] = draw.choices(self._applications, cum_weights=self._weights)
        tokens, pages = self._systems[application]
        prefix = Prefix(pages, tokens, self._name)
        agent = draw.random() < traffic.agents
        turns = traffic.agent_turns if agent else traffic.turns
        left = 1 + int(draw.expovariate(1 / max(turns - 1, 1e-9)) + 0.5)

        def ask(now: float) -> None:
            nonlocal left
            left -= 1
            prefix.grow(self._length(traffic.agent_tool_tokens if agent else traffic.user_tokens, draw))
            self._fleet.arrive(Job(prefix, caller, self._length(traffic.reply_tokens, draw), now, answered))

        def answered(now: float) -> None:
            if left:
                median = traffic.agent_seconds if agent else traffic.think_seconds
                later = now + median * math.exp(draw.gauss(0, 0.8))
                self._fleet.at(later, lambda: ask(later))

        ask(self._fleet.now)


def requests_per_conversation(traffic: Traffic) -> float:
    return (1 - traffic.agents) * traffic.turns + traffic.agents * traffic.agent_turns


def simulate(
    *,
    replicas: int,
    policy: str = "onedraw",
    seconds: float = 200.0,
    load: float = 0.6,
    traffic: Traffic = USUAL,
    sizes: ReplicaSizes = LARGE,
    fronts: int = 1,
    table: int = MAX_PAGES_SENT,
    lifetime: float | None = None,
    seed: int = 0,
) -> Result:
    """Simulate so many seconds. `load`: how many of the lanes are busy on average, if no request waits."""
    begin = time.perf_counter()
    fleet = Fleet(
        replicas=replicas, sizes=sizes, policy=policy, fronts=fronts, table=table, lifetime=lifetime, draw=random.Random(seed + 1)
    )
    mean_reply = traffic.reply_tokens * math.exp(traffic.spread**2 / 2)
    busy = load * sizes.lanes
    per_request = mean_reply * (sizes.step_seconds + sizes.row_seconds * (busy - 1))
    rate = replicas * busy / per_request / requests_per_conversation(traffic)
    Callers(fleet, traffic, rate=rate, seconds=seconds, seed=seed)
    fleet.run(seconds)
    return replace(fleet.result(), seconds=time.perf_counter() - begin)


# ---------------------------------------------------------------------- the recorded conversations


@dataclass(frozen=True, slots=True)
class TraceResult:
    """Hit rates over the recorded conversations: of the replicas, and of one server with their memory together."""

    replicas: int
    pages: int  # of each replica
    requests: int
    hit_rate: float
    whole_rate: float

    @property
    def kept(self) -> float:
        return self.hit_rate / self.whole_rate


def play_trace(conversations: Sequence[Conversation], *, replicas: int, pages: int, policy: str = "onedraw") -> TraceResult:
    """Send the recorded requests in the order of their times. A token is a byte of the text, so no tokenizer is needed."""
    fleet = Fleet(
        replicas=replicas,
        sizes=ReplicaSizes(pages=pages),
        policy=policy,
        fronts=1,
        table=MAX_PAGES_SENT,
        lifetime=None,
        draw=random.Random(0),
    )
    for number, conversation in enumerate(conversations):
        for turn, asked in enumerate(conversation.turns):
            text = "".join(f"{message['role']}: {message['content']}\n" for message in conversation.messages(turn))
            fleet.at(asked.at, partial(_ask, fleet, number, asked.at, text.encode(), asked.reply.encode()))
    fleet.run(math.inf)
    found = fleet.result()
    return TraceResult(replicas, pages, found.requests, found.hit_rate, found.whole_rate)


def _ask(fleet: Fleet, caller: int, now: float, prompt: bytes, reply: bytes) -> None:
    pages = iter([*page_hashes([*prompt, *reply, 0], PAGE)])
    prefix = Prefix((), 0, lambda: next(pages))
    prefix.grow(len(prompt))
    fleet.arrive(Job(prefix, caller, len(reply), now, lambda now: None))


# ---------------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fleet", "trace"))
    parser.add_argument("--replicas", default="4")
    parser.add_argument("--policies", default="onedraw", help=f"comma-separated: {', '.join(POLICIES)}")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--load", type=float, default=0.6, help="share of the lanes that are busy on average")
    parser.add_argument("--fronts", type=int, default=1, help="fronts that share nothing; a conversation stays with its front")
    parser.add_argument("--table", type=int, default=MAX_PAGES_SENT, help="entries of a front's table")
    parser.add_argument("--lifetime", type=float, default=None, metavar="HOURS", help="mean time until a replica dies")
    parser.add_argument("--pages", default="64,128,256,512", help="pages of each replica in `trace`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Result | TraceResult] = []
    for replicas in map(int, options.replicas.split(",")):
        for policy in options.policies.split(","):
            if options.what == "trace":
                for pages in map(int, options.pages.split(",")):
                    rows.append(play_trace(read_conversations(), replicas=replicas, pages=pages, policy=policy))
                    _show(rows[-1], policy, quiet=options.json)
                continue
            rows.append(
                simulate(
                    replicas=replicas,
                    policy=policy,
                    seconds=options.seconds,
                    load=options.load,
                    fronts=options.fronts,
                    table=options.table,
                    lifetime=None if options.lifetime is None else 3600 * options.lifetime,
                    seed=options.seed,
                )
            )
            _show(rows[-1], policy, quiet=options.json)
    if options.json:
        print(json.dumps([asdict(row) | {"kept": row.kept} for row in rows], indent=1))


def _show(row: Result | TraceResult, policy: str, *, quiet: bool) -> None:
    if quiet:
        return
    hits = f"hit rate {row.hit_rate:.1%} of {row.whole_rate:.1%} ({row.kept:.1%} kept)"
    if isinstance(row, TraceResult):
        print(f"{row.replicas} replicas of {row.pages} pages, {policy}: {row.requests} requests, {hits}", flush=True)
        return
    deaths = f", {row.deaths} deaths, pause {row.pause_median:.2f} / {row.pause_p99:.2f} s" if row.deaths else ""
    print(
        f"{row.replicas} replicas, {policy}: {row.requests:,} requests, {hits}, first token {row.first_median:.2f} / "
        f"{row.first_p99:.2f} s, whole p99 {row.total_p99:.0f} s, routing {1e6 * row.route_seconds:.0f} us{deaths} "
        f"[{row.seconds:.0f} s]",
        flush=True,
    )


if __name__ == "__main__":
    main()
