"""Markdown and mathematics on the page, in a real browser: what is drawn, and that nothing else gets in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server_harness import ServerProcess, running, spawn_echo

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from page_browser import Browser, chromium, needs_chromium

pytestmark = needs_chromium

# Draws a text as a whole, as an answer's element has it.
DRAW = """
const { Markdown } = await import("/page/markdown.js");
const root = document.createElement("div");
root.className = "text";
const message = document.createElement("li");
message.className = "message";
message.append(root);
document.getElementById("messages").append(message);
window.drawn = root;
new Markdown(root).show(given[0]);
"""
# Without what KaTeX draws: the formula's source stands in braces.
PLAIN = """
const copy = drawn.cloneNode(true);
for (const node of copy.querySelectorAll(".math")) {
  const display = node.querySelector(".katex-display") ? "D" : node.querySelector(".katex") ? "I" : "?";
  node.replaceWith(`${display}{${node.dataset.tex}}`);
}
for (const node of copy.querySelectorAll(".code-head")) node.remove();
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running(spawn_echo(tmp_path_factory.mktemp("page") / "log")) as found:
        yield found


@pytest.fixture
def browser(driver: Any, server: ServerProcess) -> Iterator[Browser]:
    driver.get_log("browser")
    browser = Browser(driver)
    browser.open(server)
    browser.up()
    yield browser
    assert not browser.complaints()


def html(browser: Browser, text: str) -> str:
    return str(browser.run(DRAW + PLAIN + "return copy.innerHTML", text))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"a \(x_1\) b", "<p>a I{x_1} b</p>"),
        (r"a $x_1$, b", "<p>a I{x_1}, b</p>"),
        (r"$a_1$ and $b_1$ and _c_", "<p>I{a_1} and I{b_1} and <em>c</em></p>"),
        (r"a \[x^2\] b", "<p>a D{x^2} b</p>"),
        (r"a $$x^2$$ b", "<p>a D{x^2} b</p>"),
        ("\\[\nx\n- y\n\\]", "<p>D{x\n- y}</p>"),
        ("\\[\n\nx\n\n= y\n\\].", "<p>D{x\n\n= y}.</p>"),
        ("so that\n$$\nx\n=\n> y\n$$\nand", "<p>so that</p><p>D{x\n=\n&gt; y}</p><p>and</p>"),
        ("we have $$\nx\n+ y $$", "<p>we have D{x\n+ y}</p>"),
        ("\\begin{align*}\na &= b\n- c\n\\end{align*}", "<p>D{\\begin{align*}\na &amp;= b\n- c\n\\end{align*}}</p>"),
        ("1. a\n   \\[\n   - x\n   \\]\n2. b", "<ol>\n<li>a\n<p>D{- x}</p>\n</li>\n<li>b</li>\n</ol>"),
        ("- a\n  b $$\n  - x $$", "<ul>\n<li>a\n<p>b D{- x}</p>\n</li>\n</ul>"),
        ("- a $$\n  = x $$\n# b $$\nc", "<ul>\n<li>\n<p>a D{= x}</p>\n</li>\n</ul><h3>b $$</h3><p>c</p>"),
        ("> $$\n> - x\n> $$", "<blockquote>\n<p>D{- x}</p>\n</blockquote>"),
        (r"\[a \\[2pt] b\]", r"<p>D{a \\[2pt] b}</p>"),
        (r"\(\text{for } \$5\)", r"<p>I{\text{for } \$5}</p>"),
        (r"$$\text{if $x$}$$", r"<p>D{\text{if $x$}}</p>"),
        (r"**bold $x$**", "<p><strong>bold I{x}</strong></p>"),
        ("## $x$", "<h4>I{x}</h4>"),
        (r'\("x" < y & z\)', r'<p>?{"x" &lt; y &amp; z}</p>'),
        (r"\(\nonsense{\) \(x\)", r"<p>?{\nonsense{} I{x}</p>"),
        (r"\(x\(", "<p>(x(</p>"),
        ("$$ for you\n\nand $$ for me", "<p>$$ for you</p><p>and $$ for me</p>"),
    ],
)  # fmt: skip
def test_mathematics(browser: Browser, text: str, wanted: str) -> None:
    assert html(browser, text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "from $5 to $10", "US$5-$10", "$5, $10 and $20.", "$ x $", "a $HOME/$USER b", "one $", "$$", "$", "5$", "$x$y",
        r"\$x\$", r"a \\(x\\)",
    ],
)  # fmt: skip
def test_what_is_no_mathematics(browser: Browser, text: str) -> None:
    assert html(browser, text) == f"<p>{text.replace(chr(92) + '$', '$').replace(chr(92) * 2, chr(92))}</p>"


