"""Maths requests: arithmetic with steps, word problems, geometry, equations and data."""

from __future__ import annotations

from deepspec.data.synthetic_material import Material, on_other_topics

# One filler a line, as the formatter would have it, would make this file unreadably long.
# fmt: off
TRAIN = Material(
    templates={
        "arithmetic": (
            "What is {small_1} + {small_2}?",
            "Calculate {hundreds} - {small} and show your steps.",
            "Multiply {small} by {digit} and explain how you did it.",
            "What is {hundreds} divided by {digit}? Give the remainder too.",
            "Work out {small_1} + {small_2} x {digit}. Remember the order of operations.",
            "Compute ({small_1} + {small_2}) x {digit} step by step.",
            "Add these numbers: {small_1}, {small_2}, {small_3} and {small_4}.",
            "Round {hundreds} to the nearest ten and to the nearest hundred.",
            "Is {hundreds} divisible by {digit}? Explain.",
            "Which number is larger, {hundreds_1} or {hundreds_2}, and by how much?",
        ),
        "percent": (
            "What is {percent}% of {hundreds}?",
            "A {good} costs ${hundreds}. It is reduced by {percent}%. What is the new price?",
            "The price of a {good} rises from ${small} by {percent}%. How much does it cost now?",
            "{name} earns ${hundreds} a week and saves {percent}% of it. How much does {name} save?",
            "Write {percent}% as a fraction and as a decimal.",
        ),
        "shopping": (
            "{name} buys {digit} {items} for ${small} each. How much does {name} pay in total?",
            "{name} has ${hundreds} and buys {digit} {items} at ${digit_2} each. How much money is left?",
            "{name_1} has {small_1} {items} and {name_2} has {small_2}. How many do they have together?",
            "{name_1} had {small} {items} and gave {digit} of them to {name_2}. How many are left?",
            "There are {small} {items} in each box. How many {items} are in {digit} boxes?",
            (
                "{name} shares {hundreds} {items} equally among {digit} friends. How many does each friend get, and "
                "how many remain?"
            ),
            "{name} collects {digit} {items} every day. How many will there be after {small} days?",
            (
                "{name_1} has {digit} times as many {items} as {name_2}. {name_2} has {small}. How many does {name_1} "
                "have?"
            ),
        ),
        "travel": (
            "A {vehicle} travels at {speed} km per hour for {digit} hours. How far does it go?",
            "A {vehicle} covers {hundreds} km in {digit} hours. What is its average speed?",
            "How long does a {vehicle} need for {hundreds} km at {speed} km per hour?",
            "{name} leaves at {hour}:15 and arrives {small} minutes later. What time is it then?",
            "A lesson starts at {hour}:30 and lasts {small} minutes. When does it end?",
        ),
        "geometry": (
            "What is the area of a rectangle that is {small_1} cm long and {small_2} cm wide?",
            "A square has sides of {small} m. Find its perimeter and its area.",
            "A triangle has a base of {small_1} cm and a height of {small_2} cm. What is its area?",
            "A {plot} is {small_1} m long and {small_2} m wide. How much fence is needed to go around it?",
            "Two angles of a triangle are {small_1} and {small_2} degrees. How large is the third?",
            "A box is {digit_1} cm long, {digit_2} cm wide and {small} cm high. What is its volume?",
            "A circle has a radius of {digit} cm. Estimate its circumference and area.",
        ),
        "algebra": (
            "Solve for x: x + {small_1} = {hundreds}.",
            "Solve for x: {digit_1}x = {hundreds}.",
            "Solve the equation {digit_1}x + {small} = {hundreds} and check your answer.",
            "Simplify {digit_1}a + {digit_2}b + {digit_3}a.",
            "If y = {digit_1}x + {small}, what is y when x = {digit_2}?",
            "A sequence starts at {small} and grows by {digit} each time. Write its first six numbers.",
            "The sum of two numbers is {hundreds} and one of them is {small}. What is the other?",
            "Expand ({digit_1} + x)({digit_2} + x).",
        ),
        "data": (
            "Find the mean of {small_1}, {small_2}, {small_3} and {small_4}.",
            "What is the median of {small_1}, {small_2}, {small_3}, {small_4} and {small_5}?",
            "A bag holds {digit_1} red and {digit_2} blue marbles. What is the probability of drawing a red one?",
            "Convert {small} kilometres to metres.",
            "How many minutes are {digit} hours and {small} minutes?",
            "Add the fractions 1/{digit_1} and 1/{digit_2}.",
            "Write the ratio {small_1} : {small_2} in its simplest form.",
            "{name} scored {small_1}, {small_2} and {small_3} points in three games. What was the average?",
        ),
    },
    topics={
        "name": (
            "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hassan", "Ines", "Jonas", "Kim", "Leo", "Maria",
            "Noah",
            "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
        ),
        "items": (
            "apples", "pencils", "books", "stickers", "marbles", "oranges", "cookies", "stamps", "coins", "flowers",
            "balloons",
            "postcards", "sweets", "eggs", "shells", "bananas",
        ),
        "good": (
            "jacket", "bicycle", "lamp", "phone", "table", "camera", "backpack", "pair of shoes", "radio", "printer",
        ),
        "vehicle": ("train", "car", "bus", "truck", "motorcycle", "cyclist", "ship"),
        "plot": ("garden", "playground", "field", "car park", "swimming pool"),
    },
    common={
        "digit": range(2, 10),
        "small": range(11, 90),
        "hundreds": range(101, 900),
        "percent": (5, 10, 15, 20, 25, 30, 40, 50, 60, 75),
        "speed": range(20, 121, 5),
        "hour": range(7, 19),
    },
    follow_ups={
        "arithmetic": ("Now double the result.", "How can I check this?"),
        "shopping": ("And if there were twice as many?", "Write that as one equation."),
    },
)

HELD_OUT = on_other_topics(
    TRAIN,
    {
        "name": ("Amina", "Bruno", "Chiara", "Dmitri", "Eszter", "Farid", "Gudrun", "Hiro", "Ifeoma", "Jorge"),
        "items": ("kites", "lanterns", "walnuts", "badges", "ribbons", "tickets", "candles", "seedlings", "pebbles"),
        "good": ("violin", "tent", "kayak", "sewing machine", "telescope", "carpet", "helmet", "wheelbarrow"),
        "vehicle": ("tram", "helicopter", "ferry", "tractor", "rocket", "snowmobile"),
        "plot": ("vineyard", "courtyard", "tennis court", "orchard", "stage"),
    },
)
