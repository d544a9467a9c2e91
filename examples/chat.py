"""Ask a question, then ask for a streamed answer, with OpenAI's own client.

Start a server with `onedraw serve smollm2` and run `python examples/chat.py`.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
question = {"role": "user", "content": "Why is the sky blue?"}

with client:
    model = client.models.list().data[0].id

    reply = client.chat.completions.create(model=model, messages=[question], max_tokens=64)
    print(reply.choices[0].message.content)

    for chunk in client.chat.completions.create(model=model, messages=[question], max_tokens=64, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