@pytest.mark.parametrize("growing", [True, False])
@pytest.mark.parametrize(
    "text",
    [
        "\\(a " * 60_000, "\\(a " * 60_000 + "\\\\)", "\\[a " * 60_000, "\\[\n" * 30_000, "$$\n\n" * 10_000,
        "".join(f"\\begin{{{'a' * (i % 40 + 1)}{'b' * (i // 40 + 1)}}}\n" for i in range(1500)),
        "- a\n" + "  \\[\n" * 30_000 + "\nb \\]",
    ],
    ids=["inline", "escaped", "display", "lines", "dollars", "names", "item"],
)  # fmt: skip
def test_openings_without_an_end_do_not_search_the_text_each(browser: Browser, text: str, growing: bool) -> None:
    """They did, for up to a minute; together they take a second or two, and the bound is 20."""
    show = """
    const { Markdown } = await import("/page/markdown.js");
    const begun = performance.now();
    new Markdown(document.createElement("div")).show(...given);
    return performance.now() - begun;
    """
    assert browser.run(show, text, growing) < 20_000


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("`\\(x\\)` and `$x$`", "<p><code>\\(x\\)</code> and <code>$x$</code></p>"),
        ("cost $5 `a$`", "<p>cost $5 <code>a$</code></p>"),
        ("```tex\n\\[\nx\n\\]\n```", "<pre><code>\\[\nx\n\\]</code></pre>"),
        ("    $$\n    x\n    $$", "<pre><code>$$\nx\n$$</code></pre>"),
    ],
)
def test_code_has_no_mathematics(browser: Browser, text: str, wanted: str) -> None:
    drawn = html(browser, text).replace(' tabindex="0"', "").replace(' class="language-tex"', "")
    assert drawn.removeprefix('<div class="code">').removesuffix("</div>") == wanted


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("1. a\n2. b\n\ntext\n\n1. c\n2. d", [1, 1]),
        ("- a\n- b\n\n1. c\n2. d", [1]),
        ("1. a\n2. b\n\n- c\n\n1. d", [1, 1]),
        ("3. a\n4. b\n\n# x\n\n1) c", [3, 1]),
        ("1. a\n   - b\n2. c", [1]),
        ("1. a\n\n   more\n\n2. b", [1]),
    ],
)
def test_each_list_counts_by_itself(browser: Browser, text: str, starts: list[int]) -> None:
    html(browser, text)
    assert browser.script("return [...drawn.querySelectorAll('ol')].map((list) => list.start)") == starts


def test_links_tables_and_headings(browser: Browser) -> None:
    links = "[a](https://x.example \"t\"), https://y.example/a_b_c. <mailto:a@b.example> ![p](https://z.example/p.png)"
    html(browser, links + "\n\n# One\n\n| a | b |\n| - | -: |\n| 1 | 2 |")
    found = browser.script("return [...drawn.querySelectorAll('a')].map((a) => [a.href, a.rel, a.target])")
    addresses = ["https://x.example/", "https://y.example/a_b_c", "mailto:a@b.example", "https://z.example/p.png"]
    assert found == [[address, "noopener noreferrer", "_blank"] for address in addresses]
    assert browser.script("return drawn.querySelectorAll('h3').length") == 1
    assert browser.script("return getComputedStyle(drawn.querySelector('td:last-child')).textAlign") == "right"


def test_fonts_are_the_pages_own_and_nothing_is_fetched_from_elsewhere(
    browser: Browser, server: ServerProcess
) -> None:
    html(browser, r"\(\mathbf{x} y \mathcal{A}\) ![p](https://z.example/p.png)")
    browser.run("await document.fonts.ready")
    loaded = "return [...document.fonts].filter((font) => font.status === 'loaded').map((font) => font.family)"
    assert {"KaTeX_Main", "KaTeX_Math", "KaTeX_Caligraphic"} <= set(browser.script(loaded))
    fetched = browser.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert any(name.endswith(".woff2") for name in fetched)
    assert all(name.startswith(server.url) for name in fetched)


