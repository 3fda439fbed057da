"""The world the prompts talk about: NimbusDB, a made-up cloud database, and its support chatbot.

Everything is text written for this project and stays byte for byte the same, because the prefix cache, the
embedded models and the accepted baselines all rest on it. The models of `benchmarks.nimbus` learn these policies,
so a question from `QUESTIONS` is one that the target can answer.
"""

from __future__ import annotations

from typing import Final

END: Final = "<|endoftext|>"
"""Closes an answer, and every document of the training text."""

PROMPT: Final = "Question: {question}\nAnswer:"
"""What a user's request looks like to the models; the answer follows after a space."""

CHAT: Final = PROMPT + " {answer}" + END
"""A finished exchange."""

POLICIES: Final[tuple[str, ...]] = (
    (
        "Password reset (Accounts team, revised 11 March 2024): To reset a password, open the login page, choose "
        "Forgot password, and follow the link we mail to you. The link works once and expires after 30 minutes."
    ),
    (
        "Double charges (Billing team, revised 21 January 2023): Two charges in one month mean that a plan was "
        "changed in the middle of a billing period. The second charge is the price difference, and invoices list it "
        "as a proration."
    ),
    (
        "Starter plan (Sales team, revised 27 September 2023): The Starter plan costs 19 dollars a month and includes"
        " 10 gigabytes of storage and one database. It has no read replicas."
    ),
    (
        "Growth plan (Sales team, revised 12 October 2023): The Growth plan costs 99 dollars a month and includes 250"
        " gigabytes of storage, five databases and two read replicas."
    ),
    (
        "Summit plan (Sales team, revised 17 April 2023): The Summit plan costs 640 dollars a month and includes 4 "
        "terabytes of storage, unlimited databases and a named support engineer."
    ),
    (
        "Free trial (Sales team, revised 3 July 2024): Every new account gets a free trial of 14 days on the Growth "
        "plan. No card is needed, and the trial stops by itself."
    ),
    (
        "Refunds (Billing team, revised 3 April 2023): Refunds are given for any charge reported within 45 days. The "
        "money reaches the original card in 5 to 7 business days."
    ),
    (
        "Invoices (Billing team, revised 18 July 2023): Invoices are sent on the third day of each month to the "
        "billing contact. Older invoices stay in the Billing tab for seven years."
    ),
    (
        "Failed payments (Billing team, revised 27 October 2023): When a payment fails, we try the card again after "
        "2, 5 and 9 days. After the third failure the account becomes read-only, but no data is deleted."
    ),
    (
        "Yearly discount (Billing team, revised 8 November 2025): Yearly billing gives a discount of 15 percent. It "
        "can be switched on at any time under Billing, then Cycle."
    ),
    (
        "Backups (Storage team, revised 19 January 2025): Backups run every 6 hours and are kept for 35 days. On the "
        "Starter plan they run once a day and are kept for 7 days."
    ),
    (
        "Point in time recovery (Storage team, revised 19 July 2023): Point in time recovery restores a database to "
        "any second of the last 72 hours. It creates a new database and leaves the old one untouched."
    ),
    (
        "Recycle bin (Storage team, revised 8 January 2025): A deleted database stays in the recycle bin for 10 days."
        " After that it is gone and even our engineers cannot bring it back."
    ),
    (
        "Regions (Platform team, revised 28 March 2024): Data is stored in the region chosen at creation. The regions"
        " are Dublin, Oregon, Osaka, Mumbai and Santiago."
    ),
    (
        "Moving regions (Platform team, revised 14 March 2025): Moving a database to another region takes about one "
        "hour for each 200 gigabytes. Writes are paused only for the last minute."
    ),
    (
        "Encryption (Security team, revised 4 October 2024): All data at rest is encrypted with AES-256. Summit "
        "customers may bring their own key through the Vault page."
    ),
    (
        "TLS (Security team, revised 18 November 2023): Connections require TLS 1.2 or newer. Plain connections on "
        "port 5400 are refused with error N-118."
    ),
    (
        "Ports (Platform team, revised 4 October 2025): The standard port is 5433 and the pooled port is 6433. Use "
        "the pooled port when an app opens more than 50 connections."
    ),
    (
        "Connection limits (Platform team, revised 21 April 2024): A Starter database accepts 40 connections, a "
        "Growth database 400 and a Summit database 4,000. Error N-204 means that the limit was reached."
    ),
    (
        "Long queries (Platform team, revised 4 September 2025): Queries are stopped after 90 seconds with error "
        "N-310. The limit can be raised to 30 minutes in the database settings."
    ),
    (
        "API limits (Platform team, revised 3 October 2023): The API allows 600 requests a minute for each token. "
        "Beyond that it answers with status 429 and a header that says when to retry."
    ),
    (
        "API tokens (Security team, revised 20 April 2024): API tokens are created under Account, then Tokens, and "
        "last 180 days. We show a token only once, so copy it at once."
    ),
    (
        "Two-step login (Security team, revised 22 September 2024): Two-step login works with an authenticator app or"
        " a hardware key. Text messages are not offered because numbers can be stolen."
    ),
    (
        "Locked accounts (Accounts team, revised 25 June 2024): After 8 wrong passwords an account is locked for 20 "
        "minutes. An owner can unlock a member earlier on the Members page."
    ),
    (
        "Roles (Accounts team, revised 19 August 2024): An organisation has owners, editors and viewers. Only owners "
        "can delete databases or see the bills."
    ),
    (
        "Invitations (Accounts team, revised 10 April 2023): To invite a colleague, open Members, choose Invite, and "
        "enter the mail address. Invitations expire after 4 days."
    ),
    (
        "Closing an account (Accounts team, revised 23 April 2023): An account can be closed by an owner under "
        "Account, then Close. Data is kept for 60 days in case you change your mind, then erased."
    ),
    (
        "Replica lag (Storage team, revised 19 May 2025): Read replicas lag behind the primary by less than 2 seconds"
        " in normal use. The Replicas page shows the lag and warns above 15 seconds."
    ),
    (
        "Extra storage (Storage team, revised 16 June 2025): Storage grows by itself in steps of 20 gigabytes. Each "
        "extra step costs 4 dollars a month and is never removed automatically."
    ),
    (
        "Maintenance (Platform team, revised 15 May 2025): Maintenance happens on Sundays between 02:00 and 04:00 in "
        "the time of the region. Owners get a mail 6 days before."
    ),
    (
        "Uptime (Platform team, revised 3 February 2025): Uptime is promised at 99.95 percent a month for Growth and "
        "Summit. Each missing tenth of a percent returns 10 percent of the monthly price as credit."
    ),
    (
        "Status page (Support team, revised 14 March 2024): The status of all regions is shown at "
        "status.nimbusdb.example. You can subscribe there by mail or by webhook."
    ),
    (
        "Chat hours (Support team, revised 5 August 2024): Chat support answers within 10 minutes on weekdays from "
        "07:00 to 21:00 Dublin time. Outside these hours please open a ticket."
    ),
    (
        "Ticket times (Support team, revised 2 November 2023): Tickets are answered within 24 hours for Starter, 4 "
        "hours for Growth and 30 minutes for Summit. Urgent tickets need the word outage in the title."
    ),
    (
        "Imports (Storage team, revised 25 September 2025): Data is imported with the command nimbus load, which "
        "reads CSV, JSON and Parquet files. Files above 50 gigabytes should be split first."
    ),
    (
        "Exports (Storage team, revised 26 June 2024): Exports are made on the Export page and arrive as Parquet "
        "files. The download link stays valid for 48 hours."
    ),
    (
        "Drivers (Developers team, revised 23 June 2025): Supported client languages are Python, Go, Java, Rust and "
        "TypeScript. The drivers are open source and follow the server version."
    ),
    (
        "Server versions (Developers team, revised 16 October 2024): The current server version is Cirrus 8. Cirrus 6"
        " is supported until March, and upgrades take about 12 minutes."
    ),
    (
        "Audit logs (Security team, revised 3 February 2024): Audit logs record every login and every change of "
        "rights. They are kept for 400 days and only Summit customers can stream them."
    ),
    (
        "Campus (Sales team, revised 16 December 2025): Students and teachers get the Starter plan free for one year."
        " They apply with a school mail address on the Campus page."
    ),
)
"""The forty support policies, in the order of the system prompt."""

