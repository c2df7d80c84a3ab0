"""Code requests: small Python functions to write, and code to explain or repair."""

from __future__ import annotations

from deepspec.data.synthetic_material import Material

# One filler a line, as the formatter would have it, would make this file unreadably long.
# fmt: off
MATERIAL = Material(
    templates={
        "write": (
            "Write a Python function that {task}.",
            "Write a Python function that {task}. {extra}",
            "Can you show me Python code that {task}?",
            "I need a function in Python that {task}. {extra}",
        ),
        "program": (
            "Write a short Python program that {task} and prints the result.",
            "Implement a function which {task}. {extra}",
            "Write a Python function that {task}, then explain every line.",
            "Write a Python function that {task}. Then show {few} example calls.",
            "How do I write a function that {task}?",
        ),
        "explain": (
            "What does this Python code do?\n\n```python\n{snippet}\n```",
            "Explain this code line by line:\n\n```python\n{snippet}\n```",
            "Add comments to this code:\n\n```python\n{snippet}\n```",
            "There is a bug in this code. Find it and fix it:\n\n```python\n{broken}\n```",
        ),
    },
    topics={
        "task": (
            "adds two numbers", "reverses a string", "checks whether a number is even",
            "returns the largest number in a list",
            "counts the vowels in a text", "checks whether a word is a palindrome",
            "computes the factorial of a number",
            "returns the first n Fibonacci numbers", "removes duplicates from a list",
            "sorts a list of names by length",
            "converts Celsius to Fahrenheit", "counts how often each word occurs in a text",
            "returns the sum of a list",
            "finds the longest word in a sentence", "checks whether a year is a leap year", "merges two dictionaries",
            "computes the average of a list of numbers", "returns the squares of the numbers from 1 to n",
            "finds the greatest common divisor of two numbers", "checks whether a number is prime",
            "reads a text file and returns its lines", "writes a list of strings to a file", "rolls two dice",
            "capitalises the first letter of every word", "flattens a list of lists",
            "swaps the keys and values of a dictionary",
            "returns the second largest number in a list", "counts the words in a sentence",
            "removes all spaces from a string",
            "checks whether two strings are anagrams", "returns the last n elements of a list",
            "multiplies all numbers in a list",
            "generates a random password", "converts a number to binary", "returns the even numbers of a list",
            "prints a triangle of stars", "computes the area of a circle",
            "returns the number of days between two dates",
            "splits a list into chunks of size n", "finds the index of an element in a list",
            "checks whether a list is sorted",
            "replaces all negative numbers in a list by zero", "returns the common elements of two lists",
            "counts the lines in a file", "converts minutes to hours and minutes",
            "computes the power of a number without **",
            "returns the middle character of a string", "joins a list of words with commas",
            "prints the multiplication table of n",
            "validates an email address", "finds the smallest positive number in a list",
            "rotates a list by k positions",
            "returns the sum of the digits of a number", "groups words by their first letter", "shuffles a list",
            "counts upper-case letters in a string", "converts a list of strings to integers", "implements bubble sort",
            "implements binary search", "returns the transpose of a matrix", "computes the distance between two points",
            "checks whether brackets are balanced", "simulates a coin toss n times",
            "returns the keys with the highest value",
            "truncates a text to n characters", "filters a list of dictionaries by a key",
            "computes a discount on a price",
            "reverses the words of a sentence", "counts the consonants in a word",
            "returns the smallest of three numbers", "converts kilometres to miles",
            "checks whether a string contains only digits", "doubles every number in a list",
            "computes the sum of the squares of a list", "returns the first character of every word",
            "removes the vowels from a text", "checks whether a number is a perfect square",
            "finds all divisors of a number", "sorts a list of numbers in descending order",
            "returns every second element of a list", "counts how often a character occurs in a string",
            "checks whether two lists have the same elements", "converts seconds to hours, minutes and seconds",
            "returns the longest string in a list", "computes the median of a list of numbers",
            "replaces spaces with underscores", "computes the perimeter of a rectangle",
            "finds the largest word in a list", "adds an item to a dictionary of lists",
            "checks whether a list is empty", "returns the difference between the largest and the smallest number",
            "multiplies two matrices", "prints the numbers from n down to 1", "counts the positive numbers in a list",
            "removes the first element of a list", "returns the unique words of a text",
            "computes the least common multiple of two numbers",
            "downloads a web page", "asks the user for a number until it is valid", "prints the current date and time",
            "finds all files with a given extension in a folder", "parses a line of comma-separated values",
            "encodes a text with a Caesar cipher", "compresses a string with run-length encoding",
            "reads a Roman numeral", "prints the Collatz sequence of a number", "returns the mode of a list",
            "computes a moving average", "parses key=value settings", "prints Pascal's triangle up to row n",
            "converts a hexadecimal colour to red, green and blue", "wraps a paragraph at a given width",
            "detects the winner of a tic-tac-toe board", "computes the Hamming distance of two codes",
            "finds the missing number in a range", "counts the islands in a grid", "draws a progress bar",
            "interleaves two sequences", "checks an ISBN-10", "prints a histogram of a text",
            "finds the cheapest path down a number pyramid", "spells a word with the radio alphabet",
        ),
        "snippet": (
            "numbers = [1, 2, 3, 4]\nprint(sum(n * n for n in numbers))",
            "def f(x):\n    return x if x > 0 else -x",
            "words = text.split()\nlengths = [len(w) for w in words]",
            "for i in range(10):\n    if i % 3 == 0:\n        print(i)",
            "d = {}\nfor c in s:\n    d[c] = d.get(c, 0) + 1",
            "a, b = 0, 1\nwhile a < 100:\n    print(a)\n    a, b = b, a + b",
            "def g(items):\n    return sorted(items, reverse=True)[:3]",
            "with open('notes.txt') as f:\n    print(len(f.readlines()))",
            "x = 10\nwhile x > 0:\n    x -= 3\nprint(x)",
            "def h(n):\n    return 1 if n == 0 else n * h(n - 1)",
            "try:\n    age = int(input())\nexcept ValueError:\n    age = 0",
            "pairs = list(zip('abc', [1, 2, 3]))\nprint(pairs)",
            "result = ''\nfor c in 'hello':\n    result = c + result\nprint(result)",
            "matrix = [[1, 2], [3, 4]]\nprint([row[0] for row in matrix])",
            "total = 0\nfor i, price in enumerate(prices):\n    if i % 2:\n        total += price",
            "names = {'Ann', 'Bob', 'Ann'}\nprint(len(names))",
            "def k(s):\n    return s == s[::-1]",
            "import random\nprint(random.choice(['red', 'green', 'blue']))",
            "def p(n):\n    return all(n % i for i in range(2, n))",
            "scores = {'Ann': 3, 'Bob': 5}\nprint(max(scores, key=scores.get))",
            "def m(xs):\n    return [x for x in xs if x not in (None, '')]",
            "text = 'one,two,three'\nprint(text.split(',')[1].upper())",
            "i = 0\nwhile True:\n    i += 1\n    if i * i > 50:\n        break\nprint(i)",
            "class Dog:\n    def speak(self):\n        return 'Woof'\n\nprint(Dog().speak())",
            "def clamp(value, low, high):\n    return max(low, min(value, high))",
            "def initials(full):\n    return ''.join(part[0] for part in full.split())",
            (
                "def evenly(total, people):\n    share, rest = divmod(total, people)\n"
                "    return [share + (k < rest) for k in range(people)]"
            ),
            (
                "def steps(goal):\n    ways = [1, 1]\n    for _ in range(goal - 1):\n"
                "        ways.append(ways[-1] + ways[-2])\n    return ways[goal]"
            ),
            "def invert(grid):\n    return [[1 - cell for cell in line] for line in grid]",
            "def slug(title):\n    return '-'.join(title.lower().split())",
            (
                "def bisect(f, lo, hi):\n    while hi - lo > 1e-6:\n        mid = (lo + hi) / 2\n"
                "        lo, hi = (mid, hi) if f(mid) < 0 else (lo, mid)\n    return lo"
            ),
            "def overlap(a, b):\n    return a[0] < b[1] and b[0] < a[1]",
        ),
        "broken": (
            "def add(a, b)\n    return a + b",
            "for i in range(5):\nprint(i)",
            "def average(numbers):\n    return sum(numbers) / len(number)",
            "x = input('Number: ')\nprint(x + 1)",
            "def is_even(n):\n    return n % 2 = 0",
            "items = [1, 2, 3]\nprint(items[3])",
            "def greet(name):\n    print('Hello ' + nme)",
            "while n > 0:\n    print(n)",
            (
                "def largest(xs):\n    best = 0\n    for x in xs:\n        if x < best:\n            best = x\n"
                "    return best"
            ),
            "ages = {'Ann': 30}\nprint(ages['Bob'])",
            "def factorial(n):\n    return n * factorial(n - 1)",
            "print('The result is ' + 5)",
            (
                "def count(text):\n    n = 0\n    for c in text:\n        if c in 'aeiou':\n            n + 1\n"
                "    return n"
            ),
            "if x > 10\n    print('big')",
            "def add_item(item, items=[]):\n    items.append(item)\n    return items",
            "import maths\nprint(maths.sqrt(16))",
            "def reverse(s):\n    for i in range(len(s)):\n        result += s[-i]\n    return result",
            "numbers = [3, 1, 2]\nnumbers = numbers.sort()\nprint(numbers)",
            "f = open('data.txt', 'r')\nf.write('hello')",
            "def divide(a, b):\n    return a / b\n\nprint(divide(3, 0))",
            "def last_digit(n):\n    return n // 10",
            (
                "def mean_of_positive(values):\n    good = [v for v in values if v > 0]\n"
                "    return sum(good) / len(values)"
            ),
            "def is_weekend(day):\n    return day == 'Saturday' or 'Sunday'",
            "def countdown(start):\n    for t in range(start, 0):\n        print(t)",
            "def initial_upper(word):\n    word[0] = word[0].upper()\n    return word",
            (
                "def drop_blank(lines):\n    for line in lines:\n        if not line:\n"
                "            lines.remove(line)\n    return lines"
            ),
            "def seconds(h, m, s):\n    return h * 60 + m * 60 + s",
            "def same(a, b):\n    if a is b:\n        return True",
        ),
    },
    common={
        "few": ("two", "three", "four", "five"),
        "extra": (
            "Include a docstring.", "Use type hints.", "Do not use any imports.", "Keep it as short as possible.",
            "Handle invalid input.", "Add an example of how to use it.", "Explain how it works.", "Use a loop.",
            "Write it for a beginner.", "Add comments.",
        ),
    },
    follow_ups={
        "write": ("Now add type hints.", "Can you make it shorter?", "What happens if the input is empty?"),
    },
)
