"""The prompts of an effect run: what people ask of models, in five kinds. Data."""
from __future__ import annotations

PROMPTS: tuple[tuple[str, str], ...] = (
    ("chat", "Hi! I had a long day and nothing in the fridge but eggs and rice. What should I cook tonight?"),
    ("facts", "Which planet is the largest in our solar system, and about how many Earths would fit inside it?"),
    ("code", "Write a Python function that returns the n-th Fibonacci number without recursion.\n\n"
             "def fibonacci(n: int) -> int:\n    "),
    ("data", 'Turn this into a list of names: {"people": [{"name": "Ada", "age": 36}, {"name": "Alan", "age": 41}]}'),
    ("long text", "Summarise this in one sentence. The lighthouse stood at the end of a long stone pier, and every evening the keeper "
                  "walked out with a lantern, a flask of tea and a notebook. He wrote down the wind, the height of the waves and the "
                  "names of the ships that passed. When the lamp was replaced by an electric one that needed nobody, he went on walking, "
                  "for the ships had become his friends; and in the notebook, which his granddaughter found years later, "
                  "the last line said only: all are home."),
)
"""(kind, message of the user)"""
