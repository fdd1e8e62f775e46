"""The files of the web page over HTTP: what is sent with them, to whom, and when not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from serve_process import Server

from crucible.serve import web

STATIC = Path(web.__file__).parent / "static"
FILES = {f"/web/{path.name}": path for path in STATIC.iterdir()} | {"/": STATIC / "index.html"}
del FILES["/web/index.html"]


def test_every_file_has_a_path() -> None:
    assert set(FILES) == web.PATHS


@pytest.mark.parametrize("path", sorted(FILES))
def test_files_come_as_they_are_under_a_strict_policy(null_server: Server, path: str) -> None:
    reply = null_server.get(path)
    assert reply.status_code == 200
    assert reply.content == FILES[path].read_bytes()
    kind = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    assert reply.headers["content-type"].partition(";")[0] == kind[FILES[path].suffix]
    policy = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert {policy[f"{name}-src"] for name in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in str(policy)


def test_a_browser_that_has_a_file_gets_none(null_server: Server) -> None:
    first = null_server.get("/web/main.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f'"other", W/{tag}', "*"):
        again = null_server.get("/web/main.js", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert null_server.get("/web/main.js", headers={"if-none-match": '"other"'}).content == first.content
    assert len({null_server.get(path).headers["etag"] for path in FILES}) == len(FILES)


def test_there_are_no_other_files(null_server: Server) -> None:
    for path in ("/web", "/web/", "/web/index.html", "/web/__init__.py", "/web/../__init__.py", "/web/%2e%2e/app.py"):
        assert null_server.get(path).status_code == 404
    assert null_server.post("/").status_code == 405


def test_a_name_that_is_not_served_gets_no_page(null_server: Server) -> None:
    assert null_server.get("/", headers={"host": "evil.example"}).status_code == 403


def test_the_page_is_there_without_the_key_and_nothing_else_is(make_server: Callable[..., Server]) -> None:
    server = make_server("--api-key", "secret", backend="null")
    assert {server.get(path).status_code for path in FILES} == {200}
    assert {server.get(path).status_code for path in ("/metrics", "/v1/models", "/web/", "//", "/web/none.js")} == {401}


def test_no_web_means_no_page(make_server: Callable[..., Server]) -> None:
    server = make_server("--no-web", "--api-key", "secret", backend="null")
    key = {"x-api-key": "secret"}
    for path in FILES:
        assert server.get(path, headers=key).status_code == 404
        assert server.get(path).status_code == 401
    assert "browsers" not in server.log


def test_nothing_names_another_host_and_nothing_is_inline() -> None:
    for path in FILES.values():
        text = path.read_text()
        addresses = set(re.findall(r"https?://[\w.]+", text))
        assert addresses <= {"http://www.w3.org"}, path  # SVG's name space
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]* src=)", page)
    # Files are named by relative addresses, so that the page works below a path of a proxy.
    assert not re.search(r"(?:src|href)=\"/", page)
