"""Skills of invented tools: a table of what each does with its parameters, and the kinds of values that parameters take."""

import calendar
import random
from collections.abc import Callable
from typing import Any, NamedTuple

_SKILLS = """
calculate compute find work out | the area of a triangle | triangle_area | base:length height:length unit?:unit
calculate compute find | the area of a circle | circle_area | radius:length unit?:unit
calculate determine | the volume of a box | box_volume | width:length height:length depth:length
calculate find | the perimeter of a rectangle | rectangle_perimeter | length:length width:length
solve find | the roots of a quadratic equation | quadratic_roots | a:number b:number c:number
calculate compute | the factorial of a number | factorial | number:count
find compute | the greatest common divisor | gcd | first:count second:count
calculate find | the mean of some numbers | mean | numbers:numbers
sort order | a list of numbers | sort_numbers | numbers:numbers descending?:flag
calculate estimate | the compound interest | compound_interest | principal:money rate:percent years:count
calculate work out | the monthly payment of a loan | loan_payment | amount:money rate:percent months:count
convert change | an amount of money | convert_currency | amount:money source:currency target:currency
convert | a temperature | convert_temperature | degrees:number source:scale target:scale
convert | a distance | convert_distance | distance:number source:unit target:unit
get check look up | the weather | weather | city:city date?:date unit?:scale
get fetch show | the forecast | forecast | city:city days:count
find search for | flights | search_flights | origin:city destination:city date:date passengers?:count
book reserve | a flight | book_flight | origin:city destination:city date:date class?:cabin
find search for | hotels | search_hotels | city:city arrival:date nights:count stars?:stars
book reserve | a table | book_table | restaurant:place date:date time:time guests:count
find look for | restaurants | find_restaurants | city:city cuisine:cuisine open_now?:flag
order | food | order_food | dish:dish quantity:count address?:address
find get | a recipe | find_recipe | ingredient:food servings?:count vegetarian?:flag
count calculate | the calories of a food | calories | food:food grams:count
send write | an email | send_email | to:email subject:title body:sentence
send | a text message | send_message | recipient:person text:sentence
schedule plan set up | a meeting | schedule_meeting | title:title date:date time:time attendees?:people
cancel delete | an appointment | cancel_appointment | appointment_id:code reason?:sentence
set create | a reminder | set_reminder | text:sentence date:date time?:time
set start | a timer | set_timer | minutes:count label?:word
set | an alarm | set_alarm | time:time repeat?:repeat
create add | a task | create_task | title:title priority:priority due?:date
list show | the tasks of a project | list_tasks | project:project status?:status
close resolve | a ticket | close_ticket | ticket_id:code comment?:sentence
open create file | a support ticket | create_ticket | title:title severity:priority component?:component
translate | a text | translate | text:sentence target:language source?:language
summarize shorten | a document | summarize | url:url max_words?:count
detect find out | the language of a text | detect_language | text:sentence
check correct | the spelling of a text | spell_check | text:sentence language?:language
play start | a song | play_song | title:title artist?:person shuffle?:flag
create make | a playlist | create_playlist | name:title genre:genre public?:flag
find search for | movies | search_movies | genre:genre year?:year rating?:stars
get look up | the details of a book | book_details | title:title author?:person
find search for | books | search_books | author:person language?:language
get look up check | the stock price | stock_price | symbol:ticker currency?:currency
buy | shares | buy_shares | symbol:ticker quantity:count limit?:money
get show | the exchange rate | exchange_rate | source:currency target:currency date?:date
transfer send | money | transfer_money | account:code amount:money currency:currency
get check | the balance of an account | account_balance | account:code
turn on switch on | a light | light_on | room:room brightness?:percent colour?:colour
set change | the temperature of a room | set_thermostat | room:room degrees:number
lock | a door | lock_door | door:room
measure calculate | the distance between two cities | city_distance | origin:city destination:city unit?:unit
plan find | a route | plan_route | origin:city destination:city mode:vehicle avoid_tolls?:flag
find | charging stations | charging_stations | city:city radius?:number
get look up | the population of a country | population | country:country year?:year
get find | the capital of a country | capital | country:country
find get | the time zone of a city | time_zone | city:city
get look up | public holidays | holidays | country:country year:year
get find | the history of an event | event_history | event:event year?:year
find look up | the author of a discovery | discoverer | discovery:event
calculate find | the speed of a falling object | falling_speed | height:length gravity?:number
calculate compute | the kinetic energy of an object | kinetic_energy | mass:number velocity:number
calculate find | the force between two charges | electric_force | charge_a:number charge_b:number distance:length
balance | a chemical equation | balance_equation | equation:formula
get look up | the molecular weight of a compound | molecular_weight | compound:formula unit?:mass
calculate | the body mass index | bmi | weight:number height:number
find suggest | exercises | exercises | muscle:muscle minutes?:count
get look up | the dose of a medicine | medicine_dose | medicine:medicine age:count
find look up | a doctor | find_doctor | specialty:specialty city:city
identify find | a plant | identify_plant | colour:colour leaves:count
get look up | the lifespan of an animal | lifespan | animal:animal
get show | the results of a team | team_results | team:team season?:year
get find | the ranking of a player | player_ranking | player:person sport:sport
book buy | tickets for a game | game_tickets | team:team date:date quantity:count
generate create | a password | generate_password | length:count symbols?:flag
create make | a QR code | qr_code | text:url size?:count
resize scale | an image | resize_image | path:path width:count height:count
rename move | a file | move_file | source:path target:path overwrite?:flag
delete remove | a file | delete_file | path:path
search look | in files | search_files | pattern:word folder:path recursive?:flag
read show open | a file | read_file | path:path lines?:count
run execute | a query on a database | run_query | table:table filter:filter limit?:count
insert add | a row | insert_row | table:table values:record
back up | a database | backup_database | table:table compress?:flag
deploy release | a service | deploy_service | service:component environment:environment version?:version
restart | a server | restart_server | server:component force?:flag
get show | the logs of a service | service_logs | service:component since:date level?:level
create register | a user | create_user | name:person email:email role:role
reset change | a password | reset_password | email:email notify?:flag
track follow | a parcel | track_parcel | tracking_number:code
calculate get | the shipping cost | shipping_cost | weight:number destination:country express?:flag
search for find | products | search_products | query:product max_price?:money in_stock?:flag
add put | a product in the cart | add_to_cart | product:product quantity:count
get show | reviews | product_reviews | product:product min_stars?:stars
apply use | a discount code | apply_discount | code:code cart?:code
generate draw | a chart | draw_chart | values:numbers kind:chart title?:title
fit train | a regression | fit_regression | x:numbers y:numbers
roll throw | dice | roll_dice | sides:count times?:count
pick choose | a random number | random_number | low:count high:count
find search for | jobs | search_jobs | title:job city:city remote?:flag
find get | a court case | court_case | case_number:code country?:country
calculate estimate | the income tax | income_tax | income:money country:country year?:year
estimate predict | the price of a house | house_price | city:city bedrooms:count area?:number
find look for | apartments | search_apartments | city:city max_rent:money bedrooms?:count
compare | two texts | compare_texts | first:sentence second:sentence
encode | a text | encode_text | text:sentence format:encoding
merge join | lists | merge_lists | first:words second:words
label tag | a photo | tag_photo | path:path tags:words
"""

