"""Compaction of conversations: what the model is asked for, and how its summary travels in `encrypted_content`.

The content is encoded and not encrypted: the client of a conversation may read its summary, and a client that writes one of its
own has only written a message of its user.
"""

from base64 import b64decode, b64encode

PROMPT = (
    "The conversation up to here is about to be replaced by a summary of it; only the messages of the user stay. Write this "
    "summary now, for yourself, as plain text without any call of a tool: what the user wants, what has been done and "
    "decided, what was learned (names, paths, numbers, results of tools, errors), and what remains to be done next."
)
"""The message of the user, behind the conversation, that a summary answers."""
INTRODUCTION = "This is the summary of the conversation up to here:\n\n"
"""What stands before a summary in the message of the user that the model reads instead of the conversation."""
_MARK = "jinfercept-summary-1."


def encoded_summary(text: str) -> str:
    return _MARK + b64encode(text.encode("utf-8", "replace")).decode()


def summary_in(content: str) -> str | None:
    """The text of an encoded summary; None for other contents."""
    if not content.startswith(_MARK):
        return None
    try:
        return b64decode(content.removeprefix(_MARK), validate=True).decode() or None
    except ValueError:
        return None
