"""Conversations that come from no source file: greetings, ideas of Python, small programs, sums and lists.

What a visitor types first. Programs are templates over names, expressions are evaluated by Python itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from training.pretraining.conversation import Conversation, Turn, with_reasoning
from training.pretraining.questions import fenced

IDENTITY = (
    "I am tiny, the small model bundled with draftloop. I have about five million parameters and I know a little "
    "about Python."
)
_CAN = (
    "I can answer short questions about Python: what a function does, which arguments it takes, and how to write a "
    "small function."
)
_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning", "Hi there!"), "Hello! How can I help you?"),
    (
        ("Hello, how are you?", "How are you?", "How is it going?", "Hi, how are you?"),
        "I am fine, thank you. How can I help you?",
    ),
    (
        ("Who are you?", "What are you?", "Introduce yourself.", "What is your name?", "Tell me about yourself."),
        IDENTITY,
    ),
    (("What can you do?", "How can you help me?", "What do you know?", "Help"), _CAN),
    (("Thank you!", "Thanks", "Thanks a lot!", "Thank you very much."), "You are welcome!"),
    (("Bye", "Goodbye!", "See you later."), "Goodbye!"),
    (("Are you a human?", "Are you a person?"), "No. I am a small language model."),
    (("Do you speak German?", "Can you speak French?", "Which languages do you speak?"), "I only know English."),
    (
        ("Tell me a joke.", "Say something funny.", "Do you know a joke?"),
        "Why do Python programmers like snakes? Because they never need brackets.",
    ),
    (
        ("What is the capital of France?", "Which city is the capital of France?"),
        "The capital of France is Paris.",
    ),
    (
        ("List the days of the week.", "What are the days of the week?"),
        "- Monday\n- Tuesday\n- Wednesday\n- Thursday\n- Friday\n- Saturday\n- Sunday",
    ),
    (
        ("List the months of the year.", "Name the months."),
        "- January\n- February\n- March\n- April\n- May\n- June\n- July\n- August\n- September\n- October\n"
        "- November\n- December",
    ),
    (
        ("What is speculative decoding?", "Explain speculative decoding."),
        "Speculative decoding lets a small drafter propose several tokens. The large model checks them in one step "
        "and keeps those it agrees with, so the text is the same and arrives faster.",
    ),
    (
        ("What is a language model?", "How does a language model work?"),
        "A language model predicts the next token of a text from the tokens before it. Repeating this writes a text.",
    ),
)
_IDEAS = {
    "a list": ("an ordered, mutable sequence of values", "numbers = [1, 2, 3]\nnumbers.append(4)"),
    "a tuple": ("an ordered, immutable sequence of values", "point = (1, 2)\nx, y = point"),
    "a dictionary": ("a mapping from keys to values", 'ages = {"Ann": 30}\nages["Bob"] = 25'),
    "a set": ("an unordered collection of distinct values", "letters = set('hello')\nletters.add('x')"),
    "a string": ("an immutable sequence of characters", 'name = "Python"\nprint(name.upper())'),
    "a function": (
        "a named block of code that takes arguments and returns a value",
        "def double(x):\n    return 2 * x",
    ),
    "a class": (
        "a blueprint for objects that share methods",
        "class Dog:\n    def speak(self):\n        return 'Woof'",
    ),
    "an object": ("a value with a type, attributes and methods", "text = 'abc'\nprint(type(text))"),
    "a method": ("a function that belongs to a class", "class Cat:\n    def name(self):\n        return 'Tom'"),
    "a module": ("a file of Python code that can be imported", "import math\n\nprint(math.pi)"),
    "a package": ("a folder of modules that can be imported", "from collections import abc"),
    "a generator": (
        "a function that yields values one at a time",
        "def count(n):\n    for i in range(n):\n        yield i",
    ),
    "a decorator": (
        "a function that takes a function and returns a new one",
        "import functools\n\n@functools.cache\ndef square(x):\n    return x * x",
    ),
    "a lambda": ("a small anonymous function written as one expression", "double = lambda x: 2 * x"),
    "a list comprehension": ("a short way to build a list from a loop", "squares = [x * x for x in range(10)]"),
    "an exception": (
        "an error that can be raised and handled",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    print('oops')",
    ),
    "a context manager": (
        "an object that sets something up and cleans it up with `with`",
        "with open('file.txt') as file:\n    text = file.read()",
    ),
    "an iterator": ("an object that gives its values one by one with `next`", "it = iter([1, 2])\nprint(next(it))"),
    "a for loop": ("a statement that runs its body once for each value", "for i in range(3):\n    print(i)"),
    "a while loop": ("a statement that runs its body while a condition holds", "n = 3\nwhile n > 0:\n    n -= 1"),
    "an if statement": ("a statement that runs its body when a condition holds", "if x > 0:\n    print('positive')"),
    "a variable": ("a name that refers to a value", "x = 5\nx = x + 1"),
    "a slice": ("a part of a sequence from a start to a stop", "letters = 'abcdef'\nprint(letters[1:3])"),
    "an f-string": ("a string with expressions in braces", "name = 'Ann'\nprint(f'Hello {name}')"),
    "a dataclass": (
        "a class whose fields are declared and whose methods are generated",
        "from dataclasses import dataclass\n\n@dataclass\nclass Point:\n    x: int\n    y: int",
    ),
    "a coroutine": (
        "a function declared with `async def` that can wait",
        "async def main():\n    await asyncio.sleep(1)",
    ),
    "a type hint": ("a note that says which type a value has", "def add(a: int, b: int) -> int:\n    return a + b"),
    "recursion": ("a function calling itself", "def fact(n):\n    return 1 if n == 0 else n * fact(n - 1)"),
    "inheritance": ("a class taking over the methods of another", "class Dog(Animal):\n    pass"),
    "a thread": (
        "a flow of control that runs beside others",
        "import threading\n\nthread = threading.Thread(target=work)\nthread.start()",
    ),
}
# (what it does, function name, arguments, body)
_PROGRAMS = (
    ("adds two numbers", "add", "a, b", "return a + b"),
    ("subtracts two numbers", "subtract", "a, b", "return a - b"),
    ("multiplies two numbers", "multiply", "a, b", "return a * b"),
    ("divides two numbers", "divide", "a, b", "return a / b"),
    ("returns the larger of two numbers", "larger", "a, b", "return a if a > b else b"),
    ("returns the smaller of two numbers", "smaller", "a, b", "return a if a < b else b"),
    ("squares a number", "square", "x", "return x * x"),
    ("returns the absolute value of a number", "absolute", "x", "return x if x >= 0 else -x"),
    ("checks whether a number is even", "is_even", "n", "return n % 2 == 0"),
    ("checks whether a number is odd", "is_odd", "n", "return n % 2 == 1"),
    (
        "checks whether a number is prime",
        "is_prime",
        "n",
        "if n < 2:\n        return False\n    for i in range(2, int(n ** 0.5) + 1):\n        if n % i == 0:\n"
        "            return False\n    return True",
    ),
    (
        "returns the factorial of a number",
        "factorial",
        "n",
        "result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
    ),
    (
        "returns the nth Fibonacci number",
        "fibonacci",
        "n",
        "a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    ),
    (
        "sums a list",
        "total",
        "values",
        "result = 0\n    for value in values:\n        result += value\n    return result",
    ),
    ("returns the mean of a list", "mean", "values", "return sum(values) / len(values)"),
    ("returns the largest value of a list", "largest", "values", "return max(values)"),
    ("returns the smallest value of a list", "smallest", "values", "return min(values)"),
    ("reverses a list", "reverse_list", "values", "return values[::-1]"),
    ("reverses a string", "reverse", "text", "return text[::-1]"),
    ("checks whether a string is a palindrome", "is_palindrome", "text", "return text == text[::-1]"),
    ("counts the vowels in a string", "count_vowels", "text", "return sum(c in 'aeiou' for c in text.lower())"),
    ("counts the words in a string", "count_words", "text", "return len(text.split())"),
    (
        "counts how often each item occurs",
        "count_items",
        "items",
        "counts = {}\n    for item in items:\n        counts[item] = counts.get(item, 0) + 1\n    return counts",
    ),
    ("removes duplicates from a list", "unique", "items", "return list(dict.fromkeys(items))"),
    ("sorts a list", "sort_list", "values", "return sorted(values)"),
    ("sorts words by length", "by_length", "words", "return sorted(words, key=len)"),
    ("flattens a list of lists", "flatten", "lists", "return [item for items in lists for item in items]"),
    ("merges two dictionaries", "merge", "a, b", "return {**a, **b}"),
    ("swaps keys and values of a dictionary", "invert", "mapping", "return {v: k for k, v in mapping.items()}"),
    ("reads a text file", "read_file", "path", "with open(path) as file:\n        return file.read()"),
    ("writes text to a file", "write_file", "path, text", "with open(path, 'w') as file:\n        file.write(text)"),
    ("reads a JSON file", "read_json", "path", "with open(path) as file:\n        return json.load(file)"),
    (
        "counts the lines of a file",
        "count_lines",
        "path",
        "with open(path) as file:\n        return sum(1 for _ in file)",
    ),
    ("prints the numbers from 1 to n", "print_numbers", "n", "for i in range(1, n + 1):\n        print(i)"),
    ("converts Celsius to Fahrenheit", "to_fahrenheit", "celsius", "return celsius * 9 / 5 + 32"),
    ("converts Fahrenheit to Celsius", "to_celsius", "fahrenheit", "return (fahrenheit - 32) * 5 / 9"),
    (
        "returns the greatest common divisor",
        "gcd",
        "a, b",
        "while b:\n        a, b = b, a % b\n    return a",
    ),
    (
        "searches a sorted list",
        "binary_search",
        "values, target",
        "low, high = 0, len(values)\n    while low < high:\n        middle = (low + high) // 2\n"
        "        if values[middle] < target:\n            low = middle + 1\n        else:\n            high = middle\n"
        "    return low",
    ),
    ("says hello", "greet", "name", "return f'Hello, {name}!'"),
    ("joins words with spaces", "join_words", "words", "return ' '.join(words)"),
    ("splits a list into chunks", "chunks", "values, n", "return [values[i:i + n] for i in range(0, len(values), n)]"),
    (
        "plays FizzBuzz",
        "fizz_buzz",
        "n",
        "for i in range(1, n + 1):\n        if i % 15 == 0:\n            print('FizzBuzz')\n        elif i % 3 == 0:\n"
        "            print('Fizz')\n        elif i % 5 == 0:\n            print('Buzz')\n        else:\n"
        "            print(i)",
    ),
    (
        "retries a call three times",
        "retry",
        "call",
        "for attempt in range(3):\n        try:\n            return call()\n        except Exception:\n"
        "            if attempt == 2:\n                raise",
    ),
)
_WORDS = ("apple", "banana", "cherry", "python", "list", "green", "house", "river", "table", "cloud", "stone", "light")
_LETTERS = "abcdefgh"


def small_talk(rng: random.Random) -> Conversation:
    questions, answer = rng.choice(_SMALL_TALK)
    turns = [Turn(rng.choice(questions), answer)]
    if rng.random() < 0.25:
        turns.insert(0, Turn("Hello", "Hello! How can I help you?"))
    return with_reasoning(Conversation(tuple(turns)), "The user wants to talk.", rng)


def idea(rng: random.Random) -> Conversation:
    name, (meaning, example) = rng.choice(list(_IDEAS.items()))
    question = rng.choice(("What is {x}?", "What is {x} in Python?", "Explain {x}.", "What does {x} mean in Python?"))
    answer = f"{name[0].upper()}{name[1:]} is {meaning}. For example:\n\n{fenced(example)}"
    turns = [Turn(question.format(x=name), answer)]
    if rng.random() < 0.2:
        turns = [Turn(question.format(x=name), f"{name[0].upper()}{name[1:]} is {meaning}.")]
        turns.append(Turn(rng.choice(("Show an example.", "Give me an example.", "How do I use it?")), fenced(example)))
    return with_reasoning(Conversation(tuple(turns)), f"The question is about {name}.", rng)


def program(rng: random.Random) -> Conversation:
    does, name, args, body = rng.choice(_PROGRAMS)
    question = rng.choice(
        (
            "Write a function that {d}.",
            "Write a Python function that {d}.",
            "Write a function `{n}` that {d}.",
            "Show me a function that {d}.",
            "Python code that {d}, please.",
            "I need a function that {d}.",
        )
    )
    code = f"def {name}({args}):\n    {body}"
    if rng.random() < 0.3:
        question += " Add a docstring."
        code = f'def {name}({args}):\n    """{does[0].upper()}{does[1:]}."""\n    {body}'
    if "json." in body:
        code = f"import json\n\n\n{code}"
    answer = f"This function {does}:\n\n{fenced(code)}"
    return with_reasoning(
        Conversation((Turn(question.format(d=does, n=name), answer),)), "A small function is asked for.", rng
    )


def arithmetic(rng: random.Random) -> Conversation:
    turns = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        operation = rng.choice("++--*")
        top = 12 if operation == "*" else 50
        a, b = rng.randint(0, top), rng.randint(0, top)
        result = {"+": a + b, "-": a - b, "*": a * b}[operation]
        question = rng.choice(("What is {e}?", "{e}", "{e}?", "Compute {e}.", "How much is {e}?"))
        expression = f"{a} {operation} {b}"
        turns.append(Turn(question.format(e=expression), f"{expression} = {result}"))
    return with_reasoning(Conversation(tuple(turns)), "This is a sum.", rng)


def evaluation(rng: random.Random) -> Conversation:
    numbers = [rng.randint(0, 9) for _ in range(rng.randint(2, 5))]
    word = rng.choice(_WORDS)
    k = rng.randint(2, 5)
    result: object
    expression, result = rng.choice(
        (
            (f"len({numbers})", len(numbers)),
            (f"sum({numbers})", sum(numbers)),
            (f"max({numbers})", max(numbers)),
            (f"min({numbers})", min(numbers)),
            (f"sorted({numbers})", sorted(numbers)),
            (f"{numbers}[0]", numbers[0]),
            (f"{numbers}[-1]", numbers[-1]),
            (f"{numbers}[::-1]", numbers[::-1]),
            (f"list(range({k}))", list(range(k))),
            (f"list({_LETTERS[:k]!r})", list(_LETTERS[:k])),
            (f"{word!r}.upper()", word.upper()),
            (f"{word!r}.title()", word.title()),
            (f"len({word!r})", len(word)),
            (f"[x * 2 for x in {numbers}]", [x * 2 for x in numbers]),
            (f"{numbers} + [{k}]", [*numbers, k]),
            (f"{k} in {numbers}", k in numbers),
        )
    )
    question = rng.choice(
        ("What does `{e}` return?", "What is `{e}`?", "Evaluate `{e}`.", "What is the value of `{e}`?")
    )
    turn = Turn(question.format(e=expression), f"`{expression}` returns `{result!r}`.")
    return with_reasoning(Conversation((turn,)), "This is an expression.", rng)


def counting(rng: random.Random) -> Conversation:
    start, length = rng.randint(0, 20), rng.randint(3, 15)
    step = rng.choice((1, 1, 1, 2, 5))
    values = range(start, start + length * step, step)
    how = "" if step == 1 else f" in steps of {step}"
    question = rng.choice(("Count from {a} to {b}{h}.", "List the numbers from {a} to {b}{h}."))
    answer = ", ".join(map(str, values))
    turn = Turn(question.format(a=start, b=values[-1], h=how), answer)
    return with_reasoning(Conversation((turn,)), "The numbers go in order.", rng)


LESSONS: dict[Callable[[random.Random], Conversation], float] = {
    small_talk: 1.0,
    idea: 2.0,
    program: 3.0,
    arithmetic: 1.0,
    evaluation: 1.5,
    counting: 0.5,
}


def lesson(rng: random.Random) -> Conversation:
    """One conversation, kinds drawn by weight."""
    kinds = list(LESSONS)
    return rng.choices(kinds, list(LESSONS.values()))[0](rng)
