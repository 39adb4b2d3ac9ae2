"""The attacks: what each is, who makes it, and what about it is by design."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """An attack, or who is first in a run, by the word that `strangers.WORKS`, `liar.HABITS` or `lying_node` know
    it by."""

    word: str
    sentence: str
    member: bool = True  # it is made by a member; else by somebody with the addresses
    note: str = ""  # why it costs what it costs, where that is more than nothing


JOINS = "its token is used up by its first join; the others are refused, and count as a stranger's."
REFUSED = "the first attempt of a round names it, the next asks it once more, the third goes on without it."
QUOTA = (
    "these reports and those of its part have one quota and one stream, so that its part comes late. The first "
    "that is refused has it owe the others time: in 20 rounds it owns nothing and nobody waits for it for longer "
    "than for a moment, and in as many more where it goes on."
)
STAGE = (
    "a stage of an exchange has ten times what it is to take, as far as exchanges usually take so long, three "
    "times what a slow link adds to that, and a moment more, as links stand still and processes pause: as long "
    "as a round, but from 5 s to 30 s. So much it costs once: less than a tenth of rounds of six minutes or "
    "more whose exchanges are short. With a moment of half a round or less, members that hold others up have "
    "honest ones struck for it. Then it owes the others that time: for as many rounds as it was tenths of one, "
    "20 at most, it owns nothing and nobody waits for it. Its work is taken as ever."
)
ACCUSED = (
    "each of the first two rounds takes two attempts more, which is milliseconds. Then both own no chunks for 20 "
    "rounds, as nobody knows which of them it is, and there is no path between them any more that could break."
)
BARRED = (
    "a ban is its key's, and revokes its invite: session and key are refused for good, and other keys with "
    "that invite. Joins of a key are 20, then one a second, and calls of an address that prove nothing 50, "
    "then 5 a second: at more nobody looks."
)
MOVES = (
    "it joins anew for each address, which the coordinator takes as it is told in a run on private addresses, "
    "as this one is; a public run takes and dials no private ones (security.private_addresses). Members dial "
    "it in exchanges that need a path to it, a few times in each. Who is dialled has to greet as a data plane, "
    "and where there is TLS to show the certificate whose pin the member told, before it is sent anything: a "
    "hello, signed for that member alone, at which another one closes the connection. To the round it is as "
    "one that cannot be reached, two attempts more; or, where somebody else's data plane answers, as one that "
    "is late, once. All paths that break have one end: that is charged, and not who is at the address. It owns "
    "nothing, then its work is not taken."
)
OVERDUE = (
    "once another has made it, who takes three times as long as that one, and more than 10 s and one for each ten "
    "million parameters, is not waited "
    "for: a third makes it, too, and the run begins with what two have made alike."
)
OTHERS = (
    "others make it, too, before they take anything from it; the run begins with what two have made alike, and "
    "who made another one is charged, and fetches that."
)
NO_MODEL = (
    "the config says what the model is: another one is refused when it is told, before anybody makes room for it."
)
RETURNS = (
    "one chunk of 1e30 sealed and, when it is banned for that, 20 joins a second: under its session, by its "
    "key, by other keys with its invite for 20 nodes"
)
NOTHING = Attack("nothing", "nobody does anything", False)
STRANGERS = (
    NOTHING,
    Attack("health", "1,000 streams of health a second, from members' own address", False),
    Attack("idle", "1,100 connections at each port that say nothing, from 11 addresses", False),
    Attack("trickle", "128 connections at each port that say a byte a second", False),
    Attack("knocks", "840 connections a second at a data port", False),
    Attack("replays", "a recorded hello at a data port, 50 times a second", False),
    Attack("joins", "200 joins a second by one key that has a token", False, JOINS),
)
MEMBERS = (
    Attack("flip:10", "ten times its delta, the other way"),
    Attack("noise:1e4", "noise, 10,000 times as long as its delta"),
    Attack("short norm", "ten times its delta, the other way, said to be as long as its delta"),
    Attack("zeros", "zeros in place of its delta"),
    Attack("replay", "its first delta in every round"),
    Attack("flip:1e29", "its delta times 1e29, the other way"),
    Attack("nan", "bytes that decode to NaN", note=REFUSED),
    Attack("bomb", "a zstandard bomb of 64 MiB in place of each chunk", note=REFUSED),
    Attack("seal:1", "noise sealed in every chunk that it owns"),
    Attack("vast", "one chunk of 1e30 sealed"),
    Attack("weight", "8 times the samples"),
    Attack("rate", "a told rate of 1e15 bytes a second"),
    Attack("orphans", "500 reports of orphans a second", note=QUOTA),
    Attack("mended", "500 reports a second that its memory was mended", note=QUOTA),
    Attack("names", "links under invented names at a data port, by who knows the run's key"),
    Attack("poses", "links under other members' names at a data port, by who knows the run's key"),
    Attack("never seals", "it never seals what it owns", note=STAGE),
    Attack("never holds", "it never says that it holds the sealed chunks", note=STAGE),
    Attack("other bytes", "it says in every exchange that it holds other bytes than were sealed"),
    Attack("other state", "it says after every round that it has another state"),
    Attack("returns", RETURNS, note=BARRED),
    Attack("elsewhere", "others' addresses told for its data plane, one after the other", note=MOVES),
    Attack("accuses", "it says in every exchange that the same member is unreachable", note=ACCUSED),
)
ATTACKS = (*STRANGERS, NOTHING, *MEMBERS, NOTHING)  # in the order in which they are made
# Those that cost single rounds: what they cost where rounds are long is measured, too.
SINGLE_ROUNDS = ("orphans", "mended", "poses", "never seals", "never holds", "elsewhere")
HONEST_FIRST = Attack("honest", "one that is as honest as they are")
BEGINNINGS = (
    HONEST_FIRST,
    Attack("vast model", "one that says that the model has 2^42 parameters", note=NO_MODEL),
    Attack("counts", "one that says for ever that it makes progress with state 0", note=OVERDUE),
    Attack("makes up", "one that makes state 0 up, and has it to give", note=OTHERS),
)
