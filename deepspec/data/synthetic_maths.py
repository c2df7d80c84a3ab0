"""Maths requests: word problems about prices, shares, travel, areas and averages."""

from __future__ import annotations

from deepspec.data.synthetic_material import Material

# One filler a line, as the formatter would have it, would make this file unreadably long.
# fmt: off
MATERIAL = Material(
    templates={
        "percent": (
            "A {good} costs ${hundreds}. It is reduced by {percent}%. What is the new price?",
            "The price of a {good} rises from ${small} by {percent}%. How much does it cost now?",
            "{name} earns ${hundreds} a week and saves {percent}% of it. How much does {name} save?",
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
            "{name} starts to work at {hour}:30 and stops {small} minutes later. When is that?",
        ),
        "geometry": (
            "A {plot} is {small_1} m long and {small_2} m wide. How much fence is needed to go around it?",
            "What is the area of a {plot} that is {small_1} m long and {small_2} m wide?",
            "A square {plot} has sides of {small} m. Find its perimeter and its area.",
        ),
        "data": (
            "{name} scored {small_1}, {small_2} and {small_3} points in three games. What was the average?",
            "{name} has {digit_1} red and {digit_2} blue {items} in a bag. How likely is drawing a red one?",
            "{name} counted {small_1}, {small_2}, {small_3} and {small_4} {items} on four days. Find the mean.",
        ),
    },
    topics={
        "name": (
            "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hassan", "Ines", "Jonas", "Kim", "Leo", "Maria",
            "Noah",
            "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
            "Amina", "Bruno", "Chiara", "Dmitri", "Eszter", "Farid", "Gudrun", "Hiro", "Ifeoma", "Jorge",
        ),
        "items": (
            "apples", "pencils", "books", "stickers", "marbles", "oranges", "cookies", "stamps", "coins", "flowers",
            "balloons",
            "postcards", "sweets", "eggs", "shells", "bananas",
            "kites", "lanterns", "walnuts", "badges", "ribbons", "tickets", "candles", "seedlings", "pebbles",
        ),
        "good": (
            "jacket", "bicycle", "lamp", "phone", "table", "camera", "backpack", "pair of shoes", "radio", "printer",
            "violin", "tent", "kayak", "sewing machine", "telescope", "carpet", "helmet", "wheelbarrow",
        ),
        "vehicle": (
            "train", "car", "bus", "truck", "motorcycle", "cyclist", "ship",
            "tram", "helicopter", "ferry", "tractor", "rocket", "snowmobile",
        ),
        "plot": (
            "garden", "playground", "field", "car park", "swimming pool",
            "vineyard", "courtyard", "tennis court", "orchard", "stage",
        ),
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
        "shopping": ("And if there were twice as many?", "Write that as one equation."),
    },
)
