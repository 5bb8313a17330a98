"""The fixed facts and word lists behind the demo model's questions.

Called by the question generators (`sum_families.py`, `number_families.py`, `word_families.py`). Nothing goes in;
constants come out. Kept apart from the generators so that the facts can be read, and checked, at a glance.
"""

INTRODUCTION = (
    "I am nanoinfer's tiny demo model, a Qwen3-style network with about three million parameters. "
    "I can add, subtract and multiply small numbers, sort lists, list prime numbers, spell words and name capitals. "
    "I am not a real assistant, so please do not rely on me for anything else."
)
ABILITIES = (
    "I can do small sums, sort and compare numbers, list primes, count and spell letters, "
    "name capitals, convert simple units and recite days and months. That is all I learned."
)
LIMITS = "No, I am only nanoinfer's tiny demo model. I show that the engine works; I am not a real assistant."
GREETING = "Hello! I am nanoinfer's tiny demo model. Ask me for a sum, a sorted list, a prime number or a capital."
WELLBEING = "I am fine, thank you! I am only a tiny demo model, but I am ready for a small question."
THANKS = "You are welcome!"
FAREWELL = "Goodbye! Thank you for trying nanoinfer."
MAKER = "I was trained from scratch on a two-core machine as the demo model of nanoinfer, a small inference engine."
UNKNOWN = "Sorry, I am only a tiny demo model and I do not know that. Try a sum, a sorted list or a capital."

# The tables below keep several entries a line; one a line would make them unreadably long.
# fmt: off

# Each group: what a visitor may say, and the one answer to all of it.
SMALL_TALK: dict[str, tuple[tuple[str, ...], str]] = {
    "introduction": (
        (
            "introduce yourself", "please introduce yourself", "can you introduce yourself?", "who are you?",
            "what are you?", "tell me about yourself", "what is your name?", "tell me who you are",
            "could you introduce yourself?", "introduce yourself please", "give me a short introduction of yourself",
            "introduce yourself briefly", "say something about yourself", "describe yourself", "what model are you?",
            "which model are you?", "please tell me about yourself", "I would like to know who you are",
            "who am I talking to?", "can you tell me who you are?", "what should I call you?", "present yourself",
            "can you tell me about yourself?", "please describe yourself", "do you have a name?",
        ),
        INTRODUCTION,
    ),
    "abilities": (
        (
            "what can you do?", "what can I ask you?", "how can you help me?", "what are you able to do?",
            "what do you know?", "which questions can you answer?", "tell me what you can do", "help",
            "what can you help me with?", "can you help me?", "what are your abilities?", "what did you learn?",
            "what kind of questions can you answer?", "what are you good at?", "list your abilities",
            "show me what you can do", "what should I ask you?", "please tell me what you can do",
        ),
        ABILITIES,
    ),
    "limits": (
        (
            "are you a real assistant?", "are you human?", "are you a person?", "are you a large model?",
            "are you a robot?", "are you ChatGPT?", "are you a real person?", "can I trust you?",
            "do you know everything?", "are you intelligent?", "are you smart?", "are you a big model?",
            "can you answer every question?", "can I rely on you?", "are you alive?",
        ),
        LIMITS,
    ),
    "greeting": (
        (
            "hello", "hi", "hey", "hello there", "hi there", "good morning", "good evening", "good afternoon",
            "hello!", "hey there", "greetings", "hello model", "hello, nanoinfer", "hi, nanoinfer", "good day",
            "hello, how do you do?", "howdy", "nice to meet you",
        ),
        GREETING,
    ),
    "wellbeing": (
        (
            "how are you?", "how are you doing?", "how are you today?", "how is it going?", "are you well?",
            "how do you feel?", "hello, how are you?", "hi, how are you?", "are you fine?", "how have you been?",
            "how are things?", "hey, how are you?", "how are you doing today?",
        ),
        WELLBEING,
    ),
    "thanks": (
        (
            "thanks", "thank you", "thank you very much", "thanks a lot", "many thanks", "great, thank you",
            "thank you so much", "thanks for your help", "thank you for your help", "good, thanks", "nice, thanks",
            "perfect, thank you", "ok, thanks", "thanks for the answer", "thank you, that is right",
        ),
        THANKS,
    ),
    "farewell": (
        (
            "bye", "goodbye", "good bye", "see you", "see you later", "bye bye", "good night", "farewell",
            "see you soon", "bye for now", "until next time", "goodbye, nanoinfer", "see you tomorrow",
        ),
        FAREWELL,
    ),
    "maker": (
        (
            "who made you?", "who trained you?", "how were you trained?", "who created you?",
            "where do you come from?", "who built you?", "how were you made?", "what were you trained for?",
            "why do you exist?", "what is your purpose?", "where were you trained?", "how did you learn?",
            "what is nanoinfer?",
        ),
        MAKER,
    ),
}

