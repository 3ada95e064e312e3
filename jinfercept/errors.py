"""What a user's mistake looks like: one sentence each for what is wrong, what was got, and how to fix it.

Every error here is a `ValueError`, raised before memory is taken. A failing endpoint is not an error but a `Result`;
a broken invariant of ours is an `assert`.
"""


class JinferceptError(ValueError):
    """A mistake that the caller can mend.

    Args:
        what: what is wrong, without a full stop.
        got: the value that was given.
        fix: what to do instead.
    """

    def __init__(self, what: str, *, got: object, fix: str) -> None:
        self.what, self.got, self.fix = what, got, fix
        super().__init__(f"{what}; got {got!s}; fix: {fix}")


class ConfigError(JinferceptError):
    """A flag, or a combination of flags, cannot work."""


class ModelError(JinferceptError):
    """A checkpoint, a model name or a tokenizer cannot be used."""


class RequestError(JinferceptError):
    """A request or its sampling parameters cannot be served."""
