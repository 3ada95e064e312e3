"""Text of a model or a tool made harmless for a terminal, to which control characters are commands."""

_HARMLESS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def harmless(text: str) -> str:
    """The text with every control character but new lines and tabs as its picture (`␛`), or as U+FFFD where there is none."""
    return text.translate(_HARMLESS)
