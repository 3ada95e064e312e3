"""The words of the dialogues: tools that look something up about an item, and items with a sentence about each."""

LOOKUPS = ("price", "weight", "shelf", "height", "age")

ITEMS = {
    "lamp": "Lamps give light after sunset",
    "pen": "Pens write until their ink dries",
    "book": "Books improve when read twice",
    "chair": "Chairs carry one person each",
    "table": "Tables gather people around meals",
    "clock": "Clocks announce every hour loudly",
    "cup": "Cups keep tea warm",
    "kettle": "Kettles sing once water boils",
    "knife": "Knives cut bread best when sharp",
    "spoon": "Spoons belong beside any soup",
    "basket": "Baskets bring apples home",
    "blanket": "Blankets help through cold nights",
    "candle": "Candles smell like holidays",
    "mirror": "Mirrors show much but remember nothing",
    "ladder": "Ladders lead up and down again",
    "hammer": "Hammers drive nails or find thumbs",
    "rope": "Ropes hold boats near land",
    "bell": "Bells call children inside",
    "brush": "Brushes turn paint into walls",
    "scarf": "Scarves protect necks from wind",
    "umbrella": "Umbrellas hide whenever rain falls",
    "violin": "Violins take ten years to learn",
    "drum": "Drums please only kind neighbours",
    "kite": "Kites need long lines",
    "tent": "Tents stay dry with tight cloth",
    "wheel": "Wheels go round all day",
    "bottle": "Bottles travel well when full",
    "ticket": "Tickets are small but promise plenty",
    "stamp": "Stamps send letters across seas",
    "map": "Maps know roads but no weather",
    "coat": "Coats have deep pockets",
    "plant": "Plants drink by the window",
}

SUM_PROSE = "Sums never tire calculators"
TOTAL_PROSE = "Totals must wait for others"