_WORDS = {
    "city": "Paris London Berlin Tokyo Madrid Oslo Lima Cairo Boston Chicago Toronto Sydney Mumbai Seoul Vienna Denver",
    "country": "France Japan Brazil Canada Kenya India Norway Mexico Italy Egypt Chile Germany",
    "person": "Ada_Lovelace John_Smith Maria_Garcia Chen_Wei Amir_Khan Nina_Rossi Tom_Baker Lucy_Gray Omar_Said",
    "currency": "USD EUR GBP JPY CHF CAD",
    "unit": "meters feet kilometers miles inches centimeters",
    "scale": "celsius fahrenheit kelvin",
    "mass": "grams kilograms pounds",
    "cabin": "economy business first",
    "place": "Luigi's The_Blue_Door Casa_Verde Golden_Wok Harbor_Grill",
    "cuisine": "Italian Thai Mexican Indian French Japanese Greek",
    "dish": "pizza ramen tacos lasagna a_burger sushi",
    "food": "chicken rice tofu apples salmon lentils bread",
    "repeat": "daily weekdays weekly never",
    "priority": "low medium high critical",
    "project": "Apollo Website Mobile_App Atlas Billing",
    "status": "open closed in_progress blocked",
    "component": "api auth billing search frontend cache",
    "language": "English Spanish French German Japanese Portuguese",
    "genre": "jazz rock comedy thriller classical drama horror",
    "ticker": "AAPL TSLA MSFT GOOG NVDA AMZN IBM",
    "room": "kitchen bedroom garage office hallway bathroom",
    "colour": "red blue green yellow white purple",
    "vehicle": "driving walking cycling transit",
    "event": "the_French_Revolution the_moon_landing penicillin World_War_II gravity",
    "formula": "H2O CO2 NaCl C6H12O6 H2SO4 Fe2O3",
    "muscle": "legs back chest arms core",
    "medicine": "ibuprofen aspirin paracetamol amoxicillin",
    "specialty": "cardiology dermatology pediatrics neurology",
    "animal": "elephant parrot wolf tortoise dolphin cat",
    "team": "Lakers Arsenal Bulls Barcelona Yankees",
    "sport": "tennis chess golf boxing",
    "table": "users orders products invoices sessions",
    "environment": "staging production testing",
    "level": "debug info warning error",
    "role": "admin editor viewer",
    "product": "headphones a_desk_lamp running_shoes a_laptop a_kettle",
    "chart": "bar line pie scatter",
    "job": "software_engineer nurse data_analyst teacher",
    "encoding": "base64 hex utf-8",
    "word": "coffee errors workout notes backup",
}
_ENUMS = frozenset(
    """
    unit scale mass cabin repeat priority status vehicle environment level role chart encoding currency
    """.split()  # noqa: SIM905 # a list would have a line for each
)
_TITLES = "Quarterly_Review Team_Lunch Midnight_Rain The_Last_Train Budget_Plan Blue_Horizon Project_Kickoff"
_SENTENCES = (
    "I will be late today",
    "The report is ready",
    "Please call me back",
    "Happy birthday to you",
    "The meeting moved to noon",
    "Where is the train station",
    "Thanks for your help",
)