OPENING: Final = (
    "You are Stratus, the support assistant of NimbusDB, a managed cloud database. Answer the customer briefly and "
    "politely, use only the numbered policies below, and never guess a price or a date."
)


def system_text(policies: tuple[str, ...]) -> str:
    """The system prompt over these policies: the opening, then one numbered policy a line."""
    return "\n".join((OPENING, *(f"{number}. {policy}" for number, policy in enumerate(policies, start=1))))


SYSTEM_TEXT: Final = system_text(POLICIES)
"""The system prompt that every request of the chatbot starts with."""

QUESTIONS: Final[tuple[tuple[str, str], ...]] = (
    (
        "How do I reset my password?",
        (
            "Open the login page, choose Forgot password, and follow the link in the mail. "
            "The link works once and expires after 30 minutes."
        ),
    ),
    (
        "Why was I charged twice this month?",
        (
            "Your plan was changed in the middle of the billing period. The second "
            "charge is the price difference and is listed as a proration on the invoice."
        ),
    ),
    (
        "What does the Starter plan cost?",
        ("The Starter plan costs 19 dollars a month and includes 10 gigabytes of storage and one database."),
    ),
    (
        "Does the Starter plan have read replicas?",
        ("No, the Starter plan has no read replicas. The Growth plan includes two."),
    ),
    (
        "What do I get with the Growth plan?",
        ("For 99 dollars a month you get 250 gigabytes of storage, five databases and two read replicas."),
    ),
    (
        "How much is the Summit plan?",
        (
            "The Summit plan costs 640 dollars a month, with 4 terabytes of storage, "
            "unlimited databases and a named support engineer."
        ),
    ),
    (
        "How long is the free trial?",
        ("The free trial lasts 14 days on the Growth plan. You need no card, and it stops by itself."),
    ),
    (
        "Can I get my money back?",
        (
            "Yes, we refund any charge that you report within 45 days. The money reaches your "
            "card in 5 to 7 business days."
        ),
    ),
    (
        "When will my invoice arrive?",
        "Invoices are sent to the billing contact on the third day of each month.",
    ),
    ("Where can I find old invoices?", "Open the Billing tab. Invoices stay there for seven years."),
    (
        "What happens when my payment fails?",
        (
            "We try the card again after 2, 5 and 9 days. After the third failure "
            "the account becomes read-only, but no data is deleted."
        ),
    ),
    (
        "Is there a discount for paying yearly?",
        ("Yes, yearly billing saves 15 percent. Switch it on under Billing, then Cycle."),
    ),
    (
        "How often are backups made?",
        (
            "Backups run every 6 hours and are kept for 35 days. On the Starter plan they "
            "run once a day and are kept for 7 days."
        ),
    ),
    (
        "Can I restore my data to an earlier moment?",
        (
            "Yes, point in time recovery reaches any second of the last 72 "
            "hours. It creates a new database and leaves the old one untouched."
        ),
    ),
    (
        "I deleted a database by mistake, can you help?",
        ("Look in the recycle bin, where a deleted database stays for 10 days. After that nobody can bring it back."),
    ),
    ("Which regions do you offer?", "The regions are Dublin, Oregon, Osaka, Mumbai and Santiago."),
    (
        "How do I move my database to another region?",
        ("A move takes about one hour for each 200 gigabytes. Writes are paused only for the last minute."),
    ),
    (
        "Is my data encrypted?",
        (
            "Yes, all data at rest is encrypted with AES-256. Summit customers may bring their own "
            "key through the Vault page."
        ),
    ),
    (
        "Which TLS version do I need?",
        "You need TLS 1.2 or newer. Plain connections are refused with error N-118.",
    ),
    (
        "What does error N-118 mean?",
        ("Error N-118 means that a plain connection on port 5400 was refused. Connect with TLS 1.2 or newer."),
    ),
    (
        "Which port should my app use?",
        ("Use port 5433, or the pooled port 6433 when your app opens more than 50 connections."),
    ),
    (
        "What does error N-204 mean?",
        (
            "Error N-204 means that the connection limit was reached: 40 for Starter, 400 "
            "for Growth and 4,000 for Summit."
        ),
    ),
    (
        "How many connections can I open?",
        ("A Starter database accepts 40 connections, a Growth database 400 and a Summit database 4,000."),
    ),
    (
        "Why was my query stopped?",
        (
            "Queries are stopped after 90 seconds with error N-310. You can raise the limit to "
            "30 minutes in the database settings."
        ),
    ),
    (
        "How many API requests can I make?",
        ("The API allows 600 requests a minute for each token. Beyond that it answers with status 429."),
    ),
    (
        "Why do I get status 429?",
        ("You sent more than 600 requests in a minute with one token. A header says when to retry."),
    ),
    (
        "How do I create an API token?",
        "Open Account, then Tokens. We show a token only once, so copy it at once.",
    ),
    ("How long does an API token last?", "An API token lasts 180 days."),
    (
        "Can I use two-step login by text message?",
        (
            "No, text messages are not offered because numbers can be stolen. "
            "Use an authenticator app or a hardware key."
        ),
    ),
    (
        "Why is my account locked?",
        (
            "An account is locked for 20 minutes after 8 wrong passwords. An owner can unlock "
            "you earlier on the Members page."
        ),
    ),
    ("Who can delete a database?", "Only owners can delete databases. Editors and viewers cannot."),
    (
        "How do I invite a colleague?",
        ("Open Members, choose Invite, and enter the mail address. The invitation expires after 4 days."),
    ),
    (
        "How do I close my account?",
        ("An owner can close it under Account, then Close. Data is kept for 60 days and then erased."),
    ),
    (
        "Why is my read replica behind?",
        ("A lag of less than 2 seconds is normal. The Replicas page shows the lag and warns above 15 seconds."),
    ),
    (
        "What does extra storage cost?",
        ("Storage grows in steps of 20 gigabytes, and each extra step costs 4 dollars a month."),
    ),
    (
        "When is the maintenance window?",
        (
            "Maintenance happens on Sundays between 02:00 and 04:00 in the time of the "
            "region. Owners get a mail 6 days before."
        ),
    ),
    (
        "What uptime do you promise?",
        (
            "We promise 99.95 percent a month for Growth and Summit. Each missing tenth of a "
            "percent returns 10 percent of the monthly price as credit."
        ),
    ),
    (
        "Is there an outage right now?",
        (
            "Please look at status.nimbusdb.example, which shows all regions. You can "
            "subscribe there by mail or by webhook."
        ),
    ),
    (
        "When can I chat with support?",
        ("Chat support answers within 10 minutes on weekdays from 07:00 to 21:00 Dublin time."),
    ),
    (
        "How fast are tickets answered?",
        ("Tickets are answered within 24 hours for Starter, 4 hours for Growth and 30 minutes for Summit."),
    ),
    (
        "How do I import a CSV file?",
        ("Use the command nimbus load, which reads CSV, JSON and Parquet files. Split files above 50 gigabytes first."),
    ),
    (
        "How can I export my data?",
        ("Go to the Export page. You get Parquet files, and the download link stays valid for 48 hours."),
    ),
    (
        "Which programming languages are supported?",
        ("We have drivers for Python, Go, Java, Rust and TypeScript. They are open source."),
    ),
    (
        "Which server version is current?",
        ("The current version is Cirrus 8. Cirrus 6 is supported until March, and an upgrade takes about 12 minutes."),
    ),
    (
        "How long are audit logs kept?",
        "Audit logs are kept for 400 days. Only Summit customers can stream them.",
    ),
    (
        "Is there a plan for students?",
        (
            "Yes, students and teachers get the Starter plan free for one year. Apply with "
            "a school mail address on the Campus page."
        ),
    ),
)
"""Questions that the policies answer, each with the answer that the target was taught."""

COUNTING_PROMPT: Final = "Count from 1 to 50: 1, 2, 3,"
"""Predictable text: one right continuation."""

OPEN_PROMPT: Final = "Ticket from a customer on the Growth plan. Subject:"
"""Open text: many fair continuations."""