def test_a_wide_formula_is_scrolled_and_nothing_is_drawn_over_the_page(browser: Browser) -> None:
    html(browser, "\\[" + "x + " * 200 + "y \\tag{1}\\]\n\n\\(\\raisebox{19em}{\\rule{19em}{19em}}\\)")
    assert browser.script("return document.documentElement.scrollWidth <= innerWidth")
    scrolled = "const n = drawn.querySelector('.display'); return [n.scrollWidth > n.clientWidth, n.tabIndex]"
    assert browser.script(scrolled) == [True, 0]
    outside = """
    const { top, left, bottom } = drawn.getBoundingClientRect();
    return [top - 8, bottom + 8].every((y) => !drawn.contains(document.elementFromPoint(left + 60, y)));
    """
    assert browser.script(outside)


# A text whose lines change what stands before them while they come.
GROWING = """# Title

Some *text* with `code`, \\(x_1\\) and $y$.
***bold*** after it
---
1. one
2. two

   \\[
   - a
   \\]

10. ten

$$
a
- b
$$
and | no | table

| a | b |
| - | - |
| $x$ | 2 |
```py
x = "
```
> quote
more

- a
- b

1. c

[link](https://x.example) <b>no</b> https://y.example/a_b
"""
GROW = """
const { Markdown } = await import("/page/markdown.js");
const [text] = given, roots = [document.createElement("div"), document.createElement("div")];
document.getElementById("chat").append(...roots);
const grown = new Markdown(roots[0]), firsts = new Set();
for (let length = 1; length <= text.length; length++) {
  grown.show(text.slice(0, length), true);
  roots[1].replaceChildren();
  new Markdown(roots[1]).show(text.slice(0, length), true);
  if (roots[0].innerHTML !== roots[1].innerHTML) return [text.slice(0, length), roots[0].innerHTML, roots[1].innerHTML];
  if (roots[0].children.length > 3) firsts.add(roots[0].firstElementChild);
}
return [firsts.size, grown.settled, roots[0].children.length];
"""


def test_a_growing_text_is_drawn_as_a_whole_one_and_keeps_its_elements(browser: Browser) -> None:
    kept, settled, blocks = browser.run(GROW, GROWING)
    assert kept == 1, (kept, settled, blocks)
    assert settled == blocks - 2


def test_a_formula_is_shown_as_written_until_it_has_ended(browser: Browser) -> None:
    source = 'const { Markdown } = await import("/page/markdown.js"); const root = document.createElement("div");'
    source += "new Markdown(root).show(given[0], given[1]); return root.innerHTML"
    begun = "Then\n\n\\[\nx\n- y_1 *z*"
    assert browser.run(source, begun, True) == '<p>Then</p><p class="source">\\[\nx\n- y_1 *z*</p>'
    assert "<li>" in browser.run(source, begun, False)


def test_the_page_follows_what_is_written_however_tall(browser: Browser) -> None:
    tall = r"\[\begin{matrix}" + r"x\\\\" * 12 + r"\end{matrix}\]"  # 12 rows in one frame
    browser.say("\n\n".join([tall] * 8))
    browser.answered()
    assert browser.count(".message.assistant .katex-display") == 8
    rest = "const box = document.getElementById('scroll'); return box.scrollHeight - box.scrollTop - box.clientHeight"
    assert browser.script(rest) < 2