class Value(NamedTuple):
    """A value of a parameter, and how people write it."""

    value: Any
    written: str


class Parameter(NamedTuple):
    """A parameter of a skill."""

    name: str
    kind: str
    required: bool


class Skill(NamedTuple):
    """What a tool does.

    Attributes:
        verbs: any of which asks for it.
        object: what it is done to.
        name: of the function, in words joined by underscores.
    """

    verbs: tuple[str, ...]
    object: str
    name: str
    parameters: tuple[Parameter, ...]


def _skill(line: str) -> Skill:
    verbs, thing, name, parameters = (part.strip() for part in line.split("|"))
    words, joined = verbs.split(), list[str]()
    for word in words:  # "look up" is a verb of two words
        if word in ("up", "out", "for", "on", "in") and joined:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    described = (parameter.split(":") for parameter in parameters.split())
    return Skill(
        tuple(joined),
        thing,
        name,
        tuple(Parameter(label.rstrip("?"), kind, not label.endswith("?")) for label, kind in described),
    )


SKILLS = tuple(map(_skill, _SKILLS.strip().splitlines()))


def choices(kind: str) -> list[str]:
    """The values of a kind that has a list of them, else none."""
    return [word.replace("_", " ") for word in _WORDS[kind].split()] if kind in _WORDS else []


def draw(kind: str, rng: random.Random) -> Value:
    """A value of a kind."""
    if named := choices(kind):
        word = rng.choice(named)
        value = word.replace(" ", "_") if kind == "status" else word.removeprefix("a ").removeprefix("the ")
        return Value(value, word)
    return _DRAWN[kind](rng)


def schema(kind: str) -> dict[str, Any]:
    """The JSON schema of a kind, without its description."""
    if kind in _ENUMS:
        values = choices(kind)
        return {"type": "string", "enum": [value.replace(" ", "_") for value in values]}
    match kind:
        case "count" | "year" | "stars":
            return {"type": "integer"}
        case "number" | "money" | "percent" | "length":
            return {"type": "number"}
        case "flag":
            return {"type": "boolean"}
        case "numbers":
            return {"type": "array", "items": {"type": "number"}}
        case "words" | "people":
            return {"type": "array", "items": {"type": "string"}}
        case "record":
            return {"type": "object", "additionalProperties": {"type": "string"}}
        case _:
            return {"type": "string"}


