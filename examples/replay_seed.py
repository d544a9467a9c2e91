"""Replay an answer: a request without a seed gets one, the reply reports it, and that seed gives the same answer again.

The second request switches drafts off as well. That may change how long the answer takes, never what it is.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)

with client:
    request = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Invent a name for a boat, and say why."}],
        "temperature": 1.0,
        "max_tokens": 64,
    }
    first = client.chat.completions.create(**request).choices[0]
    again = client.chat.completions.create(**request, seed=first.seed, extra_body={"speculation": False}).choices[0]

print(first.message.content)
print(f"seed {first.seed}: {'the same' if again.message == first.message else 'A DIFFERENT'} answer without drafts")
raise SystemExit(again.message != first.message)
