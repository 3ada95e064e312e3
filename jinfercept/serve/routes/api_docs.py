"""The OpenAPI document at `/openapi.json` and Swagger UI at `/docs`, whose files this server sends itself.

If the server has keys, both need one. A browser that follows a link cannot send a bearer token, so these paths, and no
others, also take HTTP Basic: any user name, and the key as the password.
"""

import base64
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from jinfercept.serve.http.page_security import csp_hash, page_headers
from jinfercept.serve.protocols.errors import ApiError
from jinfercept.serve.service import service_of

_START = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", validatorUrl: null})'
_PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>jinfercept: API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>{_START}</script>
</body>
</html>
"""
_HEADERS = page_headers(
    f"script-src 'self' {csp_hash(_START)}",
    "style-src 'self' 'unsafe-inline'",  # Swagger UI sets styles of its elements
    "connect-src 'self'",
    "img-src 'self' data:",
)
_FILES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}


def docs_router() -> APIRouter:
    """Router of the document, the page, and the files of the page."""
    router = APIRouter(include_in_schema=False, dependencies=[Depends(_check_key)])
    static = files("fastapi_offline").joinpath("static")
    contents = {name: static.joinpath(name).read_bytes() for name in _FILES}

    @router.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        document: dict[str, Any] = request.app.openapi()
        return JSONResponse(document)

    @router.get("/docs")
    async def page() -> Response:
        return Response(_PAGE, media_type="text/html", headers=_HEADERS)

    @router.get("/docs/{name}")
    async def file(name: str) -> Response:
        if name not in contents:
            raise ApiError(404, f"/docs has no file {name!r}")
        return Response(contents[name], media_type=_FILES[name], headers=_HEADERS)

    return router


async def _check_key(request: Request) -> None:
    """Raises `ApiError` 401 without a valid key; its header makes a browser ask for the key."""
    try:
        service_of(request).keys.check(*map(bearer_of, request.headers.getlist("authorization")))
    except ApiError as error:
        if error.status_code == 401:
            error.headers = {"WWW-Authenticate": 'Basic realm="jinfercept", charset="UTF-8"'}
        raise


def bearer_of(authorization: str) -> str:
    """`Bearer PASSWORD` for an `Authorization: Basic` header; any other header unchanged."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        decoded = base64.b64decode(credentials.strip(), validate=True).decode()
    except ValueError:
        return authorization
    return f"Bearer {decoded.partition(':')[2]}"
