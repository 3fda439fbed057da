"""The text the embedded pair learns from, generated from a seed.

Three kinds of text serve three needs. Support answers repeat the policies, so that the target can be right or wrong.
Counting and lists have one right continuation, so that predictable text exists. Tickets and notes are drawn from many
names, numbers and phrases, so that no model of any size can foresee them, and a draft sometimes disagrees with its
target.

The split is by seed: held-out documents are other draws from the same templates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.nimbusdb import CHAT, END, POLICIES, QUESTIONS, SYSTEM_TEXT, system_text

TRAINING_SEED: Final = 20_240
HELD_OUT_SEED: Final = 77_001

REPHRASED: Final[tuple[tuple[str, ...], ...]] = (
    ("I forgot my password, what now?", "How can I set a new password?"),
    ("Why are there two charges on my card?", "I see two payments this month, why?"),
    ("How much is Starter?", "What is included in the Starter plan?"),
    ("Can I add a replica on Starter?",),
    ("What is in the Growth plan?", "How much does Growth cost?"),
    ("What does Summit cost?", "What do I get with Summit?"),
    ("Do you have a free trial?", "Can I try NimbusDB for free?"),
    ("How do I get a refund?", "Do you give refunds?"),
    ("When do you send invoices?",),
    ("How do I see the invoice from last year?", "Where are my invoices?"),
    ("My card was declined, what happens now?", "Will I lose data if a payment fails?"),
    ("How do I switch to yearly billing?", "Can I save money with a yearly plan?"),
    ("How long do you keep backups?", "When do backups run?"),
    ("How does point in time recovery work?", "Can I go back to yesterday's data?"),
    ("How do I get a deleted database back?", "Is there a recycle bin?"),
    ("Where is my data stored?", "In which regions can I create a database?"),
    ("How long does it take to change the region?", "Can I move my data to Osaka?"),
    ("How do you encrypt my data?", "Can I bring my own encryption key?"),
    ("Do you require TLS?", "Can I connect without TLS?"),
    ("I get error N-118, why?", "Why do I see N-118?"),
    ("What is the pooled port?", "Which port is the standard port?"),
    ("I get error N-204, why?", "Why do I see N-204?"),
    ("What is the connection limit?", "How many clients can connect at once?"),
    ("I get error N-310, why?", "Can I raise the query limit?"),
    ("What is the API limit?", "Is the API rate limited?"),
    ("What does status 429 mean?",),
    ("Where do I find my API tokens?", "Can I see my API token again?"),
    ("When does my API token expire?",),
    ("How do I turn on two-step login?", "Do you send login codes by text message?"),
    ("I typed a wrong password too often, what now?", "How can I unlock my account?"),
    ("Can an editor delete a database?", "Who can see the bills?"),
    ("How do I add a new member?", "How long is an invitation valid?"),
    ("How can I delete my account?", "What happens to my data when I leave?"),
    ("How much lag is normal?", "My replica shows old data, why?"),
    ("How does storage grow?", "What happens when my disk is full?"),
    ("When do you do maintenance?", "How early do you announce maintenance?"),
    ("Do you have an uptime promise?", "What do I get back after downtime?"),
    ("Where can I see the status?", "Is NimbusDB down?"),
    ("How can I reach a person?", "What are your support hours?"),
    ("How long do I wait for a reply?", "When will you answer my ticket?"),
    ("How do I load Parquet files?", "What is the nimbus load command?"),
    ("How do I download my data?", "In which format are exports?"),
    ("Do you have a Python driver?", "Can I use NimbusDB from Rust?"),
    ("When does Cirrus 6 end?", "How long does an upgrade take?"),
    ("Can I stream the audit logs?", "Where do you record logins?"),
    ("Do students pay?", "I am a teacher, is there a discount?"),
)
"""Other ways to ask each of `QUESTIONS`, in the same order."""

GREETINGS: Final = (
    "Hello.",
    "Hi there.",
    "Good morning.",
    "Quick question.",
    "I am new here.",
    "Sorry to bother you.",
)
OPENERS: Final = ("Thanks for asking.", "Good question.", "Happy to help.", "I am sorry about that.")
CLOSERS: Final = (
    "Is there anything else?",
    "Tell us if that does not help.",
    "You can also open a ticket.",
    "Have a good day.",
)
FIRST_NAMES: Final = (
    "Amara", "Bruno", "Chidi", "Dalia", "Emre", "Freya", "Goran", "Hana", "Ines", "Jonas", "Keiko",
    "Lars", "Mira", "Nuno", "Olga", "Pavel", "Quinn", "Rosa", "Samir", "Tessa", "Umar", "Vera", "Wanda",
    "Ximena", "Yusuf", "Zora", "Alba", "Boris", "Celia", "Dario", "Edith", "Farid", "Greta", "Hugo",
    "Ilse", "Joao", "Kofi", "Leila", "Marek", "Nadia",
)  # fmt: skip
LAST_NAMES: Final = (
    "Abara", "Bergen", "Castro", "Dunne", "Eklund", "Ferrari", "Gupta", "Haas", "Ivanov", "Jansen",
    "Kimura", "Lopez", "Moreau", "Novak", "Okafor", "Petit", "Quist", "Rao", "Silva", "Tanaka", "Ueda",
    "Varga", "Weber", "Xu", "Yilmaz", "Zeman", "Arslan", "Brandt", "Costa", "Demir",
)  # fmt: skip
COMPANIES: Final = (
    "Acorn", "Bluefin", "Copperline", "Driftwood", "Emberly", "Foxglove", "Granite", "Harborlight",
    "Inkwell", "Juniper", "Kestrel", "Lanternfish", "Mapletree", "Northwind", "Orchard", "Pinecone",
    "Quarry", "Riverbend", "Saltmarsh", "Thistle", "Umbra", "Vineyard", "Willowbrook", "Yarrow", "Zephyr",
)  # fmt: skip
PLANS: Final = ("Starter", "Growth", "Summit")
REGIONS: Final = ("Dublin", "Oregon", "Osaka", "Mumbai", "Santiago")
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
ERRORS: Final = (
    "error N-118",
    "error N-204",
    "error N-310",
    "error N-427",
    "error N-502",
    "status 429",
    "status 503",
)
THINGS: Final = (
    "nightly import", "checkout service", "reporting job", "main database", "read replica", "login page", "mobile app",
    "billing export", "search index", "staging cluster", "customer table", "order queue", "backup job", "web shop",
    "data pipeline", "analytics team", "payment worker", "test database", "event log", "price list",
)  # fmt: skip
TROUBLES: Final = (
    "is slower than before", "stops after a few minutes", "shows {error}", "loses its connection",
    "returns old rows", "waits for a lock", "has grown by {number} gigabytes", "fails on every second run",
    "takes {number} minutes instead of {digit}", "answers with {error}", "is stuck at {number} percent",
    "uses {number} connections", "does not start", "writes the same row twice", "cannot reach the {region} region",
)  # fmt: skip
ATTEMPTS: Final = (
    "restarted the app", "created a new token", "raised the limit to {number}", "read the status page",
    "moved the job to {day} night", "upgraded the {language} driver", "asked our {region} office", "added an index",
    "changed the pooled port", "removed {number} old tables", "cleared the cache", "waited for {digit} hours",
)  # fmt: skip
RESULTS: Final = (
    "nothing changed", "it got worse", "it helped for a day", "the error came back on {day}", "the log stays empty",
    "only {number} rows were copied", "the lag is now {digit} seconds", "our customers still complain",
    "the bill went up by {number} dollars", "the second node failed too",
)  # fmt: skip
WISHES: Final = (
    "Could you look at the logs of {day}?", "Please tell us what to do before {day}.", "Can you call me on {day}?",
    "We need {number} more connections.", "Should we move to the {plan} plan?", "Please check the {region} region.",
    "How long will the repair take?", "Can we get a credit of {number} dollars?", "Please close ticket {ticket}.",
    "Is {company} also affected?", "What would you do in our place?", "Please write to {name} instead.",
)  # fmt: skip
LANGUAGES: Final = ("Python", "Go", "Java", "Rust", "TypeScript")
OBJECTS: Final = (
    "apples", "bolts", "candles", "drums", "envelopes", "feathers", "gloves", "hammers", "inks", "jars",
    "kites", "lamps", "mugs", "nails", "oars", "pencils", "quilts", "ropes", "spoons", "tiles",
    "umbrellas", "vases", "wheels", "yarns", "zippers",
)  # fmt: skip


def fill(rng: random.Random, template: str) -> str:
    """The template with a fresh draw for each entity that it names."""
    return template.format(
        error=rng.choice(ERRORS),
        number=rng.randrange(11, 100),
        digit=rng.randrange(2, 10),
        day=rng.choice(DAYS),
        region=rng.choice(REGIONS),
        language=rng.choice(LANGUAGES),
        plan=rng.choice(PLANS),
        company=rng.choice(COMPANIES),
        name=rng.choice(FIRST_NAMES),
        ticket=rng.randrange(1000, 10_000),
        thing=rng.choice(THINGS),
    )


def date(rng: random.Random) -> str:
    return f"{rng.randrange(1, 29)} {rng.choice(MONTHS)}"


def question_and_answer(rng: random.Random) -> tuple[str, str]:
    """A question in one of its wordings and its answer, now and then wrapped in small talk."""
    number = rng.randrange(len(QUESTIONS))
    question, answer = QUESTIONS[number]
    if rng.random() < 0.5:
        question = rng.choice(REPHRASED[number])
    if rng.random() < 0.2:
        question = f"{rng.choice(GREETINGS)} {question}"
    if rng.random() < 0.1:
        answer = f"{rng.choice(OPENERS)} {answer}"
    if rng.random() < 0.2:
        answer = f"{answer} {rng.choice(CLOSERS)}"
    return question, answer


def exchange(rng: random.Random) -> str:
    question, answer = question_and_answer(rng)
    return CHAT.format(question=question, answer=answer).removesuffix(END)


def conversation(rng: random.Random) -> str:
    """Two to four exchanges, the first of them sometimes with a name that returns at the end."""
    turns = [exchange(rng) for _ in range(rng.randrange(2, 5))]
    if rng.random() < 0.5:
        name = rng.choice(FIRST_NAMES)
        turns.insert(
            0,
            f"Question: Hello, this is {name} from {rng.choice(COMPANIES)}.\nAnswer: Hello {name}, how can I help?",
        )
        turns.append(f"Question: Thank you, goodbye.\nAnswer: Goodbye {name}, and have a good {rng.choice(DAYS)}.")
    return "\n".join(turns)


def story(rng: random.Random, sentences: int) -> str:
    """A customer's tale, which nobody can foresee."""
    tale = []
    for _ in range(sentences):
        shape = rng.randrange(6)
        if shape == 0:
            tale.append(f"Since {rng.choice(DAYS)} our {rng.choice(THINGS)} {fill(rng, rng.choice(TROUBLES))}.")
        elif shape == 1:
            tale.append(f"We {fill(rng, rng.choice(ATTEMPTS))}, but {fill(rng, rng.choice(RESULTS))}.")
        elif shape == 2:
            tale.append(fill(rng, rng.choice(WISHES)))
        elif shape == 3:
            tale.append(
                f"On {date(rng)} the {rng.choice(THINGS)} of {rng.choice(COMPANIES)} {fill(rng, rng.choice(TROUBLES))}."
            )
        elif shape == 4:
            tale.append(
                f"{rng.choice(FIRST_NAMES)} {fill(rng, rng.choice(ATTEMPTS))} and {fill(rng, rng.choice(ATTEMPTS))}."
            )
        else:
            tale.append(fill(rng, "Our {thing} runs on {language} in {region} with {number} workers."))
    return " ".join(tale)


