"""Chat requests: explanations, tips, stories, e-mails, lists, comparisons and rewriting."""

from __future__ import annotations

from deepspec.data.synthetic_material import Material, on_other_topics

# One filler a line, as the formatter would have it, would make this file unreadably long.
# fmt: off
TRAIN = Material(
    templates={
        "explain": (
            "What is {concept}?",
            "Explain {concept} to a ten-year-old.",
            "Explain {concept} in {length}.",
            "Can you tell me how {concept} works?",
            "Why is {concept} important?",
            "Give me {few} interesting facts about {concept}.",
            "Describe {concept} with an example from everyday life.",
            "What is the history of {concept}?",
        ),
        "advice": (
            "Give me {few} tips for {activity}.",
            "What should a beginner know about {activity}?",
            "Write a step-by-step guide to {activity}.",
            "What mistakes do people often make when {activity}?",
            "How can I get better at {activity}?",
            "What are the benefits of {activity}?",
            "Make a checklist for {activity}.",
        ),
        "story": (
            "Write a short story about {character} who finds {thing}.",
            "Tell me a {tone} story about {character} in {place}.",
        ),
        "email": (
            "Write a {tone} email to {person} {purpose}.",
            "Draft a short message to {person} {purpose}.",
            "Help me write an email {purpose}. It goes to {person}.",
        ),
        "list": (
            "List {few} ideas for {occasion}.",
            "Write a slogan for {business}.",
            "Write a short advertisement for {business}.",
            "Suggest a menu for {occasion}.",
            "Plan {occasion} on a small budget.",
            "Write an invitation to {occasion}.",
        ),
        "compare": (
            "What is the difference between {pair}?",
            "Compare {pair} in a few sentences.",
            "What are the advantages and disadvantages of {pair}?",
        ),
    },
    topics={
        "concept": (
            "photosynthesis", "inflation", "gravity", "the water cycle", "democracy", "an ecosystem",
            "the immune system",
            "electricity", "the solar system", "recycling", "evolution", "a volcano", "the internet",
            "the stock market",
            "climate change", "the printing press", "a black hole", "DNA", "the Roman Empire", "a steam engine",
            "sleep",
            "memory", "the human heart", "a rainbow", "an earthquake", "renewable energy", "artificial intelligence",
            "a battery", "the French Revolution", "a telescope", "supply and demand", "vaccination", "the moon",
            "a parliament", "the ozone layer", "digestion", "magnetism", "a vitamin", "the Silk Road", "bacteria",
            "the greenhouse effect", "an interest rate", "plate tectonics", "the periodic table", "a satellite",
            "the migration of birds", "the Industrial Revolution", "friction", "a search engine", "the Renaissance",
            "a budget",
            "photography", "the food chain", "a constitution", "the nervous system", "nuclear power", "opera",
            "a coral reef", "insurance", "the Great Wall of China", "yeast", "a lighthouse", "jazz music", "the tide",
        ),
        "activity": (
            "learning to swim", "growing tomatoes", "writing a diary", "training for a marathon", "saving money",
            "learning a new language", "packing for a holiday", "baking bread", "adopting a dog", "giving a speech",
            "moving to a new city", "reading more books", "starting a small business", "painting a room", "doing yoga",
            "cooking for one person", "preparing for an exam", "riding a bicycle to work", "making new friends",
            "looking after houseplants", "writing a CV", "playing the guitar", "waking up early", "camping in the rain",
            "organising a desk", "taking better photos", "raising chickens", "repairing a bicycle", "buying a used car",
            "knitting a scarf", "planning a road trip", "working from home", "cleaning a kitchen",
            "meditating every day",
            "learning to dance", "keeping a fish tank", "hosting a dinner", "hiking in the mountains",
            "teaching children",
            "building a bookshelf", "using less plastic", "fishing in a river", "drinking less coffee",
            "learning chess",
        ),
        "character": (
            "a tired baker", "a clever fox", "an old sailor", "a young wizard", "a lonely robot", "a brave mouse",
            "a forgetful king", "a curious girl", "a retired detective", "a lazy dragon", "a shy giant",
            "a travelling musician",
            "a clockmaker", "a lost astronaut", "a talking cat", "a stubborn donkey", "a postman", "two rival cooks",
            "a village doctor", "a gardener", "a nervous knight", "a librarian", "a grandmother", "a young inventor",
        ),
        "thing": (
            "a golden key", "an old map", "a broken clock", "a silver flute", "a mysterious letter", "a tiny door",
            "a magic seed", "a lost umbrella", "a glowing stone", "an empty suitcase", "a red balloon",
            "a forgotten song",
            "a wooden box", "a paper boat", "a strange coin", "a blue feather", "a secret recipe", "a cracked mirror",
        ),
        "place": (
            "a quiet fishing village", "a castle in the clouds", "a crowded train station", "a desert town",
            "an old library",
            "a snowy forest", "a city under the sea", "a busy market", "a small island", "an abandoned theatre",
            "a mountain hut", "a space station", "a flower shop", "a night train", "a country school",
            "a rainy harbour",
        ),
        "person": (
            "my landlord", "my manager", "a customer", "my neighbour", "a university professor", "the bank",
            "my sister",
            "a travel agency", "the head teacher", "a former colleague", "the building manager", "my dentist",
            "a new client",
            "the sports club", "a hotel", "the local newspaper", "my grandparents", "a job applicant",
        ),
        "purpose": (
            "to ask for a day off", "to complain about noise", "to say thank you for a gift",
            "to cancel an appointment",
            "to ask for a refund", "to apologise for being late", "to invite them to lunch",
            "to ask for more information",
            "to report a broken heater", "to ask for a recommendation", "to confirm a meeting on Tuesday",
            "to explain a delay", "to congratulate them", "to ask for an extension of a deadline", "to offer help",
            "to change a reservation", "to introduce myself", "to say goodbye",
        ),
        "occasion": (
            "a birthday party", "a rainy afternoon with children", "a family picnic",
            "a farewell party for a colleague",
            "a class reunion", "a first date", "a weekend in the countryside", "a charity event", "a team meeting",
            "a winter holiday at home", "a surprise breakfast", "a game night", "a wedding anniversary",
            "a street festival",
        ),
        "business": (
            "a small coffee shop", "a bicycle repair shop", "a dog hotel", "an online bookshop", "a vegan bakery",
            "a photo studio", "a toy store", "a language school", "a food truck", "a gym for older people",
            "a flower farm",
            "a tea company", "a cleaning service", "a mobile game", "a record store", "a shop for handmade candles",
        ),
        "pair": (
            "cats and dogs", "living in a city and living in a village", "tea and coffee", "trains and planes",
            "books and films", "renting and buying a home", "a laptop and a tablet", "summer and winter holidays",
            "football and basketball", "emails and phone calls", "rice and pasta", "public and private schools",
            "running and swimming", "electric cars and petrol cars", "cash and cards",
            "working alone and working in a team",
            "a hotel and a tent", "oil paint and watercolours", "the sea and the mountains",
            "fresh and frozen vegetables",
        ),
    },
    common={
        "few": ("three", "four", "five", "six", "seven"),
        "length": (
            "two sentences", "three sentences", "one paragraph", "about 100 words", "simple words",
            "five bullet points",
        ),
        "tone": ("friendly", "formal", "funny", "sad", "cheerful", "dramatic", "calm", "mysterious"),
    },
    follow_ups={
        "explain": (
            "Now give me one example.", "Can you make that shorter?", "Which part is the hardest to understand?",
        ),
        "advice": ("Which of these is the most important, and why?", "How much time does this take per week?"),
        "story": ("Give it a happier ending.", "What is a good title for it?", "What happens next?"),
        "email": ("Make it shorter.", "Now write the reply to it."),
        "list": ("Which one is your favourite?", "Add two more."),
    },
)

