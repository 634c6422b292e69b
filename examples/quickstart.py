"""Ask a model one question and print the answer as it is written.

python examples/quickstart.py [MODEL]
"""

import sys

from isthmus import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "demo")
messages = [{"role": "user", "content": "Why is the sky blue?"}]
for piece in llm.chat(messages, SamplingParams(temperature=0, max_tokens=120), stream=True):
    print(piece.text, end="", flush=True)
print()