REPLY_TIMES: Final = {"Starter": "24 hours", "Growth": "4 hours", "Summit": "30 minutes"}
CONNECTIONS: Final = {"Starter": "40", "Growth": "400", "Summit": "4,000"}


def ticket(rng: random.Random) -> str:
    """A ticket and its reply, which takes up the customer's name, thing, region and plan from far above."""
    first, number, plan = rng.choice(FIRST_NAMES), rng.randrange(1000, 10_000), rng.choice(PLANS)
    thing, region, trouble = rng.choice(THINGS), rng.choice(REGIONS), fill(rng, rng.choice(TROUBLES))
    if rng.random() < 0.5:
        customer = f"{first} {rng.choice(LAST_NAMES)} of {rng.choice(COMPANIES)}"
        head = f"Ticket {number} from {customer} on the {plan} plan. Subject: {thing} {trouble}."
    else:
        head = f"Ticket from a customer on the {plan} plan. Subject: {thing} {trouble}.\nTicket {number} in {region}."
    body = f"{story(rng, rng.randrange(2, 6))} Our region is {region}. Regards, {first}"
    parts = [f"Dear {first}, thank you for ticket {number}."]
    if rng.random() < 0.6:
        parts.append(f"We are sorry that your {thing} {trouble}.")
    if rng.random() < 0.5:
        parts.append(story(rng, 1))
    if rng.random() < 0.5:
        parts.append(f"As a customer on the {plan} plan you hear from us within {REPLY_TIMES[plan]}.")
    if rng.random() < 0.3:
        parts.append(f"Your {plan} database accepts {CONNECTIONS[plan]} connections.")
    if rng.random() < 0.5:
        parts.append(question_and_answer(rng)[1])
    if rng.random() < 0.4:
        parts.append(f"We will watch the {thing} in {region} until {rng.choice(DAYS)}.")
    return f"{head}\n{body}\nReply: {' '.join(parts)} {rng.choice(FIRST_NAMES)}, NimbusDB support"


