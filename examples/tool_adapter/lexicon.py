"""Words, names and units: from short lists, and from the vocabulary of a tokenizer."""

import random
import re
from collections.abc import Iterable

UNITS = {
    "length": "meters centimeters kilometers feet miles inches",
    "mass": "kilograms grams pounds kg",
    "temperature": "degrees_Celsius degrees_Fahrenheit Kelvin",
    "duration": "seconds minutes hours days weeks months years",
    "speed": "m/s km/h mph meters_per_second",
    "force": "newtons N",
    "energy": "joules kJ kWh",
    "voltage": "volts V",
    "current": "amperes amps",
    "frequency": "Hz kHz hertz",
    "pressure": "pascals atm bar",
    "volume": "liters milliliters gallons cubic_meters",
    "surface": "square_meters square_feet hectares acres",
    "angle": "degrees radians",
    "power": "watts kilowatts horsepower",
    "memory": "GB MB gigabytes",
    "portion": "cups tablespoons servings slices",
}
"""By kind of quantity its units, of which a tool has one."""
ENUMS = {
    "unit": "meters feet kilometers miles inches centimeters",
    "scale": "celsius fahrenheit kelvin",
    "massunit": "grams kilograms pounds ounces",
    "cabin": "economy business first premium_economy",
    "repeat": "daily weekdays weekly monthly never",
    "priority": "low medium high critical",
    "status": "open closed in_progress blocked pending",
    "vehicle": "driving walking cycling transit",
    "environment": "staging production testing development",
    "level": "debug info warning error",
    "role": "admin editor viewer owner",
    "chart": "bar line pie scatter histogram",
    "encoding": "base64 hex utf-8 ascii",
    "sortorder": "ascending descending newest oldest",
    "fileformat": "pdf csv json xml png mp4",
    "size": "small medium large extra_large",
    "spice": "mild medium hot",
    "diet": "vegan vegetarian gluten-free keto paleo",
    "cuisine": "Italian Thai Mexican Indian French Japanese Greek Korean Lebanese",
    "genre": "jazz rock comedy thriller classical drama horror folk",
    "difficulty": "beginner intermediate advanced expert",
    "season": "spring summer autumn winter",
    "gender": "male female",
    "activity": "sedentary light moderate active",
    "material": "copper steel wood glass aluminum cotton concrete",
    "shape": "circle square triangle rectangle hexagon",
    "period": "day week month quarter year",
    "payment": "credit_card cash bank_transfer paypal",
    "instrument": "piano guitar violin drums flute cello",
    "sport": "tennis chess golf boxing football basketball rugby",
    "blood": "A+ B- O+ AB+",
    "fuel": "gasoline diesel electric hybrid",
    "method": "linear quadratic exponential logistic",
    "property": "apartment house studio villa condo",
    "detail": "brief summary full detailed",
    "colour": "red blue green yellow white purple black orange",
    "roomtype": "single double suite deluxe",
    "soil": "clay sandy loam silt",
    "weekday": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
}
"""By kind the words of which a tool offers some, as an `enum` or in its description."""
LISTS = {
    "language": "English Spanish French German Japanese Portuguese Italian Korean Arabic Dutch",
    "currency": "USD EUR GBP JPY CHF CAD AUD INR",
    "animal": "elephant parrot wolf tortoise dolphin cat falcon octopus beaver",
    "food": "chicken rice tofu apples salmon lentils bread spinach almonds cheese potatoes",
    "dish": "pizza ramen tacos lasagna burger sushi paella pad_thai pancakes curry",
    "formula": "H2O CO2 NaCl C6H12O6 H2SO4 Fe2O3 CH4 NH3",
    "substance": "water ethanol helium iron gold carbon_dioxide oxygen glucose",
    "muscle": "legs back chest arms core shoulders",
    "medicine": "ibuprofen aspirin paracetamol amoxicillin insulin",
    "specialty": "cardiology dermatology pediatrics neurology orthopedics",
    "plant": "rose tomato oak cactus lavender basil sunflower",
    "planet": "Mars Venus Jupiter Saturn Neptune Mercury",
    "product": "headphones desk_lamp running_shoes laptop kettle backpack smartwatch",
    "occupation": "software_engineer nurse data_analyst teacher plumber architect",
    "subject": "algebra photosynthesis quantum_physics grammar the_Roman_Empire climate_change economics",
    "expression": "3x^2+2x-5 x**2 sin(x) 2x+7 x^3-4x e^x x**3+1",
    "event": "the_French_Revolution the_moon_landing World_War_II the_fall_of_Rome the_Gold_Rush",
    "team": "Lakers Arsenal Bulls Barcelona Yankees Chelsea Warriors Bayern_Munich",
    "ingredient": "garlic basil chicken mushrooms coconut_milk lemon chickpeas butter",
    "holiday": "Christmas Easter Thanksgiving Diwali Halloween",
    "room": "kitchen bedroom garage office hallway bathroom basement",
    "table": "users orders products invoices sessions employees students",
    "column": "name age price created_at email salary grade",
    "component": "api auth billing search frontend cache worker",
    "topic": "technology politics health science travel education sports finance",
    "gene": "BRCA1 TP53 CFTR MYC",
    "disease": "diabetes asthma influenza malaria anemia",
    "card": "hearts spades king queen ace",
}
"""By kind words that are no closed set."""


