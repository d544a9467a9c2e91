"""Random requests to real models, in random company and under random settings, equal the same requests alone on a plain model.

The models are tiny ones of families with different layers, with and without trained drafters. Requests are also continued from
random places and scored; the engine is paused and its weights are replaced by the same ones while they run.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onedraw.backends.sampled_rows import SamplingPosition
from onedraw.backends.torch.sampling.sampler import LaneCounts
from onedraw.build.llm import build_llm
from onedraw.contract.prove import bytes_per_page
from onedraw.errors import NoTokenLeft
from onedraw.llm.llm import LLM
from onedraw.llm.reply import Reply, new_replies
from onedraw.llm.reply_stream import Generation
from onedraw.llm.request_options import RequestOptions, make_generation
from onedraw.settings import Settings
from tests.laws.test_random_company import asked
from tests.support import tiny
from tests.support.searching import examples

CONTEXT = 256
TRAINED = Path(__file__).parents[1] / "fixtures" / "trained"
DRAFTERS = {  # by model
    "trained_qwen3": ("trained_dflash_qwen3", "trained_dflash2_qwen3", "trained_qwen3"),
    "trained_qwen3_5": ("trained_dflash_qwen3_5",),
    "qwen3_5_mtp": ("mtp",),
    "gemma4_e2b": (),
    "laguna": (),
}
SETTINGS = st.fixed_dictionaries(
    {
        "draft_tokens": st.sampled_from((None, 1, 4, 7)),
        "tree_budget": st.sampled_from((0, 8, 24)),
        "page_size": st.sampled_from((1, 4, 16, 64)),
        "max_batch": st.sampled_from((1, 3, 8)),
        "turn_tokens": st.sampled_from((None, 1, 80)),
        "prefix_cache": st.booleans(),
        "ahead": st.sampled_from(("auto", "on")),
        "step_seconds": st.sampled_from((0.0, 1e-9)),
    }
)
EXERCISED: Counter[str] = Counter()


@dataclass(frozen=True)
class Work:
    """A request, and which tokens of its plain reply it gets: as a prediction, as given ones, or as forced ones."""

    number: int
    generation: Generation
    given: int = 0


@pytest.fixture(scope="module", params=sorted(DRAFTERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in tiny.MODERN:
        return tiny.write_safetensors(request.param, tmp_path_factory.mktemp("models") / request.param)
    return TRAINED / request.param


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Callable[[str], LLM]]:
    """The plain model, by KV dtype."""
    built: dict[str, LLM] = {}

    def of(kv_dtype: str) -> LLM:
        if kv_dtype not in built:
            built[kv_dtype] = build_llm(settings(model, kv_dtype), warm_up=False)
        return built[kv_dtype]

    yield of
    for llm in built.values():
        llm.close()


def settings(model: Path, kv_dtype: str, **values: Any) -> Settings:
    base: dict[str, Any] = {"draft": ("none",), "prefix_cache": False, "max_batch": 1, "ahead": "off"}
    base |= {"max_context": CONTEXT, "self_check": False, "threads": 1, "device": "cpu", "kv_dtype": kv_dtype}
    return Settings(model=str(model), **{**base, **values})


def other_settings(rng: random.Random, model: Path, kv_dtype: str, values: dict[str, Any], folder: Path) -> Settings:
    drafters = [("none",), ("ngram", "prediction"), *((who,) for who in DRAFTERS[model.name])]
    draft = tuple(str(TRAINED / who) if who.startswith("trained") else who for who in rng.choice(drafters))
    found: dict[str, Any] = {**values, "draft": draft}
    if draft == ("none",):
        found |= {"draft_tokens": None, "tree_budget": 0}
    if values["prefix_cache"] and rng.random() < 0.4:
        found |= {"cache_budget": 2**28, "snapshot_dir": folder}
    if rng.random() < 0.3:
        found |= {"device": "auto", "devices": "cpu,cpu", "overlap": rng.choice(("on", "off"))}
    if rng.random() < 0.5:  # just enough for one sequence
        one = bytes_per_page(settings(model, kv_dtype, page_size=values["page_size"]), kv_dtype=kv_dtype.replace("auto", ""))
        found["kv_memory"] = one * (-(-CONTEXT // values["page_size"]) + 2)
    return settings(model, kv_dtype, **found)


def alone(llm: LLM, generation: Generation) -> list[Reply]:
    replies = new_replies([generation])
    try:
        for piece in llm.pieces(llm.prepare(generation)):
            replies[piece.index].add(piece)
    except NoTokenLeft:
        replies[0].stop_reason = "no token left"
    return replies


def work_on(rng: random.Random, generations: list[Generation], replies: list[list[Reply]]) -> list[Work]:
    found = []
    for number, (generation, reply) in enumerate(zip(generations, replies, strict=True)):
        tokens = tuple(reply[0].token_ids)
        for kind in rng.sample(("same", "predicted", "continued", "scored"), 2):
            whole = generation.n == 1 and tokens and reply[0].stop_reason != "no token left"
            if kind == "predicted" or not whole:
                found.append(Work(number, replace(generation, predicted=tokens)))
            elif kind == "continued":
                count = rng.randint(1, len(tokens))
                found.append(Work(number, replace(generation, given=tokens[:count], predicted=tokens), count))
            elif kind == "scored":
                params = replace(generation.params, seed=generation.params.seed + 1)
                found.append(Work(number, replace(generation, forced=tokens, params=params)))
            else:
                found.append(Work(number, generation))
    rng.shuffle(found)
    return found


async def together(rng: random.Random, llm: LLM, works: list[Work], weights: Path | None) -> list[list[Reply]]:
    pieces = 0

    async def one(work: Work, after: int) -> list[Reply]:
        nonlocal pieces
        replies = new_replies([work.generation])
        for _ in range(after):  # arrive in the middle of other replies
            await asyncio.sleep(0)
        try:
            async with aclosing(llm.apieces(llm.prepare(work.generation, caller=rng.choice("abc")))) as stream:
                async for piece in stream:
                    replies[piece.index].add(piece)
                    pieces += 1
        except NoTokenLeft:
            replies[0].stop_reason = "no token left"
        return replies

    async def disturb() -> None:
        await asyncio.sleep(0.02)
        llm.service.pause()
        if weights is not None:
            await asyncio.to_thread(llm.update_weights, weights)
        llm.service.resume()

    *replies, _ = await asyncio.gather(*(one(work, rng.randint(0, 40)) for work in works), disturb())
    return replies


def same(expected: list[Reply], got: list[Reply], given: int) -> bool:
    def content(reply: Reply, first: int) -> tuple[Any, ...]:
        return reply.tokens[first:], reply.finish, reply.stop_reason, reply.prompt_logprobs

    texts = given or [one.text for one in expected] == [one.text for one in got]
    return bool(texts) and [content(one, given) for one in expected] == [content(one, 0) for one in got]


@examples(4, many=300)
@given(
    requests=st.lists(asked(), min_size=2, max_size=4),
    values=SETTINGS,
    kv_dtype=st.sampled_from(("auto", "int8", "int4")),
    seed=st.integers(0, 2**32),
)
def test_no_company_and_no_setting_changes_a_reply_of_a_real_model(
    model: Path,
    plain: Callable[[str], LLM],
    tmp_path_factory: pytest.TempPathFactory,
    requests: list[Any],
    values: dict[str, Any],
    kv_dtype: str,
    seed: int,
) -> None:
    rng, llm = random.Random(seed), plain(kv_dtype)
    generations: list[Generation] = []
    for text, options in requests:
        given = {**options, "prediction": None, "checksums": True, "prompt_logprobs": rng.choice((None, None, 1))}
        given["logit_bias"] = {key % llm.card.vocab: value for key, value in (options.get("logit_bias") or {}).items()} or None
        prompt = llm.encode(text)
        begun = rng.choice((0, 0, 63, 64, 65, 127))
        prompt = ((prompt * begun)[:begun] + prompt)[-CONTEXT + 80 :]
        generations.append(make_generation(RequestOptions.of(**given), llm=llm, prompt=prompt))
    expected = [alone(llm, generation) for generation in generations]
    works, folder = work_on(rng, generations, expected), tmp_path_factory.mktemp("snapshots")
    with build_llm(other_settings(rng, model, kv_dtype, values, folder), warm_up=False) as other:
        for weights in (None, model):  # the second time with a full cache
            got = asyncio.run(together(rng, other, works, weights))
            for work, replies in zip(works, got, strict=True):
                assert same(expected[work.number], replies, work.given), (work.number, work.given)
        stats = other.service.stats()
    shutil.rmtree(folder)
    EXERCISED.update(
        kept=stats.accepted_tokens,
        rejected=stats.draft_tokens - stats.accepted_tokens,
        trees=stats.draft_trees,
        preemptions=stats.preemptions,
        hits=stats.prefix_hits,
        given=stats.given_tokens,
        forced=stats.forced_tokens,
        constrained=stats.mixed_constraints,
        ahead=stats.steps_ahead,
        snapshots=stats.snapshots_saved,
    )


def test_penalties_that_do_not_count_drafts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the sampler: the positions of a row's drafts have the counts of its first position."""
    right, model = LaneCounts.read, TRAINED / "trained_qwen3"

    def read(self: LaneCounts, places: Sequence[SamplingPosition]) -> tuple[Tensor, Tensor]:
        return right(self, [place._replace(drafts=()) for place in places])

    with build_llm(settings(model, "auto"), warm_up=False) as llm:
        options = RequestOptions.of(seed=3, max_tokens=40, frequency_penalty=1.5, ignore_eos=True, checksums=True)
        generation = make_generation(options, llm=llm, prompt=llm.encode("the cat sat on a mat"))
        expected = alone(llm, generation)
    work = Work(0, replace(generation, predicted=tuple(expected[0].token_ids)))
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(LaneCounts, "read", read)
        with build_llm(settings(model, "auto", draft=("prediction",), draft_tokens=4), warm_up=False) as other:
            [got] = asyncio.run(together(random.Random(1), other, [work], None))
        assert same(expected, got, 0) is not planted


def test_the_random_company_of_real_models_exercised_everything() -> None:
    if not EXERCISED:
        pytest.skip("needs the test above")
    wanted = ("kept", "rejected", "trees", "preemptions", "hits", "given", "forced", "constrained", "ahead")
    assert [name for name in wanted if not EXERCISED[name]] == []
