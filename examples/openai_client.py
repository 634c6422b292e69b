"""Talk to `isthmus serve demo` with the openai package, streaming.

isthmus serve demo &
python examples/openai_client.py [BASE_URL]
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1", api_key="none")
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Name three colours of the rainbow."}],
    temperature=0,
    max_tokens=60,
    stream=True,
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
print()