def note(rng: random.Random) -> str:
    """An entry of the support team's diary."""
    entries = [
        f"{rng.randrange(24):02}:{rng.randrange(60):02} {rng.choice(REGIONS)}: {story(rng, 1)}"
        for _ in range(rng.randrange(2, 7))
    ]
    return "\n".join((f"Notes of {rng.choice(DAYS)}, {date(rng)}", *entries))


def quote(rng: random.Random) -> str:
    number = rng.randrange(len(POLICIES))
    return f"Policy {number + 1}. {POLICIES[number]}"


def counting(rng: random.Random) -> str:
    """Numbers in order: mostly by ones from one, the most predictable text there is."""
    step = 1 if rng.random() < 0.75 else rng.choice((2, 3, 5, 10))
    start = 1 if rng.random() < 0.6 else rng.randrange(0, 90)
    stop = start + step * rng.randrange(9, 60 if step == 1 else 20)
    numbers = list(range(start, stop + 1, step))
    task = f"Count from {start} to {stop}" if step == 1 else f"Count from {start} to {stop} in steps of {step}"
    if rng.random() < 0.15:
        numbers.reverse()
        task = f"Count down from {stop} to {start}" + ("" if step == 1 else f" in steps of {step}")
    listed = ", ".join(map(str, numbers))
    return f"{task}: {listed}." if rng.random() < 0.7 else f"Question: {task}.\nAnswer: {listed}."


