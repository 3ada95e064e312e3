"""The words of the dialogues: tools that look something up about an item, and items with a sentence about each."""

LOOKUPS = ("price", "weight", "shelf", "height", "age")

ITEMS = {
    "lamp": "A lamp gives light after sunset and should stand where it cannot fall.",
    "pen": "A pen writes until its ink is dry and then wants a new one.",
    "book": "A book can be read twice, and a good one is better the second time.",
    "chair": "A chair has four legs and carries one person for an evening.",
    "table": "A table is where people eat, work and put the keys they will look for.",
    "clock": "A clock tells the hour, and an old one tells it loudly.",
    "cup": "A cup keeps tea warm for as long as it takes to find a biscuit.",
    "kettle": "A kettle boils water and sings when it is ready.",
    "knife": "A knife cuts bread best when it was sharpened last week.",
    "spoon": "A spoon is all that a soup asks for.",
    "basket": "A basket carries apples home and cats anywhere.",
    "blanket": "A blanket is a small house for one on a cold night.",
    "candle": "A candle burns for an evening and smells of holidays.",
    "mirror": "A mirror shows what stands before it and keeps nothing.",
    "ladder": "A ladder leads up, and with some care down again.",
    "hammer": "A hammer drives nails, and now and then finds a thumb.",
    "rope": "A rope holds boats, tents and everything on the roof of a car.",
    "bell": "A bell calls the children when the meal is on the table.",
    "brush": "A brush turns a bucket of colour into a wall.",
    "scarf": "A scarf is warm, and long ones can be lent by half.",
    "umbrella": "An umbrella is with you on dry days and at home on wet ones.",
    "violin": "A violin takes ten years to learn and one evening to love.",
    "drum": "A drum is heard by all neighbours, even by the kind ones.",
    "kite": "A kite needs wind, a long line and an open field.",
    "tent": "A tent keeps the rain out as long as its cloth is tight.",
    "wheel": "A wheel turns, and most machines are glad of it.",
    "bottle": "A bottle holds water for a walk of two hours.",
    "ticket": "A ticket is a small paper with a large promise.",
    "stamp": "A stamp takes a letter across the sea.",
    "map": "A map knows the way but not the weather.",
    "coat": "A coat has pockets, and the pockets have last winter in them.",
    "plant": "A plant by the window asks for water twice a week.",
}

SUM_PROSE = "Sums are left to the calculator, which does not tire."
TOTAL_PROSE = "That one had to wait for the others."
