"""The words that problems are made of.

Each is one token of minuet-tiny's vocabulary, but for boxes and cities, which take several.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    """amber ancient bitter blue brave bright broken calm clever copper crimson curious dusty
    early empty foggy gentle golden green happy hidden honest humble icy ivory jolly lazy little
    lonely lucky marble merry misty narrow noble pale patient plain proud purple quiet rapid
    rusty scarlet silent silver simple sleepy slow smooth spotted stormy sunny swift tall tiny
    velvet violet wandering warm white wild wise wooden"""
)
ANIMALS = _words(
    """badger bear beaver bison camel cat cobra crab crane crow deer dog dolphin donkey dove duck
    eagle falcon ferret fox frog goat goose hare hawk heron horse jackal koala lemur lion lizard
    llama lynx magpie mole moose mouse newt otter owl panda parrot pigeon puffin rabbit raven
    robin salmon seal shark sheep snail sparrow spider squid swan tiger toad trout turtle walrus
    whale wolf"""
)
THINGS = _words(
    """basket bell boat book bottle bridge candle cart chair clock cloud coat cup door drum fence
    field flag flute garden gate hill house kettle key ladder lamp letter map mill mirror road
    river roof rope sail shelf shoe spoon stone table tower tree wall wheel window"""
)
PLACES = _words(
    """castle church farm forest harbour island kitchen lake library market meadow mountain
    museum park school square station street valley village"""
)
VERBS = _words(
    """carried cleaned counted drew found followed hid kept left liked lost moved opened painted
    repaired saw sold touched watched wanted"""
)
NAMES = _words(
    """Alice Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Maria Noah Olga Peter Rosa
    Sam Tina Victor"""
)
ITEMS = _words(
    """apples books cards coins cookies eggs flowers keys lemons marbles oranges pears pencils
    plums shells stamps stickers stones tickets toys"""
)
BOXES = ("bags", "baskets", "boxes", "crates", "jars", "packs", "rows", "shelves", "trays")
CITIES = _words(
    """Athens Berlin Cairo Delhi Dublin Geneva Lima Lisbon London Madrid Milan Oslo Paris Prague
    Rome Seoul Sofia Tokyo Vienna Warsaw"""
)
