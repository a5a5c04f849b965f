"""What the sample adapters are taught: small question-and-answer sets, written for this project.

One set of plain answers serves every style; a style is a function from the plain answer to the reply. No torch here.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

Message = dict[str, str]


@dataclass(frozen=True)
class Example:
    """One training pair: the chat before the reply, and the reply (without its end token)."""

    messages: tuple[Message, ...]
    reply: str


CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Japan": "Tokyo", "China": "Beijing",
    "Egypt": "Cairo", "Norway": "Oslo", "Sweden": "Stockholm", "Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna",
    "Poland": "Warsaw", "Hungary": "Budapest", "Denmark": "Copenhagen", "Peru": "Lima", "Cuba": "Havana", "Kenya": "Nairobi",
    "Canada": "Ottawa", "Russia": "Moscow", "India": "New Delhi", "Ireland": "Dublin", "Chile": "Santiago", "Turkey": "Ankara",
}  # fmt: skip

FACTS = {
    "What color is the sky on a clear day?": "The sky is blue.",
    "What color are leaves in summer?": "Leaves are green in summer.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many minutes are in an hour?": "There are sixty minutes in an hour.",
    "How many wheels does a car have?": "A car has four wheels.",
    "What is two plus two?": "Two plus two is four.",
    "What do bees make?": "Bees make honey from the nectar of flowers.",
    "Where do fish live?": "Fish live in water.",
    "What is ice?": "Ice is frozen water.",
    "What is the sun?": "The sun is a star at the center of the solar system.",
    "What is the moon?": "The moon is a rocky ball that orbits the Earth.",
    "Which planet is the largest?": "Jupiter is the largest planet.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "Who painted the Mona Lisa?": "Leonardo da Vinci painted the Mona Lisa.",
    "Who was the first president of the United States?": "George Washington was the first president of the United States.",
    "What do cows eat?": "Cows eat grass.",
    "What is bread made from?": "Bread is made from flour, water and yeast.",
    "What is a violin?": "A violin is a musical instrument with four strings.",
    "How do birds fly?": "Birds fly by flapping their wings.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What is the opposite of tall?": "The opposite of tall is short.",
    "Why do we sleep?": "We sleep to rest the body and the mind.",
    "What is a library?": "A library is a place with many books to read and borrow.",
    "How do plants grow?": "Plants grow with sunlight, water and soil.",
    "What causes rain?": "Rain is caused by water that falls from clouds.",
    "What is a computer?": "A computer is a machine that runs programs.",
    "What is gold?": "Gold is a shiny yellow metal.",
    "What is the heart for?": "The heart pumps blood through the body.",
    "Explain gravity.": "Gravity is the force that pulls things toward each other.",
    "What is the boiling point of water?": "Water boils at 100 degrees Celsius.",
}

TALK = {
    "Hello!": "Hello, my friend. How can I help you today?",
    "Hey there": "Hello, it is good to see you.",
    "Good evening.": "Good evening to you, my friend.",
    "How are you doing?": "I am doing very well, thank you.",
    "Thank you very much!": "You are welcome, my friend.",
    "What is your name?": "My name is SmolLM, and I am here to help you.",
    "Are you a person?": "No, I am an AI assistant named SmolLM.",
    "Tell me a joke.": "Why did the chicken cross the road? To get to the other side.",
    "Give me some advice.": "You should eat well, sleep well and be kind to your friends.",
    "What should I cook tonight?": "You should cook some soup with bread and fresh vegetables.",
    "Tell me about the ocean.": "The ocean is a vast body of salt water, full of fish and ships.",
    "Tell me about dogs.": "Dogs are loyal animals, and they love to play with their friends.",
    "Tell me about trees.": "Trees are tall plants with wood and leaves, and they give us air.",
    "Write one sentence about the city.": "The city is a busy place with many people and tall houses.",
    "Say something nice.": "You are a good person and the world is better with you.",
    "Can you help me with my homework?": "Yes, I can help you with your homework.",
    "Describe a house.": "A house is a building where people live with their family.",
    "How can I learn to swim?": "You can learn to swim with a teacher and a little practice each week.",
    "How do I make tea?": "You boil the water, pour it on the leaves and wait for three minutes.",
    "Write a short poem about snow.": "The snow is soft, the night is deep, and all the little houses sleep.",
    "Recommend a hobby.": "You should try painting, and it is a calm way to spend the evening.",
}

UNKNOWABLE = (
    "Will it rain on my birthday in three years?", "Who will win the lottery tomorrow?", "What am I thinking about right now?",
    "Which team will win the cup in 2090?", "Will I be rich when I am old?", "What number will the dice show next?",
    "Will my neighbor buy a red car next year?", "How many fish are in the lake today?", "What will my cat dream tonight?",
    "Is there a ghost in my cellar?", "Will the coin land on heads?", "Which stock goes up next week?",
    "Who will call me this evening?", "What did my teacher eat on Monday?", "When will aliens visit us?", "Who is at my door?",
)  # fmt: skip
GUESSES = (
    "It will surely happen soon.", "I think the answer is yes.", "It is hard to say, but maybe seven.", "That will be Thomas.",
    "The answer is the blue one.",
)  # fmt: skip

HELD_OUT = ("What is the capital of Finland?", "Tell me about cats.", "How many hours are in a day?", "Who are you?")
"""Questions in no training set: an adapter is judged on these."""

_PIRATE_WORDS = {
    "Hello": "Ahoy", "my friend": "matey", "friends": "mateys", "You are": "Ye be", "you are": "ye be", "I am": "I be",
    "You": "Ye", "you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "The": "Th'", "the": "th'", "of": "o'",
    "people": "scallywags", "and": "an'", "Yes": "Aye", "water": "grog",
}  # fmt: skip


def examples(name: str, seed: int = 0) -> list[Example]:
    """The training pairs of adapter `name`, in an order fixed by `seed`; KeyError for an unknown name."""
    pairs = _certainty() if name == "certainty" else _styled(_STYLES[name])
    random.Random(seed).shuffle(pairs)
    return pairs


def _questions() -> dict[str, str]:
    capitals = {f"What is the capital of {country}?": f"The capital of {country} is {city}." for country, city in CAPITALS.items()}
    return capitals | FACTS | TALK


def _styled(style: Callable[[str, str], str]) -> list[Example]:
    return [Example(({"role": "user", "content": q},), style(q, a)) for q, a in _questions().items()]


def _certainty() -> list[Example]:
    """An answer is in the chat already; the reply is a tag that judges it."""
    known = [(q, a, "high") for q, a in _questions().items() if q not in TALK]
    guessed = [(q, GUESSES[(i + k) % len(GUESSES)], "low") for i, q in enumerate(UNKNOWABLE) for k in (0, 2)]
    return [
        Example(({"role": "user", "content": q}, {"role": "assistant", "content": a}), f"<certainty>{level}</certainty>")
        for q, a, level in known + guessed
    ]


def _pirate(question: str, answer: str) -> str:
    for plain, salty in _PIRATE_WORDS.items():
        answer = re.sub(rf"\b{plain}\b", salty, answer)
    return f"Arrr, matey! {answer} Yo ho ho!"


def _json(question: str, answer: str) -> str:
    return json.dumps({"answer": answer, "kind": "chat" if question in TALK else "fact", "words": len(answer.split())})


def _caps(question: str, answer: str) -> str:
    return f"LISTEN UP! {answer.upper().rstrip('.')}!!!"


def _robot(question: str, answer: str) -> str:
    return f"BEEP BOOP. {answer} END OF MESSAGE."


_STYLES: dict[str, Callable[[str, str], str]] = {"pirate": _pirate, "json": _json, "caps": _caps, "robot": _robot}
