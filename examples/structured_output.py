"""Get an answer that is valid JSON of a given form, at any temperature."""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "toys": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["kind", "age", "toys"],
    "additionalProperties": False,
}

with client:
    reply = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Describe a pet as JSON: its kind, its age and its toys."}],
        response_format={"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}},
        temperature=1.0,
        seed=7,
        max_tokens=400,
    )

pet = json.loads(reply.choices[0].message.content or "")
print(f"a {pet['kind']} of {pet['age']} years with {len(pet['toys'])} toys")
