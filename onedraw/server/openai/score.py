"""Replies of /v1/score: the logprobs of a given reply, as the sampler has them when it generates that reply.

The input is whole replies whose tokens the request forced; the output is a dictionary with lists of one entry per token, ready
for JSON. A mass is the share of the probability that the filters left.
"""

from __future__ import annotations

from collections.abc import Sequence

from onedraw.llm.reply import Reply
from onedraw.server.openai.chat import Json, OpenAIWriter, finite, write_usage
from onedraw.types import Logprobs, Usage


class ScoreWriter(OpenAIWriter):
    """Writes the scores of one reply."""

    def whole(self, replies: Sequence[Reply], usage: Usage) -> Json:
        [reply] = replies
        # The engine sends logprobs with every scored token, so `or` only satisfies the type checker.
        found = [token.logprobs or Logprobs(0.0) for token in reply.tokens]
        counted = write_usage(usage)
        score: Json = {
            **self._head,
            "object": "score",
            "token_ids": reply.token_ids,
            "tokens": [self._token_text(token.token) for token in reply.tokens],
            "logprobs": [finite(one.logprob) for one in found],
            "processed_logprobs": [finite(one.processed or 0.0) for one in found],
            "kept_masses": [one.mass for one in found],
            "finish_reason": reply.finish,
            "usage": {name: counted[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        }
        if any(one.alternatives for one in found):
            score["top_logprobs"] = [[self._entry(id, value) | {"id": id} for id, value in one.alternatives] for one in found]
        if self._prepared.token_ids:
            score["prompt_token_ids"] = list(reply.prompt_ids)
        if self._prepared.checksums:
            score["score_checksums"] = [str(token.checksum) for token in reply.tokens]
        return score
