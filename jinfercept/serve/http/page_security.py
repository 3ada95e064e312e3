"""Response headers of the server's HTML pages: a content security policy, and no caching without revalidation."""

import base64
import hashlib


def csp_hash(text: str) -> str:
    """The source expression that allows an inline script or style with this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_headers(*directives: str) -> dict[str, str]:
    """Headers of a page.

    Args:
        directives: of the content security policy; all other sources, forms and frames are forbidden.
    """
    fixed = ("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
    return {
        "content-security-policy": "; ".join(("default-src 'none'", *directives, *fixed)),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