def _whole(low: int, high: int) -> Callable[[random.Random], Value]:
    def value(rng: random.Random) -> Value:
        number = rng.randint(low, high)
        return Value(number, str(number))

    return value


def _decimal(low: int, high: int, written: str = "{}") -> Callable[[random.Random], Value]:
    def value(rng: random.Random) -> Value:
        number = rng.randint(low, high) if rng.random() < 0.6 else round(rng.uniform(low, high), 1)
        return Value(number, written.format(number))

    return value


def _date(rng: random.Random) -> Value:
    year, month, day = rng.randint(2023, 2027), rng.randint(1, 12), rng.randint(1, 28)
    iso = f"{year}-{month:02}-{day:02}"
    text = rng.choice((iso, iso, f"{calendar.month_name[month]} {day}, {year}", f"{month:02}/{day:02}/{year}"))
    return Value(text, text)


def _time(rng: random.Random) -> Value:
    hour, minute = rng.randint(0, 23), rng.choice((0, 15, 30, 45))
    return Value(f"{hour:02}:{minute:02}", f"{hour:02}:{minute:02}")


def _text(words: str) -> Callable[[random.Random], Value]:
    def value(rng: random.Random) -> Value:
        text = rng.choice(words.split()).replace("_", " ")
        return Value(text, f"'{text}'" if rng.random() < 0.6 else text)

    return value


def _sentence(rng: random.Random) -> Value:
    text = rng.choice(_SENTENCES)
    return Value(text, f"'{text}'" if rng.random() < 0.7 else f'"{text}"')


def _formatted(pattern: str) -> Callable[[random.Random], Value]:
    """Letters for `A` and `a`, digits for `9`."""

    def value(rng: random.Random) -> Value:
        pools = {"A": "ABCDEFGHKMNPRSTX", "a": "bcdfgklmnprst", "9": "0123456789"}
        text = "".join(rng.choice(pools[letter]) if letter in pools else letter for letter in pattern)
        return Value(text, text)

    return value


def _numbers(rng: random.Random) -> Value:
    numbers = [rng.randint(0, 99) for _ in range(rng.randint(3, 6))]
    joined = ", ".join(map(str, numbers))
    return Value(numbers, f"[{joined}]" if rng.random() < 0.5 else joined)


def _several(kind: str) -> Callable[[random.Random], Value]:
    def value(rng: random.Random) -> Value:
        words = rng.sample(choices(kind), rng.randint(2, 3))
        return Value(words, " and ".join([", ".join(words[:-1]), words[-1]]))

    return value


def _email(rng: random.Random) -> Value:
    first = rng.choice(choices("person")).split()[0].lower()
    address = f"{first}@{rng.choice(('example.com', 'mail.org', 'acme.io'))}"
    return Value(address, address)


def _record(rng: random.Random) -> Value:
    name, city = rng.choice(choices("person")), rng.choice(choices("city"))
    return Value({"name": name, "city": city}, f"name {name} and city {city}")


_DRAWN: dict[str, Callable[[random.Random], Value]] = {
    "count": _whole(2, 60),
    "year": _whole(1950, 2025),
    "stars": _whole(1, 5),
    "number": _decimal(1, 200),
    "length": _decimal(1, 60),
    "money": _decimal(10, 5000),
    "percent": _decimal(1, 40),
    "flag": lambda rng: Value(True, "yes"),
    "date": _date,
    "time": _time,
    "title": _text(_TITLES),
    "sentence": _sentence,
    "code": _formatted("AA-9999"),
    "version": _formatted("9.9.9"),
    "address": _formatted("99 Aaaaa Street"),
    "url": _formatted("https://www.aaaaa.com/aaaa"),
    "path": _formatted("/home/aaaa/aaaaa.txt"),
    "filter": _formatted("aaaa > 99"),
    "numbers": _numbers,
    "words": _several("word"),
    "people": _several("person"),
    "email": _email,
    "record": _record,
}