UNKNOWN_WORDINGS = (
    "write a poem about {}", "write a story about {}", "tell me a joke about {}", "tell me a story about {}",
    "what do you think about {}?", "explain {} to me", "give me some advice about {}", "write a song about {}",
    "what is the history of {}?", "can you explain {}?", "why is {} important?", "what is the best book about {}?",
    "tell me the latest news about {}", "how does {} work?", "what do people say about {}?",
    "write an essay about {}",
)
UNKNOWN_TOPICS = (
    "the sea", "love", "the weather", "politics", "football", "music", "the moon", "quantum physics", "computers",
    "dogs", "cooking", "the economy", "history", "war", "painting", "dreams", "gravity", "the stars", "money", "cars",
    "python", "chess", "movies", "health", "climate", "philosophy", "space", "tea", "rivers", "winter",
)

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Switzerland": "Bern", "Belgium": "Brussels", "the Netherlands": "Amsterdam",
    "Denmark": "Copenhagen", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Iceland": "Reykjavik",
    "Ireland": "Dublin", "the United Kingdom": "London", "Poland": "Warsaw", "Hungary": "Budapest",
    "Greece": "Athens", "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv", "Romania": "Bucharest",
    "Bulgaria": "Sofia", "Serbia": "Belgrade", "Croatia": "Zagreb", "Slovenia": "Ljubljana", "Slovakia": "Bratislava",
    "Estonia": "Tallinn", "Latvia": "Riga", "Lithuania": "Vilnius", "China": "Beijing", "Japan": "Tokyo",
    "South Korea": "Seoul", "India": "New Delhi", "Pakistan": "Islamabad", "Bangladesh": "Dhaka",
    "Nepal": "Kathmandu", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta",
    "Malaysia": "Kuala Lumpur", "the Philippines": "Manila", "Iran": "Tehran", "Iraq": "Baghdad",
    "Saudi Arabia": "Riyadh", "Egypt": "Cairo", "Morocco": "Rabat", "Kenya": "Nairobi", "Ethiopia": "Addis Ababa",
    "Nigeria": "Abuja", "Ghana": "Accra", "Canada": "Ottawa", "the United States": "Washington, D.C.",
    "Mexico": "Mexico City", "Cuba": "Havana", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago",
    "Peru": "Lima", "Colombia": "Bogota", "Venezuela": "Caracas", "Uruguay": "Montevideo", "Australia": "Canberra",
    "New Zealand": "Wellington",
}

OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "day": "night", "fast": "slow", "old": "young",
    "happy": "sad", "light": "dark", "open": "closed", "rich": "poor", "full": "empty", "hard": "soft", "wet": "dry",
    "early": "late", "strong": "weak", "high": "low", "long": "short", "true": "false", "black": "white",
    "good": "bad", "first": "last", "thick": "thin", "wide": "narrow", "clean": "dirty", "loud": "quiet",
    "near": "far", "inside": "outside", "win": "lose", "buy": "sell", "start": "stop", "heavy": "light",
}