HOSTILE = [
    "<script>pwned = 1</script>",
    "<img src=x onerror=pwned=1>",
    "<svg onload=pwned=1><style>@import 'https://evil.example'</style></svg>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--><img src=1 onerror=pwned=1>'>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<form><input name=attributes><input name=innerHTML></form>",
    "<a href='javascript:pwned=1'>x</a>",
    "[x](javascript:pwned=1)", "[x](JaVaScRiPt:pwned=1)", "[x](java&#x0A;script:pwned=1)",
    "[x](&#106;avascript:pwned=1)",
    "[x](\\javascript:pwned=1)", "[x]( javascript:pwned=1)", "[x](<java\tscript:pwned=1>)", "[x](vbscript:pwned=1)",
    "[x](data:text/html,<script>pwned=1</script>)", "[x](/page/main.js)", "[x](//evil.example)", "[x](blob:https://a/b)",
    "[x]\n\n[x]: javascript:pwned=1", "<javascript:pwned=1>", "![x](javascript:pwned=1)", "![x](data:image/svg+xml,x)",
    '![" onerror="pwned=1](https://x.example/"onerror="pwned=1)', '[x](https://x.example "\\" onclick=\\"pwned=1")',
    "[x](https://x.example/\" onclick=pwned=1 \")", "https://x.example/\"onclick=pwned=1//",
    "```\"><img src=x onerror=pwned=1>\nx\n```", "```x\" onclick=\"pwned=1\nx\n```",
    "~~~ <b> \n<script>pwned=1</script>\n~~~",
    "| <img src=x onerror=pwned=1> | b |\n| - | - |\n| [x](javascript:pwned=1) | 2 |",
    "# <svg/onload=pwned=1>", "> <script>pwned=1</script>", "- <b onmouseover=pwned=1>x</b>",
    r"\(\href{javascript:pwned=1}{x}\)", r"\(\url{javascript:pwned=1}\)", r"$\href{https://evil.example}{x}$",
    r"\[\includegraphics{https://evil.example/x.png}\]", r"\(\htmlClass{top}{x}\)", r"\(\htmlId{input}{x}\)",
    r"\(\htmlStyle{position:fixed;inset:0}{x}\)", r"\(\htmlData{x=y}{x}\)",
    r"\(\text{<img src=x onerror=pwned=1>}\)", r"\(\unicode{<script>}\)", r'\(x" onclick="pwned=1\)',
    r"\(\def\a{\a\a}\a\)", r"\(\rule{99999em}{99999em}\)", "\\begin{x\"onclick=pwned=1}\n\\end{x\"onclick=pwned=1}",
    r"\begin{aligned}<script>pwned=1</script>\end{aligned}",
    "$" * 2000, "\\(" * 2000, "[" * 2000, "> " * 500 + "x", "*" * 2000,
    "999999999. x", "&lt;script&gt;pwned=1&lt;/script&gt;", "\0<script\0>pwned=1</script>",
]  # fmt: skip
STRANGE = """
const tags = new Set(["BUTTON", "DIV", "P", "BR", "STRONG", "EM", "S", "CODE", "PRE", "A", "UL", "OL", "LI",
  "BLOCKQUOTE", "HR", "H3", "H4", "H5", "H6", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "SPAN"]);
const names = new Set(["href", "rel", "target", "class", "start", "tabindex", "role", "aria-label", "type",
  "data-tex"]);
const drawing = new Set(["class", "style", "aria-hidden", "xmlns", "encoding", "width", "height", "viewBox", "d",
  "preserveAspectRatio"]);
const strange = [];
for (const node of drawn.querySelectorAll("*")) {
  const formula = Boolean(node.closest(".katex"));
  if (!formula && !tags.has(node.tagName)) strange.push(node.tagName);
  if (formula && node.matches("a, img, script, style, iframe, object, form, input")) strange.push(node.tagName);
  for (const { name, value } of node.attributes) {
    const allowed = formula ? drawing.has(name) || node.closest("math") : names.has(name);
    if (!allowed || /^on/i.test(name) || (name === "href" && !/^(https?:|mailto:)/.test(value))) strange.push(name);
    if (name === "style" && /url|position|fixed|z-index/.test(value)) strange.push(value);
  }
}
const wide = [...drawn.querySelectorAll("*")].some((node) => node.getBoundingClientRect().height > 5000);
return [strange, typeof pwned, wide];
"""


def test_nothing_hostile_gets_in(browser: Browser) -> None:
    """In one page: nothing runs, no element or attribute comes in that a text does not need."""
    for text in HOSTILE:
        for whole in (text, f"before {text} after", f"- {text}\n\n> {text}"):
            assert browser.run(DRAW + STRANGE, whole) == [[], "undefined", False], whole
            browser.script("drawn.remove()")
    assert browser.script("return document.querySelectorAll('#input, #chat').length") == 2


def test_the_policy_lets_no_other_code_make_html(browser: Browser) -> None:
    """Should the page's own code ever do it: the browser refuses."""
    source = "try { document.createElement('b').innerHTML = '<i>x</i>' } catch (error) { return error.name }"
    assert browser.script(source) == "TypeError"
    assert "TrustedHTML" in " ".join(browser.complaints())
