"""A word game like Wordle as an environment, for GRPO Studio and for TRL.

In GRPO Studio: `environment: wordle.py::Wordle`, and `data: wordle`. The column `answer` of a row is its hidden word.
"""

GUESSES = 6


class Wordle:
    """One game. `reset` begins it, `guess` is the tool, and `get_reward` scores it at the end."""

    def reset(self, answer: str, **row) -> str:
        """Begin a game. What this returns is added to the prompt."""
        self.hidden = answer.strip().lower()
        self.guesses: list[str] = []
        return f"Guess the hidden word of {len(self.hidden)} letters. You have {GUESSES} guesses."

    def guess(self, word: str) -> str:
        """Guess the hidden word.

        Args:
            word: An English word with as many letters as the hidden word has.

        Returns:
            A letter for each of the word's: G if it is in place, Y if it is elsewhere in the hidden word, else -.
        """
        word = word.strip().lower()
        if self.hidden in self.guesses or len(self.guesses) == GUESSES:
            raise ValueError("The game is over.")
        if len(word) != len(self.hidden) or not word.isalpha():
            raise ValueError(f"The word must have {len(self.hidden)} letters.")
        self.guesses.append(word)
        if word == self.hidden:
            return f"{'G' * len(word)} Solved in {len(self.guesses)}."
        return f"{_marks(word, self.hidden)} {GUESSES - len(self.guesses)} left."

    def get_reward(self) -> float:
        """1.0 for the word at the first guess and 0.1 less for each more; unsolved, up to 0.25 for letters in place."""
        if self.hidden in self.guesses:
            return 1.0 - 0.1 * (len(self.guesses) - 1)
        return max((_marks(word, self.hidden).count("G") for word in self.guesses), default=0) * 0.25 / len(self.hidden)


def _marks(word: str, hidden: str) -> str:
    left = [letter for letter, right in zip(word, hidden) if letter != right]
    others = [right for letter, right in zip(word, hidden) if letter != right]
    found = []
    for letter in left:
        found.append("Y" if letter in others else "-")
        if letter in others:
            others.remove(letter)  # a letter that the hidden word has once is marked once
    places = iter(found)
    return "".join("G" if letter == right else next(places) for letter, right in zip(word, hidden))