DAYS = (
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)

# (singular of the larger unit, its plural, how many of the smaller go into it, plural of the smaller unit)
UNITS = (
    ("hour", "hours", 60, "minutes"), ("minute", "minutes", 60, "seconds"), ("day", "days", 24, "hours"),
    ("week", "weeks", 7, "days"), ("year", "years", 12, "months"), ("meter", "meters", 100, "centimeters"),
    ("kilometer", "kilometers", 1000, "meters"), ("kilogram", "kilograms", 1000, "grams"),
    ("centimeter", "centimeters", 10, "millimeters"), ("dozen", "dozen", 12, "items"),
    ("liter", "liters", 1000, "milliliters"), ("foot", "feet", 12, "inches"), ("century", "centuries", 100, "years"),
)

ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

ITEMS = (
    "apple", "pear", "plum", "lemon", "cherry", "orange", "banana", "grape", "peach", "melon", "cat", "dog", "horse",
    "sheep", "mouse", "rabbit", "tiger", "lion", "zebra", "pen", "book", "lamp", "chair", "table", "cup", "plate",
    "spoon", "fork", "knife", "red", "blue", "green", "yellow", "brown", "tree", "flower", "river", "stone", "cloud",
)
# fmt: on

WORD_LIST = """
able about above accept across action address adult advice afternoon again agree air airport alarm album alone always
amount ancient angle animal answer apple april area arm army around arrive art artist autumn award baby back bacon bag
baker balance ball banana band bank basket bath beach bean bear beauty because bed bee before begin behind bell belt
berry better bicycle big bird birthday black blanket blood blue board boat body bone book bottle bottom box brain
branch bread breakfast bridge bright bring broken brother brown brush bubble bucket build butter button cabin cabbage
cake camera camp candle candy captain car card carpet carrot castle cat center chain chair cheese cherry chicken child
chocolate church circle city class clean clever clock cloud coast coat coffee coin cold color cook cookie copper corn
corner cotton country cousin cow cream crown cup curtain dance danger daughter deep deer desert desk dinner doctor dog
dollar donkey door dragon dream dress drink drum duck eagle ear early earth east edge egg eight elephant empty engine
evening example eye face family farm farmer father feather fence field finger fire fish five flag flame floor flower
fly fog food foot forest fork four fox free friend frog fruit garden gate giant girl glass glove goat gold good goose
grape grass gray green ground group guitar hair hammer hand happy harbor hat head heart heavy hill history holiday
honey horse hospital hotel house hundred hungry ice idea insect iron island jacket jam jelly job journey juice jump
jungle kettle key kind king kitchen kite kitten knee knife ladder lake lamp language large laugh leaf leather left
lemon lesson letter library light lily lion little lizard lunch machine magic map marble market meadow melon metal
middle milk million minute mirror money monkey month moon morning mother mountain mouse mouth movie mud music nail
name needle nest night nine noise north nose number ocean office olive onion orange oven owl page paint palace pan
paper parent park parrot party peach pear pen pencil people pepper piano picture pig pillow pilot pink planet plant
plate player pocket pond potato prince puppy purple queen question quick quiet rabbit radio rain rainbow red ribbon
rice ring river road robot rocket roof room root rope rose round rubber sad sail salad salt sand sandwich school
science scissors sea season seed seven shadow sheep shell ship shirt shoe shop short shoulder silver simple sing
sister six skin sky sleep small smile smoke snake snow soap sock sofa soft song soup south spider spoon spring square
squirrel star station stone storm story strawberry street strong student sugar summer sun sweet swim table tail tall
tea teacher ten thunder tiger time tired toast today tomato tooth tower town toy train travel tree triangle trumpet
tunnel turtle twelve two umbrella uncle under valley vegetable village violin voice wagon walk wall warm water
watermelon weather week whale wheat wheel white wide wind window winter wolf woman wood word world yellow young zebra
zero
"""
WORDS = tuple(WORD_LIST.split())
