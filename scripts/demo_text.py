"""Writes the demo model's text from templates: ferries, harbours, pages and caches."""

import re
from collections.abc import Iterator

import numpy as np

WORDS = {
    "boat": "ferry|small ferry|night ferry|car ferry|mail boat|old steamer|pilot boat|tug|barge"
    "|harbour launch|island boat|freighter",
    "crew": "captain|mate|deckhand|engineer|pilot|purser|harbour master|signalman|lookout"
    "|dispatcher|ticket clerk|lighthouse keeper",
    "place": "north pier|south pier|outer harbour|inner basin|island landing|stone quay"
    "|lighthouse|narrow channel|river mouth|customs house|long breakwater|fuel dock",
    "cargo": "letters|bicycles|lorries|passengers|crates of apples|sacks of flour|barrels of oil"
    "|boxes of fish|timber|newspapers|sheep|milk cans",
    "weather": "fog|rain|a strong west wind|a low sun|drifting ice|calm weather|heavy swell"
    "|early frost|thunder|bright moonlight",
    "time": "at dawn|before noon|in the evening|at low tide|at high tide|after midnight"
    "|on Sundays|every hour|twice a day|in winter|in the first week of spring",
    "verb": "carries|brings|collects|delivers|unloads|takes aboard|counts|weighs",
    "part": "page|cache|request|token|prompt|prefix|page table|queue|batch|chunk|buffer|slot",
    "parts": "pages|requests|tokens|prompts|prefixes|batches|chunks|buffers|slots|copies",
    "host": "prefill worker|decode worker|router|scheduler|registry|front door|memory pool"
    "|transfer engine",
    "does": "waits|moves|grows|returns|is reserved|is released|is written once|is read many times"
    "|is shared|leaves at once",
    "why": "because memory is small|so that nothing is lost|because the first answer counts"
    "|so that others may go on|because each page has one owner|so that no one waits twice"
    "|because a copy costs time",
    "size": "small|large|empty|full|heavy|light|slow|quick|broad|narrow",
    "number": "two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|forty",
    "feel": "quiet|busy|patient|careful|cheerful|tired|proud|ready|late|early",
}

SENTENCES = """\
The {boat} leaves the {place} {time}.
The {boat} {verb} {cargo} and turns towards the {place}.
A {feel} {crew} stands at the {place} and waits for the {boat}.
In {weather} the {boat} keeps close to the {place}.
The {crew} {verb} {cargo} {time}.
There are {number} {cargo} on the deck of the {boat}.
Nobody at the {place} remembers such {weather}.
When the {boat} is full, the {crew} closes the gate and the others wait for the next one.
The {crew} writes the number of {cargo} into the book and signs it.
A {boat} without a {crew} goes nowhere, and a {crew} without a {boat} stays {feel}.
The {place} has room for {number} boats, no more.
After {weather} comes a {feel} day at the {place}.
It takes {number} minutes from the {place} to the {place}.
The bell rings {number} times, and the {boat} slows down.
A {part} is like a {boat}: it {does}, {why}.
The {host} gives each {part} a place, {why}.
Each {part} {does} before the next {part} arrives.
The {host} keeps {number} {parts} and lets the oldest go first.
A {size} {part} fits where a {size} one does not.
If the {part} is already in the cache, the {host} does not compute it again.
The {host} sends the {parts} across, and the other side confirms them.
When the pool is full, the {host} asks the client to come back later.
The {part} {does} while the {host} works on {number} other {parts}.
A cache remembers what was said, {why}.
The keys and values of a prompt fill {number} pages, and the last page is seldom full.
Prefill reads the whole prompt at once; decode writes one token after another.
The first token goes to the client at once, and the pages follow the {boat} across the water.
Between the two harbours there is only water, so every page is counted on both sides.
The {crew} says that a {size} {boat} and a {size} {part} have the same trouble: too little room.
If one {boat} sinks, another takes its {cargo} and goes on from the {place}.
The {feel} {crew} knows every stone of the {place}.
Lamps are lit along the {place} {time}, even in {weather}.
The timetable says {number}, but the {boat} comes when the tide allows.
The passengers talk about {weather} and about the price of {cargo}.
Ropes, chains and {cargo} lie on the {place} until the {boat} has room.
A good {crew} never hurries, yet the {boat} is never late.
"""

QUESTIONS = """\
Hello!
Who are you?
What does the {boat} carry?
When does the {boat} leave the {place}?
Tell me about the {place}.
What is a {part}?
Why does the {part} wait?
How many {cargo} are on the {boat}?
What does the {host} do?
Write a story about a {feel} {crew}.
What happens in {weather}?
Where is the {crew}?
"""

