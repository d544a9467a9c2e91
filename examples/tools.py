"""Let the model call a function, run it here, and let the model answer with its result."""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}


def weather(city: str) -> str:
    return f"In {city} it is sunny, 21 degrees."


messages = [{"role": "user", "content": "What is the weather in Paris?"}]
with client:
    model = client.models.list().data[0].id
    for choice in ("required", "none"):  # call a function first, then answer; an agent would say "auto"
        request = {"model": model, "messages": messages, "tools": [WEATHER], "parallel_tool_calls": False, "seed": 7}
        reply = client.chat.completions.create(**request, tool_choice=choice, reasoning_effort="none", max_tokens=400)
        message = reply.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            result = weather(**json.loads(call.function.arguments))
            print(f"weather({call.function.arguments}) → {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
