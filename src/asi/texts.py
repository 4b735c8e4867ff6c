"""Texts as words."""

import re

WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """No stemming and no stop words, so that it is the same in every language.

    >>> words("The naïve user's 2nd query")
    ['the', 'naïve', 'user', 's', '2nd', 'query']
    """
    return WORD.findall(text.casefold())
