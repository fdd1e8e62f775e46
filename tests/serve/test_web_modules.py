"""The page's modules by themselves, in the browser: Markdown, server-sent events, quantiles and ticks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import chromium
from serve_process import Server

Module = Callable[..., Any]


@pytest.fixture(scope="module")
def run(null_server: Server) -> Iterator[Module]:
    """Calls a JavaScript function of a module and an argument."""
    with chromium() as browser:
        page = browser.new_page()
        page.goto(null_server.url)

        def call(module: str, function: str, argument: Any = None) -> Any:
            body = f"async (argument) => ({function})(await import('/web/{module}.js'), argument)"
            return page.evaluate(body, argument)

        yield call


RENDER = """({update}, text) => {
    const element = document.createElement("div");
    update(element, text);
    return element.innerHTML.replace(/ (tabindex|role|aria-label|target|rel|type|class)="[^"]*"/g, "")
        .replace(/<button>.*?<\\/button>/gs, "");
}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Plain\ntext", "<p>Plain<br>text</p>"),
        ("One\n\nTwo", "<p>One</p><p>Two</p>"),
        ("## Title ##\nText", "<h4>Title</h4><p>Text</p>"),
        ("**bold** and *thin*, ~~gone~~", "<p><strong>bold</strong> and <em>thin</em>, <del>gone</del></p>"),
        ("***both***", "<p><strong><em>both</em></strong></p>"),
        ("snake_case_name, 2 * 3 * 4, a ** b", "<p>snake_case_name, 2 * 3 * 4, a ** b</p>"),
        (r"\*not thin\*", "<p>*not thin*</p>"),
        ("`a < b` and ``c`d``", "<p><code>a &lt; b</code> and <code>c`d</code></p>"),
        ("`open", "<p>`open</p>"),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("1. a\n2. b\n\nText", "<ol><li>a</li><li>b</li></ol><p>Text</p>"),
        ("3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        ("Text:\n- a\n- b", "<p>Text:</p><ul><li>a</li><li>b</li></ul>"),
        (
            "1. Do\n   ```py\n   x = 1\n   ```\n2. Done",
            "<ol><li>Do<figure><figcaption><span>py</span></figcaption><pre><code>x = 1</code></pre></figure></li>"
            "<li>Done</li></ol>",
        ),
        ("> a\n> b\n\nc", "<blockquote><p>a<br>b</p></blockquote><p>c</p>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        (
            "```python\nif a < b:\n\n    # **no**\n```\nafter",
            "<figure><figcaption><span>python</span></figcaption><pre><code>if a &lt; b:\n\n    # **no**</code></pre>"
            "</figure><p>after</p>",
        ),
        (
            "```\nstill open",
            "<figure><figcaption><span>text</span></figcaption><pre><code>still open</code></pre></figure>",
        ),
        (
            "| a | b |\n|---|--:|\n| 1 | *2* |",
            "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><em>2</em></td></tr>"
            "</tbody></table></div>",
        ),
        ("[a](https://x.y/z_(1))", '<p><a href="https://x.y/z_(1)">a</a></p>'),
        ("See https://x.y/a_b.", '<p>See <a href="https://x.y/a_b">https://x.y/a_b</a>.</p>'),
        # What could do something stays text.
        ("<img src=x onerror=alert(1)><b>x</b>", "<p>&lt;img src=x onerror=alert(1)&gt;&lt;b&gt;x&lt;/b&gt;</p>"),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
        ("[a](data:text/html,x) [b](/v1)", "<p>[a](data:text/html,x) [b](/v1)</p>"),
        ("![pixel](https://x.y/p.gif)", '<p><a href="https://x.y/p.gif">pixel</a></p>'),
    ],
)
def test_markdown_becomes_elements(run: Module, text: str, expected: str) -> None:
    assert run("markdown", RENDER, text) == expected


LONG = """# Title

Some *text* with `code`,
and a [link](https://x.y).

1. one
   - inner
2. two

   more of two

| a | b |
|---|---|
| 1 | 2 |

```c
int main() {

}
```
> quote
> - item

The end."""


def test_a_text_that_grows_looks_at_each_moment_as_if_it_had_been_there(run: Module) -> None:
    same = """({update}, text) => {
        const grown = document.createElement("div");
        for (let end = 0; end <= text.length; end += 1) {
            update(grown, text.slice(0, end));
            const fresh = document.createElement("div");
            update(fresh, text.slice(0, end));
            if (!grown.isEqualNode(fresh)) return text.slice(0, end);
        }
        const first = grown.firstElementChild;
        update(grown, text + " And more.");
        return first === grown.firstElementChild;
    }"""
    assert run("markdown", same, LONG) is True


@pytest.mark.parametrize(
    "text", ["*" * 20_000, "> " * 20_000, "[" * 20_000, "`" * 9_999 + " " + "`" * 9_998, "- " * 9_999, "_a " * 9_999]
)
def test_a_text_made_to_be_slow_is_not(run: Module, text: str) -> None:
    took = """({update}, text) => {
        const began = performance.now();
        update(document.createElement("div"), text);
        return performance.now() - began;
    }"""
    assert run("markdown", took, text) < 3000  # ms


def test_events_are_the_same_wherever_the_stream_is_cut(run: Module) -> None:
    whole = 'event: token\ndata: {"text":"é𝄞"}\n\nevent: done\ndata: {"a":1}\n\nevent: token\ndata: {"cut":'
    read = """async ({events}, [text, size]) => {
        const bytes = new TextEncoder().encode(text);
        const stream = new ReadableStream({start(controller) {
            for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
            controller.close();
        }});
        const found = [];
        for await (const one of events(stream)) found.push(one);
        return JSON.stringify(found);
    }"""
    for size in (1, 2, 3, 7, 1000):
        assert json.loads(run("api", read, [whole, size])) == [["token", {"text": "é𝄞"}], ["done", {"a": 1}]]


def test_quantiles_are_of_what_was_counted_since(run: Module) -> None:
    quantile = (
        "({quantile}, [before, after, share]) => quantile({counts: before}, {bounds: [1, 2, 4], counts: after}, share)"
    )
    assert run("dashboard", quantile, [[5, 5, 5, 5], [5, 5, 5, 5], 0.5]) is None
    assert run("dashboard", quantile, [[9, 0, 0, 0], [9, 10, 0, 0], 0.5]) == 1.5
    assert run("dashboard", quantile, [[0, 0, 0, 0], [4, 0, 4, 0], 0.75]) == 3
    assert run("dashboard", quantile, [[0, 0, 0, 0], [0, 0, 0, 3], 0.95]) == 4


@pytest.mark.parametrize(
    ("highest", "is_whole", "expected"),
    [
        (0, False, [0, 0.25, 0.5, 0.75, 1]),
        (1, True, [0, 1]),
        (7, True, [0, 2, 4, 6, 8]),
        (10, True, [0, 5, 10]),
        (117, False, [0, 50, 100, 150]),
        (0.037, False, [0, 0.01, 0.02, 0.03, 0.04]),
    ],
)
def test_ticks_are_round(run: Module, highest: float, is_whole: bool, expected: list[float]) -> None:
    assert run("plot", "({ticks}, [a, b]) => ticks(a, b)", [highest, is_whole]) == pytest.approx(expected)