# Common words, only for the vocabulary: prompts in plain English should not break into letters.
COMMON = """\
about above across act add afraid again against age agree air all allow almost alone along also
always among amount animal another answer any appear apply area arm army around arrive art ask
attack baby back bad ball bank base basic be bear beat beautiful because become bed before begin
behind believe below beside best better between beyond big bird bit black blood blow blue body
bone book born both bottom box boy branch bread break bridge bright bring brother build burn
business busy but buy call can capital car card care carry case catch cause center central
certain chair chance change character charge check child choice choose church circle city claim
class clean clear climb clock close cloud coat cold collect college color come common company
compare complete computer condition connect consider contain continue control cook cool copy
corner correct cost could country course cover create cross crowd cry current cut dance danger
dark data daughter day dead deal death decide deep degree describe design desk detail develop
different difficult dinner direct discover discuss distance divide do doctor dog dollar door
doubt down draw dream dress drink drive drop dry during dust each ear earth east easy eat edge
education effect egg eight either electric else empty end enemy energy engine enjoy enough enter
equal escape even evening event ever every exact example except exercise expect experience
explain eye face fact fail fair fall false family famous far farm fast father favor fear feed
feeling field fight figure fill film final find fine finger finish fire first fish fit floor
flower fly follow food foot force foreign forest forget form forward found free fresh friend
from front fruit function funny future game garden gas general get gift girl give glass goal
gold good government grass great green ground group guess guide guitar gun hair half hall hand
happen happy hard hat hate have head health hear heart heat help here high hill history hit hold
hole home hope horse hospital hot hotel hour house how huge human hundred hurry husband ice idea
image imagine important improve include increase indeed industry inside instead interest into
iron island issue job join judge jump just keep key kill kind king kitchen knock know knowledge
lady land language last laugh law lead learn least leave left leg less lesson letter level
library life lift light like line list listen little live local long look lose love low luck
lunch machine magic main make man manage many map mark market master match material matter maybe
mean measure meat medicine meet member memory mention message metal method middle might million
mind minute mirror miss model modern moment money month moon morning mother mountain mouth move
movie much music must name nation natural near necessary neck need network never news next nice
night noise north nose nothing notice now number object ocean offer office often once only open
operate opinion orange order other our out outside over own page pain paint paper parent park
part particular party pass past pattern pay peace people perfect perhaps period person phone
picture piece plan plane plant plate play please pocket poem point police poor popular position
possible power practice prepare present press pretty price print private problem process produce
program promise proof protect proud prove provide public pull purpose push put python quality
question quick quiet quite race radio raise range rather reach read ready real reason receive
record red remember repeat reply report require rest result return rich ride right ring rise
river road rock roll roof room rose round row rule run safe salt same sand save say scale school
science score sea search season seat second secret see seem sell send sense sentence separate
serious serve set seven several shade shake shape share sharp she shine ship shirt shoe shoot
shop short should shoulder shout show shut sick side sign silver similar simple since sing
single sister sit situation skill skin sky sleep smell smile smoke smooth snow social soft
soldier some son song soon sorry sort sound south space speak special speed spell spend sport
spread spring square stage stand star start state station stay step stick still stone stop store
storm story straight strange street strong student study style subject success such sudden sugar
suggest summer supply support sure surface surprise sweet swim system take talk tall taste teach
team tell temperature ten test than thank that their them then theory there these they thick
thin thing think third this those though thought thousand thread through throw tie time tiny
together tomorrow tonight too tool top total touch toward town track trade train translate
travel tree trip trouble true trust truth try turn type under understand unit universe until up
upon use usual valley value various very view village visit voice wait walk wall want war warm
wash watch water wave way we weak wear weather week weight welcome well west what wheel where
whether which while white who whole whose why wide wife wild will win wind window wine winter
wish with within without woman wonder wood word work world worry would write wrong year yellow
yes yesterday yet you young your zero
"""


class Writer:
    """Fills templates with words, never the same word of a kind twice in a row."""

    def __init__(self, random: np.random.RandomState) -> None:
        self._random = random
        self._words = {kind: words.split("|") for kind, words in WORDS.items()}

    def line(self, templates: list[str]) -> str:
        template = templates[self._random.randint(len(templates))]
        return re.sub(r"\{(\w+)\}", lambda match: self._word(match[1]), template)

    def documents(self, num_documents: int) -> Iterator[str]:
        sentences, questions = SENTENCES.splitlines(), QUESTIONS.splitlines()
        for index in range(num_documents):
            text = " ".join(self.line(sentences) for _ in range(self._random.randint(2, 5)))
            if index % 2:
                question = self.line(questions)
                yield (
                    f"<|im_start|>user\n{question}<|im_end|>\n"
                    f"<|im_start|>assistant\n{text}<|im_end|>\n"
                )
            else:
                yield f"{text}<|endoftext|>"

    def _word(self, kind: str) -> str:
        words = self._words[kind]
        place = self._random.randint(len(words) - 1)
        words.append(words.pop(place))  # the one just used is last, and last is never drawn
        return words[-1]
