"""Search over a small text as a tool, for GRPO Studio and for TRL. The town in it is invented, so no model knows it.

Questions about it, with their answers, are in `search.jsonl`.
"""

import math
import re
from collections import Counter

_TEXT = """
Marrowby is a harbour town of 4,300 people on the east bank of the river Sele, where it meets the Grey Sea.
Marrowby was founded in 1387 by Isolde Fenn, a salt trader, who built the first jetty of oak.
The lighthouse of Marrowby stands on Gannet Point. It is 41 metres high and was lit for the first time in 1822.
The keeper of the lighthouse is Tomas Ode. His family has kept it for five generations.
The ferry Petrel crosses the Sele every 20 minutes from six in the morning to eleven at night. A crossing costs 3 crowns.
The ferry Petrel was built in 1961 in the yard of Lund and Daughters, which also built the tug Bramble.
The market of Marrowby is held on Thursdays on Salt Square. It is known for smoked eel and for blue cheese from Aldern.
Aldern is a village nine kilometres north of Marrowby. Its 210 people keep goats and make a blue cheese.
The school of Marrowby has 380 pupils. Its head is Wilhelmina Strand, who taught physics before.
The library of Marrowby is in the old customs house. It has 27,000 books and is closed on Mondays.
The great flood of 1904 destroyed the Old Bridge. The New Bridge, 212 metres long, was opened in 1911.
The architect of the New Bridge was Ansel Brightwater, who also designed the town hall.
The town hall has a clock of copper that runs four minutes fast on purpose, so that nobody misses the ferry.
The mayor of Marrowby is Ruth Calloway. She was elected in 2019 and is a boat builder by trade.
The football club Marrowby Rovers plays in green and white. Its ground, the Ropewalk, has 1,900 seats.
The railway came to Marrowby in 1868. The journey to the capital, Vessen, takes two hours and ten minutes.
The hospital of Marrowby has 64 beds. Its founder was the doctor Henrike Moll.
The highest hill near Marrowby is the Cask, at 346 metres. From the top one sees the island of Little Skerry.
Little Skerry is an island with 12 people and about 9,000 puffins. The post boat goes there on Tuesdays and Fridays.
The painter Odile Marsh was born in Marrowby in 1853. Her picture The Net Menders hangs in the town hall.
The bakery Crumb and Co. has made the salt bun, a roll with caraway, since 1790.
The wind farm on Heron Bank has 18 turbines and gives power to 15,000 homes.
The festival of lanterns is on the last Saturday of October. It remembers the sailors of the schooner Hesper.
The schooner Hesper was lost in a storm in 1877 with a crew of eleven.
"""
_PASSAGES = _TEXT.strip().splitlines()


def _words(text: str) -> list[str]:
    return [word.removesuffix("s") for word in re.findall(r"\w+", text.lower())]


_COUNTS = [Counter(_words(passage)) for passage in _PASSAGES]
_PASSAGES_WITH = Counter(word for counts in _COUNTS for word in counts)


def search(query: str, results: int = 2) -> str:
    """Search a text about the town of Marrowby.

    Args:
        query: Words to look for.
        results: How many passages to return, 1 to 5.

    Returns:
        The passages that fit best, one a line.
    """
    weights = {w: math.log(1 + len(_PASSAGES) / _PASSAGES_WITH[w]) for w in set(_words(query)) if w in _PASSAGES_WITH}
    scores = [sum(weights[word] for word in weights if word in counts) for counts in _COUNTS]
    best = sorted(range(len(_PASSAGES)), key=lambda i: -scores[i])[: max(1, min(results, 5))]
    return "\n".join(_PASSAGES[i] for i in best if scores[i]) or "Nothing was found."