def listing(rng: random.Random) -> str:
    """A list in a known order, or a numbered list of things in any order."""
    shape = rng.randrange(4)
    if shape == 0:
        first = rng.randrange(7)
        return "The days in order: " + ", ".join(DAYS[(first + day) % 7] for day in range(rng.randrange(7, 20))) + "."
    if shape == 1:
        first = rng.randrange(12)
        return "The months in order: " + ", ".join(MONTHS[(first + month) % 12] for month in range(12)) + "."
    if shape == 2:
        return "The alphabet: " + ", ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ") + "."
    things = rng.sample(OBJECTS, rng.randrange(5, 16))
    listed = "A numbered list:\n" + "\n".join(f"{number}. {thing}" for number, thing in enumerate(things, start=1))
    draw = rng.random()
    if draw < 0.3:
        return f"{listed}\nIn reverse: {', '.join(reversed(things))}."
    return listed if draw < 0.5 else f"{listed}\nThe same in one line: {', '.join(things)}."


def briefed_conversation(rng: random.Random) -> str:
    """Exchanges below a short system prompt of a few policies in any order."""
    policies = tuple(rng.sample(POLICIES, rng.randrange(2, 6)))
    return system_text(policies) + "\n\n" + exchange(rng)


def fully_briefed_conversation(rng: random.Random) -> str:
    """Exchanges below the whole system prompt, or as much of it as a caller might have kept."""
    draw = rng.random()
    if draw < 0.25:
        system = SYSTEM_TEXT
    elif draw < 0.85:
        system = SYSTEM_TEXT[: rng.randrange(len(SYSTEM_TEXT) // 3, len(SYSTEM_TEXT))]
    else:
        system = system_text(tuple(rng.sample(POLICIES, rng.randrange(10, 36))))
    gap = rng.choice(("\n\n", "\n\n", "\n", " ", ""))
    if rng.random() < 0.15:
        return system + gap + counting(rng)
    return system + gap + "\n".join(exchange(rng) for _ in range(rng.randrange(1, 7)))


Kind = Callable[[random.Random], str]
Documents = Callable[[int], Iterator[str]]
SHORT: Final[dict[Kind, int]] = {
    exchange: 28,
    conversation: 8,
    ticket: 26,
    note: 12,
    quote: 6,
    counting: 10,
    listing: 6,
    briefed_conversation: 4,
}
"""How many of a hundred short documents are of each kind; for windows of a few hundred tokens."""


def short_documents(seed: int) -> Iterator[str]:
    """Endless documents of all short kinds, each closed by `END`."""
    rng = random.Random(seed)
    kinds, weights = tuple(SHORT), tuple(SHORT.values())
    while True:
        yield rng.choices(kinds, weights)[0](rng) + END


def documents_of(kind: Kind, seed: int) -> Iterator[str]:
    """Endless documents of one kind, each closed by `END`."""
    rng = random.Random(seed)
    while True:
        yield kind(rng) + END


def long_documents(seed: int) -> Iterator[str]:
    """Endless documents with a long system prompt in front."""
    return documents_of(fully_briefed_conversation, seed)


def windows(documents: Iterator[str], encode: Callable[[str], list[int]], length: int, count: int) -> list[list[int]]:
    """`count` rows of `length` ids. Each row starts with a whole document, as a prompt does, and cuts its last one."""
    rows = []
    for _ in range(count):
        row: list[int] = []
        while len(row) < length:
            row += encode(next(documents))
        rows.append(row[:length])
    return rows