HELD_OUT = on_other_topics(
    TRAIN,
    {
        "concept": (
            "a compass", "the blood circulation", "a credit card", "bird song", "the Olympic Games", "a refrigerator",
            "hibernation", "the United Nations", "chocolate making", "an eclipse", "a submarine", "crop rotation",
            "glass",
            "a microscope", "the Aztec civilisation", "paper money", "a glacier", "allergies", "public transport",
            "a fossil",
            "anaesthesia", "a thunderstorm", "the alphabet", "a trade union",
        ),
        "activity": (
            "keeping bees", "restoring old furniture", "sailing a small boat", "learning sign language",
            "making cheese",
            "joining a choir", "selling things at a flea market", "sewing a shirt", "climbing indoors",
            "volunteering abroad",
            "insulating an attic", "writing a family history", "running a podcast", "skating on a frozen lake",
        ),
        "character": (
            "a shepherd", "an ambitious penguin", "a blind painter", "a ferry captain", "the youngest judge in town",
            "a dishonest jeweller", "a sleepy owl", "a chess champion", "a street sweeper", "a pair of twins",
        ),
        "thing": (
            "a violin without strings", "a bottle of purple ink", "a ticket from the future", "a rusty bell",
            "a snow globe", "an unfinished statue", "a box of matches", "a crown made of leaves",
        ),
        "place": (
            "a salt mine", "a circus tent", "a monastery garden", "an airport at midnight", "a windmill",
            "a frozen river town",
            "a museum of hats", "a tunnel below the palace",
        ),
        "person": (
            "the mayor", "my football coach", "an insurance company", "my godmother", "a piano teacher",
            "the ferry operator",
            "our wedding photographer", "the museum director",
        ),
        "purpose": (
            "to say that a parcel never arrived", "to skip a rehearsal", "to explain that the tickets are lost",
            "to request a larger room", "to dispute an invoice", "to announce a career change", "to praise the lessons",
            "to mention that the garden wall fell down",
        ),
        "business": (
            "a piano tuner", "a rooftop cinema", "a mountain guide agency", "a soap factory", "a second-hand tool shop",
            "a dance studio", "a fishmonger", "a board game cafe",
        ),
        "pair": (
            "wooden and plastic toys", "a ferry and a bridge", "poetry and prose", "gas and induction cookers",
            "leather and canvas shoes", "violins and cellos", "paper maps and navigation systems", "bees and wasps",
        ),
        "occasion": (
            "a village bicycle race", "a school science fair", "a baby shower", "a harvest supper",
            "a retirement dinner",
            "the opening of a playground", "a poetry evening", "a costume ball", "a neighbourhood clean-up day",
        ),
    },
)
