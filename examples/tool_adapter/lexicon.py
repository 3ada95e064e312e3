"""Words and names: from short lists, and from the vocabulary of a tokenizer."""

import random
import re
from collections.abc import Iterable


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