def listed(text: str, between: str | None = None) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split(between))


PLACES = tuple(
    (city.replace("_", " "), region.replace("_", " "))
    for city, region in (
        pair.split("/")
        for pair in listed("""
Paris/France London/UK Berlin/Germany Tokyo/Japan Madrid/Spain Oslo/Norway Lima/Peru Cairo/Egypt Boston/MA Chicago/IL
Toronto/Canada Sydney/Australia Mumbai/India Seoul/South_Korea Vienna/Austria Denver/Colorado Dublin/Ireland Lisbon/Portugal
Rome/Italy Athens/Greece Prague/Czechia Warsaw/Poland Zurich/Switzerland Dallas/TX Houston/Texas Phoenix/AZ Portland/Oregon
Seattle/WA Miami/FL Atlanta/Georgia Detroit/Michigan Austin/TX Nairobi/Kenya Lagos/Nigeria Bangkok/Thailand Manila/Philippines
Jakarta/Indonesia Hanoi/Vietnam Istanbul/Turkey Dubai/UAE Stockholm/Sweden Helsinki/Finland Copenhagen/Denmark Brussels/Belgium
Amsterdam/Netherlands Munich/Germany Kyoto/Japan Osaka/Japan Delhi/India Beijing/China Shanghai/China Singapore/Singapore
Auckland/New_Zealand Santiago/Chile Bogota/Colombia Havana/Cuba Montreal/Canada Vancouver/BC New_York/NY Los_Angeles/CA
San_Francisco/CA San_Diego/California Las_Vegas/NV New_Orleans/LA Salt_Lake_City/Utah Kansas_City/MO Mexico_City/Mexico
Rio_de_Janeiro/Brazil Buenos_Aires/Argentina Cape_Town/South_Africa Tel_Aviv/Israel Hong_Kong/China Omaha/NE Tampa/FL
""")
    )
)
"""Cities with the region that may follow them."""
_COUNTRIES = listed(
    "France Japan Brazil Canada Kenya India Norway Mexico Italy Egypt Chile Germany Spain Poland Greece Turkey Vietnam China "
    "Australia Sweden Peru Portugal Ireland Morocco Nigeria Thailand Iceland Austria USA UK South_Korea New_Zealand"
)
_FIRST = listed(
    "Ada John Maria Chen Amir Nina Tom Lucy Omar Sofia David Emma Liam Olivia Noah Ava Ethan Mia Lucas Isabella Hiro Yuki Raj "
    "Priya Carlos Elena Ivan Olga Fatima Hassan Grace Henry Julia Peter Alice Victor Clara Felix Rosa Samuel"
)
_LAST = listed(
    "Lovelace Smith Garcia Wei Khan Rossi Baker Gray Said Johnson Brown Miller Davis Wilson Moore Taylor Anderson Thomas Lee "
    "Martin Clark Lewis Walker Young King Scott Green Adams Nelson Hill Tanaka Patel Novak Silva Costa Weber Larsen Okafor"
)
_COMMON = frozenset(
    listed(
        "about above after again against among around because before being below between could doing during every from "
        "have having here into itself might more most must never only other over same should since some such than that "
        "their them then there these they this those through under until very were what when where which while will with "
        "without would your yours"
    )
)


class Lexicon:
    """Words by chance.

    Args:
        tokens: the texts of a tokenizer's tokens; those that are a whole word with a space before it are used.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        pieces = sorted(tokens)
        self._words = [t[1:] for t in pieces if re.fullmatch(r" [a-z]{4,10}", t) and t[1:] not in _COMMON]
        self._names = [t[1:] for t in pieces if re.fullmatch(r" [A-Z][a-z]{3,9}", t) and t[1:].lower() not in _COMMON]

    def word(self, rng: random.Random) -> str:
        """Lower case."""
        return rng.choice(self._words)

    def name(self, rng: random.Random) -> str:
        """A word with a capital."""
        return rng.choice(self._names)

    def person(self, rng: random.Random) -> str:
        """First and last name, or one of them."""
        first = rng.choice(_FIRST) if rng.random() < 0.7 else self.name(rng)
        last = rng.choice(_LAST) if rng.random() < 0.6 else self.name(rng)
        return first if rng.random() < 0.15 else f"{first} {last}"

    def country(self, rng: random.Random) -> str:
        """One that is known."""
        return rng.choice(_COUNTRIES).replace("_", " ")

    def title(self, rng: random.Random) -> str:
        """Of a book, a song, a meeting, a game."""
        words = [self.name(rng) for _ in range(3)]
        forms = ("{0}", "{0} {1}", "The {0} {1}", "The {0} of {1}", "{0} and {1}", "{0} {1} {2}")
        return rng.choice(forms).format(*words)

    def company(self, rng: random.Random) -> str:
        """Of a firm."""
        return rng.choice(("{0}", "{0} Inc", "{0} {1}", "{0} Corp")).format(self.name(rng), self.name(rng))

    def place(self, rng: random.Random) -> str:
        """A restaurant, a hotel, a park, a museum."""
        after = rng.choice(("Hotel", "Park", "Museum", "Grill", "Cafe", "Bridge", "Library", "Inn"))
        return rng.choice(("{0} {1}", "the {0} {1}", "{0}'s")).format(self.name(rng), after).removeprefix("the ")
